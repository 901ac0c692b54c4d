"""What pricing asks of a graph and a sharding again and again, gathered once. In: an inventory, a sharding. Out: `Parts`.

Operators that cost the same are one entry (layers are alike), so a layout is priced in the time of one layer. Data is divided
later: entries say whether they follow the batch and whether replicas share them. Not modelled: values shared that do not follow the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cache, cached_property, partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from weft.cost.devices.convolutions import FULL, NEVER
from weft.cost.devices.kernels import NOTHING, Kernel, Moved
from weft.cost.devices.recurrent import extra_bytes, in_units, single_steps
from weft.cost.memory.memory import Inventory
from weft.cost.memory.places import Places, Stored
from weft.cost.memory.runs import NO_BYTES, Amount, Amounts
from weft.cost.operators.rounds import Span, around, kept, merged, on_the_way
from weft.cost.pieces import cut, pieces, pieces_moving, shared_by_data, tensor_axes, work_ways
from weft.model.dims.labels import expert_weights
from weft.model.graph import Graph, Operator, Variable
from weft.model.sharding.pointwise import is_product
from weft.model.sharding.sharding import Move, Sharding
from weft.model.stages.core_attention import core_numbers
from weft.model.stages.stages import Cut
from weft.model.work import num_steps
from weft.ops import record_of
from weft.ops.attention import is_causal
from weft.ops.recurrent import gathered_steps
from weft.plan.axis import DATA, EXPERT, SAMPLES, axis_of
from weft.plan.placement import Placement, R, Shard, dual, is_full, is_halo, is_shard
from weft.plan.transition import LOCAL, sent_part, transition

T = TypeVar("T", bound=Hashable)
Seen = set[tuple[str, str]]  # storages that are counted already: (root, which copy of it in another dtype)


@dataclass(frozen=True, slots=True)
class Local:
    """An operator as one tensor rank has it, with the samples of all data replicas."""

    kernel: Kernel
    batched: bool
    shared: bool  # by the data replicas


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective on `size_bytes` (float32, whole along `axis`, the graph's batch). `narrow`: in 16 bits under autocast."""

    name: str
    axis: str
    size_bytes: float
    batched: bool
    shared: bool
    narrow: bool
    wide: bool = False  # float32 whatever the precision
    among: Span = None  # ranks of the axis, where not all


