"""Models that could not be captured: replicated on every rank (data parallelism), after a trial that their loss is a mean over samples."""
