"""Roofline model of one operator on one CPU rank. In: its `Work`, how it is sharded, a rank's `Speed`. Out: forward and backward seconds.

Roofline (Williams et al. 2009) with the rate that each kind of operator reaches in training: matrix products by FLOPs, the rest by bytes
moved, plus the launch time of a call of its kind. A product also packs its weights in every call, forward, for the input's gradient and
for their own: a cost per microbatch however few samples it has. These are scaled by the ratio of whole measured layers to the sum of their
operators (`weft.cluster.block`), since a step finds colder caches than an operator alone; nearly empty layers give the ratio for launch
times. Weight gradients are accumulated by stage (`weft.cost.stages.base`). A label sharded over an axis divides FLOPs and bytes by the
axis's size. Convolutions are padded to blocks of channels (`convolutions`), and in groups of few channels run at separate rates. GPUs are
priced by `kernels`. Not modelled: the lower efficiency of odd shapes beyond that, fusion by a compiler, clocks that fall under load.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from weft.cluster.block import FEW, TRANSFORMER, Block
from weft.cluster.cluster import BESIDES, GROUPED, SCORES, START, STEPPED, WEIGHTS, Speed
from weft.model.work import MATMUL_KINDS, Work
from weft.plan.precision import PRECISIONS

ATTENTION = 0.6  # rate of attention relative to large products, if it was not measured
GROUPED_PARTS = {1: 0.04, 4: 0.11}  # rate by channels of a group, relative to other convolutions, if it was not measured
STEP_OPERATORS = 12  # operators of a GRU step, forward
SCORED_AGAIN = 2.5  # attention's backward over its forward, for products and for scores
TAP_S = 4e-10  # seconds of a core to add one entry of a window; measured with windows of 4 to 81 entries on a two-core Xeon (torch 2.13)
VIEWS = 5  # views in a layer of a block: heads split and moved to the front, and back
LEAST = 0.5  # lower bound of an operator's time in a model over its time alone: less would be noise


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
class Rates:
    """Rates of a rank at one precision: FLOP/s and bytes/s by kind of operator.

    `by_kind`: the speed's rates. Ratios of times in a model to times alone: `size_factor` of size-dependent times, `launch_factor` of
    launches.
    """

    speed: Speed
    precision: str
    flops: float
    moved: float  # bytes moved per byte counted: 2 in float64; in bfloat16 they are counted in autocast's dtypes
    by_kind: Mapping[str, float]
    sized: float = 1.0
    begins: float = 1.0
    is_cast: bool = False  # products have 16-bit operands

    @classmethod
    def of(cls, speed: Speed, precision: str) -> Rates:
        """Build the rates. Raises `KeyError` if the speed lacks the precision: the search asks for none that the device lacks."""
        flops, is_cast = dict(speed.flops), bool(PRECISIONS[precision].products)
        if precision not in flops and (
            substitute := PRECISIONS[precision].elsewhere
        ):  # not measured on processors: not faster, often slower
            return replace(cls.of(speed, substitute), is_cast=is_cast)
        wide = 2.0 if precision == "float64" else 1.0
        unscaled = cls(speed, precision, flops[precision], wide, dict(speed.rates), is_cast=is_cast)
        threads = max(1, speed.threads)
        measured = unscaled.by_kind.get(TRANSFORMER.rate(precision))
        if measured is None:
            return unscaled
        block_s, (sized, begun) = threads / measured, unscaled._block(TRANSFORMER, TRANSFORMER.sequences * threads)
        if (rate := unscaled.by_kind.get(FEW.rate(precision))) is None:
            each = block_s / (sized + begun)
            return replace(unscaled, sized=each, begins=each)
        # Two blocks and two unknowns: one block is dominated by sizes, the other by launches.
        small_s, (small_sized, small_begun) = 1 / rate, unscaled._block(FEW, FEW.sequences)
        spread = sized * small_begun - begun * small_sized
        by_size, begins = (block_s * small_begun - small_s * begun) / spread, (small_s * sized - block_s * small_sized) / spread
        return replace(unscaled, sized=max(LEAST, by_size), begins=max(LEAST, begins))

    def _block(self, block: Block, sequences: int) -> tuple[float, float]:
        """Return seconds of a block's operators one by one: (those that grow with sizes, those of launches)."""
        works = list(block_work(block, sequences, self.is_cast))
        begun = sum(self._host(1, work.kind) + self._host(2, work.kind) for work in works)
        return sum(self.seconds(work).total for work in works) - begun, begun

    def seconds(self, work: Work, divide: float = 1.0, scale: float = 1.0) -> Seconds:
        """Price one operator with 1/`divide` of its work, at `scale` times the graph's batch."""
        if work.kind == "view":
            return Seconds(self._host(1, "view"), self._host(2, "view"))
        part = scale / divide
        packed = self._packed(work.kind, work.weight_bytes / divide)
        scored = self._scores(work.scores * part)
        slowdown = self._slower(work.channels)
        weights, casts = work.weight_bytes * part, self._cast(work.cast_bytes * part)
        stepped = self._stepped(work.steps)
        tap_s = TAP_S * part / max(1, self.speed.threads)
        forward = self._one(work.kind, slowdown * work.flops * part, work.bytes * part, 1, weights) + packed + scored + casts + stepped
        forward += tap_s * work.taps
        if not work.backward_bytes:
            return Seconds(forward)
        backward = self._one(work.kind, slowdown * work.backward_flops * part, work.backward_bytes * part, 2, 2 * weights)
        backward += self._cast(work.backward_cast_bytes * part) + 2 * stepped + tap_s * work.backward_taps
        return Seconds(forward, backward + 2 * packed + SCORED_AGAIN * scored)

    @property
    def table_precision(self) -> str:
        """The precision whose figures replace this one's if only products were measured in it."""
        return "float32" if self.precision == "float64" else self.precision

    def _stepped(self, steps: float) -> float:
        """Seconds of launching the operators of a recurrence's steps, one pass, whatever the numbers of samples and states."""
        rate = self.by_kind.get(STEPPED)
        return steps * (STEP_OPERATORS * self.speed.launch_s if rate is None else 1 / rate)

    def _slower(self, channels: float) -> float:
        """Slowdown of a convolution in groups of few channels, which fill little of a vector on the input and output side."""
        if not channels:
            return 1.0
        full_rate = self.by_kind.get(f"convolution.{self.precision}", self.flops)
        one, four = (self.by_kind.get(f"{GROUPED}{n}.{self.table_precision}", part * full_rate) for n, part in GROUPED_PARTS.items())
        return max(1.0, full_rate / max(one, four * (channels / 4) ** 2))

    def _packed(self, kind: str, size_bytes: float) -> float:
        """Seconds of packing a product's weights once; 0 if that was not measured."""
        rate = self.by_kind.get(WEIGHTS + kind)
        if rate is None:
            return 0.0
        return self._width * size_bytes / rate * self.sized

    @property
    def _width(self) -> float:
        """Width of a weight that a product reads, relative to float32."""
        return 0.5 if self.is_cast else self.moved

    def _cast(self, moved: float) -> float:
        """Seconds of casting operands or their gradients."""
        return moved / self.by_kind.get("cast", self.speed.memory_bandwidth_bytes_per_s) * self.sized

    def _scores(self, number: float) -> float:
        """Seconds of attention's work per score; 0 if that was not measured separately from its products."""
        rate = self.by_kind.get(SCORES + self.table_precision)
        return number / rate * self.sized if rate else 0.0

    def _host(self, launches: int, kind: str) -> float:
        calls = self.by_kind.get(START + kind)
        return launches * self.begins * (self.speed.launch_s if calls is None else 1 / calls)

    def _one(self, kind: str, flops: float, moved: float, launches: int, weights: float) -> float:
        """Seconds of one pass. `weights`: the bytes of `moved` that are a product's weights, which it packs."""
        rates, bandwidth = self.by_kind, self.speed.memory_bandwidth_bytes_per_s
        besides = rates.get(f"{BESIDES}{kind}.{self.table_precision}")
        if besides is not None:
            moved = max(0.0, moved - self._width / self.moved * weights)
        moved *= self.moved
        if kind in MATMUL_KINDS:
            reached = rates.get(f"{kind}.{self.precision}", self.flops * (ATTENTION if kind == "attention" else 1.0))
            busy = max(flops / reached, moved / bandwidth) if besides is None else flops / reached + moved / besides
        else:
            busy = moved / rates.get(kind, bandwidth)
        return self._host(launches, kind) + busy * self.sized


