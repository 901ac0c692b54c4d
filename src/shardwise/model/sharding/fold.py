"""Folding of repeated layers: a smaller graph without the middle copies of repeated layers, and for every operator and value of the full
graph its stand-in.

Layers are repeated where their operators are equal, read equally from their own layer and the previous one, and are read from nowhere else.
Of each run the first two (or three) and the last are retained; the last of the leading ones stands for those between. A sharding of the
small graph extends to the full one where that layer is sharded like the one before it and outputs the same placements. Not modeled: layers
that repeat with changed shapes, and those whose results are collected (losses of routers): they are not folded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from shardwise.model.dataflow import cached_on_graph
from shardwise.model.graph import Arg, Graph, Operator, Ref, Variable, rename_inputs
from shardwise.model.sharding.propagate import propagate as propagate_whole
from shardwise.model.sharding.sharding import Prices, Redistribution, Sharding, Shards
from shardwise.plan.ir.axis import axis_of
from shardwise.plan.ir.choice import AUTO
from shardwise.plan.ir.placement import is_shard

MIN_COPIES = 5  # copies of a layer worth folding
MAX_PERIOD = 2000  # operators of one layer
MAX_CANDIDATES = 12  # stretches of equal operators that are tried


@dataclass(frozen=True, slots=True)
class LayerRun:
    """`count` equal layers of `period` operators from operator `start` on.

    `successors[k][v]`: what layer k + 1 reads where layer k reads v, of variables and of inputs of the first layer.
    """

    start: int
    period: int
    count: int
    successors: tuple[Mapping[str, str], ...]
    num_leading: int = 2  # leading layers that are retained

    @property
    def end(self) -> int:
        return self.start + self.period * self.count

    @property
    def num_saved_operators(self) -> int:
        """Size by which runs are compared, independent of the number of leading layers."""
        return _num_saved_operators(self.count, self.period)

    @property
    def omitted(self) -> range:
        """Operators between the leading layers and the last."""
        return range(self.start + self.num_leading * self.period, self.start + (self.count - 1) * self.period)


@dataclass(frozen=True)
class LayerFold:
    """`small` stands for `full`. `stand_in_index[i]`: operator of `small` that stands for operator i of `full`; `stand_in_value`: likewise
    of values."""

    full: Graph
    small: Graph
    runs: tuple[LayerRun, ...]
    stand_in_index: tuple[int, ...]
    stand_in_value: Mapping[str, str]

    @cached_property
    def with_longer_lead(self) -> LayerFold | None:
        """The same with one leading layer more, for graphs whose first layers are treated differently."""
        return _build_fold(self.full, tuple(replace(run, num_leading=run.num_leading + 1) for run in self.runs))

    @cached_property
    def stand_in_operator(self) -> dict[str, str]:
        """Name of an operator of the full graph -> name of its stand-in."""
        return {op.name: self.small.operators[i].name for op, i in zip(self.full.operators, self.stand_in_index, strict=True)}

    def expand(self, sharding: Sharding) -> Sharding | None:
        """Return the full graph's sharding from the small graph's; None where layers do not join as the small graph's do."""
        moves: dict[str, list[Redistribution]] = {}
        for move in sharding.redistributions:
            moves.setdefault(move.op, []).append(move)
        if not all(self._layers_join(run, sharding, moves) for run in self.runs):
            return None
        full_value_of = {v: k for k, v in self.stand_in_value.items() if k in self.small.tensors}
        expanded: list[Redistribution] = []
        for op in self.full.operators:
            at = self.stand_in_operator[op.name]
            full_inputs = dict(zip(self._small_operator[at].inputs, op.inputs, strict=True))
            for move in moves.get(at, ()):
                expanded.append(replace(move, op=op.name, value=full_inputs.get(move.value, full_value_of.get(move.value, move.value))))
        forms = {value: sharding.placements[self.stand_in_value[value]] for value in self.full.tensors}
        state = (*self.full.parameters, *self.full.buffers)
        gradients = {
            value: sharding.gradient_axes[small] for value, small in self.stand_in_value.items() if small in sharding.gradient_axes
        }
        replicated = set(sharding.replicated_sites)
        return Sharding(
            sharding.sizes,
            {op.name: sharding.labels[self.stand_in_operator[op.name]] for op in self.full.operators},
            forms,
            {op.name: sharding.input_placements[self.stand_in_operator[op.name]] for op in self.full.operators},
            gradients,
            tuple(sorted(expanded, key=lambda move: list(sharding.sizes).index(move.axis))),
            tuple(op.site for op in self.full.operators if self._small_operator[self.stand_in_operator[op.name]].site in replicated),
            {a: tuple((v.name, form.dim) for v in state if is_shard(form := forms[v.value][a])) for a in sharding.shards},
            attention=sharding.attention,
        )

    @cached_property
    def _small_operator(self) -> dict[str, Operator]:
        return {op.name: op for op in self.small.operators}

    def _layers_join(self, run: LayerRun, sharding: Sharding, moves: Mapping[str, list[Redistribution]]) -> bool:
        """Return whether a copy of the stand-in layer may follow it as it follows the layer before it."""
        at = run.start + (run.num_leading - 2) * run.period
        first = self.full.operators[at : at + run.period]
        second = self.full.operators[at + run.period : at + 2 * run.period]
        layer_values = {value for op in (*first, *second) for value in op.outputs} | set(run.successors[run.num_leading - 2].values())
        for a, b in zip(first, second, strict=True):
            if sharding.labels[a.name] != sharding.labels[b.name] or sharding.input_placements[a.name] != sharding.input_placements[b.name]:
                return False
            if any(sharding.placements[u] != sharding.placements[v] for u, v in zip(a.outputs, b.outputs, strict=True)):
                return False
            if any(move.value not in layer_values for move in moves.get(b.name, ())):
                return False  # a value of all layers would be redistributed once, not in each
        is_state = self.full.is_state
        return all(
            sharding.placements[u] == sharding.placements[v] for u, v in run.successors[run.num_leading - 2].items() if u in is_state
        )


