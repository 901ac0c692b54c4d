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

from shardwise.errors import LayoutError
from shardwise.lower.call import OperatorCall
from shardwise.lower.chunked_loss import chunk_losses
from shardwise.lower.lowering import Lowering, Nodes, bind_named, wait_for_constant
from shardwise.lower.operator_lowering import lower_operator
from shardwise.lower.redistribute import scale_gradient
from shardwise.lower.regions import BranchTransfer, exchange_region_values, group_by_region
from shardwise.model.chunked_loss import find_chunkable_losses
from shardwise.model.gradients import values_needing_gradient
from shardwise.model.graph import Operator, running_statistics_of, writes_buffer, written_buffers
from shardwise.model.sharding.reads import Variant, WantedVariant, choose_source, crosses_head_shards, find_available, redistribution_steps
from shardwise.model.sharding.sharding import BranchOwners
from shardwise.model.stages.stages import Stage
from shardwise.plan.ir.placement import D, Placement, R, has_single_owner, is_shard

__all__ = ["LocalStage", "Lowering", "layer_of", "lower", "snapshot_buffer"]

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
    placements: Mapping[str, Mapping[str, Placement]]


def lower(stage: Stage, lowering: Lowering) -> LocalStage:
    """Lower one stage. Raises LayoutError where two placements cannot be redistributed."""
    builder = _StageLowering(stage, lowering)
    return builder.build()


