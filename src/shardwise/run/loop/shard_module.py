"""Sharding a module in place for a plain training loop: `net(x)`, `loss.backward()` and `opt.step()` stay the user's.

The plan has no pipeline. The module object stays the same; its parameters become this rank's shards and its forward the lowered graph. A
model that could not be captured is replicated and keeps its own forward. Gradients are reduced while backward runs and are complete when
`loss.backward()` returns.

The loss is the user's, over this rank's samples, so gradients are averaged over the ranks that reduce them: that is the gradient of the
mean over all samples if the loss is a mean over samples, and also right for terms of the weights alone (a penalty on their norm). What the
model itself computes is exact over the whole batch (batch norm included): its gradient contributions are scaled to survive the averaging.

Submodules have hooks for calling them directly: `model.decode(z)`, or an encoder before generation. While such a call runs, sharded tensors
are replaced by all-gathered full ones, so that the module's own code computes what it computes in one process; every rank that stores a
shard must call it. In backward each rank gets its shard of the mean of the ranks' gradients. The hooks refer to no module, so that a copy
of the model can share them. Where the model is traced, or runs on gathered weights, no tensor is sharded and they do nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial, wraps
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.capture.fakes import Fake, fake_mode
from shardwise.capture.modes import training_modes
from shardwise.errors import Infeasible, UsageError
from shardwise.lower.redistribute import redistribute, scale_gradient
from shardwise.model.graph import Variable
from shardwise.plan.compatibility import EACH, SPLIT_FIXED
from shardwise.plan.ir.mesh import Mesh
from shardwise.plan.ir.placement import D, is_shard
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.run.gradients.loop_reducer import LoopGradientReducer
from shardwise.run.gradients.outside_parameters import patch_autograd
from shardwise.run.loop.attribute_watch import AttributeWatch
from shardwise.run.loop.earlier_parameters import keep_parameter_objects
from shardwise.run.loop.forward import GraphReplica, ModuleCaptures
from shardwise.run.loop.module import OVERRIDDEN_ATTRIBUTES, ShardedModule, sharded_modules_of, unsharded_tensors
from shardwise.run.loop.mutation_guard import MutationGuard
from shardwise.run.loop.optimizer_state import full_optimizer_state, patch_optimizer_methods
from shardwise.run.loop.optimizer_steps import OptimizerSteps
from shardwise.run.loop.original_module import OriginalModule
from shardwise.run.loop.sharded_tensor import GlobalTensorSpec, ShardedParameter, ShardedTensor
from shardwise.run.parts.rank_model import RankModel
from shardwise.run.rank_agreement import digest_tensors
from shardwise.run.rank_model.build import BuildRequest, build_rank_model
from shardwise.run.rank_model.model_source import ModelSource
from shardwise.run.state.block_ranges import block_of, block_shape
from shardwise.run.state.parameters import install_tensors
from shardwise.run.state.precision import set_matmul_precision
from shardwise.run.uncaptured.replicated import replicate_module
from shardwise.world import private
from shardwise.world.launch.current import current_world
from shardwise.world.world import World

TensorTables = list[tuple[dict[str, Any], dict[str, Any]]]  # tensor tables of modules, each with its original items


@dataclass(frozen=True)
class SubmoduleCallHooks:
    """Forward hooks of one submodule. `sharded_buffers`: by local name; sharded parameters carry their own spec."""

    world: World
    sharded_buffers: Mapping[str, GlobalTensorSpec]
    _saved_tables: list[TensorTables] = field(default_factory=list)

    def __deepcopy__(self, memo: object) -> Self:
        return type(self)(self.world, self.sharded_buffers)

    def gather_tensors(self, submodule: nn.Module, args: Any, kwargs: Any) -> None:
        """Replace the submodule's shards by full tensors.

        Raises:
            UsageError: a submodule in training mode would write a sharded buffer, or would compute batch norm statistics over samples
                that other ranks do not have.
        """
        if any(isinstance(m, private.BatchNorm) and m.training for m in submodule.modules()) and not _is_traced(submodule):
            self._check_inputs_equal(submodule, (args, kwargs))
        full: dict[int, Tensor] = {}
        with private.as_base_tensor():
            for name, buffer in submodule.named_buffers():
                if name in self.sharded_buffers and buffer.shape != self.sharded_buffers[name].global_shape:
                    if submodule.training:
                        raise UsageError(
                            f"{type(submodule).__name__} is called by itself and trains, and its {name} lies in pieces on several ranks, "
                            "where it would write the whole; call the model, part.eval() before, or use a layout that cuts no weights "
                            '(plan="data=N")'
                        )
                    full[id(buffer)] = _gather_tensor(buffer, self.sharded_buffers[name])
            full |= {id(p): _gather_tensor(p, p.spec) for p in submodule.parameters() if isinstance(p, ShardedTensor)}
        tables: TensorTables = (
            [(table, dict(table)) for module in submodule.modules() for table in private.tensor_tables(module)] if full else []
        )
        self._saved_tables.append(tables)
        for table, items in tables:
            table.update({key: full[id(x)] for key, x in items.items() if id(x) in full})

    def _check_inputs_equal(self, submodule: nn.Module, inputs: Any) -> None:
        """Raise UsageError if ranks call the submodule with different tensors."""
        local_digest = torch.tensor([int(digest_tensors(inputs), 16)], device=self.world.device)
        if len(set(self.world.world_group.all_gather(local_digest, 0).tolist())) > 1:
            raise UsageError(
                f"{type(submodule).__name__} is called by itself and trains, with other samples on other ranks, of which its batch norm "
                f"would "
                "take statistics apart; call the model, or part.eval() before, or let every rank load the whole batch"
            )

    def restore_shards(self, submodule: nn.Module, args: object, output: object) -> None:
        """Restore the shards."""
        for table, items in self._saved_tables.pop() if self._saved_tables else ():
            table.update(items)


def register_submodule_hooks(model: nn.Module, buffers: Mapping[str, GlobalTensorSpec], world: World) -> None:
    """Register hooks on every submodule of `model` that has sharded tensors or batch norm. `sharded_buffers`: the sharded buffers by
    name."""
    for path, part in model.named_modules() if world.num_ranks > 1 else ():
        sharded_buffers = {name.removeprefix(f"{path}."): spec for name, spec in buffers.items() if name.startswith(f"{path}.")}
        has_norm = any(isinstance(m, private.BatchNorm) for m in part.modules())
        if path and (sharded_buffers or has_norm or any(isinstance(p, ShardedTensor) for p in part.parameters())):
            hooks = SubmoduleCallHooks(world, sharded_buffers)
            part.register_forward_pre_hook(hooks.gather_tensors, with_kwargs=True)
            part.register_forward_hook(hooks.restore_shards, always_call=True)


def _is_traced(submodule: nn.Module) -> bool:
    return isinstance(next(chain(submodule.parameters(), submodule.buffers()), None), Fake)


def _gather_tensor(x: Tensor, spec: GlobalTensorSpec) -> Tensor:
    for placement, group in reversed(spec.placements):
        x = scale_gradient(redistribute(x, placement, D, group), 1.0 / group.size)
    return x


def _refuse_kept_keys(layout: Layout) -> None:
    """Refuse what the loop itself decides: what backward reads, the optimizer's state and the dtype of gradients. Raises Infeasible."""
    if layout.recompute != "none" or layout.offload != "none":
        raise Infeasible(
            f"{layout}: a plain loop keeps what its own backward reads, and its optimizer is the user's, so recompute and offload do not "
            "apply; leave them out (a model may checkpoint its own layers: torch.utils.checkpoint), or use shardwise.parallelize"
        )
    if layout.gradients != "float32":
        raise Infeasible(
            f"{layout}: in a plain loop the optimizer is the user's, and takes gradients in the dtype of weights; leave gradients out, or "
            "use shardwise.parallelize"
        )


