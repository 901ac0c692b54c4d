"""Parallel autoregressive decoding: each rank has its shards of the weights and of the paged key-value cache."""
