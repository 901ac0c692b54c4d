"""Cluster descriptions: devices, links, hierarchy and prices, from a catalogue, a TOML file or a local measurement."""
