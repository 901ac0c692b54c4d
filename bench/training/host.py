"""`scripts/bench host`: what the host does in a step on one rank beside plain PyTorch, on models whose kernels take next to nothing.

In: deep models of tiny tensors, one thread, float32 and bfloat16. Both sides take turns in one process. Out: processor seconds of forward
and backward (in plain PyTorch also of `zero_grad`), and of whole steps; operators that torch dispatches in a step; and of wider models the
most memory that either holds. A GPU waits for just this where it is faster than the host.

AdamW is fused on both sides: on a processor torch then goes from tensor to tensor, so whole steps are kinder to shardwise than a GPU's
are, and the target is of forward and backward. Of the models for memory the last has more weights than activations: then both hold most
when backward is over, and shardwise a bucket of gradients twice.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import shardwise
from bench.common.document import command, header, load, terminal, versions
from bench.common.measure import turn
from bench.common.processes import ROOT
from bench.training.host_mlp import CASES, measure_steps, table_lines
from bench.training.host_mlp import __doc__ as PERCEPTRON
from shardwise.capture.capture import call_with_loss
from shardwise.run.engine import Engine
from shardwise.world.memory import Accounts, accounts_of
from shardwise.world.world import World
from shardwise.zoo.resolve import resolve
from shardwise.zoo.resolved import ResolvedModel

PAGE = ROOT / "docs" / "benchmarks" / "host.md"
GOAL = 1.05
SAMPLES = 2
PRECISIONS = ("float32", "bfloat16")
TINY = (
    "vit:hidden=16,layers=24,heads=2,image=32,patch=16",
    "bert:hidden=16,layers=24,heads=2,vocabulary=256,mask_id=3,sequence=8",
    "resnet-50:base=2,image=8",
    "moe:hidden=16,layers=12,heads=2,vocabulary=256,sequence=16",
)
WIDE = (  # for memory: (model, samples)
    ("vit:hidden=128,layers=6,heads=4,image=128,patch=16", 16),
    ("bert:hidden=128,layers=6,heads=4,vocabulary=1024,sequence=64", 16),
    ("resnet-50:base=16,image=64", 16),
    ("moe:hidden=64,layers=4,heads=4,vocabulary=1024,sequence=64", 16),
    ("bert:hidden=256,layers=6,heads=4,vocabulary=1024,sequence=32", 4),
)
Step = Callable[[], object]


@dataclass(frozen=True)
class Took:
    """By round processor seconds of both sides: forward and backward, whole steps. `operators`: that each dispatches in a step."""

    model: str
    precision: str
    backward_s: tuple[float, ...]
    peer_backward_s: tuple[float, ...]
    step_s: tuple[float, ...]
    peer_step_s: tuple[float, ...]
    operators: int
    peer_operators: int

    @property
    def backward_ratio(self) -> float:
        """shardwise's seconds over plain PyTorch's, the median of rounds."""
        return median(a / b for a, b in zip(self.backward_s, self.peer_backward_s, strict=True))

    @property
    def step_ratio(self) -> float:
        """The same of whole steps."""
        return median(a / b for a, b in zip(self.step_s, self.peer_step_s, strict=True))


@dataclass(frozen=True)
class Held:
    """The most bytes that each side holds in a step."""

    model: str
    samples: int
    precision: str
    held_bytes: float
    peer_bytes: float


def shardwise_side(model: ResolvedModel, samples: int, precision: str) -> tuple[Step, Step]:
    """(forward and backward, a step) of an engine."""
    plan = "data=1" if precision == "float32" else f"data=1 precision={precision}"
    engine: Engine = shardwise.parallelize(model, samples, plan=plan, world=World(), seed=0, optimizer={"name": "adamw", "lr": 1e-4})
    batch = model.batch(samples)
    return (lambda: engine.forward_backward(batch)), (lambda: engine.step(batch).loss)


def plain_side(model: ResolvedModel, samples: int, precision: str) -> tuple[Step, Step]:
    """(forward and backward, a step) of the loop that users of plain PyTorch write."""
    torch.manual_seed(0)
    module, batch = model.make(), model.batch(samples)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)

    def backward() -> Tensor:
        optimizer.zero_grad()
        with nullcontext() if precision == "float32" else torch.autocast("cpu", dtype=torch.bfloat16):
            loss: Tensor = call_with_loss(module, batch, model.loss)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def step() -> float:
        loss = backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return backward, step


def measure(name: str, precision: str, rounds: int, steps: int) -> Took:
    """Both sides in turns."""
    model = resolve(name, SAMPLES)
    sides = [make(model, SAMPLES, precision) for make in (shardwise_side, plain_side)]
    for _ in range(3):
        losses = [step() for _, step in sides]
    if losses[0] != losses[1]:
        raise SystemExit(f"{name}: losses {losses} of the two sides differ")
    seconds: dict[tuple[int, int], list[float]] = {(side, kind): [] for side in (0, 1) for kind in (0, 1)}
    for number in range(rounds):
        for kind in (0, 1):
            for side in turn((0, 1), number):
                began = time.process_time()
                for _ in range(steps):
                    sides[side][kind]()
                seconds[side, kind].append((time.process_time() - began) / steps)
    times = [tuple(seconds[side, kind]) for kind in (0, 1) for side in (0, 1)]
    return Took(name, precision, *times, *(dispatched(step) for _, step in sides))


def dispatched(step: Step) -> int:
    """Operators that torch dispatches, those of backward and those inside of others included."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    return sum(event.name.startswith("aten::") for event in profile.events())


