"""What a run tells: a table in the terminal, and docs/benchmarks/NAME.md. In: header, rows, verdicts, reasons for skipping."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.common.arithmetic import Row, Series, Verdict

NEAR = 0.1  # what a predicted step may be off by
KINDS = {
    "data": "Data parallelism",
    "exchange": "What the exchange of gradients costs",
    "pipeline": "Pipelines",
    "tensor": "Tensor parallelism",
    "chosen": "The plan that shardwise chooses, beside the fastest peers",
    "settings": "What each of shardwise's settings contributes to its own plan",
    "gpu": "One GPU",
    "out of core": "shardwise's choice beside other ways, under the limit",
}


def header(command: str, versions: Mapping[str, str], **more: Any) -> dict[str, Any]:
    """Machine, command, date and versions."""
    return {
        "command": command,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": f"{processor()}, {os.cpu_count()} cores, {memory_gib():.0f} GiB, {platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": dict(versions),
        **more,
    }


def load() -> str:
    """What else the machine does, for the header: taken before anything is measured."""
    return f"{os.getloadavg()[0]:.1f} processes were running before (a quiet machine has 0)"


def terminal() -> Console:
    """Where a run tells its tables; in a file their lines are as long as they are."""
    return Console() if sys.stdout.isatty() else Console(soft_wrap=True)


def command(name: str, arguments: Sequence[str]) -> str:
    """The command as a page names it: everything but where this run's figures were put besides, which is nobody else's path.

    >>> command("train", ["--rounds", "3", "--json", "/home/me/x.json", "--steps=1", "--json=y.json"])
    'scripts/bench train --rounds 3 --steps=1'
    """
    places = ("--json", "--page")
    pairs = zip(("", *arguments), arguments, strict=False)
    kept = [word for before, word in pairs if before not in places and word.partition("=")[0] not in places]
    return " ".join(["scripts/bench", name, *kept])


def processor() -> str:
    """The processor's name, as the system gives it."""
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def memory_gib() -> float:
    """Memory of the machine."""
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) / 2**30


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Versions of the installed ones among `packages`, those of the peers' own environment included."""
    found: dict[str, str] = {}
    for folder in [*sys.path, *map(str, Path(__file__).parents[2].glob(".venv-peers/lib/python*/site-packages"))]:
        for one in metadata.distributions(path=[folder]):
            name = one.metadata["Name"]
            if name in packages:
                found.setdefault(name, one.version)
    return {name: found[name] for name in packages if name in found}


def tables(rows: Sequence[Row], verdicts: Sequence[Verdict], skipped: Mapping[str, str]) -> list[Table]:
    """Rows by kind, verdicts, and what was skipped."""
    out = []
    for kind, title in KINDS.items():
        mine = [r for r in rows if r.kind == kind]
        if not mine:
            continue
        table = Table(title=title, title_justify="left")
        for name, justify in (("case", "left"), ("shardwise", "left"), ("s/step", "right"), ("peer", "left"), ("s/step", "right")):
            table.add_column(name, justify=justify)  # type: ignore[arg-type]
        table.add_column("ratio", justify="right")
        table.add_column("min..max", justify="right")
        table.add_column("loss differs", justify="right")
        for r in mine:
            style = "green" if r.ratio >= 1 else "red"
            table.add_row(
                escape(r.case),
                escape(r.shardwise_name),
                f"{r.shardwise:.3f}",
                escape(r.peer_name),
                f"{r.peer:.3f}",
                f"[{style}]{r.ratio:.2f}[/]",
                f"{r.ratio_min:.2f}..{r.ratio_max:.2f}",
                f"{r.loss_difference:.0e}",
            )
        out.append(table)
    targets = Table(title="Targets", title_justify="left")
    for name in ("target", "at least", "ratio", "", "case", "worst"):
        targets.add_column(name)
    for v in verdicts:
        style = {True: "green", False: "red", None: "yellow"}[v.met]
        ratio = f"{v.ratio:.2f}" if v.met is not None else "-"
        targets.add_row(escape(v.target), f"{v.at_least:.2f}", ratio, f"[{style}]{v.word}[/]", escape(v.case), escape(v.why))
    out.append(targets)
    return [*out, *left_out(skipped)]


def left_out(skipped: Mapping[str, str]) -> list[Table]:
    """Which contenders were not measured, and why, where there are any."""
    table = Table(title="Not measured", title_justify="left")
    table.add_column("contender")
    table.add_column("why")
    for name, reason in skipped.items():
        table.add_row(escape(name), escape(reason))
    return [table] if skipped else []


def show(console: Console, rows: Sequence[Row], verdicts: Sequence[Verdict], skipped: Mapping[str, str]) -> None:
    """Print all tables."""
    for table in tables(rows, verdicts, skipped):
        console.print(table)


