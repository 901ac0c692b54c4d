"""Intermediate representation: frozen data (layouts, programs, placements, plans) that every other part shares. Standard library only."""

from shardwise.callable import make_callable

make_callable(__name__)
