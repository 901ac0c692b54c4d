"""What a step costs: seconds of compute and of the network, bytes of memory. From a graph, its sharding and a cluster."""
