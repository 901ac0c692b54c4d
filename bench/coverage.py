"""`scripts/bench coverage`: what is sharded and what is whole: operators by their labels, models by their axes.

In: the records of operators; the zoo's tiny models, the tests' odd ones, and every Hugging Face class that ships a tensor plan, made
tiny. Out: docs/coverage.md: for every operator the labels that can be sharded; for every model and axis whether the parallel run equals
the serial one in float64 to 1e-9 over two steps, and the share that is divided. `--json FILE` is written after every model,
`--merge FILE` runs nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.document import command, header, versions
from bench.processes import ROOT
from bench.tiny_models import planned, resolved
from bench.verify_all import LIMIT_S, REFUSED, TOLERANCE, Subject, models
from weft.errors import said
from weft.ops import FAMILIES
from weft.ops.record import Op
from weft.plan.layout import Layout
from weft.zoo.resolve import resolve
from weft.zoo.resolved import Resolved

PAGE = ROOT / "docs" / "coverage.md"
LAYOUTS = ("tensor=2", "data=2 zero=3", "pipeline=2")
IMAGES = "spatial=2"  # of models whose first input is one
INTRO = """What weft shards and what it replicates. Shares are of parameters and of FLOPs: 1 where the ranks along the axis have equal
parts, 0 where one of them has everything. `tensor` runs with `--cut-everything`, since the planner replicates most of such small models."""


@dataclass(frozen=True)
class Row:
    """One model under one layout. `status`: equal, differs, refused, failed or not captured; shares that its axis divides."""

    model: str
    layout: str
    status: str
    worst: float = 0.0
    parameters: float = 0.0
    flops: float = 0.0
    note: str = ""
    seconds: float = 0.0


def subjects() -> Iterator[tuple[str, Callable[[], Resolved]]]:
    """(name, what makes it) of every model."""
    for name in models():
        yield name, lambda name=name: resolve(name)  # type: ignore[misc]
    for name, cls in planned().items():
        yield f"hf {name}", lambda name=name, cls=cls: resolved(name, cls)  # type: ignore[misc]


def rows_of(name: str, make: Callable[[], Resolved], wanted: Sequence[str]) -> Iterator[Row]:
    """A row for each layout; one alone where the model cannot be followed."""
    try:
        model = make()
        subject = Subject(name, min(model.default_batch, 8), model=model)
        graph = subject.source.capture(subject.batch, subject.loss, subject.size).graph
    except Exception as error:
        yield Row(name, "", "not captured", note=_line(said(error)))
        return
    images = any(v.batched and len(v.tensor.shape) > 2 and v.tensor.is_float for v in graph.inputs)
    for layout in [*wanted, *([IMAGES] if images else [])]:
        began = time.perf_counter()
        try:
            asked = Layout.parse(layout)
            checked = subject.check(replace(asked, precision="float64"), limit_s=LIMIT_S, cut_everything=asked.tensor > 1)
        except Exception as error:
            status = "refused" if isinstance(error, REFUSED) else "failed"
            yield Row(name, layout, status, note=_line(said(error)), seconds=time.perf_counter() - began)
            continue
        axis = layout.partition("=")[0]
        share: Mapping[str, float] = checked.divided.get(axis, {"parameters": 0.0, "flops": 0.0})
        status, note = ("equal", "") if checked.ok and checked.tolerance <= TOLERANCE else ("differs", checked.first_difference or "")
        worst = max(checked.worst.values(), default=0.0)
        yield Row(name, layout, status, worst, share["parameters"], share["flops"], note, time.perf_counter() - began)


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
        "many dimensions as are left; `x~` has windows that slide, `x/` an average, `x^` classes, `x+` statistics (`weft.ops.rule`).",
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
    lines = ["# Coverage", "", INTRO, "", f"`{top['command']}` on {top['machine']}, {top['date']}.", "", "## Models x axes", ""]
    captured = [row for row in rows if row.layout]
    names = dict.fromkeys(row.model for row in captured)
    count = {status: sum(row.status == status for row in captured) for status in ("equal", "differs", "refused", "failed")}
    lines += [f"{len(names)} models, {len(captured)} runs: " + ", ".join(f"{n} {status}" for status, n in count.items()) + "."]
    worst = max((row.worst for row in captured if row.status == "equal"), default=0.0)
    lines += [f"The worst relative error of those that are equal is {worst:.1e}. Shares: parameters, FLOPs.", ""]
    columns = [*LAYOUTS, IMAGES]
    lines += [f"| model | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    by = {(row.model, row.layout): row for row in captured}
    lines += [f"| {name} | {' | '.join(_cell(by.get((name, column))) for column in columns)} |" for name in names]
    refused = [row for row in captured if row.status != "equal"]
    if refused:
        lines += ["", "Not equal, with the reason:", "", *(f"- {r.model}, {r.layout}: {r.status}, {r.note}" for r in refused)]
    lost = [row for row in rows if not row.layout]
    if lost:
        lines += ["", f"Not captured, so that they train data-parallel or not at all here ({len(lost)}):", ""]
        lines += [f"- {row.model}: {row.note}" for row in lost]
    return "\n".join([*lines, "", *operators()]) + "\n"


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{row.parameters:.2f}, {row.flops:.2f}" if row.status == "equal" else row.status


def main(arguments: Sequence[str]) -> int:
    """Run what the arguments choose; 4 where a run differs from the serial one."""
    parser = argparse.ArgumentParser(prog="scripts/bench coverage", description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("models", nargs="*", help="parts of names; all by default")
    parser.add_argument("--json", metavar="FILE", help="write the rows there, after every model")
    parser.add_argument("--merge", metavar="FILE", nargs="+", help="run nothing: take the rows of these files")
    given = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows: list[Row] = []
    for file in given.merge or ():
        rows += [Row(**entry) for entry in json.loads(Path(file).read_text(encoding="utf-8"))["rows"]]
    rows = list({(row.model, row.layout): row for row in rows}.values())  # the last word on each
    for name, make in () if given.merge else subjects():
        if given.models and not any(word in name for word in given.models):
            continue
        for row in rows_of(name, make, LAYOUTS):
            rows.append(row)
            print(
                f"{row.status:12} {row.seconds:5.1f} s  {row.model}  {row.layout}  {row.parameters:.2f} {row.flops:.2f} {row.note}",
                flush=True,
            )
        if given.json:
            Path(given.json).write_text(json.dumps({"rows": [asdict(row) for row in rows]}, indent=1) + "\n", encoding="utf-8")
    if given.merge or not given.models:
        words = [word for word in arguments if word != "--merge" and word not in (given.merge or ())]
        PAGE.write_text(document(rows, header(command("coverage", words), versions(("torch", "transformers")))), encoding="utf-8")
    return 4 if any(row.status in ("differs", "failed") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
