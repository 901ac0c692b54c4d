"""The batch of a graph: where samples lie, what is drawn for them, whether losses of microbatches add up."""
