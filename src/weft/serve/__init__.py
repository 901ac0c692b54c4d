"""Serving: a workflow of models on mixed workers. From operators with variants and workers with prices to the cheapest placement."""
