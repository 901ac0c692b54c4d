"""The model that is trained: the graph of operators, its factor rules and its work."""
