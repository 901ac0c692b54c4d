"""Factor rules beside brute force, over PyTorch's own samples of every operator: scripts/validate rules."""
