"""`scripts/verify_all --axes --prove`: which models are proven under which axes, and why others are not.

In: the zoo's tiny models, and Hugging Face's classes made tiny (`bench.common.architectures`, `bench.common.tiny_models`). Out:
docs/benchmarks/proven.md: each model under every axis that it admits, on two ranks, at one random point. `--json FILE` keeps each row as
soon as there is one and is gone on with; `--merge FILE` runs nothing.
"""

from __future__ import annotations

import json
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from bench.common import architectures
from bench.common.document import header, versions
from bench.common.processes import ROOT
from bench.common.tiny_models import planned, resolved
from bench.planning.coverage import AXES, NOTHING, known_files, resumable_parser
from shardwise.errors import format_error
from shardwise.plan.layout import Layout
from shardwise.run.prove.field_tensor import NotProvable
from shardwise.run.prove.prove import prove_plan
from shardwise.run.prove.serial_points import ProofModel, ProofOptions
from shardwise.zoo.names import published_sizes
from shardwise.zoo.resolve import resolve
from shardwise.zoo.resolved import ResolvedModel
from tests.support.verified_models import REFUSED, Subject

PAGE = ROOT / "docs" / "benchmarks" / "proven.md"
COMMAND = "scripts/verify_all --axes --prove"
LAYOUTS = {axis: pair[0] for axis, pair in AXES.items()}
ONE_POINT = 0.5
BATCH = 4
SHOWN = {"nothing": "", "proven": "proven", "refused": "refused", "not provable": "no", "differs": "DIFFERS", "failed": "FAILED"}


@dataclass(frozen=True)
class ProvenRow:
    """One model under one layout. `status`: proven, not provable, refused, differs, failed, nothing that the axis could cut, or not made
    or not captured, without a layout."""

    model: str
    layout: str
    status: str
    note: str = ""
    seconds: float = 0.0


def list_subjects() -> Iterator[tuple[str, Callable[[], ResolvedModel]]]:
    """Return (name, what makes it) of every model."""
    for name in published_sizes():
        if name.endswith("-tiny"):
            yield name, lambda name=name: resolve(name)  # type: ignore[misc]
    for name in architectures.TABLE:
        yield f"hf {name}", lambda name=name: architectures.resolved(name)  # type: ignore[misc]
    for name, cls in planned().items():
        if name not in architectures.TABLE:
            yield f"hf {name}", lambda name=name, cls=cls: resolved(name, cls)  # type: ignore[misc]


def prove_model(name: str, make: Callable[[], ResolvedModel], known: Iterable[str]) -> Iterator[ProvenRow]:
    """Prove each layout that is not `known`; a row without a layout says why there is no model to prove."""
    wanted = [layout for layout in LAYOUTS.values() if layout not in known]
    if not wanted or "" in known:
        return
    try:
        model = make()
        subject = Subject(name, min(model.default_batch, BATCH), model=model)
    except Exception as error:
        yield ProvenRow(name, "", "not made", _line(format_error(error)))
        return
    try:
        subject.source.capture(subject.batch, subject.loss, subject.size)
    except Exception as error:
        yield ProvenRow(name, "", "not captured", _line(format_error(error)))
        return
    proven = ProofModel(subject.make, subject.batch, subject.loss, subject.source)
    for layout in wanted:
        yield prove_layout(subject, proven, layout)


def prove_layout(subject: Subject, model: ProofModel, layout: str) -> ProvenRow:
    """Prove one layout; never raises for what the model or shardwise does."""
    began = time.process_time()

    def row(status: str, note: str = "") -> ProvenRow:
        return ProvenRow(subject.name, layout, status, _line(note), time.process_time() - began)

    asked = Layout.parse(layout)
    try:
        plan = subject.plan(replace(asked, precision="float64"))
        options = ProofOptions(ONE_POINT, seed=subject.seed)
        proof = prove_plan(plan, model, options, asked.tensor > 1, locates_difference=False)
    except NotProvable as error:
        return row("not provable", str(error))
    except REFUSED as error:
        return row("nothing" if NOTHING in str(error) else "refused", format_error(error))
    except Exception as error:
        # A crash is a finding, not the end of the run.
        return row("failed", f"{type(error).__name__}: {error}")
    return row("proven") if proof.ok else row("differs", proof.outcome)


