"""Constants that were measured or published, and their fit."""
