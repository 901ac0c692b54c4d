"""Models of the papers, in plain PyTorch, and the resolver of MODEL. Every model file has Config, Model, SIZES, example_batch, loss."""