def block_work(block: Block, sequences: int, is_cast: bool = False) -> Iterator[Work]:
    """Yield the work of a block's operators for a batch of `sequences`. `is_cast`: under autocast, where norms and sums stay float32."""
    h, tokens = block.hidden, sequences * block.sequence
    x, half = 4.0 * tokens * h, 0.5 if is_cast else 1.0

    def linear(into: int, out: int, after_norm: bool = False) -> Work:
        flops, read, wrote, weight = 2.0 * into * out * tokens, into / h * x, out / h * x, 4.0 * (into * out + out)
        moved = half * (read + wrote + weight), half * (wrote + 2 * read + 2 * weight)
        cast = 1.5 * (weight + (read if after_norm else 0.0)) * is_cast
        return Work("linear", flops, 2 * flops, *moved, weight_bytes=4.0 * into * out, cast_bytes=cast, backward_cast_bytes=cast)

    scores = 4.0 * tokens * block.sequence * h
    for _ in range(block.layers):
        yield from (Work("norm", bytes=2 * x, backward_bytes=3 * x),) * 2
        yield from (linear(h, 3 * h, after_norm=True), linear(h, h), linear(h, 4 * h, after_norm=True), linear(4 * h, h))
        attended = half * 4 * x, half * 8 * x
        yield Work("attention", scores, SCORED_AGAIN * scores, *attended, scores=tokens * block.heads * block.sequence)
        yield Work("activation", bytes=half * 8 * x, backward_bytes=half * 12 * x)
        yield from (Work("elementwise", bytes=(2 + half) * x, backward_bytes=(2 + half) * x),) * 2
        yield from (Work("view"),) * VIEWS


def optimizer_s(speed: Speed, num_parameters: float, states: int = 2) -> float:
    """Seconds of an optimizer step, which reads weight, gradient and states and writes weight and states, in float32."""
    moved = 4.0 * num_parameters * (3 + 2 * states)
    return moved / dict(speed.rates).get("optimizer", speed.memory_bandwidth_bytes_per_s)
