"""Data parallelism for models that could not be captured: the full module on every rank, each with its shard of the samples.

The plan has `uncaptured` set, so only `data` applies, and in an engine also `zero` up to 2 and `microbatches`. An engine gets the same
`RankModel` as for a captured model, with a single operator: the module itself with its loss. A plain loop gets an `EagerReplica`, which
runs the module's own code on this rank's samples and reduces gradients.

A trial first checks that ranks with shards of the batch train what one process does (`run/uncaptured/trial`). Outputs that are means over
samples (an engine's loss, a module's output in a loop) are then averaged over all ranks; per-sample outputs are this rank's. The module's
random draws depend on the step and the rank's shard; those of the loop stay equal on all ranks.

Not covered: losses that are such a mean on the tried batch only; numbers that are not tensors (`loss.item()`), which are local.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.capture.capture import Loss, call_with_loss
from shardwise.capture.initialization import materialize_module
from shardwise.capture.modes import in_modes, set_modes, training_modes
from shardwise.capture.nesting import batch_size_of, count_samples, named_leaves, replace_leaves
from shardwise.capture.unsupported_models import refuse_hooks, refuse_sparse_batch
from shardwise.errors import Infeasible, ModelError, UsageError
from shardwise.lower.float64_mode import cast_to_float64, compute_in_float64, is_float64
from shardwise.lower.kernels.randomness import DrawState
from shardwise.lower.local import LocalStage
from shardwise.lower.redistribute import redistribute, scale_gradient
from shardwise.model.graph import Graph, Variable
from shardwise.model.graph import Tensor as Spec
from shardwise.model.sharding.sharding import Sharding
from shardwise.model.stages.stages import Stage
from shardwise.plan.ir.axis import DATA
from shardwise.plan.ir.placement import D, P, Placement, R, Shard
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan, check_uncaptured
from shardwise.run.checkpoint import StateShard, full_shard
from shardwise.run.gradients.loop_reducer import LoopGradientReducer
from shardwise.run.gradients.outside_parameters import ModuleCall
from shardwise.run.parts.rank_model import RankModel, program_of
from shardwise.run.parts.rows import CallConvention
from shardwise.run.rank_model.build import BuildRequest
from shardwise.run.rank_model.model_source import ModelSource, cast_to_precision
from shardwise.run.state.block_ranges import full_ranges
from shardwise.run.state.parameters import LocalParameter, build_groups, choose_all_reduce, install_tensors
from shardwise.run.state.precision import autocast_dtype_of
from shardwise.run.uncaptured.trial import OutputSpec, check_data_parallel, infer_output_specs
from shardwise.world import private
from shardwise.world.world import World


def build_replicated(request: BuildRequest) -> RankModel:
    """Build the rank model of a module that is replicated on every rank.

    Raises:
        Infeasible: the layout shards more than samples, or the loss is no mean over the shards of the batch.
    """
    plan, batch, world = request.plan, request.batch, request.world
    layout, model = plan.layout, request.source.model
    refuse_sparse_batch(batch)
    set_modes(model, training_modes(model))
    loss = request.source.loss_of(request.loss)
    is_double = _materialize_model(model, request.source, plan, world)
    check_data_parallel(plan, model, batch, loss)
    graph = cast_to_precision(_graph_of(model, batch, plan.microbatch_sizes[0]), plan)
    saved = frozenset(model.state_dict(keep_vars=True))
    specs = _local_parameters(model, layout.mesh.group(world.rank, DATA), world.rank, request.optimizer.decays)
    servers = layout.servers_of(world.rank)
    groups, parameters = build_groups(list(specs.values()), world.device, layout.zero, world.rank, plan.bucket_bytes, servers)
    choose_all_reduce(plan, world, groups)
    with torch.no_grad():
        for name, p in model.named_parameters():
            parameters[name].copy_(p)
    install_tensors(model, parameters, {})
    draw = DrawState(seed=request.seed)
    module = _EagerModule(model, batch, loss, layout, is_double, draw, world.rank)
    sharding = _sharding_of(graph, layout.data)
    stage = Stage(0, (), tuple(v.value for v in graph.variables), (), (), ("loss",))
    local = LocalStage(module, tuple(v.value for v in graph.inputs), (), (), ("loss",), sharding.placements)
    blocks = {b.name: (b, full_ranges(b.tensor.shape)) for b in graph.buffers}
    program = program_of(plan, (stage,), world)
    buffers = dict(model.named_buffers())
    return RankModel(
        graph, sharding, (stage,), program, {0: local}, parameters, specs, groups, buffers, blocks, {}, draw, state_dict_names=saved
    )


def replicate_module(model: nn.Module, source: ModelSource, plan: Plan, batch: Any, world: World) -> EagerReplica:
    """Materialize `model` in place and average its gradients over ranks; `batch` holds the arguments of a call with the global batch.

    Raises:
        Infeasible: shards of the batch would train something else than the full batch. ModelError: gradients depend on more than the
            model's parameters: hooks on parameters, or parameters of other modules.
    """
    data = plan.layout.data
    is_double = _materialize_model(model, source, plan, world)
    with in_modes(model, training_modes(model)):
        outputs = infer_output_specs(plan, model, batch) if data > 1 else {}
    parameters = dict(model.named_parameters())
    trainable = {name: p for name, p in parameters.items() if p.requires_grad}
    exchange = None
    if data > 1 and trainable:
        specs = _local_parameters(model, world.world_group.ranks, world.rank, lambda shape: True)
        groups, _ = build_groups([spec for spec in specs.values() if spec.is_trainable], world.device, 0, world.rank, plan.bucket_bytes)
        for group in groups:
            group.data = torch.empty(0)  # weights stay in the model's own tensors
        means = any(output.dim is None and output.has_gradient for output in outputs.values())
        per_sample_outputs = [path for path, output in outputs.items() if output.dim is not None and output.has_gradient]
        exchange = LoopGradientReducer(groups, trainable, world, uses_differ=True, reduces_at_end=means, outputs=per_sample_outputs)
    if world.rank == 0:
        description = f"each of data={data} ranks holds all of it and a part of the samples" if data > 1 else "it runs as it is"
        print(f"shardwise: {plan.model} could not be captured ({plan.uncaptured}), so {description}", file=sys.stderr, flush=True)
    return EagerReplica(model, plan, world, is_double, model.forward, parameters, outputs, exchange, DrawState(seed=torch.initial_seed()))


def _materialize_model(model: nn.Module, source: ModelSource, plan: Plan, world: World) -> bool:
    """Materialize the model on this rank's device in the plan's precision; return whether its code itself is float64."""
    layout = plan.layout
    check_uncaptured(layout, plan.uncaptured)
    if layout.num_ranks != world.num_ranks:
        raise Infeasible(f"the layout {layout} needs {layout.num_ranks} ranks, {world.num_ranks} were started")
    refuse_hooks(model)
    if source.deferred is not None:
        materialize_module(source.deferred, model)
    model.to(world.device)
    is_double_model = is_float64(model)
    if layout.precision == "float64":
        cast_to_float64(model)
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.sparse = False  # gradients are stored in dense flat buffers
    return is_double_model


def _local_parameters(
    model: nn.Module, ranks: tuple[int, ...], rank: int, decays: Callable[[tuple[int, ...]], bool]
) -> dict[str, LocalParameter]:
    """Return specs of the parameters, replicated on `ranks`; backward completes the last one first."""
    return {
        name: LocalParameter(
            name, tuple(p.shape), full_ranges(p.shape), p.dtype, p.requires_grad, ranks if p.requires_grad else (rank,),
            rank == ranks[0], True, decays(tuple(p.shape)), (), -number,
        )
        for number, (name, p) in enumerate(model.named_parameters())
    }  # fmt: skip


def _graph_of(model: nn.Module, batch: Any, size: int) -> Graph:
    """Build a graph without operators: parameters, buffers and inputs, for microbatches of `size` samples."""

    def spec(x: Tensor, shape: tuple[int, ...] | None = None) -> Spec:
        return Spec(tuple(x.shape) if shape is None else shape, str(x.dtype).removeprefix("torch."))

    names: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    parameters = tuple(Variable(name, name, spec(p), tuple(names[id(p)][1:]), p.requires_grad) for name, p in model.named_parameters())
    buffers = tuple(Variable(name, name, spec(b)) for name, b in model.named_buffers())
    inputs, samples = [], batch_size_of(batch)
    for path, x in named_leaves(batch):
        if isinstance(x, Tensor):
            batched = bool(x.dim()) and x.shape[0] == samples
            inputs.append(Variable(f"batch_{path}", path, spec(x, (size, *x.shape[1:]) if batched else None), batched=batched))
    tensors = {v.value: v.tensor for v in (*parameters, *buffers, *inputs)} | {"loss": Spec((), "float32")}
    return Graph(parameters, buffers, tuple(inputs), (), (), tensors, "loss", size)


def _sharding_of(graph: Graph, data: int) -> Sharding:
    """Build the sharding over data ranks: samples sharded, the loss a partial sum, gradients reduced."""
    if data == 1:
        return Sharding({}, {}, {value: {} for value in graph.tensors}, {}, {}, (), ())
    placements: dict[str, Mapping[str, Placement]] = {v.value: {DATA: R} for v in graph.variables}
    placements |= {v.value: {DATA: Shard(0)} for v in graph.inputs if v.batched} | {"loss": {DATA: P}}
    placements |= {v.value: {DATA: D} for v in graph.parameters if v.trainable}
    return Sharding({DATA: data}, {}, placements, {}, {v.value: (DATA,) for v in graph.parameters if v.trainable}, (), ())


@contextmanager
def _seeded_draws(draw: DrawState, shard: int, device: torch.device) -> Iterator[None]:
    """Seed draws in a block by the step and the shard of samples; the loop's own generators are restored after it."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(draw.generator(torch.device("cpu"), 0, shard).initial_seed())
        yield


