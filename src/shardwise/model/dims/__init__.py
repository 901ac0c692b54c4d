"""Meaning of tensor dimensions: samples, features, positions, experts."""
