"""Progress display of training on standard error: a live progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from shardwise import units
from shardwise.plan.ir.metric_lines import Row

_RECENT = 20
_LINE_EVERY_S = 5.0


class Display(Protocol):
    """Shows metrics and messages; only rank 0 has one that prints."""

    def show_row(self, row: Row) -> None: ...

    def say(self, text: str) -> None: ...


class SilentDisplay:
    """A display that prints nothing."""

    def show_row(self, row: Row) -> None:
        pass

    def say(self, text: str) -> None:
        pass


def format_row(row: Row, steps: int, remaining_s: float) -> str:
    """Format a row in one line: step, loss, tokens/s, model-FLOP utilisation, remaining time.

    >>> format_row({"step": 3, "loss": 2.5, "tokens_per_s": 40960.0, "mfu": 0.41}, 100, 42.0)
    'step 3/100  loss 2.500  41.0k tokens/s  MFU 41.0 %  42.0 s left'
    """
    parts = [f"step {row['step']}/{steps}", f"loss {row['loss']:.3f}"]
    if row.get("eval_loss") is not None:
        parts.append(f"held out {row['eval_loss']:.3f}")
    if row.get("tokens_per_s"):
        parts.append(f"{units.format_count(float(row['tokens_per_s'] or 0))} tokens/s")
    if row.get("mfu"):
        parts.append(f"MFU {units.format_percent(float(row['mfu'] or 0))}")
    return "  ".join([*parts, f"{units.format_seconds(remaining_s)} left"])


class _RemainingTime:
    """Estimate of the remaining time, from the median of the last steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._recent: deque[float] = deque(maxlen=_RECENT)

    def remaining_s(self, row: Row) -> float:
        self._recent.append(float(row["step_time_s"] or 0))
        return median(self._recent) * (self.steps - int(row["step"] or 0))


class LineDisplay:
    """A display of plain lines: the first step, every few seconds, every evaluation and the last step."""

    def __init__(self, steps: int) -> None:
        self._remaining, self._next_s = _RemainingTime(steps), 0.0

    def show_row(self, row: Row) -> None:
        left_s = self._remaining.remaining_s(row)
        now = time.monotonic()
        if now >= self._next_s or row["step"] == self._remaining.steps or row.get("eval_loss") is not None:
            self._next_s = now + _LINE_EVERY_S
            self.say(format_row(row, self._remaining.steps, left_s))

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class LiveDisplay:
    """A display of one line with a progress bar, on a terminal."""

    def __init__(self, steps: int, start: int) -> None:
        self._console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        columns = (BarColumn(bar_width=24), TextColumn("{task.description}", markup=False))
        self._progress = Progress(*columns, console=self._console, refresh_per_second=4)
        self._task = self._progress.add_task("starting", total=steps, completed=start)
        self._remaining = _RemainingTime(steps)

    def __enter__(self) -> LiveDisplay:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()

    def show_row(self, row: Row) -> None:
        self._progress.update(
            self._task,
            completed=int(row["step"] or 0),
            description=format_row(row, self._remaining.steps, self._remaining.remaining_s(row)),
        )

    def say(self, text: str) -> None:
        self._console.print(text)


@contextmanager
def open_display(rank: int, steps: int, start: int) -> Iterator[Display]:
    """Open the display of one rank: live if standard error is a terminal."""
    if rank:
        yield SilentDisplay()
    elif sys.stderr.isatty():
        with LiveDisplay(steps, start) as live:
            yield live
    else:
        yield LineDisplay(steps)
