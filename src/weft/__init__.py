"""weft trains any PyTorch model in parallel."""