@cached_on_graph
def fold_layers(graph: Graph) -> LayerFold | None:
    """Return the graph with its repeated layers once; None where nothing repeats often enough.

    >>> from shardwise.model.graph import Graph
    >>> fold_layers(Graph((), (), (), (), (), {}, "loss", 1)) is None
    True
    """
    runs = _find_runs(graph)
    return _build_fold(graph, tuple(runs)) if runs else None


def _build_fold(graph: Graph, runs: tuple[LayerRun, ...]) -> LayerFold | None:
    operators = graph.operators
    index: list[int] = []
    retained: list[Operator] = []
    value: dict[str, str] = {v: v for v in graph.tensors}
    rename: dict[str, str] = {}  # what the last layer reads of its predecessor -> the same of the second layer
    run_of_omitted = {i: run for run in runs for i in run.omitted}
    new_index: dict[int, int] = {}
    for i, op in enumerate(operators):
        run = run_of_omitted.get(i)
        if run is None:
            new_index[i] = len(retained)
            index.append(len(retained))
            reads_renamed = not rename.keys().isdisjoint(op.inputs)
            retained.append(rename_inputs(op, lambda value: rename.get(value, value)) if reads_renamed else op)
            continue
        second = run.start + (run.num_leading - 1) * run.period + (i - run.start) % run.period
        index.append(new_index[second])
        last_left_out = i >= run.omitted.stop - run.period
        for u, v in zip(op.outputs, operators[second].outputs, strict=True):
            value[u] = v
            if last_left_out:
                rename[u] = v
    for run in runs:
        for pairs in run.successors[run.num_leading - 1 : -1]:  # variables of the layers left out
            value.update({v: value[u] for u, v in pairs.items()})
    used = {u for op in retained for u in op.inputs} | {graph.loss, *graph.outputs}
    read = {u for op in operators for u in op.inputs}

    def variables_of(group: tuple[Variable, ...]) -> tuple[Variable, ...]:
        return tuple(v for v in group if v.value in used or v.value not in read)

    small = graph.replace_variables(variables_of, operators=tuple(retained), tensors={})
    names = {v.value for v in small.variables} | {u for op in retained for u in op.outputs}
    small = replace(small, tensors={u: t for u, t in graph.tensors.items() if u in names})
    if any(value[u] not in small.tensors for u in graph.tensors):
        return None
    return LayerFold(graph, small, runs, tuple(index), value)


