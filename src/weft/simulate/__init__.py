"""Simulation of a `Program` with given costs: its `Timeline` and memory, exactly and without running it."""

from weft.callable import make_callable

make_callable(__name__)
