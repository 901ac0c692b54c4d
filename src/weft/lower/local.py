"""One rank's part of a stage as a callable: local shapes, redistributions where placements differ, kernels where a sharded label needs one.

The result is a `LocalStage`, a `torch.fx.GraphModule` with one positional argument for each variable and each received value.
"""

from __future__ import annotations

import operator as python_operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from weft.errors import LayoutError
from weft.lower.arrival import arrived
from weft.lower.call import Call
from weft.lower.lowering import Lowering, Nodes, Variant, bind
from weft.lower.redistribute import counted
from weft.lower.regions import Way, exchanged, runs
from weft.lower.special import called
from weft.model.gradients import needs_gradient
from weft.model.graph import Operator, statistics, writes_buffer, written_buffers
from weft.model.sharding.sharding import Owners, move_collectives
from weft.model.stages.stages import Stage
from weft.plan.axis import axis_of
from weft.plan.placement import D, P, Placement, R, is_owned, is_shard
from weft.plan.transition import allowed

__all__ = ["LocalStage", "Lowering", "layer_of", "lower", "snapshot"]

_LAYER = re.compile(r"^(?:[^/]*?\.)?\d+(?=\.|/|$)")


@dataclass(frozen=True)
class LocalStage:
    """`module(*variables, *received)` -> sent values, stage by stage in order, then the stage's results.

    `placements[value]`: of every variable, received, sent or resulting value, by axis.
    """

    module: torch.nn.Module
    variables: tuple[str, ...]
    received: tuple[str, ...]
    sent: tuple[str, ...]
    results: tuple[str, ...]
    forms: Mapping[str, Mapping[str, Placement]]


def lower(stage: Stage, lowering: Lowering) -> LocalStage:
    """Lower one stage. Raises LayoutError where two placements cannot be redistributed."""
    builder = _Builder(stage, lowering)
    return builder.build()


