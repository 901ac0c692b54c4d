"""Data model of serving: `Workflow` (sources, operators with variants, accuracy) and `Machines` (workers, links), frozen and validated.

Units: requests/s, seconds, bytes, dollars an hour, dollars a GiB. A source sends requests to operators; an operator processes `ratio`
requests for each request of an input, and sends one message each; outputs without a reader are the answer.

Not modelled: content-dependent rates; workers that run several operators at once on different cores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter

from shardwise.errors import ConfigError, UsageError, did_you_mean

Batches = tuple[tuple[int, float], ...]  # (requests together, seconds), ascending


@dataclass(frozen=True, slots=True)
class OperatorVariant:
    """An implementation of an operator. `latency_s`: by worker, seconds of a batch by its size. `output_bytes`: of one message.

    `factor`: its factor on accuracy, for workflows without an accuracy table. `model` or `call`: the implementation, a MODEL (or
    `export:FILE.pt2`) or `file.py:name` of a function; the file is in the workflow's `folder`.
    """

    name: str
    latency_s: tuple[tuple[str, Batches], ...]
    output_bytes: float = 0.0
    factor: float = 1.0
    model: str = ""
    call: str = ""

    def batches(self, worker: str) -> Batches:
        """Return (batch size, seconds) on a worker; () if it cannot run the variant."""
        return dict(self.latency_s).get(worker, ())


@dataclass(frozen=True, slots=True)
class WorkflowOperator:
    """`inputs`: names of sources and operators, each with the number of requests for one request of the input."""

    name: str
    inputs: tuple[tuple[str, float], ...]
    variants: tuple[OperatorVariant, ...]

    def variant(self, name: str) -> OperatorVariant:
        return next(v for v in self.variants if v.name == name)


@dataclass(frozen=True, slots=True)
class RequestSource:
    """A source of requests: `share` of the planned rate, on `tier`."""

    name: str
    output_bytes: float = 0.0
    share: float = 1.0
    tier: int = 0


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """`count` equal machines on a tier; `spot` machines may be reclaimed. `device`: `here`, or the CLUSTER of its device, for profiles;
    `threads`: of a machine that is measured here."""

    name: str
    tier: int
    price_per_hour: float
    count: int = 1
    spot: bool = False
    device: str = "here"
    threads: int = 1


@dataclass(frozen=True, slots=True)
class TierLink:
    """A link from a tier, worker or source to a tier or worker. `latency_s` and `bandwidth_bytes_per_s` matter with a latency target."""

    start: str
    end: str
    price_per_gib: float = 0.0
    latency_s: float = 0.0
    bandwidth_bytes_per_s: float = float("inf")


@dataclass(frozen=True)
class Machines:
    """Workers by tier, and the links on which traffic goes up; within a tier it is free, and it never goes down.

    Raises:
        ConfigError: two workers with the same name, a negative price, a count below one.
    """

    workers: tuple[WorkerGroup, ...]
    links: tuple[TierLink, ...] = ()

    def __post_init__(self) -> None:
        names = [w.name for w in self.workers]
        if len(set(names)) < len(names) or not names:
            raise ConfigError(f"workers {', '.join(names) or '(none)'}: give at least one, each with a name of its own")
        for w in self.workers:
            if not 0 <= w.price_per_hour < float("inf") or w.count < 1 or w.tier < 0:
                raise ConfigError(
                    f"worker {w.name}: price_per_hour = {w.price_per_hour:g}, count = {w.count}, tier = {w.tier}; "
                    "a price and a tier are zero or more, and there is at least one of it"
                )

    def worker(self, name: str) -> WorkerGroup:
        return next(w for w in self.workers if w.name == name)

    @cached_property
    def _by_ends(self) -> dict[tuple[str, str], TierLink]:
        return {(link.start, link.end): link for link in self.links}

    def link(self, start: str, start_tier: int, end: WorkerGroup) -> TierLink | None:
        """Return the most specific link from a worker or source `start` to a worker; None if there is none."""
        for key in ((start, end.name), (start, str(end.tier)), (str(start_tier), end.name), (str(start_tier), str(end.tier))):
            if key in self._by_ends:
                return self._by_ends[key]
        return None


@dataclass(frozen=True)
class Accuracy:
    """Accuracy of a choice of variants: a `table` of end-to-end values by the variants of `operators`, or (without one) `base` times the
    factors of all variants."""

    operators: tuple[str, ...] = ()
    table: tuple[tuple[tuple[str, ...], float], ...] = ()
    base: float = 100.0


@dataclass(frozen=True, slots=True)
class Measure:
    """How accuracy is measured. `labelled`: `file.py:name` of a function that returns requests (values by source) and labels; `score`: of a
    function from answers and labels to a number, by default the percentage of equal ones."""

    labelled: str = ""
    score: str = ""


@dataclass(frozen=True)
class Workflow:
    """Operators in any order; they are sorted topologically. `folder`: of the files that it names.

    Raises:
        ConfigError: a cycle, an unknown input or variant, an operator without variants.
    """

    name: str
    sources: tuple[RequestSource, ...]
    operators: tuple[WorkflowOperator, ...]
    accuracy: Accuracy = field(default_factory=Accuracy)
    measure: Measure = Measure()
    folder: str = ""

    def __post_init__(self) -> None:
        names = [*(s.name for s in self.sources), *(op.name for op in self.operators)]
        if len(set(names)) < len(names) or not self.operators or not self.sources:
            raise ConfigError(f"workflow {self.name} has sources and operators {', '.join(names)}; each needs a name of its own")
        for source in self.sources:
            if not 0 < source.share < float("inf"):
                raise ConfigError(f"source {source.name}: share = {source.share:g} of the rate; it is above zero")
        if not 0 < self.accuracy.base < float("inf"):
            raise ConfigError(f"accuracy: base = {self.accuracy.base:g}; it is above zero")
        for op in self.operators:
            if not op.variants or not op.inputs:
                have = f"{len(op.variants)} variants and {len(op.inputs)} inputs"
                raise ConfigError(f"operator {op.name} has {have}; give at least one of each")
            for name, ratio in op.inputs:
                if name not in names:
                    raise ConfigError(f"operator {op.name}: input {name} is no source and no operator{did_you_mean(name, names)}")
                if not 0 < ratio < float("inf"):
                    raise ConfigError(f"operator {op.name}: {ratio:g} requests of one of {name}'s; it is above zero")
        graph = {op.name: {name for name, _ in op.inputs} for op in self.operators}
        try:
            order = list(TopologicalSorter(graph).static_order())
        except CycleError as error:
            raise ConfigError(f"workflow {self.name} goes in a circle: {' -> '.join(error.args[1])}; cut one of these inputs") from None
        by_name = {op.name: op for op in self.operators}
        object.__setattr__(self, "operators", tuple(by_name[name] for name in order if name in by_name))
        self._check_accuracy(by_name)

    def _check_accuracy(self, by_name: Mapping[str, WorkflowOperator]) -> None:
        for name in self.accuracy.operators:
            if name not in by_name:
                raise ConfigError(f"accuracy: {name} is no operator{did_you_mean(name, by_name)}")
        for row, _ in self.accuracy.table:
            for name, variant in zip(self.accuracy.operators, row, strict=True):
                have = [v.name for v in by_name[name].variants]
                if variant not in have:
                    raise ConfigError(f"accuracy: operator {name} has no variant {variant}{did_you_mean(variant, have)}")

    def operator(self, name: str) -> WorkflowOperator:
        return next(op for op in self.operators if op.name == name)

    @cached_property
    def rates(self) -> dict[str, float]:
        """Requests of each source and operator for one request/s: the slowest input determines an operator's rate."""
        rates = {s.name: s.share for s in self.sources}
        for op in self.operators:
            rates[op.name] = min(rates[name] * ratio for name, ratio in op.inputs)
        return rates

    @property
    def sinks(self) -> tuple[str, ...]:
        read = {name for op in self.operators for name, _ in op.inputs}
        return tuple(op.name for op in self.operators if op.name not in read)

    def accuracy_of(self, variants: Mapping[str, str]) -> float:
        """Return the end-to-end accuracy of a variant for each operator. Raises `UsageError` if the table lacks it."""
        if not self.accuracy.table:
            accuracy = self.accuracy.base
            for op in self.operators:
                accuracy *= op.variant(variants[op.name]).factor
            return accuracy
        key = tuple(variants[name] for name in self.accuracy.operators)
        for row, value in self.accuracy.table:
            if row == key:
                return value
        raise UsageError(f"workflow {self.name} does not say how accurate {', '.join(key)} is; add it to its table of accuracy")

    def accuracy_levels(self) -> tuple[float, ...]:
        """Return the accuracies that choices of variants reach, ascending; thinned out to 64 if they are products of factors."""
        if self.accuracy.table:
            return tuple(sorted({value for _, value in self.accuracy.table}))
        levels = {self.accuracy.base}
        for op in self.operators:
            levels = {value * v.factor for value in levels for v in op.variants}
            if len(levels) > 4096:
                levels = set(_thin_out(sorted(levels), 1024))
        return tuple(_thin_out(sorted(levels), 64))


def _thin_out(values: list[float], limit: int) -> Iterator[float]:
    """Yield the first, the last, and every n-th value between, about `limit` in all."""
    step = max(1, -(-len(values) // limit))
    yield from (v for i, v in enumerate(values) if i % step == 0 or i == len(values) - 1)
