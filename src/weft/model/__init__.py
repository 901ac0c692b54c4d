"""What is trained: the graph of operators, its factor rules, its work, and how it is captured."""