class _StageLowering:
    def __init__(self, stage: Stage, lowering: Lowering) -> None:
        self.stage, self.lowering = stage, lowering
        self.nodes = Nodes()
        self.nodes_of: dict[str, dict[Variant, fx.Node]] = {}
        self.state = {v.value: v for v in (*lowering.graph.parameters, *lowering.graph.buffers)}
        self.tensors = lowering.graph.tensors
        self.written = written_buffers(lowering.graph)
        self.awaited_done: set[str] = set()
        self.needs_gradient = values_needing_gradient(lowering.graph) if lowering.sharding.regions else set[str]()

    def build(self) -> LocalStage:
        low, stage = self.lowering, self.stage
        forms: dict[str, Mapping[str, Placement]] = {}
        variables = tuple(value for value in stage.variables if not self._is_off_rank(value))
        for value in variables:
            self.nodes_of[value] = {low.variant(low.sharding.placements[value]): self.nodes.graph.placeholder(_as_identifier(value))}
            forms[value] = low.sharding.placements[value]
        for value in variables:
            if low.gradient_shares.get(value, 1.0) != 1.0:
                ((variant, node),) = self.nodes_of[value].items()
                self.nodes_of[value] = {variant: self.nodes.add(bind_named(scale_gradient, share=low.gradient_shares[value]), (node,))}
        received = tuple(dict.fromkeys(v for _, values in stage.receives for v in values))
        for value in received:
            self.nodes_of[value] = {low.received_variant(value): self.nodes.graph.placeholder(_as_identifier(value))}
            forms[value] = dict(zip(low.axes, low.received_variant(value), strict=True))
        for region, operators in group_by_region(stage.operators, low.sharding.regions):
            if region is not None:
                self._lower_region(region, operators)
                continue
            for op in operators:
                self._set_layer(layer_of(op.site))
                self._lower_operator(op)
        sent = tuple(dict.fromkeys(v for _, values in stage.sends for v in values))
        outputs = []
        for value in sent:
            outputs.append(self.node_in(value, low.sent_variant(value)))
            forms[value] = dict(zip(low.axes, low.sent_variant(value), strict=True))
        for value in stage.results:
            # A loss remains a partial sum: its gradient is 1 on every rank, and the sum is needed for display only.
            wanted = low.output_variant(value) if low.graph.outputs else low.read_variant(value)
            outputs.append(self.node_in(value, wanted))
            forms[value] = dict(zip(low.axes, wanted, strict=True))
        self.nodes.graph.output(tuple(outputs))
        for value, variants in self.nodes_of.items():
            for variant, node in variants.items():
                node.meta["value"] = (value, variant)
        if low.loss_chunks > 1:
            chunk_losses(self.nodes.graph, find_chunkable_losses(low.graph), stage.operators, low.loss_chunks)
        self.nodes.graph.lint()
        module = fx.GraphModule(torch.nn.Module(), self.nodes.graph, class_name=f"Stage{stage.index}")
        return LocalStage(module, variables, received, sent, stage.results, forms)

    def _set_layer(self, layer: str) -> None:
        """Set the layer of the operators that follow."""
        if layer != self.nodes.layer or not self.nodes.layer_run[0]:
            self.nodes.layer, self.nodes.layer_run = layer, (self.nodes.layer_run[0] + 1, bool(layer))

    def _is_off_rank(self, value: str) -> bool:
        """Return whether another rank owns a variable."""
        return any(
            has_single_owner(form) and form.rank != self.lowering.coordinates[axis]
            for axis, form in self.lowering.sharding.placements[value].items()
        )

    def _lower_region(self, region: BranchOwners, operators: Sequence[Operator]) -> None:
        """Lower parallel branches: send inputs to the owners, run this rank's branches, return outputs to all."""
        low, own_rank = self.lowering, self.lowering.coordinates[region.axis]
        if len(operators) != len(region.rank_of):
            raise LayoutError(
                f"a pipeline stage begins between parallel branches that {region.axis}={low.sharding.sizes[region.axis]} gives to ranks, "
                f"among {operators[0].site} to {operators[-1].site}; let it begin before or behind them"
            )
        layers = {layer_of(op.site) for op in operators}
        outer_layer = layers.pop() if len(layers) == 1 else ""
        self._set_layer(outer_layer)
        self.nodes.in_region = True
        ghosts = self._enter_region(region, operators)
        for op in operators:
            self._set_layer(layer_of(op.site))
            if region.rank_of[op.name] == own_rank:
                self._lower_operator(op)
        self._set_layer(outer_layer)
        self._leave_region(region, operators, ghosts)
        self.nodes.in_region = False

    def _enter_region(self, region: BranchOwners, operators: Sequence[Operator]) -> list[fx.Node]:
        """Send sharded inputs of branches to their owners; return placeholders for values that others own."""
        low, i = self.lowering, self.lowering.axes.index(region.axis)
        outputs = {value for op in operators for value in op.outputs}
        moves: dict[tuple[str, Placement], tuple[Variant, BranchTransfer]] = {}
        for op in operators:
            for value, row in zip(op.inputs, low.sharding.input_placements[op.name], strict=True):
                needed, variants = row[region.axis], self.nodes_of.get(value, {})
                assert has_single_owner(needed)
                source = next((variant for variant in variants if is_shard(variant[i])), None)
                if value in outputs or source is None or any(variant[i] is D for variant in variants):
                    continue
                moves[value, needed] = (source, self._transfer(value, source, i, needed.rank))
        if not moves:
            return []
        group, transfers = low.groups[region.axis], tuple(transfer for _, transfer in moves.values())
        sources = [self.nodes_of[value][source] for (value, _), (source, _) in moves.items()]
        node = self.nodes.add(bind_named(exchange_region_values, True, transfers, group), tuple(sources))
        ghosts = []
        for k, ((value, needed), (source, transfer)) in enumerate(moves.items()):
            item = self.nodes.add(python_operator.getitem, (node, k))
            if transfer.owner == group.index:
                self.nodes_of[value][(*source[:i], needed, *source[i + 1 :])] = item
            else:
                ghosts.append(item)
        return ghosts

    def _leave_region(self, region: BranchOwners, operators: Sequence[Operator], ghosts: Sequence[fx.Node]) -> None:
        """Bring values read after branches from their owners into shards; their other values are no longer available."""
        low, i = self.lowering, self.lowering.axes.index(region.axis)
        nodes: list[fx.Node | None] = []
        exits: list[tuple[str, Variant, BranchTransfer]] = []
        for op in operators:
            for value in op.outputs:
                if value in region.exit_shards:
                    source = low.read_variant(value)
                    exits.append((value, source, self._transfer(value, source, i, region.rank_of[op.name])))
                    form = low.variant(low.sharding.placements[value])
                    nodes.append(self.nodes_of[value][form] if value in self.nodes_of else None)
        for value in set(self.nodes_of) - set(self.state):
            self.nodes_of[value] = {variant: node for variant, node in self.nodes_of[value].items() if not has_single_owner(variant[i])}
        node = self.nodes.add(
            bind_named(exchange_region_values, False, tuple(transfer for *_, transfer in exits), low.groups[region.axis]), (*nodes, *ghosts)
        )
        for k, (value, source, _) in enumerate(exits):
            self.nodes_of[value] = {source: self.nodes.add(python_operator.getitem, (node, k))}

    def _transfer(self, value: str, source: Variant, i: int, owner: int) -> BranchTransfer:
        """Return the transfer of a value in placements `source`, sharded along axis `i`, from or to its owner there."""
        low, tensor, form = self.lowering, self.tensors[value], source[i]
        assert is_shard(form)
        other_placements = {axis: placement for k, (axis, placement) in enumerate(zip(low.axes, source, strict=True)) if k != i}
        shape = low.sharding.local_shape(value, tensor.shape, other_placements, low.coordinates)
        return BranchTransfer(shape, form, owner, low.dtype(value), value in self.needs_gradient)

    def node_in(self, value: str, wanted: WantedVariant) -> fx.Node:
        """Return the node of `value` in placements `want` (None: any), redistributing it where no earlier redistribution did."""
        axes, available = self.lowering.axes, self.nodes_of[value]
        if (found := find_available(available, wanted)) is not None:
            return available[found]
        source = choose_source(axes, available, wanted)
        if crosses_head_shards(axes, source, wanted):
            raise LayoutError(f"{value} is read in shards of heads that two axes shard in another order; use attention=gather")
        node, at = available[source], list(source)
        for i, target in redistribution_steps(axes, source, wanted):
            node = self.nodes.redistribute(node, self.lowering.groups[axes[i]], at[i], target)
            at[i] = target
            available[tuple(at)] = node
        return node

    def _reduce_on_read(self, value: str, x: fx.Node) -> fx.Node:
        """Return a variable as an operator reads it whose gradient nobody reduces as this graph leaves it."""
        reduction = self.lowering.local_reductions.get(value)
        for axis in reduction.reduced_axes if reduction else ():
            x = self.nodes.redistribute(x, self.lowering.groups[axis], R, D)
        return x if reduction is None or reduction.share == 1.0 else self.nodes.add(bind_named(scale_gradient, share=reduction.share), (x,))

    def _lower_operator(self, op: Operator) -> None:
        low = self.lowering
        rows = low.sharding.input_placements[op.name]
        for value in low.awaited_constants.intersection(op.inputs) - self.awaited_done:
            self.awaited_done.add(value)
            self.nodes_of[value] = {
                variant: self.nodes.add(bind_named(wait_for_constant, low.pending_constants), (node,))
                for variant, node in self.nodes_of[value].items()
            }
        inputs = [self.node_in(value, tuple(row[axis] for axis in low.axes)) for value, row in zip(op.inputs, rows, strict=True)]
        if not low.local_reductions.keys().isdisjoint(op.inputs):  # per operator, so that a gathered weight belongs to its layer
            inputs = [self._reduce_on_read(value, x) for value, x in zip(op.inputs, inputs, strict=True)]
        if not writes_buffer(op, self.state):
            # Backward may need the value read, whatever later microbatches write; running statistics are written where they are read.
            written = self.written - running_statistics_of(op)
            inputs = [self.nodes.add(snapshot_buffer, (x,)) if v in written else x for v, x in zip(op.inputs, inputs, strict=True)]
        node = lower_operator(OperatorCall.from_operator(low, self.nodes, op, inputs), writes_buffer(op, self.state))
        if writes_buffer(op, self.state):  # other placements hold its old value
            stored = low.variant(low.sharding.placements[op.inputs[0]])
            self.nodes_of[op.inputs[0]] = {stored: self.nodes_of[op.inputs[0]][stored]}
        variants = [low.variant(low.sharding.placements[value]) for value in op.outputs]
        if op.returns_sequence:
            for i, (value, variant) in enumerate(zip(op.outputs, variants, strict=True)):
                self.nodes_of[value] = {variant: self.nodes.add(python_operator.getitem, (node, i))}
        else:
            self.nodes_of[op.outputs[0]] = {variants[0]: node}


def layer_of(site: str) -> str:
    """Return the repeated layer of a site: its path up to the first number; empty outside of layers.

    >>> layer_of("encoder.layers.3.mlp/linear"), layer_of("head/linear")
    ('encoder.layers.3', '')
    """
    match = _LAYER.match(site)
    return match.group(0) if match else ""


def _as_identifier(value: str) -> str:
    return value.replace(".", "_")


def snapshot_buffer(buffer: Tensor) -> Tensor:
    """Return a copy of a buffer or parameter, for an operator that reads it."""
    return buffer.clone()
