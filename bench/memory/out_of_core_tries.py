"""Ways to train under one limit of memory, and what a try of one gives.

In: a model and a size of its samples, a batch, a limit that is enforced. Out: the plan of a way, and `Tried`: seconds, losses and the most
bytes held, or why it does not fit. A way that fails for another reason than memory says it in the same place, so that the others go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

import shardwise
from shardwise.errors import ShardwiseError
from shardwise.plan.plan import Plan
from shardwise.run.engine import DeviceOptions, Engine
from shardwise.run.rank_model.model_source import CachedModelSource
from shardwise.world.launch.launch import launch
from shardwise.world.world import World
from shardwise.zoo import names
from shardwise.zoo.resolve import resolve
from shardwise.zoo.resolved import ResolvedModel

OWN = "shardwise's choice"
SWAPS = "swap or drop"
LATE = "not tried: the time was over"
SILENT_S = 600.0  # of a rank, after which it is given up


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train on two ranks: a layout, or what constrains shardwise's choice. `images`: it is for these alone."""

    name: str
    layout: str = ""
    constraints: str = ""
    images: bool = False


def ways(microbatches: int) -> tuple[Way, ...]:
    """All that are compared, with so many microbatches where a way has them."""
    end = f"pipeline=2 microbatches={microbatches}"
    return (
        Way("MP-Basic", "pipeline=2 schedule=sequential"),
        Way("GPipe", f"{end} schedule=gpipe"),
        Way("1F1B", f"{end} schedule=1f1b"),
        Way("GEMS MAST", "pipeline=2 microbatches=2 schedule=gems-mast"),
        Way("GEMS MASTER", f"{end} schedule=gems-master"),
        Way("recompute", "data=2 recompute=full"),
        Way("offload", "data=2 offload=all"),
        Way("spatial", "spatial=2", images=True),
        Way(SWAPS, constraints="ranks=2 data=2 microbatches=1 zero=0 precision=float32 offload!=optimizer offload!=all"),
        Way(OWN, constraints="ranks=2 precision=float32"),
    )


@dataclass(frozen=True, slots=True)
class Size:
    """What is trained: `model` of the zoo on samples of `extent` (pixels a side, or tokens), `batch` of them a step."""

    model: str
    extent: int
    batch: int

    @property
    def key(self) -> str:
        """What the model calls its extent."""
        _, config = names.find(self.model)
        return "image" if hasattr(config, "image") else "sequence"

    @property
    def named(self) -> str:
        return f"{self.model}{',' if ':' in self.model else ':'}{self.key}={self.extent}"

    def __str__(self) -> str:
        return f"{self.key} {self.extent}, batch {self.batch}"


@dataclass(frozen=True, slots=True)
class Tried:
    """What a try gave: `why` it did not fit, or seconds, losses and the most bytes that a rank held; `predicted_bytes` are the plan's."""

    seconds: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    held_bytes: float = 0.0
    layout: str = ""
    why: str = ""
    predicted_bytes: float = 0.0
    is_late: bool = False


