"""Seconds and bytes of one training step. In: a graph's inventory, a cluster, a batch, a layout, its stages. Out: `Prediction`.

A step is: every microbatch forward and backward through the stages, gradients summed, the optimizer. The pipeline is in closed
form here, (sum of the stages) + (m - 1) x (the slowest stage), which is exact for equal stages; the search replaces it by the clock of
the real program. Gradient buckets hide behind the last backward on GPUs; on processors they take the same cores, and nothing hides.
Not modelled: collectives that slow compute down, stragglers, the data loader, and a first step that compiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from weft.cluster.cluster import Cluster, Speed
from weft.cost.compute import Rates, Seconds, optimizer_s
from weft.cost.memory import Inventory, StageState, activation_bytes, cut_ways, memory_of, value_ways
from weft.cost.network import Group, collective_s, send_s
from weft.errors import Infeasible
from weft.model.graph import Graph, Operator
from weft.model.fold import propagate
from weft.model.sharding import Prices, Sharding
from weft.model.stages import Cut, Stage, cuts, split
from weft.model.work import model_flops, packet
from weft.plan.layout import Layout
from weft.plan.plan import Memory, Prediction

BUCKET_BYTES = 25 * 2**20  # gradients are summed in pieces of this size
HIDDEN = 0.9  # part of the last backward that gradient buckets can hide behind, on GPUs
MICROBATCH_S = 3e-4  # the executor's own time for one microbatch of one stage of a pipeline
STEP_S = 1e-3  # what a step costs besides: the loop, clipping, logging
NARROW = ("linear", "attention", "convolution", "recurrent", "activation")  # results are bfloat16 under autocast


@dataclass(frozen=True, slots=True)
class StageCost:
    """One stage on one rank. `compute` and `tensor`: of one microbatch. `gradients_s`, `optimizer_s`: of the step."""

    compute: Seconds
    tensor: Seconds
    gradients_s: float
    optimizer_s: float
    memory: Memory

    @property
    def forward_s(self) -> float:
        return self.compute.forward + self.tensor.forward

    @property
    def backward_s(self) -> float:
        return self.compute.backward + self.tensor.backward


@dataclass(frozen=True, slots=True)
class _Base:
    compute: Seconds
    tensor: Seconds
    gradients_s: float
    last_bucket_s: float
    state: StageState
    kept: tuple[float, float]


@dataclass
class Pricer:
    """Prices layouts of one graph on one cluster for one batch. It keeps what layouts share; nothing else changes."""

    graph: Graph
    cluster: Cluster
    batch_size: int
    optimizer_states: int = 2
    shards: Mapping[str, tuple[tuple[str, int], ...]] | None = None
    _shardings: dict[tuple[bool, int], Sharding | None] = field(default_factory=dict)
    _operators: dict[tuple[object, ...], tuple[list[Seconds], list[Seconds]]] = field(default_factory=dict)
    balanced: dict[tuple[object, ...], tuple[str, ...]] = field(default_factory=dict)  # where the search begins stages, by layout
    _bases: dict[tuple[object, ...], list[_Base]] = field(default_factory=dict)
    _splits: dict[tuple[str, ...], tuple[Stage, ...]] = field(default_factory=dict)

    @cached_property
    def inventory(self) -> Inventory:
        return Inventory.of(self.graph)

    @cached_property
    def cuts(self) -> tuple[Cut, ...]:
        """Places where a stage may begin, the first operator's not among them."""
        return tuple(cut for cut in cuts(self.graph) if cut.index > 0)

    @cached_property
    def _position(self) -> dict[str, int]:
        return {op.name: i for i, op in enumerate(self.graph.operators)}

    @cached_property
    def _narrow(self) -> frozenset[str]:
        works = self.inventory.works
        return frozenset(v for op in self.graph.operators if works[op.name].kind in NARROW for v in op.outputs)

    @cached_property
    def model_flops(self) -> float:
        """FLOPs of one step on the whole batch, as `weft.model.work.model_flops` counts them."""
        return model_flops(self.graph) * self.batch_size / self.graph.batch_size

    def speed(self, layout: Layout) -> Speed:
        return self.cluster.speed(layout.num_ranks, layout.threads)

    def sharding(self, layout: Layout) -> Sharding | None:
        """The sharding over data and tensor; None for one rank a stage.

        Data is propagated once, over 2 ranks: the same labels are cut whatever its size.
        """
        sequence = layout.sequence_parallel == "on"
        key = (layout.data > 1, layout.tensor, sequence)
        if key not in self._shardings:
            sizes = {"data": 2 if layout.data > 1 else 1, "tensor": layout.tensor}
            if max(sizes.values()) == 1:
                self._shardings[key] = None
            else:
                found = propagate(self.graph, sizes, self.shards, prices=self._prices(layout), sequence=sequence)
                matrices = sum(len(v.tensor.shape) > 1 for v in self.graph.parameters)
                if layout.tensor > 1 and 2 * len(found.shards.get("tensor", ())) < matrices:
                    # Too small a model for cuts to pay; but who asks for tensor ranks wants them to share the work.
                    found = propagate(self.graph, sizes, self.shards, sequence=sequence)
                self._shardings[key] = found
        return self._shardings[key]

    def _prices(self, layout: Layout) -> dict[str, Prices]:
        speed = self.speed(layout)
        found = {}
        for axis, size, stride in (("data", layout.data, layout.tensor), ("tensor", layout.tensor, 1)):
            if size > 1:
                group = Group(size, stride, layout.num_ranks)
                little, much = (collective_s(self.cluster, "all_reduce", s, group) for s in (1.0, 2.0**24))
                rate = 2 * (size - 1) / size * 2.0**24 / max(much - little, 1e-9)
                flops = dict(speed.flops).get(layout.precision, dict(speed.flops)["float32"])
                found[axis] = Prices(flops, speed.memory_bandwidth_bytes_per_s, rate, little)
        return found

    def microbatch(self, layout: Layout) -> float:
        """Size of the whole microbatch, all data replicas together, against the graph's batch."""
        return self.batch_size / layout.microbatches / self.graph.batch_size

    def operators(self, layout: Layout) -> tuple[list[Seconds], list[Seconds]]:
        """(compute, collectives) of every operator of the graph on one rank, for one microbatch."""
        key = (layout.data, layout.tensor, layout.num_ranks, layout.threads, layout.microbatches, layout.precision,
               layout.sequence_parallel)  # fmt: skip
        if key not in self._operators:
            self._operators[key] = (self._compute(layout), self._collectives(layout))
        return self._operators[key]

    def _compute(self, layout: Layout) -> list[Seconds]:
        rates = Rates.of(self.speed(layout), layout.precision, not self.cluster.is_cpu)
        sharding = self.sharding(layout)
        axes = {"data": layout.data, "tensor": layout.tensor}
        scale = self.microbatch(layout)
        ways = {op.name: cut_ways(sharding, op.name, axes) for op in self.graph.operators}
        known: dict[tuple[object, ...], Seconds] = {}
        found = []
        for op in self.graph.operators:
            done = self.inventory.works[op.name]
            divide = ways[op.name]
            by = scale if op.outputs[0] in self.inventory.batched else 1.0
            key = (done.kind, done.flops, done.backward_flops, done.bytes, done.backward_bytes, divide, by)
            if key not in known:
                known[key] = rates.seconds(done, divide, by)
            found.append(known[key])
        return found

    def _collectives(self, layout: Layout) -> list[Seconds]:
        sharding = self.sharding(layout)
        found = [Seconds()] * len(self.graph.operators)
        if sharding is None:
            return found
        position = self._position
        axes = {"data": layout.data, "tensor": layout.tensor}
        scale = self.microbatch(layout)

        def take(name: str, value: str, axis: str, size_bytes: float | None = None) -> float:
            if size_bytes is None:
                tensor = self.graph.tensors[value]
                others = {a: n for a, n in axes.items() if a != axis}
                by = scale if value in self.inventory.batched else 1.0
                half = 0.5 if layout.precision == "bfloat16" and value in self._narrow else 2.0 if layout.precision == "float64" else 1.0
                size_bytes = tensor.size_bytes * by * half / value_ways(sharding, value, others)
            return collective_s(self.cluster, name, size_bytes, self.group(layout, axis))

        for move in sharding.moves:
            if axes.get(move.axis, 1) < 2 or move.op not in position:
                continue
            back = take(move.backward, move.value, move.axis) if move.value in self.inventory.grads else 0.0
            found[position[move.op]] += Seconds(take(move.forward, move.value, move.axis), back)
        for i, op in enumerate(self.graph.operators):
            for axis, size in axes.items():
                if size > 1 and sharding.ops[op.name].get(axis):
                    found[i] += self._inside(op, axis, sharding, take)
        return found

    def _inside(self, op: Operator, axis: str, sharding: Sharding, take: object) -> Seconds:
        """Collectives that a cut operator's own kernel makes, which no `Move` shows."""
        assert callable(take)
        name, out = packet(op), op.outputs[0]
        whole = sharding.forms[out].get(axis, "R")[0] in "R+"
        if name == "cross_entropy_loss" and whole:
            rows = 4.0 * self.graph.tensors[op.inputs[1]].size * self.batch_size / self.graph.batch_size
            return Seconds(3 * take("all_reduce", out, axis, rows), 0.0)
        if name == "batch_norm":
            statistics = 8.0 * self.graph.tensors[op.inputs[0]].shape[1]
            return Seconds(take("all_reduce", out, axis, statistics), take("all_reduce", out, axis, statistics))
        if self.inventory.works[op.name].kind in ("linear", "convolution") and whole:
            return Seconds(take("all_reduce", out, axis), 0.0)  # summed before the bias is added
        return Seconds()

    def group(self, layout: Layout, *axes: str) -> Group:
        """Ranks along `axes`: tensor varies fastest, then data, then pipeline."""
        size, stride = 1, 0
        at = 1
        for axis, n in (("tensor", layout.tensor), ("data", layout.data), ("pipeline", layout.pipeline)):
            if axis in axes and n > 1:
                size, stride = size * n, stride or at
            at *= n
        return Group(size, stride or 1, layout.num_ranks)

    def split(self, sites: Sequence[str]) -> tuple[Stage, ...]:
        """The stages that begin at `sites`; one of the whole graph where there are none."""
        key = tuple(sites)
        if key not in self._splits:
            self._splits[key] = split(self.graph, key)
        return self._splits[key]

    def stages(self, layout: Layout, sites: Sequence[str] = ()) -> tuple[StageCost, ...]:
        """Every stage's cost. `sites`: where stages after the first begin.

        Raises:
            LayoutError: sites that the graph does not have, or not in order.
        """
        key = (layout.data, layout.tensor, layout.pipeline, layout.microbatches, layout.precision, layout.threads, layout.sequence_parallel, tuple(sites))
        if key not in self._bases:
            self._bases[key] = [self._base(layout, stage) for stage in self.split(sites)]
        return tuple(self._stage(layout, i, base) for i, base in enumerate(self._bases[key]))

    def _base(self, layout: Layout, stage: Stage) -> _Base:
        """What a stage costs whatever the schedule, ZeRO stage and recomputation."""
        compute, collectives = self.operators(layout)
        sharding = self.sharding(layout)
        axes = {"data": layout.data, "tensor": layout.tensor}
        busy, network = Seconds(), Seconds()
        for op in stage.operators:
            busy += compute[self._position[op.name]]
            network += collectives[self._position[op.name]]
        if layout.num_ranks * layout.microbatches > 1 and self.cluster.is_cpu:
            busy += Seconds(MICROBATCH_S / 2, MICROBATCH_S / 2)
        used = set(stage.variables)
        number = trainable = 0.0
        sums: dict[tuple[str, ...], float] = {}
        for variable in self.graph.parameters:
            if variable.value not in used:
                continue
            local = variable.tensor.size / value_ways(sharding, variable.value, axes)
            number += local
            if variable.trainable:
                trainable += local
                over = () if sharding is None else tuple(a for a in sharding.gradients.get(variable.value, ()) if axes.get(a, 1) > 1)
                if over:
                    sums[over] = sums.get(over, 0.0) + local
        width = 8.0 if layout.precision == "float64" else 4.0
        # Every microbatch but the first reads, adds to and writes the gradients that are there.
        adding = 3 * width * trainable / self.speed(layout).memory_bandwidth_bytes_per_s
        busy += Seconds(0.0, adding * (layout.microbatches - 1) / layout.microbatches)
        summing = last = 0.0
        for over, count in sums.items():
            pieces = max(1.0, width * count / BUCKET_BYTES)
            one = collective_s(self.cluster, "all_reduce", width * count / pieces, self.group(layout, *over))
            summing += pieces * one
            last = max(last, one)
        entering = sum(self.crossing(layout, values) for _, values in stage.receives) / layout.data
        kept = activation_bytes(self.inventory, stage.operators, self.microbatch(layout), layout.precision, sharding, axes)
        return _Base(busy, network, summing, last, StageState(number, trainable, entering), kept)

    def _stage(self, layout: Layout, index: int, base: _Base) -> StageCost:
        busy, network = base.compute, base.tensor
        if layout.recompute == "full":
            busy = Seconds(busy.forward, busy.backward + busy.forward)
            network = Seconds(network.forward, network.backward + network.forward)
        summing = base.gradients_s
        if not self.cluster.is_cpu:
            summing = max(min(base.last_bucket_s, summing), summing - HIDDEN * (busy.backward + network.backward))
        updated = base.state.num_trainable / (layout.data if layout.zero else 1)
        optimizer = optimizer_s(self.speed(layout), updated, self.optimizer_states)
        memory = memory_of(base.state, base.kept, layout, index, self.cluster.device.scratch_bytes, self.optimizer_states)
        return StageCost(busy, network, summing, optimizer, memory)

    def crossing(self, layout: Layout, values: Sequence[str]) -> float:
        """Bytes of these values, of one whole microbatch."""
        scale = self.microbatch(layout)
        return sum(self.graph.tensors[v].size_bytes * (scale if v in self.inventory.batched else 1.0) for v in values)

    def transfer_s(self, layout: Layout, size_bytes: float) -> float:
        """Seconds to hand one microbatch's `size_bytes` to the next stage, every replica its part."""
        stride = layout.data * layout.tensor
        return send_s(self.cluster, size_bytes / layout.data, stride, stride)

    def predict(
        self, layout: Layout, costs: Sequence[StageCost], transfers_s: Sequence[float], pipeline_s: float | None = None
    ) -> Prediction:
        """The step. `transfers_s`: seconds of each border's transfer, one way. `pipeline_s`: of all microbatches, where it was timed."""
        busiest = max(costs, key=lambda c: c.forward_s + c.backward_s)
        m = layout.microbatches
        if pipeline_s is None:
            round_trip = [c.forward_s + c.backward_s for c in costs]
            pipeline_s = sum(round_trip) + (m - 1) * max(round_trip) + 2 * sum(transfers_s)
        compute = m * busiest.compute.total
        tensor = m * busiest.tensor.total
        gradients = max(c.gradients_s for c in costs)
        optimizer = max(c.optimizer_s for c in costs)
        total = pipeline_s + gradients + optimizer + STEP_S
        parts = (
            ("compute", compute),
            ("tensor", tensor),
            ("pipeline", max(0.0, pipeline_s - compute - tensor)),
            ("gradients", gradients),
            ("optimizer", optimizer),
            ("overhead", STEP_S),
        )
        fullest = max((c.memory for c in costs), key=lambda memory: memory.total)
        flops = self.model_flops
        return Prediction(total, flops / total / self.peak_flops(layout), flops, fullest, parts)

    def peak_flops(self, layout: Layout) -> float:
        """FLOP/s of all devices that the layout uses, at its precision."""
        cores = 1 if not self.cluster.is_cpu else self.cluster.threads_of(layout.num_ranks, layout.threads)
        return self.cluster.device.peak(layout.precision) * min(layout.num_ranks * cores, max(self.cluster.num_devices, layout.num_ranks))

    def check_memory(self, layout: Layout, prediction: Prediction) -> None:
        """Raise `Infeasible` with the numbers where the fullest rank does not fit."""
        have = self.cluster.memory_of(layout.num_ranks)
        need = prediction.memory.total
        if need > have:
            m = prediction.memory
            held = ", ".join(f"{name} {value / 2**30:.2f}" for name, value in (
                ("parameters", m.parameters), ("gradients", m.gradients), ("optimizer", m.optimizer),
                ("activations", m.activations), ("buffers", m.buffers), ("margin", m.margin)))  # fmt: skip
            raise Infeasible(
                f"{layout}: the fullest rank needs {need / 2**30:.2f} GiB ({held}), and has {have / 2**30:.2f} GiB; "
                "use more microbatches, recompute=full, zero=1, or more devices"
            )
