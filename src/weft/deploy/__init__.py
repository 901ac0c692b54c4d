"""Workflows at work: what computes an operator, measured here and priced elsewhere; deployments of a plan, and new weights for them."""
