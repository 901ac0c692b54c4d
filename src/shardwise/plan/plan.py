"""Plan: the decision. Layout, where stages begin, how parameters are sharded, and what was predicted, with the reasons."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwise.errors import Infeasible
from shardwise.plan.compatibility import refuse_uncaptured
from shardwise.plan.data_context_splits import Splits
from shardwise.plan.ir.choice import AUTO, AllReduceChoices
from shardwise.plan.ir.notebook_html import render_html
from shardwise.plan.ir.step_remainder import COPY_BANDWIDTH, MIN_STEP_S, snapshot_interval
from shardwise.plan.layout import Layout
from shardwise.plan.microbatches import check_equal_shares, layout_microbatch_sizes
from shardwise.units import format_seconds

FORMAT_VERSION = 1
BUCKET_BYTES = 25 << 20  # gradients are reduced in buckets of this size, as in DistributedDataParallel (Li et al., VLDB 2020)
FIRST_BUCKET_BYTES = 1 << 20


def unshared_bucket_bytes(size_bytes: float) -> float:
    """Bytes of a bucket of gradients of `size_bytes` that nobody else reduces: they exist twice while they are collected.

    >>> [int(unshared_bucket_bytes(mib << 20)) >> 20 for mib in (8, 64, 4096)]
    [1, 4, 25]
    """
    return min(BUCKET_BYTES, max(FIRST_BUCKET_BYTES, size_bytes / 16))


@dataclass(frozen=True, slots=True)
class MemoryBreakdown:
    """Bytes on the fullest device, by category."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    buffers: float = 0.0
    margin: float = 0.0

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers + self.margin

    @property
    def buddy_copy_bytes(self) -> float:
        """Bytes for buddy copies of another host's state at most, where there are several hosts and no replica is on another: the message,
        and twice what is received.

        >>> MemoryBreakdown(parameters=4.0, gradients=4.0, optimizer=8.0).buddy_copy_bytes
        36.0
        """
        return 3 * (self.parameters + self.optimizer)

    @property
    def async_save_bytes(self) -> float:
        """Bytes of host memory a rank, at most, for the snapshot of its state that is written while training goes on (`run.save =
        "async"`): less where replicas hold the same state, which one of them writes.

        >>> MemoryBreakdown(parameters=4.0, gradients=4.0, optimizer=8.0).async_save_bytes
        12.0
        """
        return self.parameters + self.optimizer


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted cost of one step: seconds, bytes on the fullest device, model FLOPs utilisation (0 to 1).

    `parts` splits `step_time_s` by cause: compute, tensor, pipeline, gradients, optimizer, overhead.
    """

    step_time_s: float
    mfu: float
    model_flops: float
    memory: MemoryBreakdown
    parts: tuple[tuple[str, float], ...] = ()

    @property
    def time_breakdown(self) -> str:
        """Describe the step time and its parts in words; parts below half a per cent are left out.

        >>> Prediction(2.0, 0.5, 1.0, MemoryBreakdown(), (("compute", 1.5), ("pipeline", 0.5), ("optimizer", 0.0))).time_breakdown
        '2.00 s: compute 1.50 s, pipeline 500 ms'
        """
        step = self.step_time_s
        return f"{format_seconds(step)}: " + ", ".join(f"{name} {format_seconds(s)}" for name, s in self.parts if s >= 0.005 * step)


@dataclass(frozen=True, slots=True)
class LayoutCandidate:
    """A layout that was considered: its prediction, or why it was refused."""

    layout: Layout
    prediction: Prediction | None
    note: str = ""


@dataclass(frozen=True, repr=False)
class Plan:
    """Plan to train `model` on `cluster`, `batch_size` samples a step.

    `stages`: site of the first operator of every stage after the first (pipeline x chunks - 1 of them).
    `shards`: per mesh axis other than data, (parameter name or pattern with `*` for layer numbers, dim that is sharded).
    The placement of everything else follows from these by propagation.
    `sums`: the algorithms of `all_reduce=auto` by bytes of gradients. `splits`: the prices that `split=lengths` compares.
    """

    layout: Layout
    model: str
    cluster: str
    batch_size: int
    stages: tuple[str, ...] = ()
    shards: tuple[tuple[str, tuple[tuple[str, int], ...]], ...] = ()
    prediction: Prediction | None = None
    reasons: tuple[tuple[str, str], ...] = ()  # (axis or choice, why)
    candidates: tuple[LayoutCandidate, ...] = ()
    replicated_operators: tuple[str, ...] = ()  # sites of operators without a rule
    uncaptured: str = ""  # why the model could not be captured; then only data and zero apply
    bucket_bytes: int = 0  # gradients are reduced in buckets of this size; 0 is `BUCKET_BYTES`
    bound_gap: float | None = None  # the step against a proven lower bound: 0.05 is 5 % above; None where nothing is proven
    planning_time_s: float = field(default=0.0, compare=False)
    sums: AllReduceChoices = field(default_factory=AllReduceChoices)
    splits: Splits = field(default_factory=Splits)

    def __post_init__(self) -> None:
        if len(self.stages) != self.layout.num_stages - 1 and not self.uncaptured:
            raise Infeasible(f"{self.layout} needs {self.layout.num_stages - 1} stage boundaries, the plan has {len(self.stages)}")
        _ = self.microbatch_sizes
        if self.uncaptured:
            check_equal_shares(self.batch_size, self.layout, f"this model runs whole ({self.uncaptured})")
        if self.bucket_bytes < 0:
            raise Infeasible(f"bucket_bytes = {self.bucket_bytes} is below zero; use 0 for the usual size, or bytes such as 4194304")

    def __repr__(self) -> str:
        step = f", {format_seconds(self.prediction.step_time_s)} a step" if self.prediction is not None else ""
        return f"Plan({self.layout}; {self.model} on {self.cluster}, {self.batch_size} samples{step})"

    def _repr_html_(self) -> str:
        return render_html(self)

    @property
    def protection_bytes(self) -> float:
        """Bytes of host memory a rank, besides its device's memory, for two snapshots of its state (`run.protect = "memory"`): weights, its
        part of optimizer state that replicas share; and of its gradients where a step is long enough to be resumed. 0 without a prediction.

        >>> memory = MemoryBreakdown(parameters=4.0, gradients=4.0, optimizer=8.0)
        >>> [Plan(Layout(data=2, zero=zero), "m", "c", 4, prediction=Prediction(0.1, 0, 0, memory)).protection_bytes for zero in (0, 1)]
        [16.0, 24.0]
        """
        if self.prediction is None:
            return 0.0
        memory, step_s, layout = self.prediction.memory, self.prediction.step_time_s, self.layout
        interval, count = snapshot_interval(memory.gradients / COPY_BANDWIDTH, step_s / layout.microbatches), layout.microbatches
        has_none = self.uncaptured or layout.staleness or layout.servers or layout.scatters_last
        has_snapshots = step_s >= MIN_STEP_S and interval < count and not has_none
        sharing = 1 if layout.zero or layout.servers else min(data for data, _ in layout.stage_sizes)
        return 2 * (memory.parameters + memory.optimizer / sharing + (memory.gradients if has_snapshots else 0.0))

    @property
    def all_reduce(self) -> AllReduceChoices:
        """Return the all-reduce algorithms for gradients, by bytes."""
        layout = self.layout
        return self.sums if layout.all_reduce == AUTO else AllReduceChoices(default=layout.all_reduce, text=layout.collective)

    @property
    def microbatch_sizes(self) -> tuple[int, ...]:
        """Number of samples of each microbatch, all data replicas together."""
        return layout_microbatch_sizes(self.batch_size, self.layout)


def check_uncaptured(layout: Layout, reason: str) -> None:
    """Raise Infeasible where a layout of a model that was not captured, for the given `reason`, has more than data parallelism and ZeRO."""
    if remedy := refuse_uncaptured(layout):
        raise Infeasible(f"{layout}: this model could not be captured ({reason}), so {remedy}")
