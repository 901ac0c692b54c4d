"""The data that everything speaks: programs, placements, meshes and timelines, and the proof of a program."""
