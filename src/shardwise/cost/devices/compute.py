"""Roofline model of one operator on one CPU rank. In: its `OperatorWork`, how it is sharded, a rank's `Speed`. Out: forward and backward
seconds.

Roofline (Williams et al. 2009) with the rate that each kind of operator reaches in training: matrix products by FLOPs, the rest by bytes
moved, plus the launch time of a call of its kind. A product also packs its weights in every call, forward, for the input's gradient and
for their own: a cost per microbatch however few samples it has. These are scaled by the ratio of whole measured layers to the sum of their
operators (`shardwise.cluster.block`), since a step finds colder caches than an operator alone; nearly empty layers give the ratio for
launch
times. Weight gradients are accumulated by stage (`shardwise.cost.stages.base`). A label sharded over an axis divides FLOPs and bytes by the
axis's size. Convolutions are padded to blocks of channels (`convolutions`), and in groups of few channels run at separate rates. GPUs are
priced by `kernels`. Not modelled: the lower efficiency of odd shapes beyond that, fusion by a compiler, clocks that fall under load.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from shardwise.cluster.block import LARGE_BLOCK, SMALL_BLOCK, ProbeBlock
from shardwise.cluster.cluster import GROUPED_RATE, LAUNCH_RATE, SCORE_RATE, STEP_RATE, TRAFFIC_RATE, WEIGHT_RATE, Speed
from shardwise.model.work import MATMUL_KINDS, OperatorWork
from shardwise.plan.ir.precision import PRECISIONS

ATTENTION = 0.6  # rate of attention relative to large products, if it was not measured
GROUPED_PARTS = {1: 0.04, 4: 0.11}  # rate by channels of a group, relative to other convolutions, if it was not measured
STEP_OPERATORS = 12  # operators of a GRU step, forward
ATTENTION_BACKWARD = 2.5  # attention's backward over its forward, for products and for scores
TAP_S = 4e-10  # seconds of a core to add one entry of a window; measured with windows of 4 to 81 entries on a two-core Xeon (torch 2.13)
NUM_VIEWS = 5  # views in a layer of a block: heads split and moved to the front, and back
MIN_FACTOR = 0.5  # lower bound of an operator's time in a model over its time alone: less would be noise


@dataclass(frozen=True, slots=True)
class Seconds:
    """Forward and backward of one operator or stage, for one microbatch."""

    forward: float = 0.0
    backward: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.backward

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.forward + other.forward, self.backward + other.backward)


@dataclass(frozen=True, slots=True)
class RankRates:
    """Rates of a rank at one precision: FLOP/s and bytes/s by kind of operator.

    `by_kind`: the speed's rates. Ratios of times in a model to times alone: `size_factor` of size-dependent times, `launch_factor` of
    launches.
    """

    speed: Speed
    precision: str
    flops: float
    traffic_factor: float  # bytes moved per byte counted: 2 in float64; in bfloat16 they are counted in autocast's dtypes
    by_kind: Mapping[str, float]
    size_factor: float = 1.0
    launch_factor: float = 1.0
    is_cast: bool = False  # products have 16-bit operands

    @classmethod
    def of(cls, speed: Speed, precision: str) -> RankRates:
        """Build the rates. Raises `KeyError` if the speed lacks the precision: the search asks for none that the device lacks."""
        precision = PRECISIONS[precision].kernel_precision
        flops, is_cast = dict(speed.flops), bool(PRECISIONS[precision].product_dtype)
        if precision not in flops and (
            substitute := PRECISIONS[precision].substitute
        ):  # not measured on processors: not faster, often slower
            return replace(cls.of(speed, substitute), is_cast=is_cast)
        wide = 2.0 if precision == "float64" else 1.0
        unscaled = cls(speed, precision, flops[precision], wide, dict(speed.rates), is_cast=is_cast)
        threads = max(1, speed.threads)
        measured = unscaled.by_kind.get(LARGE_BLOCK.rate_key(precision))
        if measured is None:
            return unscaled
        block_s, (sized, begun) = threads / measured, unscaled._block_seconds(LARGE_BLOCK, LARGE_BLOCK.sequences * threads)
        if (rate := unscaled.by_kind.get(SMALL_BLOCK.rate_key(precision))) is None:
            each = block_s / (sized + begun)
            return replace(unscaled, size_factor=each, launch_factor=each)
        # Two blocks and two unknowns: one block is dominated by sizes, the other by launches.
        small_s, (small_sized, small_begun) = 1 / rate, unscaled._block_seconds(SMALL_BLOCK, SMALL_BLOCK.sequences)
        spread = sized * small_begun - begun * small_sized
        by_size, begins = (block_s * small_begun - small_s * begun) / spread, (small_s * sized - block_s * small_sized) / spread
        return replace(unscaled, size_factor=max(MIN_FACTOR, by_size), launch_factor=max(MIN_FACTOR, begins))

    def _block_seconds(self, block: ProbeBlock, sequences: int) -> tuple[float, float]:
        """Return seconds of a block's operators one by one: (those that grow with sizes, those of launches)."""
        works = list(block_work(block, sequences, self.is_cast))
        begun = sum(self._launch_s(1, work.kind) + self._launch_s(2, work.kind) for work in works)
        return sum(self.seconds(work).total for work in works) - begun, begun

    def seconds(self, work: OperatorWork, divide: float = 1.0, scale: float = 1.0) -> Seconds:
        """Price one operator with 1/`divide` of its work, at `scale` times the graph's batch."""
        if work.kind == "view":
            return Seconds(self._launch_s(1, "view"), self._launch_s(2, "view"))
        part = scale / divide
        packed = self._packing_s(work.kind, work.weight_bytes / divide)
        scored = self._scores_s(work.scores * part)
        slowdown = self._grouped_slowdown(work.channels)
        weights, casts = work.weight_bytes * part, self._cast_s(work.cast_bytes * part)
        stepped = self._stepwise_launch_s(work.steps)
        tap_s = TAP_S * part / max(1, self.speed.threads)
        forward = self._pass_s(work.kind, slowdown * work.flops * part, work.bytes * part, 1, weights) + packed + scored + casts + stepped
        forward += tap_s * work.taps
        if not work.backward_bytes:
            return Seconds(forward)
        backward = self._pass_s(work.kind, slowdown * work.backward_flops * part, work.backward_bytes * part, 2, 2 * weights)
        backward += self._cast_s(work.backward_cast_bytes * part) + 2 * stepped + tap_s * work.backward_taps
        return Seconds(forward, backward + 2 * packed + ATTENTION_BACKWARD * scored)

    @property
    def table_precision(self) -> str:
        """The precision whose figures replace this one's if only products were measured in it."""
        return "float32" if self.precision == "float64" else self.precision

    def _stepwise_launch_s(self, steps: float) -> float:
        """Seconds of launching the operators of a recurrence's steps, one pass, whatever the numbers of samples and states."""
        rate = self.by_kind.get(STEP_RATE)
        return steps * (STEP_OPERATORS * self.speed.launch_s if rate is None else 1 / rate)

    def _grouped_slowdown(self, channels: float) -> float:
        """Slowdown of a convolution in groups of few channels, which fill little of a vector on the input and output side."""
        if not channels:
            return 1.0
        full_rate = self.by_kind.get(f"convolution.{self.precision}", self.flops)
        one, four = (self.by_kind.get(f"{GROUPED_RATE}{n}.{self.table_precision}", part * full_rate) for n, part in GROUPED_PARTS.items())
        return max(1.0, full_rate / max(one, four * (channels / 4) ** 2))

    def _packing_s(self, kind: str, size_bytes: float) -> float:
        """Seconds of packing a product's weights once; 0 if that was not measured."""
        rate = self.by_kind.get(WEIGHT_RATE + kind)
        if rate is None:
            return 0.0
        return self._weight_width * size_bytes / rate * self.size_factor

    @property
    def _weight_width(self) -> float:
        """Width of a weight that a product reads, relative to float32."""
        return 0.5 if self.is_cast else self.traffic_factor

    def _cast_s(self, moved: float) -> float:
        """Seconds of casting operands or their gradients."""
        return moved / self.by_kind.get("cast", self.speed.memory_bandwidth_bytes_per_s) * self.size_factor

    def _scores_s(self, number: float) -> float:
        """Seconds of attention's work per score; 0 if that was not measured separately from its products."""
        rate = self.by_kind.get(SCORE_RATE + self.table_precision)
        return number / rate * self.size_factor if rate else 0.0

    def _launch_s(self, launches: int, kind: str) -> float:
        calls = self.by_kind.get(LAUNCH_RATE + kind)
        return launches * self.launch_factor * (self.speed.launch_s if calls is None else 1 / calls)

    def _pass_s(self, kind: str, flops: float, moved: float, launches: int, weights: float) -> float:
        """Seconds of one pass. `weights`: the bytes of `traffic_factor` that are a product's weights, which it packs."""
        rates, bandwidth = self.by_kind, self.speed.memory_bandwidth_bytes_per_s
        besides = rates.get(f"{TRAFFIC_RATE}{kind}.{self.table_precision}")
        if besides is not None:
            moved = max(0.0, moved - self._weight_width / self.traffic_factor * weights)
        moved *= self.traffic_factor
        if kind in MATMUL_KINDS:
            reached = rates.get(f"{kind}.{self.precision}", self.flops * (ATTENTION if kind == "attention" else 1.0))
            busy = max(flops / reached, moved / bandwidth) if besides is None else flops / reached + moved / besides
        else:
            busy = moved / rates.get(kind, bandwidth)
        return self._launch_s(launches, kind) + busy * self.size_factor


