"""Checkpoints of a plain training loop: `shardwise.save` and `shardwise.load`.

A checkpoint has the engines' format (`run/checkpoint`) and loads into any layout: parameters, buffers, tensors and options of the
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

from shardwise.errors import CheckpointError, UsageError
from shardwise.plan.ir.axis import DATA
from shardwise.plan.ir.mesh import Mesh
from shardwise.run import checkpoint
from shardwise.run.checkpoint import StateShard, full_shard
from shardwise.run.checkpoint.manifest import Manifest
from shardwise.run.checkpoint.state_shard import DTYPES
from shardwise.run.engine import Engine
from shardwise.run.loop.module import ShardedModule, sharded_modules_of, state_shards
from shardwise.run.loop.sharded_tensor import GlobalTensorSpec, ShardedTensor
from shardwise.run.state.block_ranges import full_ranges, shards_at
from shardwise.run.uncaptured.replicated import replicated_shards
from shardwise.world import private
from shardwise.world.launch.current import current_world
from shardwise.world.world import World

LOOP, USER = "loop", "user"  # keys in a checkpoint's extra values
Optimizers = Optimizer | Sequence[Optimizer] | None


def save(
    folder: str | Path, model: nn.Module | Engine, optimizer: Optimizers = None, *, step: int = 0, keep: int = 0, **extra: Any
) -> Path:
    """Write a checkpoint `folder/step-00000120` of a loop's training state and return its path. Every rank calls it.

    Args:
        model: a module sharded by `shardwise.auto_parallelize`, an ordinary module, or an engine (which saves itself).
        optimizer: the loop's optimizer, or several. step: number of completed steps. keep: number of newest checkpoints to keep, 0 for all.
        extra: JSON values that the loop needs to resume: `epoch=3`, `scheduler=scheduler.state_dict()`.

    Raises:
        CheckpointError: the checkpoint cannot be written, or a value cannot be stored; no partial checkpoint stays visible. UsageError: an
            optimizer trains parameters that are not the model's, or has state that is neither tensors nor JSON.

    >>> import tempfile, torch, shardwise
    >>> net = torch.nn.Linear(2, 2)
    >>> opt = torch.optim.SGD(net.parameters(), lr=0.1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = shardwise.save(folder, net, opt, step=7, epoch=1)
    ...     path.name, shardwise.load(folder, net, opt)
    ('step-00000007', {'epoch': 1, 'step': 7})
    """
    if isinstance(model, Engine):
        _refuse_optimizer(optimizer)
        return model.save(folder, extra, keep)
    state = _LoopState.from_model(model, _as_list(optimizer))
    loop_state = {"optimizers": [state.describe_optimizer(opt) for opt in state.optimizers], "draw": state.draw_state()}
    loop_state["loaders"] = [position.state() for position in state.world.loader_positions.positions]
    pieces = [*state.weights, *state.optimizer_shards(), *state.generator_states()]
    added = {key: _to_json(key, value) for key, value in extra.items()}
    return checkpoint.save(folder, step, pieces, {LOOP: loop_state, USER: added}, state.world, keep=keep)


def load(folder: str | Path, model: nn.Module | Engine, optimizer: Optimizers = None) -> dict[str, Any]:
    """Resume from a checkpoint of `shardwise.save`, saved in any layout, and return its extra values with `step`. Every rank calls it.

    Args:
        folder: one checkpoint, or a folder of checkpoints, whose newest intact one is loaded.
        model, optimizer: newly built, as for `save`. Without an optimizer only the model is loaded.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or of another model or optimizer; nothing has been changed then.
    """
    if isinstance(model, Engine):
        _refuse_optimizer(optimizer)
        return model.load(folder)
    state = _LoopState.from_model(model, _as_list(optimizer))
    path, manifest = checkpoint.open_checkpoint(folder, state.world)
    loop_state = manifest.extra.get(LOOP)
    if not isinstance(loop_state, dict):
        raise CheckpointError(
            f"{path} is an engine's checkpoint; engine.load(folder) goes on from it, shardwise.load from what shardwise.save wrote"
        )
    checkpoint.check_same_model(path, manifest, state.weights, state.world)
    stored = loop_state["optimizers"] if state.optimizers else []
    state.check_optimizers(path, stored)
    slots = state.allocate_slots(manifest)
    streams, restore = state.allocate_generator_states(manifest)
    checkpoint.fill_shards(path, manifest, [*state.weights, *(piece for _, pieces, _ in slots for piece in pieces), *streams], state.world)
    for opt, description in zip(state.optimizers, stored, strict=True):
        _set_options(opt, description)
        for group in opt.param_groups:
            for p in group["params"]:
                opt.state[p] = {pieces[0].slot: tensor for q, pieces, tensor in slots if q is p}
                opt.state[p].update(description["values"].get(state.names[id(p)], {}))
                if not opt.state[p]:
                    del opt.state[p]
    restore(loop_state["draw"])
    state.world.loader_positions.load(loop_state.get("loaders", []))
    return {**manifest.extra.get(USER, {}), "step": manifest.step}


def _refuse_optimizer(optimizer: Optimizers) -> None:
    if optimizer is not None:
        raise UsageError("an engine has an optimizer of its own, which is saved and loaded with it: leave the optimizer out")


def _as_list(optimizer: Optimizers) -> list[Optimizer]:
    return [] if optimizer is None else [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)


@dataclass(frozen=True)
class _LoopState:
    """State of a loop on this rank. `names`: parameter names by id; `weights`: shards of the parameters and buffers in the state dict."""

    world: World
    mesh: Mesh
    sharded_module: ShardedModule | None
    names: Mapping[int, str]
    weights: list[StateShard]
    optimizers: list[Optimizer]

    @classmethod
    def from_model(cls, model: nn.Module, optimizers: list[Optimizer]) -> _LoopState:
        sharded = _find_sharded_module(model)
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
            weights = replicated_shards(model, world) if sharded is None else state_shards(model)
        mesh = Mesh(((DATA, world.num_ranks),)) if sharded is None else sharded.plan.layout.mesh
        return cls(world, mesh, sharded, names, weights, optimizers)

    def _parameters(self) -> Iterator[tuple[Optimizer, nn.Parameter]]:
        for opt in self.optimizers:
            for group in opt.param_groups:
                for p in group["params"]:
                    yield opt, p

    def optimizer_shards(self) -> list[StateShard]:
        """Return the shards of the optimizers' tensors."""
        pieces = []
        for opt, p in self._parameters():
            for slot, value in opt.state.get(p, {}).items():
                if isinstance(value, Tensor):
                    pieces += self._slot_shards(self.names[id(p)], slot, value)
        return pieces

    def _slot_shards(self, name: str, slot: str, value: Tensor) -> list[StateShard]:
        if not isinstance(value, ShardedTensor):
            return [full_shard(name, "optimizer", value.detach(), slot, is_owner=self.world.rank == 0)]
        spec = value.spec
        coordinates, sharding_ranks = self.mesh.coordinates(self.world.rank), {group.ranks for group in spec.groups}
        owner = all(place == 0 or self.mesh.group(self.world.rank, axis) in sharding_ranks for axis, place in coordinates.items())
        with private.as_base_tensor():
            return shards_at(name, "optimizer", spec.global_shape, spec.block_ranges, value.detach().as_subclass(Tensor), slot, owner)

    def describe_optimizer(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's non-tensor state: its class, its groups with their options, and numbers in its state."""
        groups = []
        for group in optimizer.param_groups:
            options = {key: _to_json(f"the optimizer's option {key}", value) for key, value in group.items() if key != "params"}
            groups.append({"parameters": [self.names[id(p)] for p in group["params"]], "options": options})
        values: dict[str, Any] = {}
        for group in optimizer.param_groups:
            for p in group["params"]:
                name = self.names[id(p)]
                numbers = {k: v for k, v in optimizer.state.get(p, {}).items() if not isinstance(v, Tensor)}
                json_numbers = {k: _to_json(f"the optimizer's state {name}:{k}", v) for k, v in numbers.items()}
                if json_numbers:
                    values[name] = json_numbers
        return {"kind": type(optimizer).__name__, "groups": groups, "values": values}

    def check_optimizers(self, path: Path, stored: list[dict[str, Any]]) -> None:
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

    def allocate_slots(self, manifest: Manifest) -> list[tuple[nn.Parameter, list[StateShard], Tensor]]:
        """Allocate tensors for the saved optimizer state; return (parameter, shards to fill, tensor) of each."""
        parameters = {self.names[id(p)]: (p, group) for opt in self.optimizers for group in opt.param_groups for p in group["params"]}
        allocated = []
        for stored in manifest.tensors:
            if stored.kind != "optimizer" or stored.name not in parameters:
                continue
            p, group = parameters[stored.name]
            spec = slot_spec(p, tuple(stored.shape))
            shape = tuple(stored.shape) if spec is None else spec.local_shape
            with private.as_base_tensor():
                narrow = DTYPES[stored.dtype].is_floating_point and bool(stored.shape)
                device = p.device if stored.shape or group.get("capturable") or group.get("fused") else torch.device("cpu")
                full = torch.empty(shape, dtype=p.dtype if narrow else DTYPES[stored.dtype], device=device)
                tensor = full if spec is None else ShardedTensor.from_local(full, spec)
                spans = full_ranges(shape) if spec is None else spec.block_ranges
                pieces = shards_at(stored.name, "optimizer", tuple(stored.shape), spans, full, stored.slot)
            allocated.append((p, pieces, tensor))
        return allocated

    def draw_state(self) -> dict[str, int]:
        """Return the seed and step of the model's random draws."""
        return {} if self.sharded_module is None else self.sharded_module.draw_state()

    def generator_states(self) -> list[StateShard]:
        """Return torch's random generator states, which are equal on all ranks."""
        first, device = self.world.rank == 0, self.world.device
        pieces = [full_shard("loop cpu", "random", torch.random.get_rng_state(), is_owner=first)]
        if device.type == "cuda":
            pieces.append(full_shard("loop cuda", "random", torch.cuda.get_rng_state(device), is_owner=first))
        return pieces

    def allocate_generator_states(self, manifest: Manifest) -> tuple[list[StateShard], Callable[[Mapping[str, int]], None]]:
        """Return shards to load the saved generator states into, and a function that restores them."""
        loops = [t for t in manifest.tensors if t.kind == "random" and t.name.startswith("loop ")]
        tensors = {t.name: torch.empty(t.shape, dtype=DTYPES[t.dtype]) for t in loops}

        def restore(draw: Mapping[str, int]) -> None:
            if "loop cpu" in tensors:
                torch.random.set_rng_state(tensors["loop cpu"])
            if "loop cuda" in tensors and self.world.device.type == "cuda":
                torch.cuda.set_rng_state(tensors["loop cuda"], self.world.device)
            if self.sharded_module is not None and draw:
                self.sharded_module.load_draw_state(draw)

        return [full_shard(name, "random", x) for name, x in tensors.items()], restore


def slot_spec(p: Tensor, shape: tuple[int, ...]) -> GlobalTensorSpec | None:
    """Return the spec of an optimizer tensor of this shape: sharded where its dimensions match the parameter's. None if not sharded."""
    if not isinstance(p, ShardedTensor) or len(shape) != len(p.spec.global_shape):
        return None
    cuts = tuple((form, group) for form, group in p.spec.placements if shape[form.dim] == p.spec.global_shape[form.dim])
    return GlobalTensorSpec(p.spec.name, shape, cuts) if cuts else None


def _find_sharded_module(model: nn.Module) -> ShardedModule | None:
    """Return the sharded module that a model is or contains; None if there is none."""
    modules = sharded_modules_of(model)
    if len(modules) > 1:
        raise UsageError(f"{type(model).__name__} has {len(modules)} divided modules: save and load each of them in a folder of its own")
    return modules[0][1] if modules else None


def _to_json(description: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        raise UsageError(
            f"{description} is a {type(value).__name__}, which a checkpoint cannot hold: save numbers, text, and lists and dicts of them"
        ) from None


def _set_options(optimizer: Optimizer, description: Mapping[str, Any]) -> None:
    for group, stored in zip(optimizer.param_groups, description["groups"], strict=True):
        for key, value in stored["options"].items():
            now = group.get(key)
            if isinstance(now, Tensor):
                now.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(now, tuple) else value
