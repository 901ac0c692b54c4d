"""Constants that were measured or published."""