def propagate_with_folding(
    graph: Graph,
    sizes: Mapping[str, int],
    shards: Mapping[str, Shards] | None = None,
    *,
    prices: Prices | Mapping[str, Prices] | None = None,
    sequence: bool = False,
    samples: bool = False,
    attention: str = AUTO,
) -> Sharding:
    """Return the sharding as `propagate_with_folding.propagate` does, on folded layers where that extends to the full graph."""
    unfolded = partial(propagate_whole, prices=prices, sequence=sequence, samples=samples, attention=attention)
    owns = any(axis_of(axis).owns_operators for axis, n in sizes.items() if n > 1)  # branches are balanced over all layers
    folded = None if owns else fold_layers(graph)
    while folded is not None:
        try:
            shards_of_small = _small_shards(graph, folded, shards)
        except KeyError:
            break
        expanded = folded.expand(unfolded(folded.small, sizes, shards_of_small))
        if expanded is not None:
            return expanded
        folded = folded.with_longer_lead if folded is fold_layers(graph) else None
    return unfolded(graph, sizes, shards)


def _small_shards(graph: Graph, folded: LayerFold, shards: Mapping[str, Shards] | None) -> dict[str, Shards] | None:
    """Return the shards of the small graph. Raises `KeyError` for an unknown name, or equal layers that are sharded differently."""
    if shards is None:
        return None
    value_of = {v.name: v.value for v in (*graph.parameters, *graph.buffers)}
    names = {v.name for v in (*folded.small.parameters, *folded.small.buffers)}
    by_axis: dict[str, Shards] = {}
    for axis, axis_shards in shards.items():
        dims = {value_of[name]: dim for name, dim in axis_shards}
        if any(dims.get(value) != dims.get(folded.stand_in_value[value]) for value in value_of.values()):
            raise KeyError(axis)
        by_axis[axis] = tuple((name, dim) for name, dim in axis_shards if name in names)
    return by_axis


def _find_runs(graph: Graph) -> list[LayerRun]:
    """Return runs of equal layers, those that save most first, without overlap, in order."""
    classes = np.asarray(operator_classes(graph))
    runs: list[LayerRun] = []
    segments = [(0, len(classes))]
    while segments:
        low, high = segments.pop()
        run = _best_run(graph, classes, low, high)
        if run is not None:
            runs.append(run)
            segments += [(low, run.start), (run.end, high)]
    return sorted(runs, key=lambda run: run.start)


def _num_saved_operators(count: int, period: int) -> int:
    """Number of operators between the third layer and the last."""
    return (count - 3) * period


