"""What pricing asks of a graph under a sharding, gathered. In: an inventory, a sharding. Out: `Parts`.

Operators of layers that repeat are alike, and a fold places them alike (`model.sharding.fold`): what one has is told once for all.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache, cached_property, partial

import numpy as np
from numpy.typing import NDArray

from weft.cost.devices.convolutions import FULL, NEVER
from weft.cost.devices.kernels import NOTHING, Kernel, Moved
from weft.cost.devices.recurrent import extra_bytes, in_units, single_steps
from weft.cost.memory.memory import Inventory
from weft.cost.memory.places import Places
from weft.cost.memory.runs import Amount, Amounts
from weft.cost.operators.dispatch import ANY, dispatched
from weft.cost.operators.parts import Collective, Local, Parts, block
from weft.cost.operators.rounds import Span, around, kept, merged, on_the_way
from weft.cost.pieces import cut, pieces, pieces_moving, shared_by_data, tensor_axes, work_ways
from weft.model.graph import Graph, Operator
from weft.model.sharding.fold import operator_classes
from weft.model.sharding.pointwise import is_product
from weft.model.sharding.sharding import Move, Sharding
from weft.model.stages.core_attention import core_numbers
from weft.model.work import num_steps
from weft.ops import record_of
from weft.ops.attention import is_causal
from weft.ops.recurrent import gathered_steps
from weft.plan.axis import DATA, EXPERT, SAMPLES, axis_of
from weft.plan.placement import Placement, R, Shard, dual, is_full, is_halo, is_shard
from weft.plan.transition import LOCAL, sent_part, transition


class _Unique:
    """Numbers things in the order in which they first come."""

    def __init__(self) -> None:
        self.numbers: dict[Hashable, int] = {}

    def __call__(self, thing: Hashable) -> int:
        return self.numbers.setdefault(thing, len(self.numbers))


def _sent(move: Move, n: int) -> tuple[float, float]:
    """What the rank sends that sends most, forward and backward, over what it would if pieces were equal; of windows, over the value."""
    if is_halo(move.target) and is_shard(move.source):
        part = sent_part(move.source, move.target, n)
        return part or 1.0, part or 1.0
    return _longer(move.source, move.target, n), _longer(dual(move.target), dual(move.source), n)


def _longer(source: Placement, target: Placement, n: int) -> float:
    equal = [Shard(form.dim) if is_shard(form) else form for form in (source, target)]
    return sent_part(source, target, n) / sent_part(equal[0], equal[1], n) if transition(source, target).collective not in LOCAL else 1.0


@dataclass(frozen=True)
class Unplaced:
    """What is asked of a graph's operators whatever the sharding. `narrow`: values that are 16-bit under autocast on processors."""

    inventory: Inventory
    narrow: frozenset[str]

    @cached_property
    def position(self) -> dict[str, int]:
        """By operator's name."""
        return {op.name: i for i, op in enumerate(self.inventory.graph.operators)}

    @cached_property
    def joined(self) -> list[tuple[int, ...]]:
        """By operator: its operands whose gradients come to one that waits, and are added up into a third."""
        operators, grads = self.inventory.graph.operators, self.inventory.grads
        last = {value: i for i, op in enumerate(operators) for value in op.inputs if op.outputs[0] in grads}
        joins = {value for value in last if value in grads and value in self.inventory.graph.place}
        return [tuple(at for at, v in enumerate(op.inputs) if v in joins and last[v] > i) for i, op in enumerate(operators)]

    @cached_property
    def siblings(self) -> dict[str, float]:
        """Rows of all products of one input with weights, by operator: q, k and v run as one product."""
        groups: dict[str, list[tuple[str, float]]] = {}
        for op in self.inventory.graph.operators:
            if record_of(op).product == "linear":
                groups.setdefault(op.inputs[0], []).append((op.name, float(self.inventory.graph.tensors[op.inputs[1]].shape[0])))
        return {name: sum(rows for _, rows in group) for group in groups.values() for name, _ in group}

    @cached_property
    def blocks(self) -> tuple[str, ...]:
        return tuple(block(op.site) for op in self.inventory.graph.operators)

    @cached_property
    def attention_core(self) -> tuple[int, ...]:
        return core_numbers(self.inventory.graph, self.blocks)

    @cached_property
    def attention(self) -> NDArray[np.bool_]:
        return np.array([self.inventory.works[op.name].kind == "attention" for op in self.inventory.graph.operators])

    @cached_property
    def numbers(self) -> list[int]:
        """By operator: a number, the same for those that have the same where their values lie alike."""
        inventory, unique = self.inventory, _Unique()
        sets = (inventory.batched, inventory.grads, inventory.held, self.narrow)
        numbers = []
        for op, kind, joined in zip(inventory.graph.operators, operator_classes(inventory.graph), self.joined, strict=True):
            values, done, saved = (*op.inputs, *op.outputs), inventory.works[op.name], inventory.kept[op.name]
            key = (
                kind, joined, self.siblings.get(op.name), tuple([v in some for v in values for some in sets]),
                tuple([values.index(v) for v in values]), astuple(replace(done, keeps=())), tuple([v in done.keeps for v in values]),
                astuple(replace(saved, storages=())), id(op.function),
            )  # fmt: skip
            numbers.append(unique(key))
        return numbers

    def placed(self, sharding: Sharding | None) -> Sequence[Hashable]:
        """By operator: the same for those of one number that are placed by the same part of a fold."""
        if sharding is None:
            return self.numbers
        if sharding.regions:
            return range(len(self.numbers))
        labels, needs, forms = sharding.ops, sharding.needs, sharding.forms
        return [
            (number, id(labels[op.name]), id(needs[op.name]), *[id(forms.get(v)) for v in (*op.inputs, *op.outputs)])
            for number, op in zip(self.numbers, self.inventory.graph.operators, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class _Alone:
    """What one operator has in `Parts` whatever its values are called: entries of `compute` and `collectives`, bytes."""

    local: int
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    extra: float
    working: float
    owned: float
    weights: float
    shared: bool


@dataclass
class _Gathering:
    """`gather` at work."""

    source: Unplaced
    sharding: Sharding | None

    def __post_init__(self) -> None:
        self.inventory, self.graph = self.source.inventory, self.source.inventory.graph
        self.compute, self.collectives = _Unique(), _Unique()
        self.places = Places(self.inventory, self.sharding)
        self.axes = (DATA, *tensor_axes(self.sharding))
        self.travels = dispatched(self.inventory)
        self._experts = dict(self.travels.values())
        self._ways = cache(partial(pieces, self.sharding))

    def moved(
        self, name: str, value: str, axis: str, size: float | None = None, by_row: bool = False, ways: float = 0, among: Span = None
    ) -> int:
        """The entry of a collective, of `size` bytes where these are not the value's."""
        shared = (shared_by_data(self.sharding, value) or by_row) and not (axis_of(axis).replicas and axis_of(axis).cuts <= {SAMPLES})
        moves = self.graph.tensors[value].size_bytes / (ways or self._ways(value, axis)) if size is None else size
        follows = by_row or (size is None and value in self.inventory.batched)
        of = self._experts[value] if axis == EXPERT else ANY
        return self.collectives(Collective(name, axis, moves, follows, shared, value in self.source.narrow, size is not None, among, of))

    def moves(self) -> Iterator[tuple[int, int | None, int | None]]:
        """(operator, entries forward and backward) of every `Move`."""
        sharding = self.sharding
        for move in sharding.moves if sharding is not None else ():
            if sharding is None or move.op not in self.source.position:
                continue
            at = self.source.position[move.op]
            ways: float = 0 if axis_of(move.axis).replicas else pieces_moving(sharding, self.graph.operators[at], move)
            there, back = _sent(move, sharding.sizes[move.axis])
            ways = ways or self._ways(move.value, move.axis)
            backward = move.backward if move.value in self.inventory.grads else ""
            forth, again = (
                None if name in LOCAL else self.moved(name, move.value, move.axis, ways=ways / more)
                for name, more in ((move.forward, there), (backward, back))
            )
            yield at, forth, again

    def alone(self, op: Operator, joined: Sequence[int]) -> _Alone:
        """`joined`: as `Unplaced.joined` has it."""
        inventory, sharding, places, mine = self.inventory, self.sharding, self.places, self.inventory.kept[op.name]
        local = self.compute(_local(inventory, sharding, op, self.source.siblings))
        forward: list[int] = []
        backward: list[int] = []
        for axis in self.axes:
            if cut(sharding, op.name, axis):
                _inside(inventory, sharding, op, axis, self.moved, forward, backward)
        divide = work_ways(sharding, op)
        extra = extra_bytes(op, self.graph.tensors, sharding, inventory.works[op.name].extra_bytes, divide)
        is_cut = any(cut(sharding, op.name, axis) for axis in self.axes)
        beside = mine.spread_bytes if is_cut else mine.alone_bytes
        more = _beside_pieces(inventory, places, op, divide) if sharding is not None else 0.0
        least = max((2 * places.storage_of(op.inputs[at], places.ways_read(op, at)).size_bytes for at in joined), default=0.0)
        return _Alone(
            local, tuple(forward), tuple(backward), extra,
            max(least, (mine.working_bytes + beside) / divide + more), max(least, (mine.torch_bytes + beside) / divide + more),
            mine.weight_bytes / divide, cut(sharding, op.name, DATA),
        )  # fmt: skip


def gather(source: Unplaced, sharding: Sharding | None) -> Parts:
    """What pricing asks of a graph under a sharding."""
    inventory, graph = source.inventory, source.inventory.graph
    work = _Gathering(source, sharding)
    places, makers, keys = work.places, graph.place, source.placed(sharding)
    forward: list[tuple[int, int]] = []
    backward: list[tuple[int, int]] = []
    for at, there, back in work.moves():
        forward += [] if there is None else [(at, there)]
        backward += [] if back is None else [(at, back)]
    alone: dict[Hashable, _Alone] = {}
    each, stored, reads, makes = [], [], [], []
    for i, (op, key) in enumerate(zip(graph.operators, keys, strict=True)):
        if key not in alone:
            alone[key] = work.alone(op, source.joined[i])
        each.append(mine := alone[key])
        forward += [(i, entry) for entry in mine.forward]
        backward += [(i, entry) for entry in mine.backward]
        if op.name in work.travels:
            for entries in (forward, backward):
                entries.append((i, work.moved("all_to_all", work.travels[op.name][0], EXPERT)))
        arriving = places.read(op, key)
        places.add(op, arriving)
        saved = (places.kept(op, arriving, *one) for one in inventory.kept[op.name].storages)
        stored.append((*saved, *places.padded(op), *kept(places, op)))
        makes.append(tuple(places.storages[v] for v in op.outputs))
        reads.append(tuple((makers[v], places.storages[v]) for v in dict.fromkeys(op.inputs) if v in makers))
    return Parts(
        tuple(work.compute.numbers),  # type: ignore[arg-type]
        np.array([one.local for one in each], dtype=np.intp),
        tuple(work.collectives.numbers),  # type: ignore[arg-type]
        _columns(forward),
        _columns(backward),
        tuple(stored),
        tuple(reads),
        tuple(makes),
        np.array([one.extra for one in each]),
        np.array([one.working for one in each]),
        np.array([one.owned for one in each]),
        np.array([one.weights for one in each]),
        _waiting(graph, inventory.grads, makers, [places.storage_of(v).amount for v in makers]),
        np.array([one.shared for one in each], dtype=bool),
        source.attention,
        source.blocks,
        source.attention_core,
    )


def _beside_pieces(inventory: Inventory, places: Places, op: Operator, divide: float) -> float:
    """Bytes of gradients that are not cut as the operator's work is: of what it reads whole, and of summands. A convolution has that of
    its first operand in a layout of its own, too."""
    tensors, sharding = inventory.graph.tensors, places.sharding
    more = 0.0
    for at, value in enumerate(op.inputs):
        if value in inventory.grads and value not in inventory.held:
            twice = 2.0 if at == 0 and inventory.works[op.name].kind == "convolution" else 1.0
            ways = places.ways_read(op, at)
            more += twice * tensors[value].size_bytes * max(0.0, 1 / ways - 1 / divide)
            if record_of(op).joins and ways < pieces(sharding, value):  # of its gradient a piece is cut out and sent
                more += tensors[value].size_bytes / ways
    for value in op.outputs:
        if value in inventory.grads:
            more += tensors[value].size_bytes * max(0.0, 1 / pieces(sharding, value) - 1 / divide)
    more += on_the_way(inventory, sharding, op)
    return more


def _waiting(graph: Graph, grads: frozenset[str], makers: Mapping[str, int], sizes: Sequence[Amount]) -> Amounts:
    """By operator: gradients that lie there while its backward runs, since something behind it has made them and their own operator's
    backward is still to come: of what goes round it. `sizes`: of what is `makers`. What goes round an operator and is added to its result
    has the gradient of that result, one tensor, which counts there as the operator's."""
    last = {value: i for i, op in enumerate(graph.operators) for value in op.inputs}
    first = {value: i for i, op in reversed([*enumerate(graph.operators)]) for value in op.inputs}
    rows = [[0.0] * (len(graph.operators) + 1) for _ in range(3)]
    for (value, maker), size in zip(makers.items(), sizes, strict=True):
        if value in grads and last.get(value, 0) > maker + 1:
            for row, each in zip(rows, (size.shared, size.batched, size.fixed), strict=True):
                row[maker + 1] += each
                row[last[value]] -= each
            reader = graph.operators[last[value]]
            beside = [makers[v] for v in reader.inputs if v in makers and first[v] == last[v] and makers[v] > maker]
            if record_of(reader).gradient in ("same", "summed") and len(beside) == 1:
                for row, each in zip(rows, (size.shared, size.batched, size.fixed), strict=True):
                    row[beside[0]] -= each
                    row[beside[0] + 1] += each
    return Amounts(*(np.cumsum(row[:-1]) for row in rows))


def _columns(pairs: Sequence[tuple[int, int]]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    table = np.array(pairs, dtype=np.intp).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _local(inventory: Inventory, sharding: Sharding | None, op: Operator, siblings: dict[str, float]) -> Local:
    done = inventory.works[op.name]
    tensors = inventory.graph.tensors
    if sharding is not None and op.name in sharding.elsewhere:
        return Local(Kernel("view"), op.outputs[0] in inventory.batched, cut(sharding, op.name, DATA))
    divide = work_ways(sharding, op)
    m = n = k = scores = heads = head = 0.0
    share = visible = 1.0
    if record_of(op).product == "linear" and len(tensors[op.inputs[1]].shape) == 2:
        rows, inner = tensors[op.inputs[1]].shape
        m, n, k = tensors[op.outputs[0]].size / rows, siblings[op.name], float(inner)
        share = rows / n
        for axis in tensor_axes(sharding):
            if sharding is not None and cut(sharding, op.name, axis):
                form, ranks = sharding.forms[op.inputs[1]].get(axis, R), sharding.ways(op, axis)
                dim = form.dim if is_shard(form) else None
                m, n, k = (m, _of(n, ranks), k) if dim == 0 else (m, n, _of(k, ranks)) if dim == 1 else (_of(m, ranks), n, k)
    elif done.kind == "attention":
        query, key = (tensors[v].shape for v in op.inputs[:2])
        heads = _of(float(np.prod(query[:-2])), divide)
        scores = heads * query[-2] * key[-2]
        head = float(query[-1])
        visible = 0.5 if is_causal(op) else 1.0
    products = done.kind in ("linear", "convolution", "recurrent")
    weights = sum(tensors[v].size_bytes / pieces(sharding, v) for v in op.inputs if products and v not in inventory.batched)
    weights *= num_steps(op, tensors)
    filling, torch_kernel = inventory.kernels.convolution(op, tensors, sharding) if done.kind == "convolution" else (FULL, NEVER)
    kind = "linear" if is_product(op, tensors, sharding) else done.kind
    more = merged(inventory, sharding, op) if done.kind == "attention" else (0.0, 0.0)
    kernel = Kernel(
        kind, done.flops / divide, done.backward_flops / divide, (done.bytes + more[0]) / divide, (done.backward_bytes + more[1]) / divide,
        m, n, k, share, scores, heads, weights, filling if kind == "convolution" else FULL, torch_kernel,
        done.cast_bytes / divide, done.backward_cast_bytes / divide, single_steps(op, tensors, in_units(sharding, op)), visible, head,
        _fixed(inventory, op, divide), done.taps / divide, done.backward_taps / divide,
    )  # fmt: skip
    return Local(kernel, op.outputs[0] in inventory.batched, cut(sharding, op.name, DATA))


def _of(size: float, ways: float) -> float:
    """A part of a size: of unequal pieces the longest, which is a whole number where the size is."""
    return size / ways if isinstance(ways, int) else round(size / ways, 6)


def _fixed(inventory: Inventory, op: Operator, divide: float) -> Moved:
    """Of what an operator moves that of operands which are the same for every sample, of scalars, and of their gradients."""
    done, tensors = inventory.works[op.name], inventory.graph.tensors
    fixed = [v for v in dict.fromkeys((*op.inputs, *op.outputs)) if v not in inventory.batched or not tensors[v].shape]
    if op.outputs[0] not in inventory.batched or op.function is not None or not fixed:
        return NOTHING
    read = 0.0 if done.kind == "gather" else float(sum(tensors[v].size_bytes for v in fixed))
    back = float(sum(tensors[v].size_bytes * ((v in inventory.grads) + (v in done.keeps)) for v in fixed))
    casts = inventory.cast_of(op)
    cast, learned = (float(sum(size for v, size in casts.items() if v in some)) for some in (set(fixed), set(fixed) & inventory.grads))
    return Moved(*(min(full, part) / divide for full, part in (
        (done.bytes, read), (done.backward_bytes, back), (done.cast_bytes, cast), (done.backward_cast_bytes, learned),
    )))  # fmt: skip


def _inside(
    inventory: Inventory, sharding: Sharding | None, op: Operator, axis: str, moved: Callable[..., int],
    forward: list[int], backward: list[int],
) -> None:  # fmt: skip
    """Entries of the collectives that a cut operator's own kernel makes, which no `Move` shows, added to those `forward` and `backward`."""
    assert sharding is not None
    record, out = record_of(op), op.outputs[0]
    lies = sharding.forms[out].get(axis, R)
    is_replicated = is_full(lies)
    tensors = inventory.graph.tensors
    for one in around(inventory, sharding, op, axis):
        at = moved(one.name, one.value, axis, one.size_bytes, one.size_bytes is not None, one.ways, one.among)
        forward += [at] * one.forward
        backward += [at] * one.backward
    if cut(sharding, op.name, axis) and in_units(sharding, op):
        steps, state = gathered_steps(op, tensors)
        forward += [moved("all_gather", out, axis, state, by_row=True)] * steps
        backward += [moved("reduce_scatter", out, axis, state, by_row=True)] * (steps if out in inventory.grads else 0)
    elif record.fuses_softmax and is_replicated:
        # Largest logit, sum and target's logit of every row.
        forward += [moved("all_reduce", out, axis, 4.0 * tensors[op.inputs[1]].size, by_row=True)] * 3
    elif record.over_samples and not (is_shard(lies) and lies.dim == 1) and len(op.args) > 5 and op.args[5] is True:
        # In training, over samples or places; ranks that have channels of their own have the statistics of those.
        statistics = moved("all_reduce", out, axis, 8.0 * tensors[op.inputs[0]].shape[1])
        forward.append(statistics)
        backward.append(statistics)
    elif record.extreme and is_replicated:
        largest = moved("all_reduce", out, axis)
        forward.append(largest)
        backward.append(largest)
    elif inventory.works[op.name].kind in ("linear", "convolution") and is_replicated:
        forward.append(moved("all_reduce", out, axis))  # summed before the bias is added
