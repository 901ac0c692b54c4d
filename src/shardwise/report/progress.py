"""A progress bar, drawn on a terminal once its block has taken two seconds."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

AFTER_S = 2.0
_BAR_LOCK = threading.Lock()  # acquired by the block whose bar may be drawn


@contextmanager
def show_progress(
    text: str, total: int | None = None, console: Console | None = None, after_s: float = AFTER_S
) -> Iterator[Callable[[], None]]:
    """Run a block with a progress bar; it gets a function to call after each part of `total`. Only the outermost of nested blocks draws,
    and only on a terminal.

    >>> with show_progress("planning", 2) as done:
    ...     done()
    """
    if (console is None and not sys.stderr.isatty()) or not _BAR_LOCK.acquire(blocking=False):
        yield lambda: None
        return
    try:
        yield from _draw_progress_bar(text, total, console, after_s)
    finally:
        _BAR_LOCK.release()


def _draw_progress_bar(text: str, total: int | None, console: Console | None, after_s: float) -> Iterator[Callable[[], None]]:
    from rich.console import Console as Terminal  # here: slow to import
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console or Terminal(stderr=True), transient=True)
    task = bar.add_task(text, total=total)

    timer = threading.Timer(after_s, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda: bar.advance(task)
    finally:
        timer.cancel()
        timer.join()
        if bar.live.is_started:
            bar.stop()
