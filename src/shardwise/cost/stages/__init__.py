"""Time and memory of one pipeline stage."""