class _Builder:
    def __init__(self, stage: Stage, lowering: Lowering) -> None:
        self.stage, self.low = stage, lowering
        self.nodes = Nodes()
        self.env: dict[str, dict[Variant, fx.Node]] = {}
        self.placed = {v.value: v for v in (*lowering.graph.parameters, *lowering.graph.buffers)}
        self.tensors = lowering.graph.tensors
        self.written = written_buffers(lowering.graph)
        self.arrived: set[str] = set()
        self.learning = needs_gradient(lowering.graph) if lowering.sharding.regions else set[str]()

    def build(self) -> LocalStage:
        low, stage = self.low, self.stage
        forms: dict[str, Mapping[str, Placement]] = {}
        variables = tuple(value for value in stage.variables if not self._elsewhere(value))
        for value in variables:
            self.env[value] = {low.variant(low.sharding.forms[value]): self.nodes.graph.placeholder(_identifier(value))}
            forms[value] = low.sharding.forms[value]
        for value in variables:
            if low.shares.get(value, 1.0) != 1.0:
                ((variant, node),) = self.env[value].items()
                self.env[value] = {variant: self.nodes.add(bind(counted, share=low.shares[value]), (node,))}
        received = tuple(dict.fromkeys(v for _, values in stage.receives for v in values))
        for value in received:
            self.env[value] = {low.arriving(value): self.nodes.graph.placeholder(_identifier(value))}
            forms[value] = dict(zip(low.axes, low.arriving(value), strict=True))
        for region, operators in runs(stage.operators, low.sharding.regions):
            if region is not None:
                self._region(region, operators)
                continue
            for op in operators:
                self._stand(layer_of(op.site))
                self._operator(op)
        sent = tuple(dict.fromkeys(v for _, values in stage.sends for v in values))
        outputs = []
        for value in sent:
            outputs.append(self.get(value, low.crossing(value)))
            forms[value] = dict(zip(low.axes, low.crossing(value), strict=True))
        for value in stage.results:
            # A loss remains a partial sum: its gradient is 1 on every rank, and the sum is needed for display only.
            wanted = low.handed_out(value) if low.graph.outputs else low.lies(value)
            outputs.append(self.get(value, wanted))
            forms[value] = dict(zip(low.axes, wanted, strict=True))
        self.nodes.graph.output(tuple(outputs))
        self.nodes.graph.lint()
        module = fx.GraphModule(torch.nn.Module(), self.nodes.graph, class_name=f"Stage{stage.index}")
        return LocalStage(module, variables, received, sent, stage.results, forms)

    def _stand(self, layer: str) -> None:
        """Set the layer of the operators that follow."""
        if layer != self.nodes.layer or not self.nodes.part[0]:
            self.nodes.layer, self.nodes.part = layer, (self.nodes.part[0] + 1, bool(layer))

    def _elsewhere(self, value: str) -> bool:
        """Return whether another rank owns a variable."""
        return any(is_owned(form) and form.rank != self.low.at[axis] for axis, form in self.low.sharding.forms[value].items())

    def _region(self, region: Owners, operators: Sequence[Operator]) -> None:
        """Lower parallel branches: send inputs to the owners, run this rank's branches, return outputs to all."""
        low, own_rank = self.low, self.low.at[region.axis]
        if len(operators) != len(region.ranks):
            raise LayoutError(
                f"a pipeline stage begins between parallel branches that {region.axis}={low.sharding.sizes[region.axis]} gives to ranks, "
                f"among {operators[0].site} to {operators[-1].site}; let it begin before or behind them"
            )
        layers = {layer_of(op.site) for op in operators}
        outer_layer = layers.pop() if len(layers) == 1 else ""
        self._stand(outer_layer)
        self.nodes.in_region = True
        ghosts = self._enter(region, operators)
        for op in operators:
            self._stand(layer_of(op.site))
            if region.ranks[op.name] == own_rank:
                self._operator(op)
        self._stand(outer_layer)
        self._leave(region, operators, ghosts)
        self.nodes.in_region = False

    def _enter(self, region: Owners, operators: Sequence[Operator]) -> list[fx.Node]:
        """Send sharded inputs of branches to their owners; return placeholders for values that others own."""
        low, i = self.low, self.low.axes.index(region.axis)
        outputs = {value for op in operators for value in op.outputs}
        moves: dict[tuple[str, Placement], tuple[Variant, Way]] = {}
        for op in operators:
            for value, row in zip(op.inputs, low.sharding.needs[op.name], strict=True):
                needed, variants = row[region.axis], self.env.get(value, {})
                assert is_owned(needed)
                source = next((variant for variant in variants if is_shard(variant[i])), None)
                if value in outputs or source is None or any(variant[i] is D for variant in variants):
                    continue
                moves[value, needed] = (source, self._way(value, source, i, needed.rank))
        if not moves:
            return []
        group, transfers = low.groups[region.axis], tuple(transfer for _, transfer in moves.values())
        sources = [self.env[value][source] for (value, _), (source, _) in moves.items()]
        node = self.nodes.add(bind(exchanged, True, transfers, group), tuple(sources))
        ghosts = []
        for k, ((value, needed), (source, transfer)) in enumerate(moves.items()):
            item = self.nodes.add(python_operator.getitem, (node, k))
            if transfer.owner == group.index:
                self.env[value][(*source[:i], needed, *source[i + 1 :])] = item
            else:
                ghosts.append(item)
        return ghosts

    def _leave(self, region: Owners, operators: Sequence[Operator], ghosts: Sequence[fx.Node]) -> None:
        """Bring values read after branches from their owners into shards; their other values are no longer available."""
        low, i = self.low, self.low.axes.index(region.axis)
        nodes: list[fx.Node | None] = []
        exits: list[tuple[str, Variant, Way]] = []
        for op in operators:
            for value in op.outputs:
                if value in region.leaves:
                    source = low.lies(value)
                    exits.append((value, source, self._way(value, source, i, region.ranks[op.name])))
                    form = low.variant(low.sharding.forms[value])
                    nodes.append(self.env[value][form] if value in self.env else None)
        for value in set(self.env) - set(self.placed):
            self.env[value] = {variant: node for variant, node in self.env[value].items() if not is_owned(variant[i])}
        node = self.nodes.add(bind(exchanged, False, tuple(transfer for *_, transfer in exits), low.groups[region.axis]), (*nodes, *ghosts))
        for k, (value, source, _) in enumerate(exits):
            self.env[value] = {source: self.nodes.add(python_operator.getitem, (node, k))}

    def _way(self, value: str, source: Variant, i: int, owner: int) -> Way:
        """Return the transfer of a value in placements `source`, sharded along axis `i`, from or to its owner there."""
        low, tensor, form = self.low, self.tensors[value], source[i]
        assert is_shard(form)
        other_placements = {axis: placement for k, (axis, placement) in enumerate(zip(low.axes, source, strict=True)) if k != i}
        shape = low.sharding.shape(value, tensor.shape, other_placements, low.at)
        return Way(shape, form, owner, low.dtype(value), value in self.learning)

    def get(self, value: str, want: tuple[Placement | None, ...]) -> fx.Node:
        """Return the node of `value` in placements `want` (None: any), redistributing it where no earlier redistribution did."""
        available = self.env[value]
        for variant, node in available.items():
            if all(w is None or w == v for w, v in zip(want, variant, strict=True)):
                return node
        source = min(available, key=lambda variant: self._moves(variant, want))
        if self._crossed(source, want):
            raise LayoutError(f"{value} is read in shards of heads that two axes shard in another order; use attention=gather")
        node, at = available[source], list(source)
        order = sorted(range(len(at)), key=lambda i: self._turn(i, at, want))
        for i in order:
            target = want[i]
            if target is None or target == at[i]:
                continue
            axis = self.low.axes[i]
            node = self.nodes.move(node, self.low.groups[axis], at[i], target)
            at[i] = target
            available[tuple(at)] = node
        return node

    def _turn(self, i: int, at: Sequence[Placement], want: Sequence[Placement | None]) -> tuple[int, int]:
        """Return the sort key of an axis for redistribution. Partial sums are reduced first, so that later redistributions move full
        tensors; nested shards are gathered from within. Heads sharded over two axes are tensor ranks' shards, sharded again over a context
        axis: these are made last and gathered first."""
        if axis_of(self.low.axes[i]).cuts_sequences:
            for placement, rank_in_order in ((want[i], 3), (at[i], -1)):
                if is_shard(placement) and at[i] != want[i] and any(placement in (at[j], want[j]) for j in range(len(at)) if j != i):
                    return rank_in_order, i
        is_nested = is_shard(at[i]) and at.count(at[i]) > 1
        return (0 if at[i] is P else 1 if is_nested else 2), (-i if is_nested else i)

    def _entered(self, value: str, x: fx.Node) -> fx.Node:
        """Return a variable as an operator reads it whose gradient nobody reduces as this graph leaves it."""
        reduction = self.low.entering.get(value)
        for axis in reduction.summed if reduction else ():
            x = self.nodes.move(x, self.low.groups[axis], R, D)
        return x if reduction is None or reduction.share == 1.0 else self.nodes.add(bind(counted, share=reduction.share), (x,))

    def _moves(self, variant: Variant, want: tuple[Placement | None, ...]) -> tuple[int, int]:
        """Return (collectives, redistributions) from one variant to another: the fewest win."""
        num_collectives = num_moves = 0
        if self._crossed(variant, want):
            return 1000, 0
        for a, b in zip(variant, want, strict=True):
            if b is None or a == b:
                continue
            if not allowed(a, b):
                return 1000, 0
            forward, backward = move_collectives(a, b)
            num_collectives += (forward not in ("", "slice")) + (backward not in ("", "slice", "pad"))
            num_moves += 1
        return num_collectives, num_moves

    def _crossed(self, at: Variant, want: tuple[Placement | None, ...]) -> bool:
        """Return whether head shards of a context axis would be sharded, or gathered, along another axis."""
        pairs = [*zip(at, want, strict=True)]
        shards = [a for axis, (a, b) in zip(self.low.axes, pairs, strict=True) if axis_of(axis).cuts_sequences and is_shard(a) and a == b]
        return any(a != b and b is not None and shard in (a, b) for shard in shards for a, b in pairs)

    def _operator(self, op: Operator) -> None:
        low = self.low
        rows = low.sharding.needs[op.name]
        for value in low.awaited.intersection(op.inputs) - self.arrived:
            self.arrived.add(value)
            self.env[value] = {variant: self.nodes.add(bind(arrived, low.arrival), (node,)) for variant, node in self.env[value].items()}
        inputs = [self.get(value, tuple(row[axis] for axis in low.axes)) for value, row in zip(op.inputs, rows, strict=True)]
        if not low.entering.keys().isdisjoint(op.inputs):  # per operator, so that a gathered weight belongs to its layer
            inputs = [self._entered(value, x) for value, x in zip(op.inputs, inputs, strict=True)]
        if not writes_buffer(op, self.placed):
            # Backward may need the value read, whatever later microbatches write; running statistics are written where they are read.
            written = self.written - statistics(op)
            inputs = [self.nodes.add(snapshot, (x,)) if v in written else x for v, x in zip(op.inputs, inputs, strict=True)]
        node = called(Call.of(low, self.nodes, op, inputs), writes_buffer(op, self.placed))
        if writes_buffer(op, self.placed):  # other placements hold its old value
            stored = low.variant(low.sharding.forms[op.inputs[0]])
            self.env[op.inputs[0]] = {stored: self.env[op.inputs[0]][stored]}
        variants = [low.variant(low.sharding.forms[value]) for value in op.outputs]
        if op.multiple:
            for i, (value, variant) in enumerate(zip(op.outputs, variants, strict=True)):
                self.env[value] = {variant: self.nodes.add(python_operator.getitem, (node, i))}
        else:
            self.env[op.outputs[0]] = {variants[0]: node}


def layer_of(site: str) -> str:
    """Return the repeated layer of a site: its path up to the first number; empty outside of layers.

    >>> layer_of("encoder.layers.3.mlp/linear"), layer_of("head/linear")
    ('encoder.layers.3', '')
    """
    match = _LAYER.match(site)
    return match.group(0) if match else ""


def _identifier(value: str) -> str:
    return value.replace(".", "_")


def snapshot(buffer: Tensor) -> Tensor:
    """Return a copy of a buffer or parameter, for an operator that reads it."""
    return buffer.clone()
