"""A verb's output as a Python object, `Answer`: it prints the tables, shows them in a notebook, and has the JSON record."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from shardwise.cli.output import CommandOutput, as_json, show_table
from shardwise.report.notebook import html_table
from shardwise.report.tables import TextTable

if TYPE_CHECKING:
    from rich.text import Text


class Answer(CommandOutput):
    """The result of `shardwise.explain` and similar functions: `tables`, `record` as of `--json`; `str` draws the tables."""

    def __init__(self) -> None:
        super().__init__(None)
        self.record: dict[str, object] = {}
        self._entries: list[TextTable | str] = []

    @property
    def tables(self) -> tuple[TextTable, ...]:
        return tuple(entry for entry in self._entries if isinstance(entry, TextTable))

    def __getitem__(self, key: str) -> Any:
        return self.record[key]

    def text(self, text: str) -> None:
        self._entries.append(text)

    def picture(self, picture: Text) -> None:
        self._entries.append(picture.plain)

    def table(self, table: TextTable) -> None:
        self._entries.append(table)

    def message(self, text: str) -> None:
        self._entries.append(text)

    def answer(self, record: Mapping[str, object]) -> None:
        self.record = {key: as_json(value) for key, value in record.items()}

    def __str__(self) -> str:
        from io import StringIO

        from rich.console import Console

        buffer = StringIO()
        console = Console(file=buffer, width=120, highlight=False, markup=False, emoji=False)
        for entry in self._entries:
            if isinstance(entry, TextTable):
                show_table(entry, console)
            else:
                console.print(entry, soft_wrap=True)
        return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return "".join(html_table(entry) if isinstance(entry, TextTable) else f"<p>{escape(entry)}</p>" for entry in self._entries)
