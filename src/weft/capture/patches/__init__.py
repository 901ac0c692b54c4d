"""What torch does otherwise than a captured graph needs, one thing a file."""
