"""Memory of a stage between forward and backward: activations saved, recomputed or offloaded; weights gathered layer by layer."""
