"""Training runs: configuration, data, the training loop, checkpointing, recovery, and the artifacts of a run."""
