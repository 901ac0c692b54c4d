"""Capture a user's module, batch and loss as a `Graph` with torch.export: graph reading, patches of torch, deferred initialisation."""
