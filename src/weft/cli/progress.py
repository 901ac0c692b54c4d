"""A bar for what takes a while. In: what is done, of how many parts. Out: a block, drawn on a terminal once it has taken two seconds."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

AFTER_S = 2.0


@contextmanager
def progress(text: str, total: int | None = None, console: Console | None = None, after_s: float = AFTER_S) -> Iterator[Callable[[], None]]:
    """A block that takes a while; it is given what to call when one part of `total` is done. Nothing is drawn but on a terminal.

    >>> with progress("planning", 2) as done:
    ...     done()
    """
    if console is None and not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console as Terminal
    from rich.errors import LiveError
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    shown = Progress(*columns, console=console or Terminal(stderr=True), transient=True)
    task = shown.add_task(text, total=total)

    def start() -> None:
        with suppress(LiveError):  # a bar around this one is drawn already
            shown.start()

    timer = threading.Timer(after_s, start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda: shown.advance(task)
    finally:
        timer.cancel()
        timer.join()
        if shown.live.is_started:
            shown.stop()
