"""Variations of leading layouts that are worth a price."""
