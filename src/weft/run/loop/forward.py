"""A divided module that computes by its captures, one for each of its modes and choice of tensors: of this rank's samples.

In: the parts of its captures, with the tensors that the module holds. Out: the module's output, its tensors whole but for samples. A plain
loop exchanges each parameter's gradient over the same ranks whatever capture made it (`run/loop/divide`), so what a capture leaves to be
summed over other axes is summed where the parameter enters.
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
    """What ranks call a model with: each its part of the samples; all of them, which each computes; or all of them, of which each computes
    its part, and returns all."""

    PARTS = 0
    REPLICATED = 1
    FULL = 2


class NotReturned:
    """Stands for an output that a divided model does not compute: an object of another kind than nested tensors (a cache of keys)."""

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
    """The parts of a capture over other tensors of the same names."""
    held = {**buffers, **parameters}
    names = {v.value: v.name for v in (*parts.graph.parameters, *parts.graph.buffers)}
    variables = {value: held[names[value]] if value in names else x for value, x in parts.variables.items()}
    return replace(parts, parameters=dict(parameters), buffers=dict(buffers), variables=variables)


@dataclass(frozen=True)
class Forward:
    """One capture. `exchanged`: axes over which each parameter's gradient is exchanged, by name. `batch`: which samples ranks are called
    with; `part`: what this replica has of them, in parts of what each would have of equal shares."""

    parts: Parts
    plan: Plan
    world: World
    exchanged: Mapping[str, tuple[str, ...]]
    batch: Given = Given.PARTS
    part: float = 1.0

    def __call__(self, inputs: Mapping[str, Tensor]) -> Any:
        """The output. `inputs`: the tensors of the call by path."""
        parts, layout, local = self.parts, self.plan.layout, self.parts.only
        tensors = {v.value: inputs[v.name].to(self.world.device) for v in parts.graph.inputs}
        for value, group in self._summed_inputs:
            if tensors[value].requires_grad:  # another model made it, and waits for the whole gradient
                tensors[value] = redistribute(tensors[value], R, D, group)
        at = layout.mesh.coordinates(self.world.rank)
        but = () if self.batch is Given.FULL else parts.sharding.sample_axes
        for value, x in tensors.items():
            tensors[value] = narrowed(x, parts.sharding.held(value, x.shape, at, but=but))
        values = [parts.variables[v] if v in parts.variables else tensors[v] for v in local.variables]
        for position, group in self._summed_here:
            values[position] = redistribute(values[position], R, D, group)
        for position, share in self._extra_summands:
            values[position] = counted(values[position], share)
        kind = self.world.device.type
        theirs = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None  # the user's own, around the call
        autocast = products_of(layout.precision) or theirs
        saved, module = self._gathering
        with private.as_base_tensor(), torch.autocast(kind, dtype=autocast, enabled=autocast is not None), saved.kept():
            results = module(*values)
        out = []
        for name, x in zip(local.results, results, strict=True):
            # The same on all data ranks, each of which may make something else of it: a scale of its own samples' scores.
            for axis in parts.sharding.sample_axes if x.is_floating_point() else ():
                x = x if is_shard(local.forms[name].get(axis, R)) else redistribute(x, R, D, self._group(axis))
            # What the loop makes of outputs is a mean over this rank's samples, which counts by how many they are.
            x = x if self.part == 1.0 else counted(x, self.part)
            out.append(private.writable(x))  # a loop may change what a model returns in place: a loss, an image that it scales
        paths, others = self._outputs
        return rebuild(parts.structure, others | dict(zip(paths, out, strict=True)))

    @cached_property
    def talks(self) -> bool:
        """Whether ranks exchange anything in it, so that all of them must be called, and with tensors of one form."""
        groups: list[Group] = []
        for node in getattr(self.parts.only.module, "graph", fx.Graph()).nodes:
            fx.node.map_aggregate((node.args, node.kwargs), lambda x: groups.append(x) if isinstance(x, Group) and x.size > 1 else None)
        return bool(groups or self.parts.pieces)

    @cached_property
    def _outputs(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The model's output by path: tensors, and everything else as it will be returned."""
        returned = list(leaves(self.parts.structure))
        tensors = {path: leaf for path, leaf in returned if isinstance(leaf, Tensor)}
        return tensors, {path: _kept(path, leaf) for path, leaf in returned if path not in tensors}

    @cached_property
    def _axes(self) -> dict[str, tuple[set[str], set[str]]]:
        """By graph value of exchanged parameters: the axes over which this capture leaves summands, and those of the exchange."""
        names = {one.name for group in self.parts.groups for one in group.members}
        gradients, pieces = self.parts.sharding.gradients, self.parts.pieces
        return {  # of what lies in pieces over data, the gather's backward sums
            v.value: (set(gradients.get(v.value, ())) - ({DATA} if v.name in pieces else set()), set(self.exchanged[v.name]))
            for v in self.parts.graph.parameters
            if v.name in names
        }

    @cached_property
    def _gathering(self) -> tuple[Saved, nn.Module]:
        """What computes, where parameters that lie in pieces come together."""
        parts, saved, module = self.parts, Saved(self.plan.layout.zero == 3), self.parts.only.module
        names = {v.value: v.name for v in parts.graph.parameters if v.name in parts.pieces}
        if not names:
            return saved, module
        assert isinstance(module, fx.GraphModule)
        read = R if self.batch is Given.REPLICATED else D  # where every rank computes all samples, its gradient is whole
        pieces = {
            i: Pieces(names[v], parts.pieces[names[v]], read, self._group(DATA)) for i, v in enumerate(parts.only.variables) if v in names
        }
        return saved, gathering(module, pieces, saved)

    @cached_property
    def _summed_here(self) -> list[tuple[int, Group]]:
        """Where parameters enter of whose gradient ranks have summands that no exchange sums, with these ranks."""
        sums = []
        for i, value in enumerate(self.parts.only.variables):
            partial, exchanged = self._axes.get(value, (set[str](), set[str]()))
            sums += [(i, self._group(axis)) for axis in self.parts.sharding.sizes if axis in partial - exchanged]
        return sums

    @cached_property
    def _extra_summands(self) -> list[tuple[int, float]]:
        """Where parameters enter of whose gradient more or fewer than the data ranks have a summand, with how many times as many they are.

        The exchange takes the mean (see `run/loop/divide`): of what is whole on every data rank it then counts the data ranks' part.
        """
        data, sizes = 1 if self.batch is Given.REPLICATED else self.plan.layout.data, self.parts.sharding.sizes
        shares = {value: prod(sizes[axis] for axis in partial & exchanged) / data for value, (partial, exchanged) in self._axes.items()}
        return [(i, shares[v]) for i, v in enumerate(self.parts.only.variables) if shares.get(v, 1.0) != 1.0]

    @cached_property
    def _summed_inputs(self) -> list[tuple[str, Group]]:
        """Inputs of whose gradient each rank of a group of tensor ranks has a summand."""
        gradients = self.parts.sharding.gradients
        axes = [(v.value, axis) for v in self.parts.graph.inputs for axis in gradients.get(v.value, ()) if not axis_of(axis).cuts_samples]
        return [(value, self._group(axis)) for value, axis in axes]

    def _group(self, axis: str) -> Group:
        return self.world.group(self.plan.layout.mesh.group(self.world.rank, axis))


