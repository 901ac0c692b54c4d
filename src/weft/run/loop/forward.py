"""The forward of a sharded module, computed by captured graphs: one for each combination of module modes and input structure.

It returns the module's output for this rank's samples, in full tensors. A plain loop reduces a parameter's gradient over the same ranks
whichever capture computed it (`run/loop/shard_module`), so partial gradients over any other axis are reduced where the parameter enters.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn

from weft.capture.modes import Modes, modes_of
from weft.capture.nesting import BatchForm, batch_size_of, count_samples, is_value, leaves, rebuild, tensors_of
from weft.errors import Infeasible, ModelError, UsageError
from weft.lower.kernels.randomness import Draw
from weft.lower.redistribute import counted, redistribute
from weft.plan.axis import DATA, axis_of, sample_axes
from weft.plan.placement import D, R, is_shard, piece
from weft.plan.plan import Plan
from weft.run.build import Source, Traced
from weft.run.captures import Asked, captured_in
from weft.run.expects import Expects
from weft.run.loop.gathered_weights import GatheredWeights
from weft.run.loop.hooks import Hooked, call_hooks, recording
from weft.run.loop.original import Original
from weft.run.loop.pieces import Pieces, Saved, gathering
from weft.run.loop.unchanged import Unchanged
from weft.run.rank_agreement import digest
from weft.run.recent import MOST_FORMS, Recent
from weft.run.reduce.exchange import Exchange
from weft.run.sharded_state import full_state, narrowed, weights_of
from weft.run.state.checkpoint import Piece
from weft.run.state.precision import products_of
from weft.run.training_parts import Parts
from weft.world import private
from weft.world.world import Group, World


class Given(Enum):
    """The samples with which ranks call a model: each with its shard of the batch; each with the global batch, computed in full by each; or
    each with the global batch, of which it computes its shard and returns all outputs."""

    PARTS = 0
    REPLICATED = 1
    FULL = 2


class NotReturned:
    """Placeholder for an output that a sharded model does not return: an object that is no nest of tensors (a key-value cache)."""

    def __init__(self, path: str, kind: str) -> None:
        self._why = f"the output {path} is a {kind}, which a divided model does not return; switch it off in the model (use_cache=False)"

    def __repr__(self) -> str:
        return f"NotReturned({self._why})"

    def __getattr__(self, name: str) -> Any:
        raise ModelError(self.__dict__["_why"])

    def __getitem__(self, key: object) -> Any:
        raise ModelError(self._why)

    def __len__(self) -> int:
        raise ModelError(self._why)


def _kept(path: str, leaf: Any) -> Any:
    return leaf if is_value(leaf) else NotReturned(path, type(leaf).__name__)


def with_tensors(parts: Parts, parameters: Mapping[str, Any], buffers: Mapping[str, Tensor]) -> Parts:
    """Return a capture's rank model over other tensors of the same names."""
    tensors = {**buffers, **parameters}
    names = {v.value: v.name for v in (*parts.graph.parameters, *parts.graph.buffers)}
    variables = {value: tensors[names[value]] if value in names else x for value, x in parts.variables.items()}
    return replace(parts, parameters=dict(parameters), buffers=dict(buffers), variables=variables)


