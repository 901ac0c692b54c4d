"""What a verb says, kept for Python. In: its tables and texts. Out: `Answer`, which prints, shows in a notebook, and has the record."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from weft.cli.output import Output, as_json, show_table
from weft.report.notebook import html_table
from weft.report.tables import Table

if TYPE_CHECKING:
    from rich.text import Text


class Answer(Output):
    """The answer of `weft.explain` and its like: `tables` of words, `record` as `--json` has it; `str` draws the tables."""

    def __init__(self) -> None:
        super().__init__(None)
        self.record: dict[str, object] = {}
        self._said: list[Table | str] = []

    @property
    def tables(self) -> tuple[Table, ...]:
        return tuple(said for said in self._said if isinstance(said, Table))

    def __getitem__(self, key: str) -> Any:
        return self.record[key]

    def text(self, text: str) -> None:
        self._said.append(text)

    def picture(self, picture: Text) -> None:
        self._said.append(picture.plain)

    def table(self, table: Table) -> None:
        self._said.append(table)

    def message(self, text: str) -> None:
        self._said.append(text)

    def answer(self, record: Mapping[str, object]) -> None:
        self.record = {key: as_json(value) for key, value in record.items()}

    def __str__(self) -> str:
        from io import StringIO

        from rich.console import Console

        paper = StringIO()
        console = Console(file=paper, width=120, highlight=False, markup=False, emoji=False)
        for said in self._said:
            if isinstance(said, Table):
                show_table(said, console)
            else:
                console.print(said, soft_wrap=True)
        return "\n".join(line.rstrip() for line in paper.getvalue().splitlines())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return "".join(html_table(said) if isinstance(said, Table) else f"<p>{escape(said)}</p>" for said in self._said)
