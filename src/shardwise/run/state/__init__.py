"""What a rank holds from step to step: parameters in flat buffers, their optimizer, checkpoints."""
