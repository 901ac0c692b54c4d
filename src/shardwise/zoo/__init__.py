"""Published models in plain PyTorch, and the resolver of MODEL. A model file has a configuration, a module, sizes, batches and a loss."""
