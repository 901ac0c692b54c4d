"""Bytes on one rank: what is kept, where it lies, what is there for a moment."""