def held(name: str, samples: int, precision: str, accounts: Accounts) -> Held:
    """The peak of each, without the other."""
    model, found = resolve(name, samples), []
    for make in (shardwise_side, plain_side):
        gc.collect()
        before = accounts.current().total
        with accounts.counting("buffers"):
            _, step = make(model, samples, precision)
            for _ in range(2):
                step()
            accounts.reset_peak()
            step()
        found.append(accounts.peak().total - before)
        del step, _
    return Held(name, samples, precision, *found)


def lines(file: Mapping[str, Any]) -> Iterator[str]:
    """The page."""
    yield from ("# Benchmark: the host's part of a step", "", "Written by `scripts/bench host`.", "", "|  |  |", "| --- | --- |")
    yield from (f"| {key} | {_cell(key, value)} |" for key, value in file["header"].items())
    yield from ("", *(__doc__ or "").partition("\n\n")[2].strip().splitlines(), "")
    rows = [Took(**row) for row in file["measured"]]
    worst = max(rows, key=lambda row: row.backward_ratio)
    met = "met" if worst.backward_ratio <= GOAL else "missed"
    yield f"Forward and backward in at most {GOAL} of plain PyTorch's time: **{met}**, {worst.backward_ratio:.2f} for {worst.model}."
    yield from ("", "| model | precision | forward and backward | plain | ratio | step | plain | ratio | operators | plain |")
    yield "| --- " * 10 + "|"
    for row in rows:
        cells = [f"{median(s) * 1e3:.1f} ms" for s in (row.backward_s, row.peer_backward_s, row.step_s, row.peer_step_s)]
        cells = [*cells[:2], f"**{row.backward_ratio:.2f}**", *cells[2:], f"{row.step_ratio:.2f}"]
        yield f"| {row.model} | {row.precision} | {' | '.join(cells)} | {row.operators} | {row.peer_operators} |"
    yield from ("", *(PERCEPTRON or "").partition("\n\n")[2].strip().splitlines(), "")
    yield from file["perceptron"]
    yield from ("", "Memory, at the fullest moment of a step:", "", "| model | samples | precision | shardwise | plain | ratio |")
    yield "| --- " * 6 + "|"
    for one in (Held(**row) for row in file["held"]):
        sizes = f"{one.held_bytes / 2**20:.1f} MiB | {one.peer_bytes / 2**20:.1f} MiB | {one.held_bytes / one.peer_bytes:.3f}"
        yield f"| {one.model} | {one.samples} | {one.precision} | {sizes} |"


def _cell(key: str, value: Any) -> str:
    return ", ".join(f"{name} {version}" for name, version in value.items()) if key == "versions" else str(value)


def main(arguments: Sequence[str]) -> int:
    """Read the options, measure, tell."""
    p = argparse.ArgumentParser(prog="scripts/bench host", description="the host's part of a step beside plain PyTorch", allow_abbrev=False)
    p.add_argument("--json", metavar="FILE", type=Path, help="write what was measured to FILE")
    p.add_argument("--page", metavar="FILE", type=Path, default=PAGE, help="write the page to FILE")
    p.add_argument("--rounds", type=int, default=15)
    p.add_argument("--steps", type=int, default=5)
    given = p.parse_args(list(arguments))
    torch.set_num_threads(1)
    about = header(command("host", arguments), versions(("torch",)), load=load())
    accounts, console = accounts_of(torch.device("cpu")), terminal()
    measured = [asdict(measure(name, precision, given.rounds, given.steps)) for name in TINY for precision in PRECISIONS]
    memory = [asdict(held(*one, precision, accounts)) for one in WIDE for precision in PRECISIONS] if accounts.is_counting else []
    perceptron = table_lines([measure_steps(ranks, max(given.rounds, 15), 20, products) for ranks, products in CASES])
    file = {"header": about, "measured": measured, "held": memory, "perceptron": perceptron}
    if given.json:
        given.json.write_text(json.dumps(file, indent=1) + "\n", encoding="utf-8")
    text = "\n".join(lines(file)) + "\n"
    console.print(text, markup=False)
    given.page.write_text(text, encoding="utf-8")
    return 0
