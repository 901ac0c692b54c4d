"""Output of a verb: tables and text on standard output, messages on standard error, or one JSON object.

With `--json` standard output is reserved for that object: whatever else writes there, including the user's model and the ranks,
is redirected to standard error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.errors import ShardwiseError, UsageError
from shardwise.report.progress import show_progress

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from shardwise.report.tables import TextTable


JSON_VERSION = 1  # of the objects of `--json`, see docs/json: it grows when a key is removed or means something else, not for new keys
DEFAULT_WIDTH = 120
MAX_UNBROKEN_CHARS = 16  # cells of a first column up to this length are never wrapped


class CommandOutput:
    """Writer for one verb, built by `open_output`; `to_json` is true where the answer is one JSON object."""

    def __init__(self, json_fd: int | None) -> None:
        self._json_fd = json_fd
        self.to_json = json_fd is not None

    def text(self, text: str) -> None:
        """Print lines of text; nothing with `--json`."""
        if not self.to_json:
            print(text, flush=True)

    def picture(self, picture: Text) -> None:
        """Print coloured text, on terminals that have colours; lines are never wrapped."""
        if not self.to_json:
            _make_console(stderr=False).print(picture, soft_wrap=True)

    def table(self, table: TextTable) -> None:
        """Print a table as wide as the terminal; cells are text, never markup."""
        if self.to_json:
            return
        show_table(table, _make_console(stderr=False))

    def message(self, text: str) -> None:
        """Print a message on standard error."""
        print(f"shardwise: {text}", file=sys.stderr, flush=True)

    def working(self, text: str, parts: int | None = None) -> AbstractContextManager[Callable[[], None]]:
        """Show a progress bar for a block, on a terminal only; the block gets a function to call after each of its `parts`."""
        return show_progress(text, parts)

    def answer(self, record: Mapping[str, object]) -> None:
        """Write the JSON object, with `--json`. Numbers that JSON does not have (infinity) become null."""
        if self._json_fd is not None:
            data = (json.dumps({"version": JSON_VERSION, **answer_record(record)}, allow_nan=False) + "\n").encode()
            while data:
                data = data[os.write(self._json_fd, data) :]


def write_file(target: Path, text: str, is_secret: bool = False) -> int:
    """Write a file that the user named and return its size in bytes. `is_secret`: only this user may read it, from the start on. Raises
    `UsageError` where it cannot be written."""
    data = text.encode()
    try:
        if is_secret:
            target.touch(0o600)
            target.chmod(0o600)
        target.write_bytes(data)
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror}; choose a folder that can be written to") from None
    return len(data)


def show_table(table: TextTable, console: Console) -> None:
    """Draw a table on a console, without its empty columns."""
    from rich import box  # here: slow to import
    from rich.table import Table as Drawn
    from rich.text import Text

    drawn = Drawn(
        title=table.title or None,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE if any(table.columns) else box.SIMPLE_HEAD,
        show_header=any(table.columns),
        header_style="dim",
        pad_edge=False,
    )
    for i in table.nonempty_columns:
        # Short cells are not wrapped, whatever the other columns need.
        least = max((len(row[i]) for row in table.rows if len(row[i]) <= MAX_UNBROKEN_CHARS), default=None) if i == 0 else None
        drawn.add_column(Text(table.columns[i]), justify="right" if i in table.right else "left", overflow="fold", min_width=least)
    for r, row in enumerate(table.rows):
        drawn.add_row(*(Text(row[i]) for i in table.nonempty_columns), style="bold" if r in table.marked else None)
    console.print(drawn)
    if table.note:
        console.print(Text(table.note, style="dim"))


def _make_console(stderr: bool) -> Console:
    from rich.console import Console  # here: slow to import

    # Where the width is unknown, tables have room for a layout and its numbers side by side.
    has_width = (sys.stderr if stderr else sys.stdout).isatty() or "COLUMNS" in os.environ
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, width=None if has_width else DEFAULT_WIDTH)


def answer_record(record: Mapping[str, object]) -> dict[str, object]:
    """Convert a verb's answer to JSON types."""
    return {key: as_json(value) for key, value in record.items()}


def as_json(value: object) -> object:
    """Convert a value to JSON types; numbers that JSON does not have (infinity) become None."""
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if isinstance(value, float):
        return value if isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


@contextmanager
def open_output(to_json: bool) -> Iterator[CommandOutput]:
    """Open a verb's output for a block. With `--json` a `ShardwiseError` is written as the object, with its exit code, and raised again."""
    if not to_json:
        yield CommandOutput(None)
        return
    sys.stdout.flush()
    json_fd = os.dup(1)
    os.dup2(2, 1)
    out = CommandOutput(json_fd)
    try:
        with redirect_stdout(sys.stderr):
            yield out
    except ShardwiseError as error:
        out.answer({"error": str(error), "kind": type(error).__name__, "exit_code": error.exit_code})
        raise
    finally:
        sys.stderr.flush()
        os.dup2(json_fd, 1)
        os.close(json_fd)