def shard_module(model: nn.Module, source: ModelSource, plan: Plan, batch: Any, world: World) -> None:
    """Shard `model` in place under `plan`; `batch` holds the arguments of a call with the global batch.

    Raises:
        Infeasible: a plan with a pipeline, microbatches, compressed gradients, staleness, servers or shard, which need the engine; or a
            model that could not be captured and would train something else on shards of the batch.
    """
    layout = plan.layout
    has_stages = max(layout.num_stages, layout.microbatches, layout.branch) > 1
    if has_stages or layout.compress != "none" or layout.staleness or layout.servers or layout.shard:
        raise Infeasible(
            f"{layout}: a plain loop owns its backward and its optimizer, so pipeline, microbatches, branch, compress, "
            "staleness, servers and shard do not apply; use shardwise.parallelize"
        )
    if layout.scatter != EACH:
        raise Infeasible(f"{layout}: a plain loop scatters where its own shardwise.accumulate ends; leave scatter out")
    _refuse_kept_keys(layout)
    patch_wrappers()
    if world.num_ranks > 1:
        patch_autograd()
    set_matmul_precision(layout.precision, world.device)
    if layout.compile == "on":
        raise Infeasible(f"{layout}: a plain loop's module is not compiled; leave compile out, or use shardwise.parallelize")
    if layout.split != SPLIT_FIXED:
        raise Infeasible(f"{layout}: a plain loop's module keeps its data x context; leave split out, or use shardwise.parallelize")
    if layout.batch_norm == "local":
        raise Infeasible(
            f"{layout}: statistics of each replica would be kept apart in a plain loop; leave batch_norm out, or use shardwise.parallelize"
        )
    if plan.uncaptured and layout.zero:
        raise Infeasible(f"{layout}: {plan.model} could not be captured, so a plain loop keeps all of it on every rank; leave zero out")
    if plan.uncaptured:
        ShardedModule(model, plan, world, replicate_module(model, source, plan, batch, world)).install()
        return
    parts = build_rank_model(BuildRequest(plan, source, batch, None, world, seed=torch.initial_seed(), returns_outputs=True))
    names = [v.name for v in parts.graph.parameters if v.is_complex_pairs]
    if names:
        raise Infeasible(
            f"parameter {names[0]} is complex, which a plain loop's optimizer cannot be given in parts; use shardwise.parallelize"
        )
    _mark_sharded_parameters(parts, world, layout.mesh)
    original = OriginalModule(model, OVERRIDDEN_ATTRIBUTES, fake_mode() if source.deferred is None else source.deferred.fake_mode)
    keep_parameter_objects(model, parts)
    install_tensors(model, parts.parameters, parts.buffers)
    register_submodule_hooks(model, _sharded_buffer_specs(parts, world, layout.mesh), world)
    captures = ModuleCaptures(
        parts, plan, source, batch, world, original, inspect.signature(model.forward), training_modes(model),
        attribute_reads=set(source.attribute_reads),
    )  # fmt: skip
    exchange = LoopGradientReducer(parts.groups, parts.parameters, world)
    attributes = AttributeWatch(model, captures.attribute_reads)
    replica = GraphReplica(model, parts, captures, MutationGuard(model), attributes, exchange, OptimizerSteps(model))
    ShardedModule(model, plan, world, replica).install()
    attributes.changes()  # as the model is now
    _register_state_dict_hooks(model, parts)


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
            f"{type(model).__name__} is not divided: give the module that was built under shardwise.auto_parallelize; "
            "an engine has full_state_dict() of its own"
        )
    states = [(prefix, module.replica.full_state()) for prefix, module in sharded_modules]
    outside = {name: x.detach().cpu().clone() for name, x in unsharded_tensors(model).items()}
    if sharded_modules[0][1].world.rank != 0:
        return None
    return outside | {prefix + name: x for prefix, state in states for name, x in (state or {}).items()}