def _table(names: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    cells = [[c.replace("|", "\\|").replace("\n", " ") for c in line] for line in lines]
    return ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names), *("| " + " | ".join(line) + " |" for line in cells), ""]


def lines_of(table: Table) -> list[str]:
    """A table as Markdown."""
    columns = [[str(cell) for cell in column.cells] for column in table.columns]
    names = [str(column.header) for column in table.columns]
    rows = [
        "| " + " | ".join(cell.split("]")[1].split("[")[0] if cell.startswith("[") else cell for cell in line) + " |"
        for line in zip(*columns, strict=True)
    ]
    return [f"## {table.title}", "", "| " + " | ".join(names) + " |", "|" + " --- |" * len(names), *rows, ""]


def opening(title: str, about: Mapping[str, Any], intro: str) -> list[str]:
    """How a page begins that a run writes without targets."""
    head = [f"| {key} | {_words(value)} |" for key, value in about.items()]
    return [f"# Benchmark: {title}", "", "Written by the run itself.", "", "|  |  |", "| --- | --- |", *head, "", intro, ""]


def markdown(
    about: Mapping[str, Any],
    rows: Sequence[Row],
    verdicts: Sequence[Verdict],
    skipped: Mapping[str, str],
    series: Mapping[str, Sequence[Series]],
    intro: str,
    title: str = "training beside peers",
) -> str:
    """The page of a run. `series`: by the title of their set, every contender's own figures."""
    parts = [f"# Benchmark: {title}", "", "Written by the run itself.", ""]
    parts += _table(["", ""], [[key, _words(value)] for key, value in about.items()])
    parts += [intro, "", "## Targets", ""]
    parts += _table(
        ["target", "at least", "ratio", "", "worst case", "seconds a step"],
        [[v.target, f"{v.at_least:.2f}", f"{v.ratio:.2f}" if v.met is not None else "", f"**{v.word}**", v.case, v.why] for v in verdicts],
    )
    for kind, heading in KINDS.items():
        mine = [r for r in rows if r.kind == kind]
        if not mine:
            continue
        parts += [f"## {heading}", ""]
        parts += _table(
            [
                "case",
                "shardwise",
                "s/step",
                "peer",
                "s/step",
                "ratio",
                "min..max",
                "CPU time ratio",
                "precision",
                "settings",
                "loss differs",
            ],
            [
                [
                    r.case,
                    r.shardwise_name,
                    f"{r.shardwise:.3f}",
                    r.peer_name,
                    f"{r.peer:.3f}",
                    f"**{r.ratio:.2f}**",
                    f"{r.ratio_min:.2f}..{r.ratio_max:.2f}",
                    f"{r.cpu_ratio:.2f}",
                    _both(r.precision, r.peer_precision),
                    _both(r.settings, r.peer_settings),
                    f"{r.loss_difference:.0e}",
                ]
                for r in mine
            ],
        )
    priced = [(title, s) for title, found in series.items() for s in found if s.predicted]
    if priced:
        close = sum(abs(s.missed) <= NEAR for _, s in priced)
        mean = sum(abs(s.missed) for _, s in priced) / len(priced)
        parts += ["## Predicted and measured", ""]
        parts += [
            f"Within {NEAR:.0%}: {close} of {len(priced)}; mean absolute error {mean:.1%}. By what `shardwise probe` measured before.",
            "",
        ]
        lines = [[title, s.name, f"{s.predicted:.3f}", f"{s.median:.3f}", f"{s.missed:+.0%}", s.plan] for title, s in priced]
        parts += _table(["set", "contender", "predicted, s", "measured, s", "off by", "plan"], lines)
    parts += ["## Every contender", "", "Medians. CPU seconds are those of all ranks together; memory is the largest rank's.", ""]
    for name, found in series.items():
        parts += [f"### {name}", ""]
        parts += _table(
            ["contender", "s/step", "min..max", "CPU s/step", "MiB", "first loss", "last loss", "plan"],
            [
                [
                    s.name,
                    f"{s.median:.3f}",
                    f"{min(s.seconds):.3f}..{max(s.seconds):.3f}",
                    f"{sorted(s.cpu_seconds)[len(s.cpu_seconds) // 2]:.3f}" if s.cpu_seconds else "",
                    f"{s.memory_bytes / 2**20:.0f}",
                    f"{s.losses[0]:.5f}" if s.losses else "",
                    f"{s.losses[-1]:.5f}" if s.losses else "",
                    s.plan,
                ]
                for s in sorted(found, key=lambda s: s.median)
            ],
        )
    if skipped:
        parts += ["## Not measured", "", *_table(["contender", "why"], [[a, b] for a, b in skipped.items()])]
    return "\n".join(parts)


def _both(ours: str, theirs: str) -> str:
    return ours if ours == theirs else f"{ours} / {theirs}"


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    return f"`{value}`" if str(value).startswith("scripts/") else str(value)
