"""Simulation of a `Program` with given costs: its `Timeline` and memory, exactly and without running it."""

from shardwise.callable import make_callable

make_callable(__name__)
