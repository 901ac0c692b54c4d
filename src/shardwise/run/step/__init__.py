"""One step of a pipeline program on one rank: its actions, its stages, and the messages between them."""
