"""One step: parameters, gradients, optimizer, executor, and the engine that holds them."""