@dataclass(frozen=True)
class Parts:
    """`compute[index[i]]` is operator i. `forward` and `backward`: (operator, entry of `collectives`)."""

    compute: tuple[Local, ...]
    index: NDArray[np.intp]
    collectives: tuple[Collective, ...]
    forward: tuple[NDArray[np.intp], NDArray[np.intp]]
    backward: tuple[NDArray[np.intp], NDArray[np.intp]]
    stored: tuple[tuple[Stored, ...], ...]
    reads: tuple[tuple[tuple[int, Stored], ...], ...]  # what each operator reads of others', with the number of the one that made it
    makes: tuple[tuple[Stored, ...], ...]
    extra_bytes: NDArray[np.float64]  # float32 tensors that are no value of the graph, kept by each operator
    working_bytes: NDArray[np.float64]  # in each operator's backward, of tensors that follow the batch if the operator does
    torch_bytes: NDArray[np.float64]  # the same where torch makes convolutions itself, as float32
    weight_bytes: NDArray[np.float64]  # the same of weights' gradients
    waiting: Amounts  # gradients that are there meanwhile: of what was made before the operator and is read behind it
    shared: NDArray[np.bool_]
    attention: NDArray[np.bool_]
    blocks: tuple[str, ...]  # the numbered block that each operator stands in, which recomputation repeats; "" for none
    attention_core: tuple[int, ...]  # the core of attention that each is of, which selective recomputation repeats; -1 for none

    @cached_property
    def batched(self) -> NDArray[np.bool_]:
        """By operator: whether its size follows the batch."""
        return np.array([local.batched for local in self.compute], dtype=bool)[self.index]

    @cached_property
    def extra(self) -> dict[int, Amount]:
        """What operators keep that is no value of the graph, of those that do."""
        amounts = {}
        for i in np.flatnonzero(self.extra_bytes).tolist():
            size = float(self.extra_bytes[i])
            amounts[i] = Amount(shared=size) if self.shared[i] else Amount(batched=size) if self.batched[i] else Amount(fixed=size)
        return amounts

    @cached_property
    def extra_half(self) -> dict[int, Amount]:
        """The same where every float tensor is 16-bit: besides losses' logarithms it is masks, a byte an element."""
        masks = {i for i in self.extra if self.compute[self.index[i]].kernel.kind == "elementwise"}
        return {i: Amount(*(0.25 * n for n in astuple(one))) if i in masks else one for i, one in self.extra.items()}

    @cached_property
    def torch_kernels(self) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_]]:
        """By operator: when torch makes a convolution itself (`TorchKernel`): its samples, whether alone, whether where it is thin."""
        owns = [local.kernel.torch_kernel for local in self.compute]
        samples, alone, thin = (np.array([getattr(one, what) for one in owns])[self.index] for what in ("samples", "alone", "thin"))
        return samples, alone, thin

    @cached_property
    def repeated(self) -> NDArray[np.bool_]:
        """By operator: whether it stands in a numbered block."""
        return np.array([bool(name) for name in self.blocks], dtype=bool)

    @cached_property
    def block_numbers(self) -> NDArray[np.intp]:
        """By operator: the number of its block."""
        numbers = {name: i for i, name in enumerate(dict.fromkeys(self.blocks))}
        return np.array([numbers[name] for name in self.blocks], dtype=np.intp)

    @cached_property
    def again(self) -> NDArray[np.bool_]:
        """By operator: whether full recomputation runs it twice: those of numbered blocks, and all where there are none."""
        return self.repeated if self.repeated.any() else np.ones(len(self.blocks), dtype=bool)


class _Unique:
    """Numbers things as they first come."""
    def __init__(self) -> None:
        self.numbers: dict[Hashable, int] = {}

    def __call__(self, thing: Hashable) -> int:
        return self.numbers.setdefault(thing, len(self.numbers))


def block(site: str) -> str:
    """The outermost numbered block that a site stands in, of which models repeat many; "" for none.

    >>> block("layers.3.mlp.up/linear"), block("head/linear")
    ('layers.3', '')
    """
    path = site.partition("/")[0].split(".")
    return ".".join(path[: next((i + 1 for i, part in enumerate(path) if part.isdigit()), 0)])


def _sent(move: Move, n: int) -> tuple[float, float]:
    """What the rank sends that sends most, forward and backward, over what it would if pieces were equal; of windows, over the value."""
    if is_halo(move.target) and is_shard(move.source):
        part = sent_part(move.source, move.target, n)
        return part or 1.0, part or 1.0
    return _longer(move.source, move.target, n), _longer(dual(move.target), dual(move.source), n)


def _longer(source: Placement, target: Placement, n: int) -> float:
    equal = [Shard(form.dim) if is_shard(form) else form for form in (source, target)]
    return sent_part(source, target, n) / sent_part(equal[0], equal[1], n) if transition(source, target).collective not in LOCAL else 1.0


