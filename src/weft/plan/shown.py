"""How a notebook shows what is planned and simulated. In: one of them. Out: HTML.

The report draws it (`weft.report.notebook`), which imports this room and not the other way round; where it is not loaded, it is text.
"""

from __future__ import annotations

from functools import singledispatch
from html import escape


@singledispatch
def html(value: object) -> str:
    """`value` as HTML: a kind that nothing is registered for as its text."""
    return f"<pre>{escape(repr(value))}</pre>"
