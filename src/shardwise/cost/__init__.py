"""Cost model of a training step: seconds of compute and communication, bytes of memory, from a graph, its sharding and a cluster."""
