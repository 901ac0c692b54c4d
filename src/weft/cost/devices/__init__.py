"""Seconds of one operator on one rank: processors and GPUs."""