class _EagerModule(nn.Module):
    """The user's module and loss as one module, called with the tensors of the local batch in order."""

    def __init__(
        self, model: nn.Module, batch: Any, loss: Loss | None, layout: Layout, is_double: bool, draw: DrawState, shard: int
    ) -> None:
        super().__init__()
        self.model, self._batch, self._loss, self._share = model, batch, loss, 1.0 / layout.data
        self._in_float64, self._is_double, self._draw, self._shard = layout.precision == "float64", is_double, draw, shard

    def forward(self, *tensors: Tensor) -> tuple[Tensor]:
        values = iter(tensors)
        new = {path: next(values) if isinstance(leaf, Tensor) else leaf for path, leaf in named_leaves(self._batch)}
        batch = replace_leaves(self._batch, new)
        device = next((x.device for x in tensors if x.is_cuda), torch.device("cpu"))
        with (
            _seeded_draws(self._draw, self._shard, device),
            compute_in_float64(self._in_float64, self._is_double),
        ):  # float64 as in the serial reference
            try:
                return (call_with_loss(self.model, batch, self._loss) * self._share,)
            except RuntimeError as error:
                if torch.is_grad_enabled() or "does not require grad" not in str(error):
                    raise
            with torch.enable_grad():  # the model computes gradients itself, in evaluation too: a differential equation
                return (call_with_loss(self.model, batch, self._loss).detach() * self._share,)