def block_work(block: ProbeBlock, sequences: int, is_cast: bool = False) -> Iterator[OperatorWork]:
    """Yield the work of a block's operators for a batch of `sequences`. `is_cast`: under autocast, where norms and sums stay float32."""
    h, tokens = block.hidden, sequences * block.sequence
    x, half = 4.0 * tokens * h, 0.5 if is_cast else 1.0

    def linear(into: int, out: int, after_norm: bool = False) -> OperatorWork:
        flops, read, wrote, weight = 2.0 * into * out * tokens, into / h * x, out / h * x, 4.0 * (into * out + out)
        cast = 1.5 * (weight + (read if after_norm else 0.0)) * is_cast
        return OperatorWork(
            "linear", flops, 2 * flops, bytes=half * (read + wrote + weight), backward_bytes=half * (wrote + 2 * read + 2 * weight),
            weight_bytes=4.0 * into * out, cast_bytes=cast, backward_cast_bytes=cast,
        )  # fmt: skip

    scores = 4.0 * tokens * block.sequence * h
    for _ in range(block.layers):
        yield from (OperatorWork("norm", bytes=2 * x, backward_bytes=3 * x),) * 2
        yield from (linear(h, 3 * h, after_norm=True), linear(h, h), linear(h, 4 * h, after_norm=True), linear(4 * h, h))
        yield OperatorWork(
            "attention", scores, ATTENTION_BACKWARD * scores, bytes=half * 4 * x, backward_bytes=half * 8 * x,
            scores=tokens * block.heads * block.sequence,
        )  # fmt: skip
        yield OperatorWork("activation", bytes=half * 8 * x, backward_bytes=half * 12 * x)
        yield from (OperatorWork("elementwise", bytes=(2 + half) * x, backward_bytes=(2 + half) * x),) * 2
        yield from (OperatorWork("view"),) * NUM_VIEWS


def optimizer_s(speed: Speed, num_parameters: float, states: int = 2) -> float:
    """Seconds of an optimizer step, which reads weight, gradient and states and writes weight and states, in float32."""
    moved = 4.0 * num_parameters * (3 + 2 * states)
    return moved / dict(speed.rates).get("optimizer", speed.memory_bandwidth_bytes_per_s)
