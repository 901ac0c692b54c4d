"""What a batch is to a graph: where its samples lie, what is drawn for them, whether parts of it add up."""
