"""Checkpoints of a plain training loop: `weft.save` and `weft.load`.

A checkpoint has the engines' format (`run/state/checkpoint`) and loads into any layout: parameters, buffers, tensors and options of the
loop's optimizers, torch's random generator states, the step, and extra values of the user. The model may be sharded or not. Not covered:
gradients, and optimizer state that is neither a tensor nor JSON.
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

LOOP, USER = "loop", "user"  # keys in a checkpoint's extra values
Optimizers = Optimizer | Sequence[Optimizer] | None


def save(
    folder: str | Path, model: nn.Module | Engine, optimizer: Optimizers = None, *, step: int = 0, keep: int = 0, **extra: Any
) -> Path:
    """Write a checkpoint `folder/step-00000120` of a loop's training state and return its path. Every rank calls it.

    Args:
        model: a module sharded by `weft.auto_parallelize`, an ordinary module, or an engine (which saves itself).
        optimizer: the loop's optimizer, or several. step: number of completed steps. keep: number of newest checkpoints to keep, 0 for all.
        extra: JSON values that the loop needs to resume: `epoch=3`, `scheduler=scheduler.state_dict()`.

    Raises:
        CheckpointError: the checkpoint cannot be written, or a value cannot be stored; no partial checkpoint stays visible. UsageError: an
            optimizer trains parameters that are not the model's, or has state that is neither tensors nor JSON.

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
    loop_state = {"optimizers": [state.told_of(opt) for opt in state.optimizers], "draw": state.draw()}
    pieces = [*state.weights, *state.slots(), *state.streams()]
    added = {key: _json(key, value) for key, value in extra.items()}
    return checkpoint.save(folder, step, pieces, {LOOP: loop_state, USER: added}, state.world, keep=keep)


def load(folder: str | Path, model: nn.Module | Engine, optimizer: Optimizers = None) -> dict[str, Any]:
    """Resume from a checkpoint of `weft.save`, saved in any layout, and return its extra values with `step`. Every rank calls it.

    Args:
        folder: one checkpoint, or a folder of checkpoints, whose newest intact one is loaded.
        model, optimizer: newly built, as for `save`. Without an optimizer only the model is loaded.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or of another model or optimizer; nothing has been changed then.
    """
    if isinstance(model, Engine):
        _refuse_optimizer(optimizer)
        return model.load(folder)
    state = _State.of(model, _several(optimizer))
    path, manifest = checkpoint.opened(folder, state.world)
    loop_state = manifest.extra.get(LOOP)
    if not isinstance(loop_state, dict):
        raise CheckpointError(f"{path} is an engine's checkpoint; engine.load(folder) goes on from it, weft.load from what weft.save wrote")
    checkpoint.match(path, manifest, state.weights, state.world)
    stored = loop_state["optimizers"] if state.optimizers else []
    state.check(path, stored)
    slots = state.room(manifest)
    streams, restore = state.room_of_streams(manifest)
    checkpoint.fill(path, manifest, [*state.weights, *(piece for _, pieces, _ in slots for piece in pieces), *streams], state.world)
    for opt, description in zip(state.optimizers, stored, strict=True):
        _set_options(opt, description)
        for group in opt.param_groups:
            for p in group["params"]:
                opt.state[p] = {pieces[0].slot: tensor for q, pieces, tensor in slots if q is p}
                opt.state[p].update(description["values"].get(state.names[id(p)], {}))
                if not opt.state[p]:
                    del opt.state[p]
    restore(loop_state["draw"])
    return {**manifest.extra.get(USER, {}), "step": manifest.step}


def _refuse_optimizer(optimizer: Optimizers) -> None:
    if optimizer is not None:
        raise UsageError("an engine has an optimizer of its own, which is saved and loaded with it: leave the optimizer out")


def _several(optimizer: Optimizers) -> list[Optimizer]:
    return [] if optimizer is None else [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)