def _best_run(graph: Graph, classes: NDArray[np.int64], low: int, high: int) -> LayerRun | None:
    """Return the run with most operators between the third layer and the last, of the most promising periods."""
    part = classes[low:high]
    tried: list[tuple[int, int, int, int]] = []  # (upper bound of omitted operators, -period, start, stop)
    for period in range(1, min(MAX_PERIOD, len(part) // MIN_COPIES) + 1):
        for start, stop in _true_stretches(part[:-period] == part[period:]):
            count = (stop - start) // period + 1
            if count >= MIN_COPIES:
                tried.append((_num_saved_operators(count, period), -period, low + start, low + stop))
    best: LayerRun | None = None
    for most, negative, start, stop in sorted(tried, reverse=True)[:MAX_CANDIDATES]:
        if best is not None and most <= best.num_saved_operators:
            break
        period = -negative
        # Inputs of the first layer come from elsewhere than those of the others.
        for first, last in _true_stretches(np.asarray([_reads_alike(graph, i, period) for i in range(start, stop)])):
            begin, end = max(start, start + first - period), start + last + period
            if _num_saved_operators((end - begin) // period, period) <= (best.num_saved_operators if best is not None else 0):
                continue
            run = _best_phase(graph, begin, period, end - begin)
            if run is not None and (best is None or run.num_saved_operators > best.num_saved_operators):
                best = run
    return best


def _true_stretches(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return (first, one past the last) of every stretch of true entries."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _reads_alike(graph: Graph, i: int, period: int) -> bool:
    """Return whether operator i + period reads what operator i does: the same, a period later, or its own parameter."""
    place, is_state = graph.producer_index, graph.is_state
    for u, v in zip(graph.operators[i].inputs, graph.operators[i + period].inputs, strict=True):
        at = place.get(u)
        if u != v and not (is_state[u] if at is None else place.get(v) == at + period):
            return False
    return True


def _best_phase(graph: Graph, start: int, period: int, length: int) -> LayerRun | None:
    """Return the longest run of equal consecutive layers in [start, start + length), over all phases."""
    best: LayerRun | None = None
    for phase in range(min(period, length - MIN_COPIES * period + 1)):
        run = _matching_layers(graph, start + phase, period, (length - phase) // period)
        if run is not None and (best is None or run.count > best.count):
            best = run
            if run.count >= length // period - 1:
                break
    return best


def _matching_layers(graph: Graph, start: int, period: int, count: int) -> LayerRun | None:
    """Return the layers of the run that read equally, with their successors; None where fewer than `MIN_COPIES` do."""
    operators = graph.operators
    place = graph.producer_index
    is_state = graph.is_state
    follows: list[dict[str, str]] = []
    good: list[bool] = []
    for k in range(count - 1):
        pairs: dict[str, str] = {}
        is_equal = True
        low = start + k * period
        for i in range(low, low + period):
            a, b = operators[i], operators[i + period]
            for u, v in zip(a.inputs, b.inputs, strict=True):
                at = place.get(u)
                if at is None:
                    is_equal = u == v or (is_state[u] and pairs.setdefault(u, v) == v)
                elif at >= low - period and (k or at >= low):
                    is_equal = place.get(v) == at + period and _output_index(operators[at], u) == _output_index(operators[at + period], v)
                else:
                    # Computed before the run: the same for all layers, or an input of the first.
                    is_equal = u == v or (k == 0 and place.get(v, -1) in range(low, low + period) and pairs.setdefault(u, v) == v)
                if not is_equal:
                    break
            if not is_equal:
                break
        good.append(is_equal and len(set(pairs.values())) == len(pairs))
        follows.append(pairs)
    # The longest stretch of consecutive equal layers.
    best, begin = (0, 0), 0
    for k in range(count):
        if k == count - 1 or not good[k]:
            best = max(best, (k + 1 - begin, -begin))
            begin = k + 1
    layers, first = best[0], -best[1]
    if layers < MIN_COPIES:
        return None
    run = LayerRun(start + first * period, period, layers, tuple(follows[first : first + layers - 1]))
    readers, final = graph.last_reader_index, {graph.loss, *graph.outputs}
    for i in run.omitted:
        if any(value in final or readers.get(value, -1) >= run.end for value in operators[i].outputs):
            return None
    return run


def _output_index(op: Operator, value: str) -> int:
    return op.outputs.index(value)


def operator_classes(graph: Graph) -> list[int]:
    """Return a number for every operator, equal for those that differ only in the values they read."""
    kind_of = {v.value: kind for kind in ("parameters", "buffers") for v in getattr(graph, kind)}
    numbers: dict[object, int] = {}

    def word(arg: Arg) -> object:
        if isinstance(arg, Ref):
            return (kind_of.get(arg.value, ""), graph.tensors[arg.value])
        if isinstance(arg, tuple | list):
            return tuple(word(item) for item in arg)
        return (type(arg).__name__, arg)

    classes = []
    for op in graph.operators:
        outputs = tuple(graph.tensors[value] for value in op.outputs)
        key = (op.target, word(op.args), word(op.kwargs), outputs, op.returns_sequence, op.autocast)
        classes.append(numbers.setdefault(key, len(numbers)))
    return classes