# The model's modes, the form of what it is called with, which samples these are, and the hooks that watch it.
Call = tuple[Modes, Hashable, Given, Hooked]


@dataclass(frozen=True)
class Captures:
    """The captures of one model, by its modes and by what it is called with: `net(x)` is another graph than `net(x, targets)`.

    Copies of the model share them. `parts`: of its training, `modes` and `batch`: what it was captured with, `others`: made since.
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
        """Of what it was captured with."""
        return BatchForm.of(self.batch)

    def of(self, call: Call, called: Any, samples: int) -> Parts:
        """The parts of such a call of so many samples, captured when it is first made."""
        first = call == (self.modes, self.form.key, Given.PARTS, ())
        if first and samples == self.plan.batch_size:
            return self.parts
        base = self.parts if first else self.others.of(call, lambda: self._captured(call, called, samples))
        try:
            with self.original.back(), recording(self.source.model, call[3]):
                one = base.of_size(samples, samples)
        except Infeasible:  # with so many it computes something else
            return self._captured(call, called, samples)
        variables = {**base.variables, **{v: x for v, x in one.constants.items() if v in base.variables}}
        return replace(base, graph=one.normal.graph, sharding=one.sharding, lowered=dict(one.lowered), variables=variables)

    def _captured(self, call: Call, called: Any, samples: int) -> Parts:
        # What a source has captured is of one form.
        is_usual = call[1] == self.form.key and not call[3]
        batch, source = (self.batch, self.source) if is_usual else (called, Traced(self.source.model, self.source.deferred))
        try:
            with self.original.back(), recording(self.source.model, call[3]):
                alone, together = call[2] is Given.REPLICATED, call[2] is Given.FULL
                asked = Asked(call[0], batch, outputs=True, size=samples, replicated=alone, together=together)
                return captured_in(asked, self.parts, self.plan, source, self.world)
        except ModelError as error:
            now = "trains" if call[0][0] else "evaluates"
            names = ", ".join(sorted(tensors_of(called)))
            raise ModelError(f"the model as it {now} now, called with {names}, cannot be divided: {error}") from error

    def nested(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call's arguments nested as the batch that the model was captured with: by keyword or in order."""
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
    """The way of a module that was captured (`run/loop/module`). `parts`: of its training, with this module's own tensors.
    `exchange`: of its gradients; of a copy, which nobody exchanges, None."""

    model: nn.Module
    parts: Parts
    captures: Captures
    unchanged: Unchanged
    exchange: Exchange | None = None
    expects: Expects = field(default_factory=Expects)
    forwards: Recent[Forward] = field(default_factory=lambda: Recent(1 + MOST_FORMS))

    @property
    def draw(self) -> Draw:
        """What its random numbers depend on, and those of its copies."""
        return self.parts.draw

    def check(self) -> None:
        """Raise where its graphs would not know of a change."""
        self.unchanged.check()

    def compute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The output of this rank's samples; without gradients and with objects that change (generation), by the model's own code."""
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
        """Its weights as its own code reads them."""
        return GatheredWeights(self.captures.world)

    def _samples_of(self, call: Call, called: Any, form: BatchForm) -> tuple[int, Given]:
        """Samples of what all ranks are called with, and which of them each is called with.

        Raises:
            Infeasible: ranks are called with other parts than `weft.shard` gives, or with other forms; on all of them.
        """
        have, samples, places, layout = batch_size_of(called), count_samples(called), self._places, self.captures.plan.layout
        n, batch = max(places) + 1, Given.PARTS
        if self.captures.world.num_ranks > 1 and not samples:
            # Where nothing is learnt and nothing exchanged, a rank may call it alone.
            alone = not (torch.is_grad_enabled() or self.expects.global_batch) and not self._forward_of(call, have * n, called).talks
            samples, batch = (have, batch) if alone else self._told(called, have, form)  # alone: of the samples that it is called with
        if n == 1:
            return have, Given.PARTS
        if samples == have and layout.expert == 1 and (batch is Given.PARTS or have < n):
            return have, Given.REPLICATED
        if batch is Given.PARTS and have != piece(samples, n, places[self.captures.world.rank])[1]:
            raise Infeasible(
                f"the model was called with {have} of {samples} samples, which {layout} divides otherwise; draw batches through "
                "weft.shard(loader)"
            )
        return samples, batch

    @cached_property
    def _places(self) -> list[int]:
        """Which part of the samples each rank has."""
        mesh = self.captures.plan.layout.mesh
        axes = sample_axes(mesh.inside)
        return [mesh.group(rank, *axes).index(rank) for rank in range(self.captures.world.num_ranks)]

    def _told(self, called: Any, have: int, form: BatchForm) -> tuple[int, Given]:
        """Samples of all ranks, and whether each has all of them: ranks tell each other how many they have, of what form, and a number that
        tells batches apart, in one message of 24 bytes.

        Raises:
            Infeasible: on all ranks, where they would wait for one another, or add what does not belong together.
        """
        world, places, layout = self.captures.world, self._places, self.captures.plan.layout
        mine = [have, form.number, int(digest(called), 16)]
        counts, forms, digests = world.everyone.all_gather(torch.tensor([mine], dtype=torch.int64, device=world.device), 0).T.tolist()
        if len(set(forms)) > 1:
            raise Infeasible(
                "ranks call the model with tensors of different shapes or kinds, and exchange values and gradients; draw batches through "
                "weft.shard(loader), or pad them to one shape on all ranks"
            )
        if len(set(digests)) == 1:
            return have, Given.FULL
        beside = {(place, number) for place, number in zip(places, digests, strict=True)}
        if self.expects.global_batch or len(beside) > len(set(places)):
            who = "all of them" if self.expects.global_batch else "those with the same samples"
            raise UsageError(
                f"ranks call the model with different batches, and {who} need the same: let every rank load and shuffle "
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
        def made() -> Forward:
            captures, n = self.captures, max(self._places) + 1
            parts = with_tensors(captures.of(call, called, samples), self.parts.parameters, self.parts.buffers)
            exchanged = {name: spec.summed_over for name, spec in parts.specs.items()}
            part = batch_size_of(called) * n / samples if call[2] is Given.PARTS else 1.0
            return Forward(parts, captures.plan, captures.world, exchanged, call[2], part)

        return self.forwards.of((call, samples), made)

    def of_copy(self, copied: nn.Module, memo: Mapping[int, Any]) -> ByGraphs:
        """The same captures over the copy's tensors."""
        held = self.parts.parameters, self.parts.buffers
        parameters, buffers = ({name: memo.get(id(x), x) for name, x in tensors.items()} for tensors in held)
        return ByGraphs(copied, with_tensors(self.parts, parameters, buffers), self.captures, Unchanged(copied))

    def pieces(self) -> list[Piece]:
        """This rank's parts of what a state dict has, for a checkpoint."""
        variables = {v.name: v for v in self.parts.graph.buffers}
        saved = {name for name, v in variables.items() if not self.parts.saved.isdisjoint((name, *v.aliases))}
        return [piece for piece in self._weights() if piece.kind == "parameter" or piece.name in saved]

    def full_state(self) -> dict[str, Tensor] | None:
        """The whole model's state dict on rank 0, None elsewhere. Every rank calls it."""
        with private.as_base_tensor():
            return full_state(self.parts, self._weights(), self.captures.world.everyone)

    def _weights(self) -> list[Piece]:
        return weights_of(self.parts, self.captures.plan.layout.mesh.coordinates(self.captures.world.rank))