def gather(inventory: Inventory, sharding: Sharding | None, narrow: frozenset[str]) -> Parts:
    """`narrow`: values that are 16-bit under autocast on processors."""
    graph = inventory.graph
    siblings = _siblings(inventory)
    compute, collectives = _Unique(), _Unique()
    index = np.zeros(len(graph.operators), dtype=np.intp)
    forward: list[tuple[int, int]] = []
    backward: list[tuple[int, int]] = []
    position = {op.name: i for i, op in enumerate(graph.operators)}
    ways_of = cache(partial(pieces, sharding))
    axes = (DATA, *tensor_axes(sharding))

    def moved(name: str, value: str, axis: str, size: float | None = None, by_row: bool = False, ways: float = 0, near: Span = None) -> int:
        shared = (shared_by_data(sharding, value) or by_row) and not (axis_of(axis).replicas and axis_of(axis).cuts <= {SAMPLES})
        moves = graph.tensors[value].size_bytes / (ways or ways_of(value, axis)) if size is None else size
        follows = by_row or (size is None and value in inventory.batched)
        return collectives(Collective(name, axis, moves, follows, shared, value in narrow, size is not None, near))

    if sharding is not None:
        for move in sharding.moves:
            if move.op not in position:
                continue
            at = position[move.op]
            ways: float = 0 if axis_of(move.axis).replicas else pieces_moving(sharding, graph.operators[at], move)
            there, back = _sent(move, sharding.sizes[move.axis])
            ways = ways or ways_of(move.value, move.axis)
            sides = ((move.forward, forward, there), (move.backward if move.value in inventory.grads else "", backward, back))
            for name, rows, more in sides:
                if name not in LOCAL:
                    rows.append((at, moved(name, move.value, move.axis, ways=ways / more)))
    dispatched: set[str] = set()
    by_expert = set(expert_weights(graph).values())
    stored, reads, makes, extra, working, owned, weights, shared = [], [], [], [], [], [], [], []
    makers = {value: i for i, op in enumerate(graph.operators) for value in op.outputs}
    last = {value: i for i, op in enumerate(graph.operators) for value in op.inputs if op.outputs[0] in inventory.grads}
    joins = {value for value in last if value in inventory.grads and value in makers}
    places = Places(inventory, sharding)
    blocks = tuple(block(op.site) for op in graph.operators)
    for i, op in enumerate(graph.operators):
        index[i] = compute(_local(inventory, sharding, op, siblings))
        for axis in axes:
            if cut(sharding, op.name, axis):
                _inside(inventory, sharding, op, i, axis, moved, forward, backward)
        value = _travels(inventory, op, by_expert)
        if value and value not in dispatched:
            dispatched.add(value)
            forward.append((i, moved("all_to_all", value, EXPERT)))
            backward.append((i, moved("all_to_all", value, EXPERT)))
        divide = work_ways(sharding, op)
        mine = inventory.kept[op.name]
        arriving = places.read(op)
        places.add(op, arriving)
        stored.append((*(places.kept(op, arriving, *one) for one in mine.storages), *places.padded(op), *kept(places, op)))
        makes.append(tuple(places.storages[v] for v in op.outputs))
        reads.append(tuple((makers[v], places.storages[v]) for v in dict.fromkeys(op.inputs) if v in makers))
        extra.append(extra_bytes(op, graph.tensors, sharding, inventory.works[op.name].extra_bytes, divide))
        is_cut = any(cut(sharding, op.name, axis) for axis in axes)
        beside = mine.spread_bytes if is_cut else mine.alone_bytes
        more = _beside_pieces(inventory, places, op, divide) if sharding is not None else 0.0
        # A gradient that comes to one that waits is added up into a third.
        read_by = ((at, v) for at, v in enumerate(op.inputs) if v in joins and last[v] > i)
        joined = (2 * places.storage_of(v, places.ways_read(op, at)).size_bytes for at, v in read_by)
        least = max(joined, default=0.0)
        working.append(max(least, (mine.working_bytes + beside) / divide + more))
        owned.append(max(least, (mine.torch_bytes + beside) / divide + more))
        weights.append(mine.weight_bytes / divide)
        shared.append(cut(sharding, op.name, DATA))
    return Parts(
        tuple(compute.numbers),  # type: ignore[arg-type]
        index,
        tuple(collectives.numbers),  # type: ignore[arg-type]
        _columns(forward),
        _columns(backward),
        tuple(stored),
        tuple(reads),
        tuple(makes),
        np.array(extra),
        np.array(working),
        np.array(owned),
        np.array(weights),
        _waiting(graph, inventory.grads, makers, [places.storage_of(v).amount for v in makers]),
        np.array(shared, dtype=bool),
        np.array([inventory.works[op.name].kind == "attention" for op in graph.operators]),
        blocks,
        core_numbers(graph, blocks),
    )


