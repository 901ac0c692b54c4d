"""The middle: frozen data that every other part meets in. Standard library only."""

from weft.callable import make_callable

make_callable(__name__)
