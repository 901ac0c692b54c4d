"""What a model trains on: devices, links, hierarchy, prices. From a catalogue, a TOML file, or measured here."""
