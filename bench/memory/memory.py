"""`scripts/bench memory`: the memory of the fullest rank, predicted against measured: architectures that are none of shardwise's, in
layouts.

Each model is planned by hand in each layout on two cores and makes one step in ranks of its own. Out: a line for each in the terminal,
`--json FILE`, and after a whole run docs/benchmarks/memory.md. Measured is what the executor accounts for, which does not depend on how
busy a machine is: counted, not timed. Not compared: what a process takes anyhow, and the margin that a plan adds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.common.document import command, header, versions
from bench.common.processes import ROOT
from shardwise.cost.memory.memory import MARGIN
from shardwise.errors import LayoutError, ShardwiseError, did_you_mean
from shardwise.plan.layout import Layout

PAGE = ROOT / "docs" / "benchmarks" / "memory.md"
CLUSTER = "1xcpu-2"
FILES = ("vision", "sequence", "assorted", "hugging_face")  # of bench/memory/models
NEEDS = {"hugging_face": "transformers"}
LAYOUTS = (
    "data=2",
    "data=2 zero=3",
    "tensor=2",
    "pipeline=2 microbatches=4 schedule=1f1b",
    "data=1 recompute=full",
    "data=1 recompute=selective",
    "data=2 precision=bfloat16",
    "data=1 recompute=full precision=bfloat16",
)
WITHIN = 0.10
MIB = 2**20

INTRO = f"""Written by `scripts/bench memory`. What the fullest rank holds when it holds most in one step, predicted against measured,
in per cent of what was measured; + is predicted too high. The architectures are none of shardwise's own (`bench/memory/models`), small
enough
for two processors; every one is planned by hand in every layout on `{CLUSTER}`, for ranks of one thread. Measured is what the executor
accounts for; predicted is without the margin that a plan adds. Counted, not timed."""

CAUSES = """## What is not modelled, and what does not run

- Forward is taken to hold less than backward does, where layers are not run again. Of a first stage in a pipeline that keeps little of its
  own, forward of a microbatch beside what another keeps may hold more: some per cent too low.
- Workspaces of depthwise convolutions whose window is larger than 3, with channels innermost, are as oneDNN takes them on processors with
  AVX-512; gradients of which several operators give a part are taken to lie as the last one's.
