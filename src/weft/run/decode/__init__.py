"""A model that continues text, divided: each rank has its shards of the weights and of the keys and values that are kept."""