def _mark_sharded_parameters(rank_model: RankModel, world: World, mesh: Mesh) -> None:
    """Replace sharded parameters by `ShardedParameter`s, which carry their global spec."""
    variables = {v.name: v for v in rank_model.graph.parameters}
    for name, spec in rank_model.local_parameters.items():
        if spec.shape != spec.global_shape:
            global_spec = _global_tensor_spec(rank_model, variables[name], world, mesh)
            if global_spec.block_ranges != spec.block_ranges:
                raise AssertionError(f"{name} is cut {global_spec.shards}, and lies at {spec.block_ranges}")
            patch_optimizer_methods()
            sharded_parameter = ShardedParameter.from_local(rank_model.parameters[name], global_spec)
            rank_model.parameters[name] = sharded_parameter
            if variables[name].value in rank_model.variables:
                rank_model.variables[variables[name].value] = sharded_parameter


def _sharded_buffer_specs(rank_model: RankModel, world: World, mesh: Mesh) -> dict[str, GlobalTensorSpec]:
    """Return the global specs of the sharded buffers by name."""
    specs = {
        name: _global_tensor_spec(rank_model, variable, world, mesh)
        for name, (variable, _) in rank_model.buffer_blocks.items()
        if name in rank_model.buffers
    }
    return {name: spec for name, spec in specs.items() if spec.placements}


