"""Solver: from a graph, a cluster and a batch to a `Plan`, by pricing every legal layout and simulating the best few."""
