"""Operators that need more than themselves on a smaller tensor when a label is cut."""