@dataclass(frozen=True)
class Forward:
    """The forward of one capture. `reduced_axes`: axes over which the loop reduces each parameter's gradient, by name. `relative_share`:
    number of this replica's samples over that of an equal share."""

    parts: Parts
    plan: Plan
    world: World
    exchanged: Mapping[str, tuple[str, ...]]
    batch: Given = Given.PARTS
    part: float = 1.0

    def __call__(self, inputs: Mapping[str, Tensor]) -> Any:
        """Return the output. `inputs`: the tensors of the call by path."""
        parts, layout, stage = self.parts, self.plan.layout, self.parts.only
        tensors = {v.value: inputs[v.name].to(self.world.device) for v in parts.graph.inputs}
        for value, group in self._summed_inputs:
            if tensors[value].requires_grad:  # another model computed it and needs the full gradient
                tensors[value] = redistribute(tensors[value], R, D, group)
        coordinates = layout.mesh.coordinates(self.world.rank)
        kept_axes = () if self.batch is Given.FULL else parts.sharding.sample_axes
        for value, x in tensors.items():
            tensors[value] = narrowed(x, parts.sharding.held(value, x.shape, coordinates, but=kept_axes))
        values = [parts.variables[v] if v in parts.variables else tensors[v] for v in stage.variables]
        for position, group in self._summed_here:
            values[position] = redistribute(values[position], R, D, group)
        for position, share in self._extra_summands:
            values[position] = counted(values[position], share)
        kind = self.world.device.type
        user_dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None  # the user's own autocast around the call
        autocast = products_of(layout.precision) or user_dtype
        saved, module = self._gathering
        with private.as_base_tensor(), torch.autocast(kind, dtype=autocast, enabled=autocast is not None), saved.kept():
            results = module(*values)
        outputs = []
        for name, x in zip(stage.results, results, strict=True):
            # Equal on all data ranks, each of which may use it differently (to scale its own samples' scores), so gradients are reduced.
            for axis in parts.sharding.sample_axes if x.is_floating_point() else ():
                x = x if is_shard(stage.forms[name].get(axis, R)) else redistribute(x, R, D, self._group(axis))
            # The loop averages over this rank's samples; its gradient is weighted by their number.
            x = x if self.part == 1.0 else counted(x, self.part)
            outputs.append(private.writable(x))  # a loop may change an output in place: a loss, an image that it scales
        paths, constants = self._outputs
        return rebuild(parts.structure, constants | dict(zip(paths, outputs, strict=True)))

    @cached_property
    def talks(self) -> bool:
        """Return whether the graph communicates, so that all ranks must call it, with tensors of the same shapes."""
        groups: list[Group] = []
        for node in getattr(self.parts.only.module, "graph", fx.Graph()).nodes:
            fx.node.map_aggregate((node.args, node.kwargs), lambda x: groups.append(x) if isinstance(x, Group) and x.size > 1 else None)
        return bool(groups or self.parts.pieces)

    @cached_property
    def _outputs(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The model's output by path: tensors, and all other leaves as they will be returned."""
        returned = list(leaves(self.parts.structure))
        tensors = {path: leaf for path, leaf in returned if isinstance(leaf, Tensor)}
        return tensors, {path: _kept(path, leaf) for path, leaf in returned if path not in tensors}

    @cached_property
    def _axes(self) -> dict[str, tuple[set[str], set[str]]]:
        """Trained parameters by graph value: axes over which this capture leaves partial gradients, and axes that the loop reduces."""
        names = {member.name for group in self.parts.groups for member in group.members}
        gradients, pieces = self.parts.sharding.gradients, self.parts.pieces
        return {  # the all-gather of ZeRO shards reduces over data in its backward
            v.value: (set(gradients.get(v.value, ())) - ({DATA} if v.name in pieces else set()), set(self.exchanged[v.name]))
            for v in self.parts.graph.parameters
            if v.name in names
        }

    @cached_property
    def _gathering(self) -> tuple[Saved, nn.Module]:
        """The module to run, with all-gathers of ZeRO shards inserted, and the saver of its gathered weights."""
        parts, saved, module = self.parts, Saved(self.plan.layout.zero == 3), self.parts.only.module
        names = {v.value: v.name for v in parts.graph.parameters if v.name in parts.pieces}
        if not names:
            return saved, module
        assert isinstance(module, fx.GraphModule)
        read = R if self.batch is Given.REPLICATED else D  # where every rank computes all samples, its gradient is complete
        pieces = {
            i: Pieces(names[v], parts.pieces[names[v]], read, self._group(DATA)) for i, v in enumerate(parts.only.variables) if v in names
        }
        return saved, gathering(module, pieces, saved)

    @cached_property
    def _summed_here(self) -> list[tuple[int, Group]]:
        """Positions of parameters with partial gradients that the loop does not reduce, with the groups to reduce over."""
        sums = []
        for i, value in enumerate(self.parts.only.variables):
            partial, exchanged = self._axes.get(value, (set[str](), set[str]()))
            sums += [(i, self._group(axis)) for axis in self.parts.sharding.sizes if axis in partial - exchanged]
        return sums

    @cached_property
    def _extra_summands(self) -> list[tuple[int, float]]:
        """Positions of parameters whose number of partial gradients is not that of the data ranks, with the ratio of the two.

        The reducer takes a mean (see `run/loop/shard_module`), which this ratio corrects.
        """
        data, sizes = 1 if self.batch is Given.REPLICATED else self.plan.layout.data, self.parts.sharding.sizes
        shares = {value: prod(sizes[axis] for axis in partial & exchanged) / data for value, (partial, exchanged) in self._axes.items()}
        return [(i, shares[v]) for i, v in enumerate(self.parts.only.variables) if shares.get(v, 1.0) != 1.0]

    @cached_property
    def _summed_inputs(self) -> list[tuple[str, Group]]:
        """Inputs with partial gradients over a group of tensor ranks."""
        gradients = self.parts.sharding.gradients
        axes = [(v.value, axis) for v in self.parts.graph.inputs for axis in gradients.get(v.value, ()) if not axis_of(axis).cuts_samples]
        return [(value, self._group(axis)) for value, axis in axes]

    def _group(self, axis: str) -> Group:
        return self.world.group(self.plan.layout.mesh.group(self.world.rank, axis))


# The model's modes, the form of its inputs, which samples these are, and the hooks on its submodules.
Call = tuple[Modes, Hashable, Given, Hooked]


@dataclass(frozen=True)
class Captures:
    """The captures of one model, by its modes and input structure: `net(x)` is another graph than `net(x, targets)`.

    Copies of the model share them. `rank_model`: the training capture, made in `modes` on `batch`; `variants`: captures made since.
    """

    parts: Parts
    plan: Plan
    source: Source
    batch: Any
    world: World
    original: Original
    signature: inspect.Signature
    modes: Modes
    others: Recent[Parts] = field(default_factory=lambda: Recent(MOST_FORMS))

    @cached_property
    def form(self) -> BatchForm:
        """The form of the batch that it was captured with."""
        return BatchForm.of(self.batch)

    def of(self, call: Call, called: Any, samples: int) -> Parts:
        """Return the rank model for such a call of so many samples; it is captured at the first call."""
        is_training_call = call == (self.modes, self.form.key, Given.PARTS, ())
        if is_training_call and samples == self.plan.batch_size:
            return self.parts
        base = self.parts if is_training_call else self.others.of(call, lambda: self._captured(call, called, samples))
        try:
            with self.original.back(), recording(self.source.model, call[3]):
                variant = base.of_size(samples, samples)
        except Infeasible:  # with that many samples it computes another graph
            return self._captured(call, called, samples)
        variables = {**base.variables, **{v: x for v, x in variant.constants.items() if v in base.variables}}
        return replace(base, graph=variant.normal.graph, sharding=variant.sharding, lowered=dict(variant.lowered), variables=variables)

    def _captured(self, call: Call, called: Any, samples: int) -> Parts:
        # A source caches captures of one input form.
        is_usual = call[1] == self.form.key and not call[3]
        batch, source = (self.batch, self.source) if is_usual else (called, Traced(self.source.model, self.source.deferred))
        try:
            with self.original.back(), recording(self.source.model, call[3]):
                is_replicated, is_global = call[2] is Given.REPLICATED, call[2] is Given.FULL
                request = Asked(call[0], batch, outputs=True, size=samples, replicated=is_replicated, together=is_global)
                return captured_in(request, self.parts, self.plan, source, self.world)
        except ModelError as error:
            mode = "trains" if call[0][0] else "evaluates"
            names = ", ".join(sorted(tensors_of(called)))
            raise ModelError(f"the model as it {mode} now, called with {names}, cannot be divided: {error}") from error

    def nested(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return a call's arguments nested like the captured batch: by keyword or in order."""
        bound = self.signature.bind(*args, **kwargs)
        if not isinstance(self.batch, Mapping):
            if bound.kwargs:
                raise Infeasible(
                    f"the model was captured with arguments in order, and is called with {', '.join(bound.kwargs)} by keyword alone"
                )
            return bound.args
        arguments: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            kind = self.signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_POSITIONAL:
                raise Infeasible(f"the model was captured with arguments by keyword, and is called with {len(value)} more in order")
            arguments.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
        return arguments


@dataclass(frozen=True)
class ByGraphs:
    """The replica of a captured module (`run/loop/module`). `rank_model`: its training capture over this module's own tensors.
    `gradient_reducer`: None for a copy, which does not train."""

    model: nn.Module
    parts: Parts
    captures: Captures
    unchanged: Unchanged
    exchange: Exchange | None = None
    expects: Expects = field(default_factory=Expects)
    forwards: Recent[Forward] = field(default_factory=lambda: Recent(1 + MOST_FORMS))

    @property
    def draw(self) -> Draw:
        """State of its random draws, shared with its copies."""
        return self.parts.draw

    def check(self) -> None:
        """Raise UsageError if the module was changed in a way that its graphs do not see."""
        self.unchanged.check()

    def compute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output for this rank's samples. Generation (new objects in the inputs, no gradients) runs the model's own code."""
        called = self.captures.nested(args, kwargs)
        form = BatchForm.of(called)
        if torch.is_grad_enabled():
            self.captures.form.check_objects(form)
            self.gathered_weights.let_go()
        elif self.captures.form.other_objects(form):
            with self.gathered_weights.held_by(self.model, self.parts, self.captures.plan.layout.mesh):
                return type(self.model).forward(self.model, *args, **kwargs)
        hooked = self.unchanged.hooked()
        call = (modes_of(self.model), form.key, Given.PARTS, hooked)
        samples, batch = self._samples_of(call, called, form)
        forward = self._forward_of((*call[:2], batch, hooked), samples, called)
        forward.parts.draw.step += 1
        output = forward(tensors_of(called))
        if hooked:
            output, calls = output
            call_hooks(self.model, hooked, calls)
        return output

    @cached_property
    def gathered_weights(self) -> GatheredWeights:
        """Full weights, for calls that run the model's own code."""
        return GatheredWeights(self.captures.world)

    def _samples_of(self, call: Call, called: Any, form: BatchForm) -> tuple[int, Given]:
        """Return the global number of samples, and the mode in which ranks are called with them.

        Raises:
            Infeasible: on all ranks, if they are called with other shards than `weft.shard` gives, or with different forms.
        """
        num_local, samples, places, layout = batch_size_of(called), count_samples(called), self._places, self.captures.plan.layout
        n, batch = max(places) + 1, Given.PARTS
        if self.captures.world.num_ranks > 1 and not samples:
            # Without gradients and communication, a rank may call the model alone.
            alone = not (torch.is_grad_enabled() or self.expects.global_batch) and not self._forward_of(call, num_local * n, called).talks
            samples, batch = (num_local, batch) if alone else self._told(called, num_local, form)  # alone: on its own samples
        if n == 1:
            return num_local, Given.PARTS
        if samples == num_local and layout.expert == 1 and (batch is Given.PARTS or num_local < n):
            return num_local, Given.REPLICATED
        if batch is Given.PARTS and num_local != piece(samples, n, places[self.captures.world.rank])[1]:
            raise Infeasible(
                f"the model was called with {num_local} of {samples} samples, which {layout} divides otherwise; draw batches through "
                "weft.shard(loader)"
            )
        return samples, batch

    @cached_property
    def _places(self) -> list[int]:
        """Index of the shard of samples that each rank has."""
        mesh = self.captures.plan.layout.mesh
        axes = sample_axes(mesh.inside)
        return [mesh.group(rank, *axes).index(rank) for rank in range(self.captures.world.num_ranks)]

    def _told(self, called: Any, have: int, form: BatchForm) -> tuple[int, Given]:
        """Agree on the global number of samples and the mode: ranks all-gather their number of samples, form and digest (24 bytes each).

        Raises:
            Infeasible: on all ranks, if their calls would deadlock or reduce gradients of mismatched samples.
        """
        world, places, layout = self.captures.world, self._places, self.captures.plan.layout
        local_info = [have, form.number, int(digest(called), 16)]
        counts, forms, digests = world.everyone.all_gather(torch.tensor([local_info], dtype=torch.int64, device=world.device), 0).T.tolist()
        if len(set(forms)) > 1:
            raise Infeasible(
                "ranks call the model with tensors of different shapes or kinds, and exchange values and gradients; draw batches through "
                "weft.shard(loader), or pad them to one shape on all ranks"
            )
        if len(set(digests)) == 1:
            return have, Given.FULL
        distinct_batches = {(place, number) for place, number in zip(places, digests, strict=True)}
        if self.expects.global_batch or len(distinct_batches) > len(set(places)):
            affected_ranks = "all of them" if self.expects.global_batch else "those with the same samples"
            raise UsageError(
                f"ranks call the model with different batches, and {affected_ranks} need the same: let every rank load and shuffle "
                "alike (the same seed on every rank, no DistributedSampler)"
            )
        n = max(places) + 1
        samples = sum(dict(zip(places, counts, strict=True)).values())
        if counts != [piece(samples, n, place)[1] for place in places]:
            raise Infeasible(
                f"ranks call the model with {', '.join(map(str, counts))} samples, which {layout} divides otherwise; draw batches through "
                "weft.shard(loader), or give every rank as many"
            )
        return samples, Given.PARTS

    def _forward_of(self, call: Call, samples: int, called: Any) -> Forward:
        def build() -> Forward:
            captures, n = self.captures, max(self._places) + 1
            parts = with_tensors(captures.of(call, called, samples), self.parts.parameters, self.parts.buffers)
            reduced_axes = {name: spec.summed_over for name, spec in parts.specs.items()}
            relative_share = batch_size_of(called) * n / samples if call[2] is Given.PARTS else 1.0
            return Forward(parts, captures.plan, captures.world, reduced_axes, call[2], relative_share)

        return self.forwards.of((call, samples), build)

    def of_copy(self, copied: nn.Module, memo: Mapping[int, Any]) -> ByGraphs:
        """Return a replica with the same captures over the copy's tensors."""
        tensor_tables = self.parts.parameters, self.parts.buffers
        parameters, buffers = ({name: memo.get(id(x), x) for name, x in tensors.items()} for tensors in tensor_tables)
        return ByGraphs(copied, with_tensors(self.parts, parameters, buffers), self.captures, Unchanged(copied))

    def pieces(self) -> list[Piece]:
        """Return this rank's shards of the state dict, for a checkpoint."""
        variables = {v.name: v for v in self.parts.graph.buffers}
        saved = {name for name, v in variables.items() if not self.parts.saved.isdisjoint((name, *v.aliases))}
        return [piece for piece in self._weights() if piece.kind == "parameter" or piece.name in saved]

    def full_state(self) -> dict[str, Tensor] | None:
        """Return the full state dict on rank 0, None elsewhere. Every rank calls it."""
        with private.as_base_tensor():
            return full_state(self.parts, self._weights(), self.captures.world.everyone)

    def _weights(self) -> list[Piece]:
        return weights_of(self.parts, self.captures.plan.layout.mesh.coordinates(self.captures.world.rank))
