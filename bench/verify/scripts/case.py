"""The table of public scripts (`cases.toml`): where each lies, which lines change, how it is run; and the scripts themselves.

In: a folder of clones, or the network. Out: a script's files, the changed ones too. Not one line of the scripts is in this project: a
change says the number of a line and what stands there instead (`"12"`), or behind it (`"12+"`).
"""

from __future__ import annotations

import hashlib
import json
import tomllib
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RANKS = (1, 2, 4)


@dataclass(frozen=True)
class Case:
    """`path`: of the script in the repository `source` at `commit`; `beside`: files of its folder that it reads,
    with `/` in front those of the repository's root. `digest`: of the script's
    text, by which line numbers hold. `lines`: what changes, by file. `both`: what changes in the original as well
    (a device or a number of epochs that the text names). `data`: of `data.py`, perhaps with the name of the folder that the
    script looks for. `standins`: folders of small libraries in the place of others. `layouts`: for 1, 2 and 4 ranks."""

    name: str
    source: str
    commit: str
    path: str
    digest: str
    arguments: str
    lines: Mapping[str, Mapping[str, str]]
    beside: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    standins: tuple[str, ...] = ("metrics",)
    layouts: tuple[str, ...] = ("data=1", "data=2", "data=4")
    precision: str = "float64"
    tolerance: float = 1e-9
    changed: str = ""
    note: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    both: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def num_lines(self) -> int:
        """How many lines the change replaces or adds."""
        return sum(len(lines) for lines in self.lines.values())

    @property
    def libraries(self) -> tuple[str, ...]:
        """What the script imports that takes long."""
        if self.source.startswith("huggingface/"):
            return ("torch", "transformers", "accelerate", "datasets")
        return ("torch", "lightning.pytorch") if self.source.startswith("Lightning-AI/") else ("torch",)

    @property
    def script(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def fingerprint(self) -> str:
        """Of all that the case says."""
        said = {key: value for key, value in vars(self).items() if value or key != "both"}
        return hashlib.sha256(json.dumps(said, sort_keys=True, default=dict).encode()).hexdigest()[:16]

    def changes_of(self, name: str, divided: bool) -> dict[str, str]:
        """The lines of a file that are replaced in the original, or in the script that divides its model."""
        return {**self.both.get(name, {}), **(self.lines.get(name, {}) if divided else {})}


def cases(path: Path = HERE / "cases.toml") -> dict[str, Case]:
    """The table, by name and in its order."""
    table = tomllib.loads(path.read_text())
    commits = table.pop("commits")
    return {name: _case(name, row, commits) for name, row in table.items()}


def _case(name: str, row: dict[str, Any], commits: Mapping[str, str]) -> Case:
    script = row["path"].rpartition("/")[2]
    lines, both = (
        {script: change} if all(isinstance(text, str) for text in change.values()) else change
        for change in (row.pop("lines"), row.pop("both", {}))
    )
    both = both if any(both.values()) else {}
    row = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    return Case(name, commit=commits[row["source"]], lines=lines, both=both, **row)


def texts(case: Case, sources: Path | None) -> dict[str, str]:
    """The script and what lies beside it as their authors wrote them, by name. `sources`: a folder with a clone of each repository.

    Raises:
        ValueError: the script is another than the one whose lines the table numbers.
    """
    folder = case.path.rpartition("/")[0]
    paths = {case.script: case.path}
    for name in case.beside:
        paths[name.lstrip("/")] = name.lstrip("/") if name.startswith("/") else f"{folder}/{name}".lstrip("/")
    found = {name: _text(case, path, sources) for name, path in paths.items()}
    digest = hashlib.sha256(found[case.script].encode()).hexdigest()[:16]
    if digest != case.digest:
        where = f"{case.path} of {case.source} at {case.commit}"
        raise ValueError(f"the file given has the digest {digest}, and lines are numbered as of {case.digest}: {where} is needed")
    return found


def _text(case: Case, path: str, sources: Path | None) -> str:
    if sources is not None:
        return (sources / case.source.rpartition("/")[2] / path).read_text()
    with urllib.request.urlopen(f"https://raw.githubusercontent.com/{case.source}/{case.commit}/{path}", timeout=60) as answer:
        return str(answer.read().decode())


def changed(text: str, lines: Mapping[str, str], **names: str) -> str:
    """A file with some lines replaced or added. `names`: what stands for `{plan}` and others there.

    >>> print(changed("a\\nb\\nc", {"2": "B", "3+": "{plan}"}, plan="d"))
    a
    B
    c
    d
    """
    rows = text.split("\n")
    for place, new in sorted(lines.items(), key=lambda item: int(item[0].rstrip("+")), reverse=True):
        at = int(place.rstrip("+"))
        for name, value in names.items():
            new = new.replace("{" + name + "}", value)
        rows[at if place.endswith("+") else at - 1 : at] = [new]
    return "\n".join(rows)