- Grids of tensor ranks (no layout of these) are predicted too high: 18 % for `unet3d` in `tensor=2x2`.
- Where `gat` does not run in bfloat16, it does not in plain torch either: its `index_add` gets a bfloat16 and a float32 tensor under
  `torch.autocast`, which torch refuses with the same words."""


@dataclass(frozen=True, slots=True)
class Row:
    """One model in one layout: bytes of the fullest rank, in all and by what they hold; or why there are none."""

    model: str
    layout: str
    predicted_bytes: float = 0.0
    measured_bytes: float = 0.0
    predicted_parts: tuple[tuple[str, float], ...] = ()
    measured_parts: tuple[tuple[str, float], ...] = ()
    note: str = ""

    @property
    def error(self) -> float:
        """By how much the prediction is too high, in parts of what was measured.

        >>> Row("a model", "data=2", 90.0, 100.0).error
        -0.1
        """
        return (self.predicted_bytes - self.measured_bytes) / self.measured_bytes

    @property
    def exceeds(self) -> bool:
        """Whether measured was more than what was predicted with the margin."""
        return self.measured_bytes > self.predicted_bytes * (1 + MARGIN)


def found() -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """Names of models by file, and a line for each file whose package is not installed."""
    models, missing = {}, []
    for file in FILES:
        package = NEEDS.get(file)
        if package and find_spec(package) is None:
            missing.append(f"{package} is not installed: the models of bench/memory/models/{file}.py are left out")
            continue
        factories = import_module(f"bench.memory.models.{file}").FACTORIES
        models[file] = tuple(factory.__name__ for factory in factories)
    return models, missing


def picked(models: Mapping[str, Sequence[str]], words: Sequence[str]) -> list[tuple[str, str]]:
    """(file, model) of the models that `words` name, by themselves or by their file; without words all.

    Raises:
        ValueError: a word that is neither.
    """
    known = {*models, *(name for names in models.values() for name in names)}
    for word in words:
        if word not in known:
            raise ValueError(f"no model {word!r}{did_you_mean(word, known)}; there are {', '.join(sorted(known))}")
    return [(file, name) for file, names in models.items() for name in names if not words or file in words or name in words]


def measure(file: str, name: str, layout: str) -> Row:
    """Plan, and make a step in ranks of their own. What fails has its reason for a note."""
    from shardwise.api import plan as make_plan
    from shardwise.run.engine import Engine
    from shardwise.run.state.optimizer import OptimizerSpec
    from shardwise.world.launch.launch import launch
    from shardwise.world.memory import PARTS
    from shardwise.world.world import World
    from shardwise.zoo.resolve import resolve

    try:
        subject = resolve(f"{ROOT}/bench/memory/models/{file}.py:{name}")
        batch = subject.example()
        plan = make_plan(subject.make, batch, loss=subject.loss, cluster=CLUSTER, layout=f"{layout} threads=1")
        if plan.prediction is None:
            return Row(name, layout, note=f"is not captured: {plan.uncaptured}")

        def on_rank(world: World) -> dict[str, float]:
            engine = Engine(plan, subject.make, batch, subject.loss, world, OptimizerSpec.of("adamw"), seed=0)
            engine.step(batch)
            peak = engine.peak_memory()
            return {part: getattr(peak, part) for part in (*PARTS, "total")} if peak else {}

        each = launch(on_rank, plan.layout.num_ranks, show=False)
    except Exception as error:  # of any kind: a model that fails is a line of the page, not the end of a long run
        return Row(name, layout, note=f"does not run: {reason(error)}")
    fullest = max(each, key=lambda peak: peak.get("total", 0.0))
    if not fullest:
        return Row(name, layout, note="is not measured: nothing counts this device's memory")
    predicted = plan.prediction.memory
    return Row(
        name,
        layout,
        predicted.total - predicted.margin,
        fullest["total"],
        tuple((part, getattr(predicted, part)) for part in PARTS),
        tuple((part, fullest[part]) for part in PARTS),
    )


def reason(error: Exception) -> str:
    """The first line of what an error says, without the folder in which this copy of shardwise lies.

    >>> reason(ValueError("no such row\\n  at line 3"))
    'ValueError: no such row'
    """
    first = (str(error).splitlines() or [""])[0].replace(f"{ROOT}/", "")
    return first if isinstance(error, ShardwiseError) else f"{type(error).__name__}: {first}"


def line(row: Row) -> str:
    """One row in words."""
    what = f"{row.model:15} {row.layout:40}"
    if row.note:
        return f"{what} {row.note}"
    parts = ", ".join(
        f"{part} {predicted / MIB:.1f}/{measured / MIB:.1f}"
        for (part, predicted), (_, measured) in zip(row.predicted_parts, row.measured_parts, strict=True)
    )
    return f"{what} {100 * row.error:+6.1f} %  {row.predicted_bytes / MIB:.1f}/{row.measured_bytes / MIB:.1f} MiB ({parts})"


def conclusion(rows: Sequence[Row]) -> list[str]:
    """How near the predictions are, in sentences."""
    done = [row for row in rows if not row.note]
    if not done:
        return ["Nothing was measured."]
    close = [row for row in done if abs(row.error) <= WITHIN]
    mean = sum(abs(row.error) for row in done) / len(done)
    over, under = max(done, key=lambda row: row.error), min(done, key=lambda row: row.error)
    beyond = [row for row in done if row.exceeds]
    named = f": {', '.join(f'`{row.model}` in `{row.layout}`' for row in beyond)}" if beyond else ""
    return [
        f"- Within {100 * WITHIN:.0f} %: {len(close)} of {len(done)}. Mean absolute error: {100 * mean:.1f} %.",
        f"- Worst over: {_case(over)}. Worst under: {_case(under)}.",
        f"- More was measured than was predicted with the plan's margin of {100 * MARGIN:.0f} %: {len(beyond)} of {len(done)}{named}.",
    ]


def _case(row: Row) -> str:
    return f"{_percent(row.error)} % (`{row.model}` in `{row.layout}`)"


def _percent(error: float) -> str:
    rounded = round(100 * error)
    return f"{rounded:+d}" if rounded else "0"


def markdown(about: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """The page: header, a table of models and layouts, what does not run, how near it is, known causes."""
    layouts, models = (list(dict.fromkeys(words)) for words in zip(*((row.layout, row.model) for row in rows), strict=True))
    by_case = {(row.model, row.layout): row for row in rows}
    noted = [row for row in rows if row.note]
    lines = ["# Memory, predicted and measured", "", INTRO, "", "| | |", "|---|---|"]
    lines += [f"| {key} | {_words(value)} |" for key, value in about.items()]
    lines += ["", f"| model | {' | '.join(layouts)} |", f"|---|{'---:|' * len(layouts)}"]
    for model in models:
        cells = []
        for layout in layouts:
            row = by_case.get((model, layout))
            cells.append("" if row is None else f"({noted.index(row) + 1})" if row.note else _percent(row.error))
        lines.append(f"| {model} | {' | '.join(cells)} |")
    if noted:
        lines += ["", *(f"{number}. `{row.model}` in `{row.layout}` {row.note}" for number, row in enumerate(noted, 1))]
    return "\n".join([*lines, "", *conclusion(rows), "", CAUSES, ""])


def _words(value: Any) -> str:
    return ", ".join(f"{key} {one}" for key, one in value.items()) if isinstance(value, Mapping) else str(value)


def main(arguments: Sequence[str]) -> int:
    """Read the options, predict and measure, tell. Exit 2 for a model or layout that is none."""
    p = argparse.ArgumentParser(prog="scripts/bench memory", description="memory, predicted against measured", allow_abbrev=False)
    p.add_argument("--json", metavar="FILE", type=Path, help="write header and rows to FILE")
    p.add_argument("--models", nargs="+", metavar="WORD", default=[], help="models, or their files' names; does not write the page")
    p.add_argument("--layouts", nargs="+", metavar="TEXT", default=[], help='such as "data=2 zero=3"; does not write the page')
    given = p.parse_args(list(arguments))
    warnings.filterwarnings("ignore")  # of models' own code, hundreds of times
    models, missing = found()
    try:
        wanted = picked(models, given.models)
        for layout in given.layouts:
            Layout.parse(layout)
    except (ValueError, LayoutError) as error:
        print(f"shardwise: {error}", file=sys.stderr)
        return 2
    console = Console(soft_wrap=True)
    for words in missing:
        console.print(words, markup=False)
    layouts = tuple(dict.fromkeys(given.layouts)) or LAYOUTS
    about = header(command("memory", arguments), versions(("torch", "transformers")), measured="one step of each with AdamW")
    began = time.monotonic()
    rows = []
    for file, name in wanted:
        for layout in layouts:
            rows.append(measure(file, name, layout))
            console.print(line(rows[-1]), markup=False, highlight=False)
    for words in conclusion(rows):
        console.print(words, markup=False)
    console.print(f"{len(rows)} runs in {time.monotonic() - began:.0f} s")
    if given.json:
        given.json.write_text(json.dumps({"header": about, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    if not given.models and not given.layouts and not missing:
        PAGE.write_text(markdown(about, rows))
        console.print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
