"""Models traced once and verified under many layouts against the serial run, and the layouts to verify them under.

Shared by the tests of ranks and by `scripts/verify_all`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from shardwise.api import plan as make_plan
from shardwise.capture.nesting import batch_size_of
from shardwise.errors import Infeasible, LayoutError, ModelError
from shardwise.model.sharding.sharding import FREE_LINKS, Prices
from shardwise.plan.ir.grid import grids_of
from shardwise.plan.ir.schedule_sizes import refuse_sizes
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.run.rank_model.model_source import CachedModelSource
from shardwise.run.verify.verification import Verification
from shardwise.run.verify.verify import verify_plan
from shardwise.zoo.resolve import resolve
from shardwise.zoo.resolved import ResolvedModel

TOLERANCE = 1e-9
LIMIT_S = 60.0
BATCH = 16  # divides into data=8 x microbatches=2
# A pipeline takes them in turn; with one rank they are the same but for what splits backward or has several stages a rank.
SCHEDULES = ("1f1b", "zb-h1", "interleaved", "chimera", "gpipe", "zb-v", "gems-master", "zb-h2", "sequential")
# These models are so small that the planner would rarely cut them. Where links cost nothing everything is cut that can be, and moved at
# will; where they cost a little, few bytes are moved.
EAGER = {
    "free links": FREE_LINKS,  # `--cut-everything`
    "dear links": Prices(flops_per_s=1e6, memory_bytes_per_s=1e7, link_bytes_per_s=1e8, latency_s=0.0),
}
REFUSED = (Infeasible, LayoutError, ModelError)


@dataclass(frozen=True)
class Row:
    """One case. `eager`: prices by which tensors were cut. `status`: equal, differs, refused (why: `note`) or failed."""

    model: str
    layout: str
    eager: str
    status: str
    worst: dict[str, float] = field(default_factory=dict)
    note: str = ""
    replicated: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def error(self) -> float:
        return max(self.worst.values(), default=0.0)


class Subject:
    """One model, traced once, verified under many layouts. `model`: where the name is not one that resolves."""

    def __init__(self, name: str, batch: int = BATCH, seed: int = 0, model: ResolvedModel | None = None, device: str = "cpu") -> None:
        resolved = model or resolve(name)
        most = resolved.default_batch if ".py" in name else batch
        self.name, self.make, self.loss, self.seed, self.device = name, resolved.make, resolved.loss, seed, device
        self.batch = resolved.batch(min(batch, most))
        self.size = batch_size_of(self.batch)
        torch.manual_seed(seed)
        self.source = CachedModelSource.from_model(self.make)

    def plan(self, layout: Layout) -> Plan:
        """The plan of a layout, as `shardwise.plan` makes it. Raises Infeasible, LayoutError or ModelError where shardwise refuses it."""
        state = torch.random.get_rng_state()
        single = replace(layout, precision="float32")
        found = make_plan(self.make, self.batch, loss=self.loss, cluster="1xcpu-2", layout=single, source=self.source)
        torch.random.set_rng_state(state)
        return replace(found, layout=layout, model=self.name)

    def check(self, layout: Layout, steps: int = 2, limit_s: float = LIMIT_S, eager: str = "", **options: Any) -> Verification:
        """Verify one layout. Raises ShardwiseError where it is refused or a rank fails.

        `eager`: one of EAGER's prices, by which tensors are cut instead of the planner's.
        """
        plan, source = self.plan(layout), self.source
        if eager and layout.tensor > 1 and not plan.uncaptured:
            plan, source = replace(plan, shards=()), replace(source, prices=EAGER[eager])
        limits: dict[str, Any] = {"timeout_s": limit_s, "device": self.device}
        return verify_plan(plan, self.make, self.batch, self.loss, source, steps=steps, seed=self.seed, **limits, **options)


def factorisations(num_ranks: int) -> Iterator[tuple[int, int, int]]:
    """Every (data, tensor, pipeline) whose product is `num_ranks`."""
    for data in range(1, num_ranks + 1):
        for tensor in range(1, num_ranks // data + 1):
            if num_ranks % (data * tensor) == 0:
                yield data, tensor, num_ranks // (data * tensor)


def layouts(counts: Sequence[int], size: int, which: str) -> Iterator[tuple[Layout, str]]:
    """(layout, eager) of each factorisation: `plain`, `mixed` with the other choices taken in turn, `grids` of the tensor ranks."""
    turn = 0
    for count in counts:
        for data, tensor, pipeline in factorisations(count):
            if which in ("plain", "all"):
                yield Layout(data, tensor, pipeline, precision="float64"), ""
            if which in ("mixed", "all"):
                most = max(size // data, 1)
                microbatches = min(4 if turn % 2 else 2, most)
                zero, recompute = (turn + 1) % 4, ("none", "selective", "full")[turn // 2 % 3]
                offload = ("none", "none", "activations", "optimizer", "all")[turn % 5]
                schedule = SCHEDULES[turn % len(SCHEDULES)]
                if refuse_sizes(schedule, microbatches):
                    schedule = "1f1b"
                chunks = 2 if schedule == "interleaved" else 1
                layout = Layout(data, tensor, pipeline, microbatches, schedule, zero, recompute, "float64", chunks=chunks, offload=offload)
                yield replace(layout, sequence_parallel="on" if tensor > 1 and turn % 3 else "off"), list(EAGER)[turn % 2]
            if which in ("grids", "all"):
                for number, grid in enumerate(grids_of(tensor)):
                    layout = Layout(data, tensor, pipeline, zero=(turn + number) % 4, precision="float64", grid=grid)
                    yield replace(layout, sequence_parallel="on" if (turn + number) % 2 else "off"), ("", *EAGER)[(turn + number) % 3]
            turn += 1


OTHER_AXES = ("tensor", "tensor", "spatial", "branch", "context", "expert", "channel")


def random_layouts(
    counts: Sequence[int], size: int, number: int, rng: random.Random, axes: Sequence[str] = ()
) -> Iterator[tuple[Layout, str]]:
    """`number` (layout, eager), every key drawn by itself: what nobody thought of putting together. `axes`: of which one takes the place of
    tensor."""
    made = 0
    while made < number:
        data, tensor, pipeline = rng.choice(list(factorisations(rng.choice(list(counts)))))
        schedule = rng.choice(SCHEDULES) if pipeline > 1 else "1f1b"
        layers = rng.choice(["", "", ":1", ":2"])
        try:
            layout = Layout(
                data, tensor, pipeline,
                rng.randint(1, max(1, min(6, size // data))),
                schedule,
                rng.randrange(4),
                rng.choice(["none", "none", "selective", "full", f"full{layers}"]),
                "float64",
                chunks=rng.choice([2, 3]) if schedule == "interleaved" else 1,
                sequence_parallel=rng.choice(["off", "on"]) if tensor > 1 else "off",
                offload=rng.choice(["none", "none", "activations", f"activations{layers}", "optimizer", "all"]),
                all_reduce=rng.choice(["auto", "auto", "native", "ring", "tree", "halving_doubling"]) if data > 1 else "auto",
                staleness=rng.choice([0, 0, 0, 1]) if data > 1 else 0,
                lend=rng.choice(["off", "on"]),
                grid=rng.choice(["", *grids_of(tensor)]),
                sample_parallel=rng.choice(["off", "on"]) if tensor > 1 else "off",
                segment=rng.choice([1, 1, 1, 2]),
            )  # fmt: skip
            if axes and tensor > 1 and (axis := rng.choice(axes)) != "tensor":
                ranks: Any = str(tensor) if axis == "spatial" else tensor
                layout = replace(layout, tensor=1, grid="", sequence_parallel="off", sample_parallel="off", **{axis: ranks})
        except LayoutError:
            continue  # words that do not go together
        made += 1
        yield layout, rng.choice(["", *EAGER])


def run_case(subject: Subject, layout: Layout, eager: str, limit_s: float) -> Row:
    """One row; never raises for what the model or shardwise does."""
    began = time.perf_counter()
    shown = str(replace(layout, precision="float32"))
    try:
        found = subject.check(layout, limit_s=limit_s, eager=eager)
    except REFUSED as error:
        return Row(subject.name, shown, eager, "refused", {}, str(error), seconds=time.perf_counter() - began)
    except Exception as error:
        # A crash is a finding, not the end of the run.
        return Row(subject.name, shown, eager, "failed", {}, f"{type(error).__name__}: {error}", seconds=time.perf_counter() - began)
    status = "equal" if found.ok and found.tolerance <= TOLERANCE else "differs"
    seconds = time.perf_counter() - began
    return Row(subject.name, shown, eager, status, found.worst, found.first_difference or "", found.replicated_operators, seconds)
