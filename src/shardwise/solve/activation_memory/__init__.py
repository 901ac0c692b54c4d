"""Choose which layers to recompute and offload so that a layout fits in memory."""
