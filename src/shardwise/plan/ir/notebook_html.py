"""HTML of plans and timelines in notebooks.

The report registers its drawings (`shardwise.report.notebook` imports this module, not the other way round); unless it is loaded, it is
text.
"""

from __future__ import annotations

from functools import singledispatch
from html import escape


@singledispatch
def render_html(value: object) -> str:
    """Render `value` as HTML: as its text, for a class that nothing is registered for."""
    return f"<pre>{escape(repr(value))}</pre>"
