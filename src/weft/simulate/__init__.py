"""`Program` and costs to a `Timeline` and to memory, exactly and without running anything."""

from weft.callable import make_callable

make_callable(__name__)