def _global_tensor_spec(rank_model: RankModel, variable: Variable, world: World, mesh: Mesh) -> GlobalTensorSpec:
    placements = tuple(
        (p, world.group(mesh.group(world.rank, axis))) for axis, p in rank_model.stored_placements(variable).items() if is_shard(p)
    )
    return GlobalTensorSpec(variable.name, variable.tensor.shape, placements)


def _register_state_dict_hooks(model: nn.Module, rank_model: RankModel) -> None:
    """Register hooks: `load_state_dict` takes full tensors for shards, and `state_dict` refuses to return shards."""
    places = {name: (spec.global_shape, spec.block_ranges) for name, spec in rank_model.local_parameters.items()}
    places |= {
        name: (variable.tensor.shape, spans) for name, (variable, spans) in rank_model.buffer_blocks.items() if name in rank_model.buffers
    }
    names = {id(x): name for name, x in (*rank_model.parameters.items(), *rank_model.buffers.items())}
    for module in model.modules():
        named_tensors = [kind(recurse=False, remove_duplicate=False) for kind in (module.named_parameters, module.named_buffers)]
        shards = {}
        for local, x in chain(*named_tensors):
            if id(x) in names and places[names[id(x)]][0] != block_shape(places[names[id(x)]][1]):
                shards[local] = places[names[id(x)]]
        if shards:
            module.register_load_state_dict_pre_hook(partial(_load_shards, shards))  # type: ignore[no-untyped-call]
            module.register_state_dict_pre_hook(_refuse_state_dict)  # type: ignore[no-untyped-call]


def _load_shards(cuts: Mapping[str, Any], module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for local, (full, spans) in cuts.items():
        value = state.get(prefix + local)
        if value is not None and tuple(value.shape) == full:
            state[prefix + local] = block_of(value, spans)


def _refuse_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    raise UsageError(
        f"{prefix or type(module).__name__ + '.'}state_dict() would hold only this rank's shards of sharded weights; "
        "shardwise.full_state_dict(net), called on every rank, returns the full one on rank 0, and net.load_state_dict takes it"
    )


@cache
def patch_wrappers() -> None:
    """Patch torch's parallel wrappers to refuse sharded modules."""
    kinds: list[Any] = [nn.DataParallel, nn.parallel.DistributedDataParallel]
    try:
        from torch.distributed.fsdp import FullyShardedDataParallel  # here: slow to import

        kinds.append(FullyShardedDataParallel)
    except ImportError:  # a torch without it
        pass
    for kind in kinds:
        kind.__init__ = _guard_constructor(kind.__init__, kind.__name__)


def _guard_constructor(constructor: Callable[..., None], name: str) -> Callable[..., None]:
    @wraps(constructor)
    def __init__(self: Any, module: Any = None, *args: Any, **kwargs: Any) -> None:
        if isinstance(module, nn.Module) and sharded_modules_of(module):
            raise UsageError(
                f"{name} is given {type(module).__name__}, which shardwise has divided, and whose gradients are summed over ranks already. "
                f"Leave {name} out; Accelerate, transformers' Trainer and Lightning leave it out with shardwise.adapters (docs/scripts.md)"
            )
        constructor(self, module, *args, **kwargs)

    return __init__
