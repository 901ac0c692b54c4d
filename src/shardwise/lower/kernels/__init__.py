"""Kernels: operators that need more than the same operator on a smaller tensor when a label is sharded."""
