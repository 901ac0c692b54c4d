"""What was found, as JSON and as the table of docs/scripts.md."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.verify.scripts.case import RANKS, Case

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "docs" / "benchmarks" / "data" / "scripts.json"
PAGE = ROOT / "docs" / "scripts.md"
BEGIN, END = "<!-- scripts: begin -->", "<!-- scripts: end -->"
Rows = Mapping[str, dict[str, Any]]


def load() -> dict[str, dict[str, Any]]:
    return dict(json.loads(RESULTS.read_text())) if RESULTS.exists() else {}


def told(name: str, row: Mapping[str, Any]) -> str:
    """One line for the terminal."""
    found = [f"{ranks}: {x:.1e}" for ranks, x in row["differences"].items()] + [f"{where}: {why}" for where, why in row["failed"].items()]
    return f"{'equal' if row['equal'] else 'NOT EQUAL':9} {name:24} {row.get('numbers', 0):4} numbers  {'  '.join(found)}"


def save(rows: Rows, table: Mapping[str, Case]) -> None:
    """Write both."""
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
    page = PAGE.read_text()
    if BEGIN in page:
        before, after = page.partition(BEGIN)[0], page.partition(END)[2]
        PAGE.write_text(f"{before}{BEGIN}\n{markdown(rows, table)}\n{END}{after}")


def markdown(rows: Rows, table: Mapping[str, Case]) -> str:
    lines = ["| script | lines | what changes | layouts | numbers | worst difference on 1, 2, 4 ranks |", "|---|---|---|---|---|---|"]
    for name, row in rows.items():
        case = table[name]
        found = [row["differences"].get(str(n)) for n in RANKS]
        worst = ", ".join("failed" if x is None else f"{x:.0e}" for x in found)
        link = f"[{case.path}](https://github.com/{case.source}/blob/{case.commit}/{case.path})"
        layouts = ", ".join(f"`{layout}`" for layout in case.layouts)
        note = "" if row["equal"] else f"; not equal: {next(iter(row['failed'].values()), case.note or 'see below')}"
        owner = case.source.rpartition("/")[2]
        lines.append(f"| {owner}: {link} | {row['lines']} | {case.changed} | {layouts} | {row.get('numbers', 0)} | {worst}{note} |")
    return "\n".join(lines)
