"""Planning of inference workflows: the cheapest placement of operators with variants on heterogeneous, priced workers."""
