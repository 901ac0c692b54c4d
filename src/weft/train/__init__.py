"""Many steps: configuration, data, the loop, and what a run leaves behind."""