@dataclass(frozen=True)
class _State:
    """State of a loop on this rank. `names`: parameter names by id; `weights`: shards of the parameters and buffers in the state dict."""

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
        visited: set[int] = set()
        for p in (p for opt in optimizers for group in opt.param_groups for p in group["params"]):
            if id(p) not in names:
                raise UsageError(
                    f"the optimizer has a parameter of {list(p.shape)} that is none of the model's: save what it trains as one module"
                )
            if id(p) in visited:
                raise UsageError(f"{names[id(p)]} is in two optimizers, of which one checkpoint cannot tell the state apart")
            visited.add(id(p))
        with private.as_base_tensor():
            weights = replicated_pieces(model, world) if sharded is None else state_pieces(model)
        mesh = Mesh(((DATA, world.num_ranks),)) if sharded is None else sharded.plan.layout.mesh
        return cls(world, mesh, sharded, names, weights, optimizers)

    def _parameters(self) -> Iterator[tuple[Optimizer, nn.Parameter]]:
        for opt in self.optimizers:
            for group in opt.param_groups:
                for p in group["params"]:
                    yield opt, p

    def slots(self) -> list[Piece]:
        """Return the shards of the optimizers' tensors."""
        pieces = []
        for opt, p in self._parameters():
            for slot, value in opt.state.get(p, {}).items():
                if isinstance(value, Tensor):
                    pieces += self._pieces(self.names[id(p)], slot, value)
        return pieces

    def _pieces(self, name: str, slot: str, value: Tensor) -> list[Piece]:
        if not isinstance(value, Cut):
            return [full_piece(name, "optimizer", value.detach(), slot, owner=self.world.rank == 0)]
        spec = value.full
        coordinates, sharding_ranks = self.mesh.coordinates(self.world.rank), {group.ranks for group in spec.groups}
        owner = all(place == 0 or self.mesh.group(self.world.rank, axis) in sharding_ranks for axis, place in coordinates.items())
        with private.as_base_tensor():
            return pieces_at(name, "optimizer", spec.shape, spec.spans, value.detach().as_subclass(Tensor), slot, owner)

    def told_of(self, one: Optimizer) -> dict[str, Any]:
        """Return an optimizer's non-tensor state: its class, its groups with their options, and numbers in its state."""
        groups = []
        for group in one.param_groups:
            options = {key: _json(f"the optimizer's option {key}", value) for key, value in group.items() if key != "params"}
            groups.append({"parameters": [self.names[id(p)] for p in group["params"]], "options": options})
        values: dict[str, Any] = {}
        for group in one.param_groups:
            for p in group["params"]:
                name = self.names[id(p)]
                numbers = {k: v for k, v in one.state.get(p, {}).items() if not isinstance(v, Tensor)}
                json_numbers = {k: _json(f"the optimizer's state {name}:{k}", v) for k, v in numbers.items()}
                if json_numbers:
                    values[name] = json_numbers
        return {"kind": type(one).__name__, "groups": groups, "values": values}

    def check(self, path: Path, stored: list[dict[str, Any]]) -> None:
        """Raise CheckpointError if these are not the optimizers that were saved."""
        kinds, present = [saved_state["kind"] for saved_state in stored], [type(opt).__name__ for opt in self.optimizers]
        if kinds != present:
            contents = f"the state of {', '.join(kinds)}" if kinds else "no optimizer's state"
            raise CheckpointError(
                f"{path} has {contents}, and is loaded into {', '.join(present)}: use the optimizers that it was saved with, in their order"
            )
        for number, (opt, saved_state) in enumerate(zip(self.optimizers, stored, strict=True)):
            saved = [set(group["parameters"]) for group in saved_state["groups"]]
            current = [{self.names[id(p)] for p in group["params"]} for group in opt.param_groups]
            if saved != current:
                differ = sorted(set().union(*saved) ^ set().union(*current))
                what = f"{differ[0]} is in one of them only" if differ else f"{len(saved)} and {len(current)} groups of parameters differ"
                raise CheckpointError(
                    f"{path} has the state of another {saved_state['kind']} (number {number}): {what}; give it the parameters that "
                    "it was saved with, in the same groups"
                )

    def room(self, manifest: Manifest) -> list[tuple[nn.Parameter, list[Piece], Tensor]]:
        """Allocate tensors for the saved optimizer state; return (parameter, shards to fill, tensor) of each."""
        parameters = {self.names[id(p)]: (p, group) for opt in self.optimizers for group in opt.param_groups for p in group["params"]}
        allocated = []
        for stored in manifest.tensors:
            if stored.kind != "optimizer" or stored.name not in parameters:
                continue
            p, group = parameters[stored.name]
            spec = state_like(p, tuple(stored.shape))
            shape = tuple(stored.shape) if spec is None else spec.part
            with private.as_base_tensor():
                narrow = DTYPES[stored.dtype].is_floating_point and bool(stored.shape)
                device = p.device if stored.shape or group.get("capturable") or group.get("fused") else torch.device("cpu")
                full = torch.empty(shape, dtype=p.dtype if narrow else DTYPES[stored.dtype], device=device)
                tensor = full if spec is None else Cut.of(full, spec)
                spans = full_spans(shape) if spec is None else spec.spans
                pieces = pieces_at(stored.name, "optimizer", tuple(stored.shape), spans, full, stored.slot)
            allocated.append((p, pieces, tensor))
        return allocated

    def draw(self) -> dict[str, int]:
        """Return the seed and step of the model's random draws."""
        return {} if self.sharded is None else self.sharded.draw_state()

    def streams(self) -> list[Piece]:
        """Return torch's random generator states, which are equal on all ranks."""
        first, device = self.world.rank == 0, self.world.device
        pieces = [full_piece("loop cpu", "random", torch.random.get_rng_state(), owner=first)]
        if device.type == "cuda":
            pieces.append(full_piece("loop cuda", "random", torch.cuda.get_rng_state(device), owner=first))
        return pieces

    def room_of_streams(self, manifest: Manifest) -> tuple[list[Piece], Callable[[Mapping[str, int]], None]]:
        """Return shards to load the saved generator states into, and a function that restores them."""
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
    """Return the spec of an optimizer tensor of this shape: sharded where its dimensions match the parameter's. None if not sharded."""
    if not isinstance(p, Cut) or len(shape) != len(p.full.shape):
        return None
    cuts = tuple((form, group) for form, group in p.full.cuts if shape[form.dim] == p.full.shape[form.dim])
    return FullTensor(p.full.name, shape, cuts) if cuts else None


def _sharded_module(model: nn.Module) -> ShardedModule | None:
    """Return the sharded module that a model is or contains; None if there is none."""
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
