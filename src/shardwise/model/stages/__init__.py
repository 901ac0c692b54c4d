"""Partitions of a graph: pipeline stages, parallel branches, cores of attention."""