def _travels(inventory: Inventory, op: Operator, by_expert: Container[str]) -> str:
    """What of tokens goes to the ranks of their experts, or back, where these are spread; "" for nothing.

    Into the first product and out of the last it is the narrower of what that reads and writes; of ragged rows all that begin or end.
    """
    if ragged := record_of(op).ragged:
        return op.outputs[0] if ragged == "begins" else op.inputs[0] if ragged == "ends" else ""
    if op.name not in by_expert:
        return ""
    ends = [v for v in (*op.inputs, op.outputs[0]) if v in inventory.batched]
    return min(ends, key=lambda v: inventory.graph.tensors[v].size, default="")


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
    backward is still to come: of what goes round it. `sizes`: of what is `makers`."""
    last = {value: i for i, op in enumerate(graph.operators) for value in op.inputs}
    rows = [[0.0] * (len(graph.operators) + 1) for _ in range(3)]
    for (value, maker), size in zip(makers.items(), sizes, strict=True):
        if value in grads and last.get(value, 0) > maker + 1:
            for row, each in zip(rows, (size.shared, size.batched, size.fixed), strict=True):
                row[maker + 1] += each
                row[last[value]] -= each
    return Amounts(*(np.cumsum(row[:-1]) for row in rows))


def _columns(pairs: Sequence[tuple[int, int]]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    table = np.array(pairs, dtype=np.intp).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _siblings(inventory: Inventory) -> dict[str, float]:
    """Rows of all products of one input with weights, by operator: q, k and v run as one product."""
    groups: dict[str, list[tuple[str, float]]] = {}
    for op in inventory.graph.operators:
        if record_of(op).product == "linear":
            groups.setdefault(op.inputs[0], []).append((op.name, float(inventory.graph.tensors[op.inputs[1]].shape[0])))
    return {name: sum(rows for _, rows in group) for group in groups.values() for name, _ in group}


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
        _fixed(inventory, op, divide),
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
    inventory: Inventory, sharding: Sharding | None, op: Operator, i: int, axis: str, moved: Callable[..., int],
    forward: list[tuple[int, int]], backward: list[tuple[int, int]],
) -> None:  # fmt: skip
    """Collectives that a cut operator's own kernel makes, which no `Move` shows."""
    assert sharding is not None
    record, out = record_of(op), op.outputs[0]
    lies = sharding.forms[out].get(axis, R)
    is_replicated = is_full(lies)
    tensors = inventory.graph.tensors
    for one in around(inventory, sharding, op, axis):
        at = moved(one.name, one.value, axis, one.size_bytes, one.size_bytes is not None, one.ways, one.among)
        forward += [(i, at)] * one.forward
        backward += [(i, at)] * one.backward
    if cut(sharding, op.name, axis) and in_units(sharding, op):
        steps, state = gathered_steps(op, tensors)
        forward += [(i, moved("all_gather", out, axis, state, by_row=True))] * steps
        backward += [(i, moved("reduce_scatter", out, axis, state, by_row=True))] * (steps if out in inventory.grads else 0)
    elif record.fuses_softmax and is_replicated:
        # Largest logit, sum and target's logit of every row.
        forward += [(i, moved("all_reduce", out, axis, 4.0 * tensors[op.inputs[1]].size, by_row=True))] * 3
    elif record.over_samples and not (is_shard(lies) and lies.dim == 1) and len(op.args) > 5 and op.args[5] is True:
        # In training, over samples or places; ranks that have channels of their own have the statistics of those.
        statistics = moved("all_reduce", out, axis, 8.0 * tensors[op.inputs[0]].shape[1])
        forward.append((i, statistics))
        backward.append((i, statistics))
    elif record.extreme and is_replicated:
        largest = moved("all_reduce", out, axis)
        forward.append((i, largest))
        backward.append((i, largest))
    elif inventory.works[op.name].kind in ("linear", "convolution") and is_replicated:
        forward.append((i, moved("all_reduce", out, axis)))  # summed before the bias is added


