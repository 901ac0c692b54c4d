"""The training state of a plain loop on disk: `weft.save` and `weft.load`.

In: a divided model (or one that is not), the optimizers of the user's loop, where the loop is. Out: a checkpoint as engines write it
(`run/state/checkpoint`), and the same state back, in any layout: parameters, buffers, the optimizers' tensors and options, torch's random
numbers, and what the user adds. Not modelled: state of an optimizer that is neither a tensor nor JSON; gradients.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.errors import CheckpointError, UsageError
from weft.plan.axis import DATA
from weft.plan.mesh import Mesh
from weft.run.engine import Engine
from weft.run.loop.cut import Cut, FullTensor
from weft.run.loop.module import ShardedModule, sharded_modules_of, state_pieces
from weft.run.state import checkpoint
from weft.run.state.checkpoint import Piece, full_piece
from weft.run.state.checkpoint.manifest import Manifest
from weft.run.state.checkpoint.piece import DTYPES
from weft.run.state.spans import full_spans, pieces_at
from weft.run.uncaptured.replicated import replicated_pieces
from weft.world import private
from weft.world.current import current_world
from weft.world.world import World

LOOP, USER = "loop", "user"  # entries of a checkpoint's extra values
Optimizers = Optimizer | Sequence[Optimizer] | None


def save(
    folder: str | Path, model: nn.Module | Engine, optimizer: Optimizers = None, *, step: int = 0, keep: int = 0, **extra: Any
) -> Path:
    """Write a checkpoint `folder/step-00000120` of a loop's training state; every rank calls it. Returns its path.

    Args:
        model: the module that was divided by `weft.auto_parallelize`, or one that was not; an engine saves itself.
        optimizer: the loop's own, or several of them. step: steps that are done. keep: how many of the newest checkpoints stay, 0 for all.
        extra: what else the loop needs to go on, as JSON: `epoch=3`, `scheduler=scheduler.state_dict()`.

    Raises:
        CheckpointError: it cannot be written, or holds what cannot be stored; then nothing visible is left. UsageError: an optimizer of
            parameters that are not the model's, or with state that is neither tensors nor JSON.

    >>> import tempfile, torch, weft
    >>> net = torch.nn.Linear(2, 2)
    >>> opt = torch.optim.SGD(net.parameters(), lr=0.1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = weft.save(folder, net, opt, step=7, epoch=1)
    ...     path.name, weft.load(folder, net, opt)
    ('step-00000007', {'epoch': 1, 'step': 7})
    """
    if isinstance(model, Engine):
        _refuse_optimizer(optimizer)
        return model.save(folder, extra, keep)
    state = _State.of(model, _several(optimizer))
    told = {"optimizers": [state.told_of(one) for one in state.optimizers], "draw": state.draw()}
    pieces = [*state.weights, *state.slots(), *state.streams()]
    added = {key: _json(key, value) for key, value in extra.items()}
    return checkpoint.save(folder, step, pieces, {LOOP: told, USER: added}, state.world, keep=keep)


def load(folder: str | Path, model: nn.Module | Engine, optimizer: Optimizers = None) -> dict[str, Any]:
    """Go on from what `weft.save` wrote, in whatever layout it was; every rank calls it. Returns the extra values, with `step`.

    Args:
        folder: one checkpoint, or a folder of them, of which the newest good one is taken.
        model, optimizer: as for `save`, made anew. Without an optimizer only the model is loaded.

    Raises:
        CheckpointError: nothing to load, damaged, or of another model or optimizer; then nothing has been changed.
    """
    if isinstance(model, Engine):
        _refuse_optimizer(optimizer)
        return model.load(folder)
    state = _State.of(model, _several(optimizer))
    path, manifest = checkpoint.opened(folder, state.world)
    told = manifest.extra.get(LOOP)
    if not isinstance(told, dict):
        raise CheckpointError(f"{path} is an engine's checkpoint; engine.load(folder) goes on from it, weft.load from what weft.save wrote")
    checkpoint.match(path, manifest, state.weights, state.world)
    stored = told["optimizers"] if state.optimizers else []
    state.check(path, stored)
    slots = state.room(manifest)
    streams, restore = state.room_of_streams(manifest)
    checkpoint.fill(path, manifest, [*state.weights, *(piece for _, pieces, _ in slots for piece in pieces), *streams], state.world)
    for one, of in zip(state.optimizers, stored, strict=True):
        _set_options(one, of)
        for group in one.param_groups:
            for p in group["params"]:
                one.state[p] = {pieces[0].slot: tensor for q, pieces, tensor in slots if q is p}
                one.state[p].update(of["values"].get(state.names[id(p)], {}))
                if not one.state[p]:
                    del one.state[p]
    restore(told["draw"])
    return {**manifest.extra.get(USER, {}), "step": manifest.step}


def _refuse_optimizer(optimizer: Optimizers) -> None:
    if optimizer is not None:
        raise UsageError("an engine has an optimizer of its own, which is saved and loaded with it: leave the optimizer out")


def _several(optimizer: Optimizers) -> list[Optimizer]:
    return [] if optimizer is None else [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)


@dataclass(frozen=True)
class _State:
    """What a loop holds on this rank. `names`: of parameters, by id; `weights`: of parameters and buffers that a state dict has."""

    world: World
    mesh: Mesh
    sharded: ShardedModule | None
    names: Mapping[int, str]
    weights: list[Piece]
    optimizers: list[Optimizer]

    @classmethod
    def of(cls, model: nn.Module, optimizers: list[Optimizer]) -> _State:
        sharded = _sharded_module(model)
        world = current_world() if sharded is None else sharded.world
        names = {id(p): name for name, p in model.named_parameters()}
        seen: set[int] = set()
        for p in (p for one in optimizers for group in one.param_groups for p in group["params"]):
            if id(p) not in names:
                raise UsageError(
                    f"the optimizer has a parameter of {list(p.shape)} that is none of the model's: save what it trains as one module"
                )
            if id(p) in seen:
                raise UsageError(f"{names[id(p)]} is in two optimizers, of which one checkpoint cannot tell the state apart")
            seen.add(id(p))
        with private.as_base_tensor():
            weights = replicated_pieces(model, world) if sharded is None else state_pieces(model)
        mesh = Mesh(((DATA, world.num_ranks),)) if sharded is None else sharded.plan.layout.mesh
        return cls(world, mesh, sharded, names, weights, optimizers)

    def _parameters(self) -> Iterator[tuple[Optimizer, nn.Parameter]]:
        for one in self.optimizers:
            for group in one.param_groups:
                for p in group["params"]:
                    yield one, p

    def slots(self) -> list[Piece]:
        """The optimizers' tensors."""
        pieces = []
        for one, p in self._parameters():
            for slot, value in one.state.get(p, {}).items():
                if isinstance(value, Tensor):
                    pieces += self._pieces(self.names[id(p)], slot, value)
        return pieces

    def _pieces(self, name: str, slot: str, value: Tensor) -> list[Piece]:
        if not isinstance(value, Cut):
            return [full_piece(name, "optimizer", value.detach(), slot, owner=self.world.rank == 0)]
        of = value.full
        at, holders = self.mesh.coordinates(self.world.rank), {group.ranks for group in of.groups}
        owner = all(place == 0 or self.mesh.group(self.world.rank, axis) in holders for axis, place in at.items())
        with private.as_base_tensor():
            return pieces_at(name, "optimizer", of.shape, of.spans, value.detach().as_subclass(Tensor), slot, owner)

    def told_of(self, one: Optimizer) -> dict[str, Any]:
        """What of an optimizer is not tensors: its kind, its groups with their options, and numbers in its state."""
        groups = []
        for group in one.param_groups:
            options = {key: _json(f"the optimizer's option {key}", value) for key, value in group.items() if key != "params"}
            groups.append({"parameters": [self.names[id(p)] for p in group["params"]], "options": options})
        values: dict[str, Any] = {}
        for group in one.param_groups:
            for p in group["params"]:
                name = self.names[id(p)]
                numbers = {k: v for k, v in one.state.get(p, {}).items() if not isinstance(v, Tensor)}
                of_parameter = {k: _json(f"the optimizer's state {name}:{k}", v) for k, v in numbers.items()}
                if of_parameter:
                    values[name] = of_parameter
        return {"kind": type(one).__name__, "groups": groups, "values": values}

    def check(self, path: Path, stored: list[dict[str, Any]]) -> None:
        """Raise where these are not the optimizers that were saved."""
        kinds, here = [of["kind"] for of in stored], [type(one).__name__ for one in self.optimizers]
        if kinds != here:
            had = f"the state of {', '.join(kinds)}" if kinds else "no optimizer's state"
            raise CheckpointError(
                f"{path} has {had}, and is loaded into {', '.join(here)}: use the optimizers that it was saved with, in their order"
            )
        for number, (one, of) in enumerate(zip(self.optimizers, stored, strict=True)):
            theirs = [set(group["parameters"]) for group in of["groups"]]
            mine = [{self.names[id(p)] for p in group["params"]} for group in one.param_groups]
            if theirs != mine:
                differ = sorted(set().union(*theirs) ^ set().union(*mine))
                what = f"{differ[0]} is in one of them only" if differ else f"{len(theirs)} and {len(mine)} groups of parameters differ"
                raise CheckpointError(
                    f"{path} has the state of another {of['kind']} (number {number}): {what}; give it the parameters that it was saved "
                    "with, in the same groups"
                )

    def room(self, manifest: Manifest) -> list[tuple[nn.Parameter, list[Piece], Tensor]]:
        """Tensors for the state that was saved, with the pieces that fill them."""
        parameters = {self.names[id(p)]: (p, group) for one in self.optimizers for group in one.param_groups for p in group["params"]}
        rooms = []
        for stored in manifest.tensors:
            if stored.kind != "optimizer" or stored.name not in parameters:
                continue
            p, group = parameters[stored.name]
            of = state_like(p, tuple(stored.shape))
            shape = tuple(stored.shape) if of is None else of.part
            with private.as_base_tensor():
                narrow = DTYPES[stored.dtype].is_floating_point and bool(stored.shape)
                there = p.device if stored.shape or group.get("capturable") or group.get("fused") else torch.device("cpu")
                full = torch.empty(shape, dtype=p.dtype if narrow else DTYPES[stored.dtype], device=there)
                tensor = full if of is None else Cut.of(full, of)
                spans = full_spans(shape) if of is None else of.spans
                pieces = pieces_at(stored.name, "optimizer", tuple(stored.shape), spans, full, stored.slot)
            rooms.append((p, pieces, tensor))
        return rooms

    def draw(self) -> dict[str, int]:
        """Where the model's own random numbers are."""
        return {} if self.sharded is None else self.sharded.draw_state()

    def streams(self) -> list[Piece]:
        """States of the loop's random numbers, which are alike on all ranks."""
        first, device = self.world.rank == 0, self.world.device
        pieces = [full_piece("loop cpu", "random", torch.random.get_rng_state(), owner=first)]
        if device.type == "cuda":
            pieces.append(full_piece("loop cuda", "random", torch.cuda.get_rng_state(device), owner=first))
        return pieces

    def room_of_streams(self, manifest: Manifest) -> tuple[list[Piece], Callable[[Mapping[str, int]], None]]:
        """Pieces for the states that were saved, and what puts them in their place."""
        loops = [t for t in manifest.tensors if t.kind == "random" and t.name.startswith("loop ")]
        tensors = {t.name: torch.empty(t.shape, dtype=DTYPES[t.dtype]) for t in loops}

        def restore(draw: Mapping[str, int]) -> None:
            if "loop cpu" in tensors:
                torch.random.set_rng_state(tensors["loop cpu"])
            if "loop cuda" in tensors and self.world.device.type == "cuda":
                torch.cuda.set_rng_state(tensors["loop cuda"], self.world.device)
            if self.sharded is not None and draw:
                self.sharded.load_draw_state(draw)

        return [full_piece(name, "random", x) for name, x in tensors.items()], restore


def state_like(p: Tensor, shape: tuple[int, ...]) -> FullTensor | None:
    """How an optimizer's tensor of this whole shape lies beside a parameter: cut where both are as large. None where it is whole."""
    if not isinstance(p, Cut) or len(shape) != len(p.full.shape):
        return None
    cuts = tuple((form, group) for form, group in p.full.cuts if shape[form.dim] == p.full.shape[form.dim])
    return FullTensor(p.full.name, shape, cuts) if cuts else None


def _sharded_module(model: nn.Module) -> ShardedModule | None:
    """The divided module that a model is or has."""
    modules = sharded_modules_of(model)
    if len(modules) > 1:
        raise UsageError(f"{type(model).__name__} has {len(modules)} divided modules: save and load each of them in a folder of its own")
    return modules[0][1] if modules else None


def _json(what: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        raise UsageError(
            f"{what} is a {type(value).__name__}, which a checkpoint cannot hold: save numbers, text, and lists and dicts of them"
        ) from None


def _set_options(one: Optimizer, of: Mapping[str, Any]) -> None:
    for group, stored in zip(one.param_groups, of["groups"], strict=True):
        for key, value in stored["options"].items():
            now = group.get(key)
            if isinstance(now, Tensor):
                now.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(now, tuple) else value