@dataclass(frozen=True)
class EagerReplica:
    """The replica of a module in a plain loop that was not captured (`run/loop/module`).

    `parameters`: those that require gradients are reduced over ranks.
    """

    model: nn.Module
    plan: Plan
    world: World
    is_double: bool
    original_forward: Callable[..., Any]
    parameters: Mapping[str, nn.Parameter]
    outputs: Mapping[str, OutputSpec]
    gradient_reducer: LoopGradientReducer | None
    draw: DrawState
    call_convention: CallConvention = field(default_factory=CallConvention)

    def check(self) -> None:
        """Raise UsageError if a trained parameter is not reduced, or batch norm would use statistics of a shard of the batch."""
        if self.plan.layout.data == 1 or self.call_convention.is_global_batch:
            return
        for name, p in self.model.named_parameters():
            if p.requires_grad and self.parameters.get(name) is not p:
                raise UsageError(
                    f"{name} was put into the model after it was divided, so that its gradient would not be summed over ranks: do that "
                    "inside the block"
                )
        for name, m in self.model.named_modules():
            if isinstance(m, private.BatchNorm) and m.training:
                raise UsageError(
                    f"{name} was set to train after the model was divided, and takes statistics over all samples, of which this rank has a "
                    "part; keep it in evaluation, or use one rank"
                )

    def compute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the model's output for this rank's samples; means over samples are averaged over all ranks."""
        num_local, share = self._sample_share((args, kwargs))
        args, kwargs = self._to_device(args, share), self._to_device(kwargs, share)
        device, layout = self.world.device, self.plan.layout
        user_dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None  # the user's own
        autocast = autocast_dtype_of(layout.precision) or user_dtype
        self.draw.step += 1
        drawing = (
            nullcontext() if layout.data == 1 or self.call_convention.is_global_batch else _seeded_draws(self.draw, self.world.rank, device)
        )
        double = compute_in_float64(layout.precision == "float64", self.is_double)
        with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None), double, drawing:
            output = self.original_forward(*args, **kwargs)
        is_local = (
            self.gradient_reducer is None or self.call_convention.is_global_batch
        )  # then every rank computes the global batch, or nothing is reduced
        output = output if is_local else self._reduce_outputs(output, num_local, share)
        ids = frozenset(map(id, self.parameters.values()))
        ModuleCall(self.world, ids, 0 if is_local else num_local, 1.0 if is_local else share).record((args, kwargs), output)
        return output

    def _sample_share(self, batch: Any) -> tuple[int, float]:
        """Return this rank's number of samples, and its ratio to an equal share. Batches not from `shardwise.shard` count as equal
        shares."""
        num_local = next((x.shape[0] for _, x in named_leaves(batch) if isinstance(x, Tensor) and x.dim()), 1)
        num_global = count_samples(batch)
        return num_local, num_local * self.plan.layout.data / num_global if num_global not in (0, num_local) else 1.0

    def _to_device(self, batch: Any, share: float) -> Any:
        """Return arguments on this rank's device, in float64 if that is the precision; gradients by them do not count by `share`."""
        double = self.plan.layout.precision == "float64"

        def moved(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            x = x.to(self.world.device, torch.float64 if double and x.is_floating_point() else x.dtype)
            return scale_gradient(x, 1 / share) if x.requires_grad and share not in (0.0, 1.0) else x

        return replace_leaves(batch, {path: moved(x) for path, x in named_leaves(batch)})

    def _reduce_outputs(self, output: Any, num_local: int, share: float) -> Any:
        """Return the output with means averaged over ranks and hooks that start the reduction in backward on every rank.

        Gradients are weighted by this rank's `share` of the samples, since the loop averages over them."""
        assert self.gradient_reducer is not None
        outputs = {path: x for path, x in named_leaves(output) if isinstance(x, Tensor)}
        learns = torch.is_grad_enabled() and any(p.requires_grad for p in self.parameters.values())
        if self.model.training and learns and outputs.keys() != self.outputs.keys():
            raise ModelError(
                f"the model returned the tensors {', '.join(self.outputs) or 'none'} of the batch that it was divided with, and now "
                f"{', '.join(outputs) or 'none'} on rank {self.world.rank}: call it with the same arguments (batch= may be a dict of what "
                "forward takes by name), and return the same tensors always"
            )
        new: dict[str, Any] = dict(named_leaves(output))
        means = [path for path, spec in self.outputs.items() if spec.dim is None and path in outputs and outputs[path].is_floating_point()]
        if means:
            reduced = self._reduce_means({path: outputs[path] for path in means}, num_local, learns)
            new.update((path, private.as_writable(scale_gradient(x, share))) for path, x in reduced.items())
        for path, spec in self.outputs.items():
            if spec.dim is not None and spec.has_gradient and learns and path in outputs:
                x = outputs[path]
                x = x if x.requires_grad else x.detach().requires_grad_()  # a data-dependent branch: it has a gradient on other ranks
                x.register_hook(partial(self.gradient_reducer.count_rows, path, x.shape[spec.dim] / share))  # type: ignore[no-untyped-call]
                new[path] = private.as_writable(scale_gradient(x, share))
        return replace_leaves(output, new)

    def _reduce_means(self, losses: Mapping[str, Tensor], num_local: int, requires_grad: bool) -> dict[str, Tensor]:
        """Return means over all samples, in one all-reduce so that all ranks make equally many; gradients are averaged over ranks."""
        weight = torch.ones(1, dtype=torch.float64, device=self.world.device)
        flat = torch.cat([*(x.reshape(-1).to(torch.float64) for x in losses.values()), weight]) * num_local
        starts_reduction = requires_grad and any(self.outputs[path].has_gradient for path in losses)
        flat = flat.detach().requires_grad_() if starts_reduction and not flat.requires_grad else flat
        flat = redistribute(flat, P, D, self.world.world_group)
        flat = flat[:-1] / flat[-1].detach()
        if starts_reduction:
            flat.register_hook(lambda grad: self.gradient_reducer.begin_backward())  # type: ignore[no-untyped-call, union-attr]
        parts = torch.split(flat, [x.numel() for x in losses.values()])
        return {path: part.reshape(x.shape).to(x.dtype) for (path, x), part in zip(losses.items(), parts, strict=True)}

    def for_copy(self, copied: nn.Module, memo: Mapping[int, Any]) -> EagerReplica:
        """Return a replica for a copy of the module, which reduces no gradients."""
        original_forward, parameters = partial(type(copied).forward, copied), dict(copied.named_parameters())
        return replace(self, model=copied, original_forward=original_forward, parameters=parameters, gradient_reducer=None)

    def state_shards(self) -> list[StateShard]:
        """Return the full state dict as shards, of which rank 0's are saved."""
        return replicated_shards(self.model, self.world)

    def full_state(self) -> dict[str, Tensor] | None:
        """Return the state dict on rank 0, None elsewhere."""
        state = {name: x.detach().cpu().clone() for name, x in self.model.state_dict().items()}
        return state if self.world.rank == 0 else None


def replicated_shards(model: nn.Module, world: World) -> list[StateShard]:
    """Return checkpoint shards of the parameters and state dict buffers of a replicated model."""
    first, state = world.rank == 0, model.state_dict(keep_vars=True)
    weights = [full_shard(name, "parameter", p.detach(), is_owner=first) for name, p in model.named_parameters()]
    return weights + [full_shard(name, "buffer", b, is_owner=first) for name, b in model.named_buffers() if name in state]