def storages_bytes(items: Iterable[Stored], half: bool, seen: Seen) -> Amount:
    """Those of these storages that are not in `seen`, to which they are added. `half` as for `keeps`."""
    shared = batched = fixed = 0.0
    for item in items:
        key = (item.root, item.copy)
        if key in seen or (item.held and not item.copy):
            continue
        seen.add(key)
        size = item.size_bytes * (0.5 if item.is_float and half else 1.0)
        if not item.batched:
            fixed += size
        elif item.shared:
            shared += size
        else:
            batched += size
    return Amount(shared, batched, fixed)


def keeps(parts: Parts, operators: Iterable[int], half: bool = False, seen: Seen | None = None) -> list[Amount]:
    """By operator: what it keeps for backward and none before it does. `seen`: storages that others count, to which these are added.

    `half`: where every float tensor is 16-bit, as on GPUs; under autocast the inventory itself says what is.
    """
    seen, amounts, extras = Seen() if seen is None else seen, [], parts.extra_half if half else parts.extra
    for i in operators:
        saved = storages_bytes(parts.stored[i], half, seen) if parts.stored[i] else NO_BYTES
        amounts.append(saved + extras[i] if i in extras else saved)
    return amounts


def kept_bytes(parts: Parts, operators: Iterable[int], half: bool = False, seen: Seen | None = None) -> Amount:
    """What these operators keep together, as `keeps`."""
    return sum(keeps(parts, operators, half, seen), NO_BYTES)


@dataclass(frozen=True, slots=True)
class Held:
    """Parameters of a stage: their number on one tensor rank, those that train, and those to sum over each set of axes.

    `expert` of the number are of experts (all of which train), which replicas of these alone sum.

    `tied` of the trainable ones another stage has too.
    """

    number: float
    trainable: float
    sums: tuple[tuple[tuple[str, ...], float], ...]
    tied: float
    expert: float = 0.0

    @property
    def unsummed(self) -> float:
        """Trainable ones whose gradients the ranks that have them do not sum, since each has the same."""
        return self.trainable - sum(n for axes, n in self.sums if any(axis_of(a).follows for a in axes))


def held_parameters(
    parameters: Mapping[str, Variable],
    sharding: Sharding | None,
    used: Sequence[str],
    readers: Mapping[str, int],
    experts: frozenset[str] = frozenset(),
) -> Held:
    """`parameters`: the graph's by value. `used`: the values that the stage reads. `readers`: how many stages read each.
    `experts`: those that are cut by experts."""
    number = trainable = tied = expert = 0.0
    sums: dict[tuple[str, ...], float] = {}
    for value in used:
        variable = parameters.get(value)
        if variable is None:
            continue
        local = variable.tensor.size / pieces(sharding, value)
        number += local
        if not variable.trainable:
            continue
        trainable += local
        if readers[value] > 1:
            tied += local
        over = () if sharding is None else tuple(sharding.gradients.get(value, ()))
        if value in experts:
            expert += local
        elif DATA in over:
            over = (*over, EXPERT)
        if over:
            sums[over] = sums.get(over, 0.0) + local
    return Held(number, trainable, tuple(sums.items()), tied, expert)


def even_sites(cuts: Sequence[Cut], num_stages: int) -> tuple[str, ...]:
    """Where stages of equally many numbered blocks begin; () for one stage, and where blocks do not divide so or hand on unequally."""
    sites: dict[str, Cut] = {}
    for one in cuts:
        if name := block(one.site):
            sites.setdefault(name, one)
    if num_stages == 1 or len(sites) % num_stages or len({one.size_bytes for one in sites.values()}) > 1:
        return ()
    starts = [one.site for one in sites.values()]
    return tuple(starts[len(starts) * i // num_stages] for i in range(1, num_stages))