class Tries:
    """Ways and sizes under one limit. What a model is traced and planned to is kept: ranks are forked from here, and inherit it.

    `deadline`: of `time.monotonic`, after which nothing is tried any more. `say` tells each try.
    """

    def __init__(self, limit: float, cluster: str, deadline: float = float("inf"), say: Callable[[str], None] = lambda text: None) -> None:
        self._limit, self._cluster, self._deadline, self._say = limit, cluster, deadline, say
        self._sources: dict[Size, tuple[ResolvedModel, Any, CachedModelSource]] = {}
        self._prepared: dict[tuple[str, Size], Plan | ShardwiseError] = {}
        self._tried: dict[tuple[str, Size], Tried] = {}

    def _source(self, size: Size) -> tuple[ResolvedModel, Any, CachedModelSource]:
        if size not in self._sources:
            subject = resolve(size.named)
            torch.manual_seed(0)
            self._sources[size] = subject, subject.batch(size.batch), CachedModelSource.from_model(subject.make)
        return self._sources[size]

    def prepare(self, size: Size, way: Way) -> Plan:
        """Raises ShardwiseError where shardwise knows beforehand that the way does not fit, or that the batch does not divide."""
        key = way.name, size
        if key not in self._prepared:
            try:
                self._prepared[key] = self._prepare(size, way)
            except ShardwiseError as error:
                self._prepared[key] = error
        found = self._prepared[key]
        if isinstance(found, ShardwiseError):
            raise found
        return found

    def _prepare(self, size: Size, way: Way) -> Plan:
        subject, batch, source = self._source(size)
        plan = partial(shardwise.plan, subject, batch, cluster=self._cluster, source=source)
        return plan(layout=way.layout) if way.layout else plan(constraints=way.constraints, device_memory=self._limit)

    def expected(self, size: Size, way: Way) -> bool:
        """Whether it should fit, by the plan's own bytes."""
        try:
            return _predicted(self.prepare(size, way)) <= self._limit
        except ShardwiseError:
            return False

    def run(self, size: Size, way: Way, steps: int) -> Tried:
        """Some steps of a way at a size."""
        if time.monotonic() > self._deadline:
            return Tried(why=LATE, is_late=True)
        began = time.monotonic()
        tried = self._run(size, way, steps)
        self._tried[way.name, size] = tried
        gave = tried.why or f"{median(tried.seconds[-1:]):.2f} s a step, held {tried.held_bytes / 2**30:.2f} GiB"
        self._say(f"    {way.name}, {size}: {gave} (took {time.monotonic() - began:.0f} s)")
        return tried

    def once(self, size: Size, way: Way) -> Tried:
        """What the way gave at the size when it was last tried; one step of it where it was not."""
        return self._tried[way.name, size] if (way.name, size) in self._tried else self.run(size, way, 1)

    def _run(self, size: Size, way: Way, steps: int) -> Tried:
        limit, predicted = self._limit, 0.0
        try:
            plan = self.prepare(size, way)
            predicted = _predicted(plan)
            subject, batch, source = self._source(size)
            source.capture_all(plan, batch, subject.loss)

            def work(world: World) -> Any:
                engine = Engine(plan, source, batch, subject.loss, world, seed=0, device=DeviceOptions(memory_limit_bytes=limit))
                seconds, losses = [], []
                for _ in range(steps):
                    world.world_group.barrier()
                    began = time.perf_counter()
                    losses.append(engine.step(batch).loss)
                    seconds.append(time.perf_counter() - began)
                return [seconds, losses, engine.peak_memory_over_ranks().get("total", 0.0)]

            seconds, losses, held = launch(work, 2, show=False, timeout_s=SILENT_S)[0]
        except ShardwiseError as error:
            return Tried(why=str(error).splitlines()[0], predicted_bytes=predicted)
        return Tried(tuple(seconds), tuple(losses), held, str(plan.layout), "", predicted)


def _predicted(plan: Plan) -> float:
    """Bytes of the fullest rank by the plan, without the margin."""
    assert plan.prediction is not None
    memory = plan.prediction.memory
    return memory.total - memory.margin


def largest(sizes: Iterable[Size], tries: Callable[[Size], Tried], expected: Callable[[Size], bool]) -> tuple[Size | None, Tried, bool]:
    """The last of ascending sizes that fits, what it gave, and whether a larger one was tried and did not: sizes that fit are below those
    that do not. The first tried is the largest that is expected to fit; where none fits, what the smallest gave.
    """
    every = list(sizes)
    at = next((i for i in reversed(range(len(every))) if expected(every[i])), 0)
    tried = tries(every[at])
    if tried.why:
        while tried.why and not tried.is_late and at > 0:
            at -= 1
            tried = tries(every[at])
        return (None if tried.why else every[at]), tried, not tried.is_late
    while at + 1 < len(every):
        more = tries(every[at + 1])
        if more.why:
            return every[at], tried, not more.is_late
        at, tried = at + 1, more
    return every[at], tried, False
