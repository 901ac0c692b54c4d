"""The parts of one rank's model: its stages, batch rows, meshes and caches of variants."""
