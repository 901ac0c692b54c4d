"""Operators of a layout, gathered and priced."""
