"""`scripts/verify_all --axes`: what is sharded and what is whole: operators by their labels, models by their axes.

In: the records of operators; the zoo's tiny models, the tests' odd ones, Hugging Face's classes made tiny (`bench.common.tiny_models`,
`bench.common.architectures`). Out: docs/coverage.md: for every operator the labels that can be sharded; for every model and every axis
that it
admits, on 2 and 4 ranks, whether the parallel run equals the serial one in float64 to 1e-9 over two steps, and the share that the axis
divides. `--json FILE` keeps each row as soon as there is one and is gone on with; `--merge FILE` runs nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.common import architectures
from bench.common.document import header, versions
from bench.common.processes import ROOT
from bench.common.tiny_models import planned, resolved
from bench.verify.verify_all import models
from shardwise.errors import format_error
from shardwise.ops import FAMILIES
from shardwise.ops.record import Op
from shardwise.plan.layout import Layout
from shardwise.zoo.resolve import resolve
from shardwise.zoo.resolved import ResolvedModel
from tests.support.verified_models import LIMIT_S, REFUSED, TOLERANCE, Subject

PAGE = ROOT / "docs" / "coverage.md"
# By column: the axis that is told about, its layout on two ranks and on four.
AXES = {
    "data": ("data=2 zero=3", ""),  # four ranks of it: below, with tensor
    "tensor": ("tensor=2", "data=2 tensor=2 zero=1"),
    "pipeline": ("pipeline=2 microbatches=2", "tensor=2 pipeline=2 microbatches=2"),
    "context": ("context=2", "context=2 tensor=2"),
    "spatial": ("spatial=2", "data=2 spatial=2"),
    "channel": ("channel=2", "channel=2 spatial=2"),
    "expert": ("data=2 expert=2", "data=4 expert=4"),
    "branch": ("branch=2", "branch=2 tensor=2"),
}
NOTHING = "leave it out"  # so refusals end where a model has nothing that the axis could cut
WHOLE = "data=2"  # where the model cannot be captured
LONGEST_S = 3 * LIMIT_S  # beside other work
INTRO = """What shardwise shards, and what it replicates. Each model runs under each axis that it admits, on two ranks and, after the bar,
on four, where the axis stands beside another: two steps of AdamW in float64. A figure says that loss, every gradient and every
weight equal the serial run's to 1e-9 relative; it is the share of parameters and of FLOPs that the axis divides: 1 where every rank
along it has equal parts, 0 where one of them has everything (`shardwise verify`). An empty cell: the model has nothing that the axis
could cut; a dot: not run yet. `tensor` runs with `--cut-everything`, since the planner replicates most of such small models."""


@dataclass(frozen=True)
class Row:
    """One model under one layout. `status`: equal, differs, refused, failed, or nothing that the axis could cut; without a layout, not made
    or not captured. Shares that its axis divides."""

    model: str
    layout: str
    status: str
    worst: float = 0.0
    parameters: float = 0.0
    flops: float = 0.0
    note: str = ""
    seconds: float = 0.0


def subjects() -> Iterator[tuple[str, Callable[[], ResolvedModel]]]:
    """(name, what makes it) of every model."""
    for name in architectures.TABLE:
        yield f"hf {name}", lambda name=name: architectures.resolved(name)  # type: ignore[misc]
    for name in models():
        yield name, lambda name=name: resolve(name)  # type: ignore[misc]
    for name, cls in planned().items():
        if name not in architectures.TABLE:
            yield f"hf {name}", lambda name=name, cls=cls: resolved(name, cls)  # type: ignore[misc]


def columns() -> list[tuple[str, str]]:
    """(axis, layout), those on two ranks first."""
    return [(axis, pair[i]) for i in (0, 1) for axis, pair in AXES.items() if pair[i]]


def rows_of(name: str, make: Callable[[], ResolvedModel], known: Mapping[str, Row], device: str = "cpu") -> Iterator[Row]:
    """A row for each layout that is not `known`; where the model cannot be followed one that says why, and one of whole replicas."""
    wanted = [(axis, layout) for axis, layout in columns() if layout not in known]
    if not wanted or ("" in known and WHOLE in known):
        return
    try:
        model = make()
        subject = Subject(name, min(model.default_batch, 8), model=model, device=device)
    except Exception as error:
        yield Row(name, "", "not made", note=_line(format_error(error)))
        return
    try:
        subject.source.capture(subject.batch, subject.loss, subject.size)
    except Exception as error:
        yield Row(name, "", "not captured", note=_line(format_error(error)))
        wanted = [("data", WHOLE)]
    for axis, layout in wanted:
        yield row_of(subject, axis, layout)


def row_of(subject: Subject, axis: str, layout: str) -> Row:
    """One run; never raises for what the model or shardwise does."""
    began = time.perf_counter()
    asked = Layout.parse(layout)
    try:
        checked = subject.check(replace(asked, precision="float64"), limit_s=LONGEST_S, cut_everything=asked.tensor > 1)
    except Exception as error:
        status = "failed" if not isinstance(error, REFUSED) else "nothing" if NOTHING in str(error) else "refused"
        return Row(subject.name, layout, status, note=_line(format_error(error)), seconds=time.perf_counter() - began)
    share: Mapping[str, float] = checked.divided.get(axis, {"parameters": 0.0, "flops": 0.0})
    status, note = ("equal", "") if checked.ok and checked.tolerance <= TOLERANCE else ("differs", checked.first_difference or "")
    worst = max(checked.worst.values(), default=0.0)
    return Row(subject.name, layout, status, worst, share["parameters"], share["flops"], note, time.perf_counter() - began)


def _line(text: str) -> str:
    return text[:160].replace("|", "/")


def rule_words(op: Op) -> str:
    """How an operator can be sharded, as its record says it."""
    if op.rule is None:
        return "whole"
    lines = (op.rule,) if isinstance(op.rule, str) else op.rule if isinstance(op.rule, tuple) else ()
    return "; ".join(f"`{line}`" for line in lines) or "follows from the call"


def operators() -> list[str]:
    """The table of operators, family by family."""
    lines = ["## Operators x labels", ""]
    records = [(family.__name__.rpartition(".")[2], op) for family in FAMILIES for op in family.OPS]
    names = sum(len(op.names.split()) for _, op in records)
    whole = sum(len(op.names.split()) for _, op in records if op.rule is None)
    lines += [f"{names} operators have a record; {names - whole} have a rule, {whole} are computed whole on every rank of an axis.", ""]
    lines += [
        "Notation: one entry a tensor that is read, `->`, one a result; equal names are sharded together, `!x` is not sharded, `b*` is as"
    ]
    lines += [
        "many dimensions as are left; `x~` has windows that slide, `x/` an average, `x^` classes, `x+` statistics (`shardwise.ops.rule`).",
        "",
    ]
    lines += ["| family | operators | labels |", "|---|---|---|"]
    merged: dict[tuple[str, str], list[str]] = {}
    for family, op in records:
        merged.setdefault((family, rule_words(op)), []).extend(op.names.split())
    lines += [f"| {family} | {' '.join(ops)} | {words} |" for (family, words), ops in merged.items()]
    return lines


def document(rows: Sequence[Row], top: Mapping[str, Any]) -> str:
    """The page."""
    lines = [
        "# Coverage",
        "",
        INTRO,
        "",
        f"`{top['command']}` on {top['machine']}, {top['date']}. {top['note']}",
        "",
        "## Models x axes",
        "",
    ]
    ran = [row for row in rows if row.layout and row.status != "nothing"]
    names = dict.fromkeys(row.model for row in rows if row.layout)
    lost = [row for row in rows if not row.layout]
    whole = {row.model for row in lost}
    count = {status: sum(row.status == status for row in ran) for status in ("equal", "differs", "refused", "failed")}
    library = sum(name.startswith(("hf", "hf:")) for name in names)
    lines += [f"{len(names)} models, {library} of them classes of Hugging Face; {len(ran)} runs: "]
    lines[-1] += ", ".join(f"{n} {status}" for status, n in count.items()) + "."
    worst = max((row.worst for row in ran if row.status == "equal"), default=0.0)
    lines += [f"The worst relative error of those that are equal is {worst:.1e}. Shares: parameters, FLOPs.", ""]
    lines += ["On two ranks, on four: " + "; ".join(" and ".join(f"`{one}`" for one in pair if one) for pair in AXES.values()) + ".", ""]
    lines += [f"| model | {' | '.join(AXES)} |", "|---" * (1 + len(AXES)) + "|"]
    by = {(row.model, *_column(row.layout)): row for row in rows if row.layout}
    for name in (n for n in names if n not in whole):
        cells = (_cell(by.get((name, axis, 2)), by.get((name, axis, 4))) for axis in AXES)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    bad = [row for row in ran if row.status != "equal"]
    if bad:
        lines += ["", "Not equal, with the reason:", "", *(f"- {r.model}, {r.layout}: {r.status}, {r.note}" for r in bad)]
    if lost:
        lines += ["", f"Not captured ({len(lost)}); these train by whole replicas, each on its own samples (`{WHOLE}`):", ""]
        lines += [f"- {row.model}{_replicas(by.get((row.model, 'data', 2)))}: {row.note}" for row in lost]
    return "\n".join([*lines, "", *operators()]) + "\n"


def _column(layout: str) -> tuple[str, int]:
    """(the axis that a layout is about, its ranks): on two ranks the only one, or the one that lies inside the other."""
    told = next((axis for axis, pair in AXES.items() if layout == pair[1]), "")
    parsed = Layout.parse(layout)
    return told or [axis for axis, n in parsed.axes if n > 1][-1], parsed.num_ranks


def _cell(two: Row | None, four: Row | None) -> str:
    """Shares of parameters and FLOPs on two ranks, and on four."""
    return f"{_shares(two)} \\| {_shares(four)}" if four is not None and four.status != "nothing" else _shares(two)


def _shares(row: Row | None) -> str:
    if row is None:
        return "."
    return f"{row.parameters:.2f}, {row.flops:.2f}" if row.status == "equal" else row.status.removeprefix("nothing")


def _replicas(row: Row | None) -> str:
    return f" ({WHOLE}: {row.status})" if row is not None else ""


def resumable_parser(prog: str, description: str | None) -> argparse.ArgumentParser:
    """The arguments of a table of models that goes on from its JSON."""
    parser = argparse.ArgumentParser(prog=prog, description=(description or "").partition("\n")[0])
    parser.add_argument("models", nargs="*", help="parts of names; all by default")
    parser.add_argument("--json", metavar="FILE", help="the rows, written as they come; rows that it has are not run again")
    parser.add_argument("--again", metavar="STATUS,...", default="", help="of the file's rows those run again: failed,differs,refused")
    parser.add_argument("--seconds", type=float, default=float("inf"), metavar="S", help="begin nothing after so long; 75 if there is more")
    parser.add_argument("--note", default="", metavar="TEXT", help="a sentence for the page")
    parser.add_argument("--merge", metavar="FILE", nargs="+", help="run nothing: write the page of the rows of these files")
    return parser


def known_files(given: argparse.Namespace) -> list[str]:
    """The files of rows to go on from."""
    return given.merge or ([given.json] if given.json and Path(given.json).is_file() else [])


def main(arguments: Sequence[str]) -> int:
    """Run what the arguments choose; 4 where a run differs from the serial one."""
    parser = resumable_parser("scripts/verify_all --axes", __doc__)
    parser.add_argument("--part", metavar="I/N", default="0/1", help="every Nth model from the Ith on")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where ranks run; several share a GPU")
    given = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    again, began = set(given.again.split(",")), time.perf_counter()
    rows = {(row.model, row.layout): row for row in _read(known_files(given)) if row.status not in again}  # the last word on each
    part, parts = (int(word) for word in given.part.split("/"))
    for name, make in () if given.merge else list(subjects())[part::parts]:
        if given.models and not any(word in name for word in given.models):
            continue
        known = {layout: row for (model, layout), row in rows.items() if model == name}
        for row in rows_of(name, make, known, given.device):
            rows[row.model, row.layout] = row
            print(
                f"{row.status:12} {row.seconds:5.1f} s  {row.model}  {row.layout}  {row.parameters:.2f} {row.flops:.2f} {row.note}",
                flush=True,
            )
            if given.json:
                _write(Path(given.json), rows.values())
            if time.perf_counter() - began > given.seconds:
                return 75
    if given.merge or not (given.models or parts > 1 or given.device != "cpu"):
        top = header("scripts/verify_all --axes", versions(("torch", "transformers")), note=given.note)
        page = document(list(rows.values()), top)
        PAGE.write_text(page, encoding="utf-8")
    return 4 if any(row.status in ("differs", "failed") for row in rows.values()) else 0


def _read(files: Sequence[str]) -> list[Row]:
    return [Row(**entry) for file in files for entry in json.loads(Path(file).read_text(encoding="utf-8"))["rows"]]


def _write(file: Path, rows: Iterable[Row]) -> None:
    new = file.with_suffix(".new")
    new.write_text(json.dumps({"rows": [asdict(row) for row in rows]}, indent=1) + "\n", encoding="utf-8")
    new.replace(file)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
