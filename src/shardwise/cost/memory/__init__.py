"""Memory model of one rank: saved activations, their storages, transient buffers."""
