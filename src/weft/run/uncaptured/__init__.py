"""A model that could not be captured: replicated on every rank, after a trial that its loss divides by samples."""
