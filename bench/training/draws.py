"""`scripts/bench draws`: what shardwise's stream of random numbers costs in a step of a GPT with dropout.

One engine draws with shardwise's stream, one with torch's own dropout and attention, one has a model without dropout; they take turns in
one
process. Out: seconds a step, and which part of shardwise's step is spent drawing (dropping included), in the terminal, in `--json FILE`
and in
docs/benchmarks/draws.md. Not measured: graphics processors (`scripts/bench draws --device cuda` where there is one).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

from bench.common.document import command, header, lines_of, load, opening, terminal, versions
from bench.common.measure import seconds_a_step, turn
from bench.common.processes import ROOT
from shardwise.api import plan as make_plan
from shardwise.lower import operator_lowering
from shardwise.lower.kernels import random_stream
from shardwise.run.engine import Engine
from shardwise.world.launch.launch import launch
from shardwise.world.world import World
from shardwise.zoo.resolve import resolve

PAGE = ROOT / "docs" / "benchmarks" / "draws.md"
MODELS = ("gpt-10m", "gpt-50m")
NAMES = ("shardwise", "torch", "none")

INTRO = """Seconds a step, medians of rounds, one rank. `shardwise`: dropout of 0.1 drawn from shardwise's stream, in attention too;
`torch`: the same
model with torch's own dropout and attention in the place of shardwise's; `none`: without dropout. `ratio`: torch's step to shardwise's,
by round,
then the median; above 1 shardwise's draws are the faster. `drawing`: the part of shardwise's step that its draws take, forward and
backward,
dropping included."""


@dataclass(frozen=True, slots=True)
class Found:
    """Seconds a step by way of drawing, in every round, and of shardwise's the seconds that it draws."""

    model: str
    step_s: dict[str, list[float]]
    drawing_s: list[float]

    @property
    def ratio(self) -> float:
        return median(a / b for a, b in zip(self.step_s["torch"], self.step_s["shardwise"], strict=True))

    @property
    def drawing(self) -> float:
        """The part of a step."""
        return median(a / b for a, b in zip(self.drawing_s, self.step_s["shardwise"], strict=True))


def _dropout(x: Tensor, p: float, draw: object, where: object) -> Tensor:
    return F.dropout(x, p)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, causal: bool, scale: float | None, drawing: object
) -> Tensor:
    fewer = k.dim() > 3 and k.shape[-3] != q.shape[-3]
    return F.scaled_dot_product_attention(q, k, v, mask, p, causal, scale=scale, enable_gqa=fewer)


@contextmanager
def _torchs_own() -> Iterator[None]:
    """While a model is lowered: torch's draws."""
    kept = operator_lowering.dropout, operator_lowering.attention
    operator_lowering.dropout, operator_lowering.attention = _dropout, _attention  # type: ignore[assignment]
    try:
        yield
    finally:
        operator_lowering.dropout, operator_lowering.attention = kept


@contextmanager
def _timed(spent: list[float], sync: Callable[[], None]) -> Iterator[None]:
    """Adds to `spent` the seconds of every draw."""
    kept = random_stream._compute_dropout

    def timed(*args: Any) -> Tensor:
        sync()
        began = time.perf_counter()
        found = kept(*args)
        sync()
        spent[0] += time.perf_counter() - began
        return found

    random_stream._compute_dropout = timed  # type: ignore[assignment]
    try:
        yield
    finally:
        random_stream._compute_dropout = kept


def measure(name: str, batch_size: int, rounds: int, steps: int, device: str) -> Found:
    """Rounds of steps on one rank."""
    layout = "data=1 threads=1" if device == "cpu" else "data=1"
    models = {way: resolve(name if way == "none" else f"{name}:dropout=0.1") for way in NAMES}
    batches = {way: model.batch(batch_size) for way, model in models.items()}
    plans = {way: make_plan(model.make, batches[way], loss=model.loss, cluster="1xcpu-2", layout=layout) for way, model in models.items()}

    def on_rank(world: World) -> tuple[dict[str, list[float]], list[float]]:
        engines = {}
        for way in NAMES:
            model = models[way]
            if way == "torch":
                with _torchs_own():
                    engines[way] = Engine(plans[way], model.make, batches[way], model.loss, world, seed=0)
            else:
                engines[way] = Engine(plans[way], model.make, batches[way], model.loss, world, seed=0)
        sync = torch.cuda.synchronize if world.device.type == "cuda" else lambda: None
        took: dict[str, list[float]] = {way: [] for way in NAMES}
        drawing = []
        for number in range(-1, rounds):  # the first does not count
            for way in turn(list(NAMES), max(0, number)):
                seconds = seconds_a_step(partial(engines[way].step, batches[way]), steps, sync)
                if number >= 0:
                    took[way].append(seconds)
            spent = [0.0]
            with _timed(spent, sync):
                seconds_a_step(partial(engines["shardwise"].step, batches["shardwise"]), steps, sync)
            if number >= 0:
                drawing.append(spent[0] / steps)
        return took, drawing

    took, drawing = launch(on_rank, 1, device=device, threads=1, timeout_s=900, show=False)[0]
    return Found(name, took, drawing)


def table(found: Sequence[Found]) -> Table:
    """One row a model."""
    out = Table(title="A step with dropout", title_justify="left")
    for name in ("model", "shardwise, ms", "torch, ms", "none, ms", "ratio", "drawing"):
        out.add_column(name, justify="left" if name == "model" else "right")
    for f in found:
        steps = [f"{median(f.step_s[way]) * 1e3:.1f}" for way in NAMES]
        out.add_row(f.model, *steps, f"{f.ratio:.2f}", f"{f.drawing:.1%}")
    return out


def rows(found: Sequence[Found]) -> list[dict[str, Any]]:
    """As every benchmark tells them."""
    return [
        {
            "case": f"{f.model} with dropout", "shardwise": median(f.step_s["shardwise"]), "peer": median(f.step_s["torch"]),
            "peer_name": "torch's own draws", "ratio": f.ratio, "unit": "s", "drawing": f.drawing,
        }
        for f in found
    ]  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Read the options, measure, tell."""
    p = argparse.ArgumentParser(prog="scripts/bench draws", description="what drawing costs in a step", allow_abbrev=False)
    p.add_argument("--json", metavar="FILE", type=Path, help="write header, rows and every round to FILE")
    p.add_argument("--models", nargs="+", default=list(MODELS))
    p.add_argument("--batch", type=int, default=8)
    p.add_argument("--rounds", type=int, default=9)
    p.add_argument("--steps", type=int, default=2, help="of each way of drawing in a round")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    p.add_argument("--quick", action="store_true", help="gpt-tiny, three rounds; does not write the page")
    given = p.parse_args(list(arguments))
    models, rounds = (["gpt-tiny"], 3) if given.quick else (given.models, given.rounds)
    about = header(
        command("draws", arguments),
        versions(("torch",)),
        load=load(),
        measured=f"{rounds} rounds of {given.steps} steps of each, interleaved; {given.batch} samples, one thread, {given.device}",
    )
    console = terminal()
    found = [measure(name, given.batch, rounds, given.steps, given.device) for name in models]
    made = table(found)
    console.print(made)
    if given.json:
        given.json.write_text(json.dumps({"about": about, "rows": rows(found), "found": [asdict(f) for f in found]}, indent=1) + "\n")
    if not given.quick and given.device == "cpu":
        PAGE.write_text("\n".join([*opening("random numbers", about, INTRO), *lines_of(made)]))
        console.print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0
