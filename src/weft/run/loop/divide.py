"""Sharding a module in place for a plain training loop: `net(x)`, `loss.backward()` and `opt.step()` stay the user's.

The plan has no pipeline. The module object stays the same; its parameters become this rank's shards and its forward the lowered graph. A
model that could not be captured is replicated and keeps its own forward. Gradients are reduced while backward runs and are complete when
`loss.backward()` returns.

The loss is the user's, over this rank's samples, so gradients are averaged over the ranks that reduce them: that is the gradient of the
mean over all samples if the loss is a mean over samples, and also right for terms of the weights alone (a penalty on their norm). What the
model itself computes is exact over the whole batch (batch norm included): its gradient contributions are scaled to survive the averaging.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from weft.capture.fakes import fake_mode
from weft.capture.modes import training_modes
from weft.errors import Infeasible, UsageError
from weft.model.graph import Variable
from weft.plan.beside import FIXED
from weft.plan.mesh import Mesh
from weft.plan.placement import is_shard
from weft.plan.plan import Plan
from weft.run.build import Source, build
from weft.run.loop.called_parts import let_parts_be_called
from weft.run.loop.cut import CutParameter, FullTensor
from weft.run.loop.cut_optimizer import full_optimizer_state, guard_optimizers
from weft.run.loop.forward import ByGraphs, Captures
from weft.run.loop.module import REPLACED, ShardedModule, sharded_modules_of, tensors_outside
from weft.run.loop.original import Original
from weft.run.loop.unchanged import Unchanged
from weft.run.loop.wrappers import guard_wrappers
from weft.run.reduce.exchange import Exchange
from weft.run.state.optimizer import OptimizerSpec
from weft.run.state.parameters import place
from weft.run.state.precision import set_products
from weft.run.state.spans import block_of, shape_of
from weft.run.training_parts import Parts
from weft.run.uncaptured.replicated import keep_replicated
from weft.world.current import current_world
from weft.world.world import World


def divide(model: nn.Module, source: Source, plan: Plan, batch: Any, world: World) -> None:
    """Shard `model` in place under `plan`; `batch` holds the arguments of a call with the global batch.

    Raises:
        Infeasible: a plan with a pipeline, microbatches, compressed gradients, staleness or servers, which need the engine; or a model that
            could not be captured and would train something else on shards of the batch.
    """
    layout = plan.layout
    has_stages = max(layout.num_stages, layout.microbatches, layout.branch) > 1
    if has_stages or layout.compress != "none" or layout.staleness or layout.servers:
        raise Infeasible(
            f"{layout}: a plain loop owns its backward and its optimizer, so pipeline, microbatches, branch, compress, "
            "staleness and servers do not apply; use weft.parallelize"
        )
    guard_wrappers()
    set_products(layout.precision, world.device)
    if layout.compile == "on":
        raise Infeasible(f"{layout}: a plain loop's module is not compiled; leave compile out, or use weft.parallelize")
    if layout.split != FIXED:
        raise Infeasible(f"{layout}: a plain loop's module keeps its data x context; leave split out, or use weft.parallelize")
    if layout.batch_norm == "local":
        raise Infeasible(
            f"{layout}: statistics of each replica would be kept apart in a plain loop; leave batch_norm out, or use weft.parallelize"
        )
    if plan.uncaptured and layout.zero:
        raise Infeasible(f"{layout}: {plan.model} could not be captured, so a plain loop keeps all of it on every rank; leave zero out")
    if plan.uncaptured:
        ShardedModule(model, plan, world, keep_replicated(model, source, plan, batch, world)).bind()
        return
    parts = build(plan, source, batch, None, world, OptimizerSpec(), torch.initial_seed(), outputs=True)
    names = [v.name for v in parts.graph.parameters if v.pairs]
    if names:
        raise Infeasible(f"parameter {names[0]} is complex, which a plain loop's optimizer cannot be given in parts; use weft.parallelize")
    _mark_cut(parts, world, layout.mesh)
    original = Original(model, REPLACED, fake_mode() if source.deferred is None else source.deferred.fake_mode)
    place(model, parts.parameters, parts.buffers)
    let_parts_be_called(model, _cut_buffers(parts, world, layout.mesh), world)
    captures = Captures(parts, plan, source, batch, world, original, inspect.signature(model.forward), training_modes(model))
    exchange = Exchange(parts.groups, parts.parameters, world)
    ShardedModule(model, plan, world, ByGraphs(model, parts, captures, Unchanged(model), exchange)).bind()
    _cut_what_is_loaded(model, parts)


def full_state_dict(model: nn.Module | Optimizer) -> dict[str, Any] | None:
    """Return the full parameters and buffers of a sharded model under its own names on rank 0, None elsewhere. Every rank calls it.

    For an optimizer, return its state dict as plain PyTorch has it, which `load_state_dict` takes in any layout.

    Raises:
        UsageError: the model is not sharded and contains no sharded module.
    """
    if isinstance(model, Optimizer):
        return full_optimizer_state(model, current_world().rank == 0)
    sharded_modules = sharded_modules_of(model)
    if not sharded_modules:
        raise UsageError(
            f"{type(model).__name__} is not divided: give the module that was built under weft.auto_parallelize; "
            "an engine has full_state_dict() of its own"
        )
    states = [(prefix, module.way.full_state()) for prefix, module in sharded_modules]
    outside = {name: x.detach().cpu().clone() for name, x in tensors_outside(model).items()}
    if sharded_modules[0][1].world.rank != 0:
        return None
    return outside | {prefix + name: x for prefix, state in states for name, x in (state or {}).items()}


def _mark_cut(parts: Parts, world: World, mesh: Mesh) -> None:
    """Replace sharded parameters by `ShardedParameter`s, which carry their global spec."""
    variables = {v.name: v for v in parts.graph.parameters}
    for name, spec in parts.specs.items():
        if spec.shape != spec.global_shape:
            global_spec = _full_tensor(parts, variables[name], world, mesh)
            if global_spec.spans != spec.spans:
                raise AssertionError(f"{name} is cut {global_spec.places}, and lies at {spec.spans}")
            guard_optimizers()
            sharded_parameter = CutParameter.of(parts.parameters[name], global_spec)
            parts.parameters[name] = sharded_parameter
            if variables[name].value in parts.variables:
                parts.variables[variables[name].value] = sharded_parameter


def _cut_buffers(parts: Parts, world: World, mesh: Mesh) -> dict[str, FullTensor]:
    """Return the global specs of the sharded buffers by name."""
    specs = {name: _full_tensor(parts, variable, world, mesh) for name, (variable, _) in parts.blocks.items() if name in parts.buffers}
    return {name: spec for name, spec in specs.items() if spec.cuts}


def _full_tensor(parts: Parts, variable: Variable, world: World, mesh: Mesh) -> FullTensor:
    placements = tuple((p, world.group(mesh.group(world.rank, axis))) for axis, p in parts.stored(variable).items() if is_shard(p))
    return FullTensor(variable.name, variable.tensor.shape, placements)


def _cut_what_is_loaded(model: nn.Module, parts: Parts) -> None:
    """Register hooks: `load_state_dict` takes full tensors for shards, and `state_dict` refuses to return shards."""
    places = {name: (spec.global_shape, spec.spans) for name, spec in parts.specs.items()}
    places |= {name: (variable.tensor.shape, spans) for name, (variable, spans) in parts.blocks.items() if name in parts.buffers}
    names = {id(x): name for name, x in (*parts.parameters.items(), *parts.buffers.items())}
    for module in model.modules():
        named_tensors = [kind(recurse=False, remove_duplicate=False) for kind in (module.named_parameters, module.named_buffers)]
        shards = {}
        for local, x in chain(*named_tensors):
            if id(x) in names and places[names[id(x)]][0] != shape_of(places[names[id(x)]][1]):
                shards[local] = places[names[id(x)]]
        if shards:
            module.register_load_state_dict_pre_hook(partial(_take_parts, shards))  # type: ignore[no-untyped-call]
            module.register_state_dict_pre_hook(_refuse_parts)  # type: ignore[no-untyped-call]


def _take_parts(cuts: Mapping[str, Any], module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for local, (full, spans) in cuts.items():
        value = state.get(prefix + local)
        if value is not None and tuple(value.shape) == full:
            state[prefix + local] = block_of(value, spans)


def _refuse_parts(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    raise UsageError(
        f"{prefix or type(module).__name__ + '.'}state_dict() would hold only this rank's shards of sharded weights; "
        "weft.full_state_dict(net), called on every rank, returns the full one on rank 0, and net.load_state_dict takes it"
    )
