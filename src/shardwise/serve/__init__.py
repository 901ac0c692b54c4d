"""Inference workflows of several models: where to place them, and their deployment."""