def _line(text: str) -> str:
    return " ".join(text.split())[:200].replace("|", "/")


def document(rows: Sequence[ProvenRow], top: Mapping[str, str]) -> str:
    """Return the page."""
    ran = [row for row in rows if row.layout and row.status != "nothing"]
    count = Counter(row.status for row in ran)
    names = list(dict.fromkeys(row.model for row in rows if row.layout))
    lines = [
        "# Models that are proven",
        "",
        "Each model under each axis that it admits, on two ranks: `shardwise prove` at one random point, which a wrong plan passes with",
        "the chance that `prove` prints (1e-3 at most, mostly below 1e-6); `tensor` with everything cut that can be. An empty cell: the",
        "model has nothing that the axis could cut; a dot: not run yet; *no*: not provable, with the reason below; *refused*: the plan is.",
        "",
        f"`{COMMAND}` on {top['machine']}, {top['date']}. {top['note']}",
        "",
        f"{len(names)} models, {sum(name.startswith('hf ') for name in names)} of them classes of Hugging Face; {len(ran)} runs: "
        + ", ".join(f"{n} {status}" for status, n in count.most_common())
        + f". CPU: {sum(row.seconds for row in rows):.0f} s.",
        "",
        "Layouts: " + "; ".join(f"`{layout}`" for layout in LAYOUTS.values()) + ".",
        "",
        f"| model | {' | '.join(LAYOUTS)} |",
        "|---" * (1 + len(LAYOUTS)) + "|",
    ]
    by = {(row.model, row.layout): row for row in rows}
    for name in names:
        cells = (SHOWN[by[name, layout].status] if (name, layout) in by else "." for layout in LAYOUTS.values())
        lines.append(f"| {name} | {' | '.join(cells)} |")
    reasons = Counter((row.status, re.sub(r"\d+", "N", row.note)) for row in ran if row.status != "proven")
    if reasons:
        lines += ["", "| not proven | why | runs |", "|---|---|---|"]
        lines += [f"| {status} | {why} | {n} |" for (status, why), n in reasons.most_common()]
    lost = [row for row in rows if not row.layout]
    if lost:
        lines += ["", "No graph to prove:", "", *(f"- {row.model}: {row.status}, {row.note}" for row in lost)]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Run what the arguments choose; 4 where a proof differs or fails."""
    given = resumable_parser(COMMAND, __doc__).parse_args(arguments)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    again, began = set(given.again.split(",")), time.perf_counter()
    found = [ProvenRow(**entry) for file in known_files(given) for entry in json.loads(Path(file).read_text(encoding="utf-8"))["rows"]]
    rows = {(row.model, row.layout): row for row in found if row.status not in again}  # the last word on each
    for name, make in () if given.merge else list_subjects():
        if given.models and not any(word in name for word in given.models):
            continue
        for row in prove_model(name, make, [layout for model, layout in rows if model == name]):
            rows[row.model, row.layout] = row
            print(f"{row.status:12} {row.seconds:5.1f} s  {row.model}  {row.layout}  {row.note}", flush=True)
            if given.json:
                Path(given.json).write_text(json.dumps({"rows": [asdict(r) for r in rows.values()]}, indent=1) + "\n", encoding="utf-8")
            if time.perf_counter() - began > given.seconds:
                return 75
    if given.merge or not given.models:
        top = header(COMMAND, versions(("torch", "transformers")), note=given.note)
        PAGE.write_text(document(list(rows.values()), top), encoding="utf-8")
    return 4 if any(row.status in ("differs", "failed") for row in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
