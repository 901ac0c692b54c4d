"""A stage's share of time and memory."""
