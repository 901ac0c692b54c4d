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

from weft.capture.capture import Loss, call
from weft.capture.init import realize
from weft.capture.modes import in_modes, set_modes, training_modes
from weft.capture.nesting import batch_size_of, count_samples, leaves, rebuild
from weft.capture.refused import refuse_hooks
from weft.errors import Infeasible, ModelError, UsageError
from weft.lower.double import doubled, is_double, widened
from weft.lower.kernels.randomness import Draw
from weft.lower.local import LocalStage
from weft.lower.redistribute import counted, redistribute
from weft.model.graph import Graph, Variable
from weft.model.graph import Tensor as Spec
from weft.model.sharding.sharding import Sharding
from weft.model.stages.stages import Stage
from weft.plan.axis import DATA
from weft.plan.layout import Layout
from weft.plan.placement import D, P, Placement, R, Shard
from weft.plan.plan import Plan, check_uncaptured
from weft.run.build import Source, in_precision
from weft.run.expects import Expects
from weft.run.reduce.exchange import Exchange
from weft.run.reduce.summing import choose_sums
from weft.run.state.checkpoint import Piece, full_piece
from weft.run.state.optimizer import OptimizerSpec
from weft.run.state.parameters import LocalParameter, build_groups, place
from weft.run.state.precision import products_of
from weft.run.state.spans import full_spans
from weft.run.training_parts import Parts, program_of
from weft.run.uncaptured.trial import Output, outputs_of_parts, refuse_division
from weft.world import private
from weft.world.world import World


def build_replicated(plan: Plan, source: Source, batch: Any, loss: Loss | None, world: World, optimizer: OptimizerSpec, seed: int) -> Parts:
    """Build the rank model of a module that is replicated on every rank.

    Raises:
        Infeasible: the layout shards more than samples, or the loss is no mean over the shards of the batch.
    """
    layout, model = plan.layout, source.model
    set_modes(model, training_modes(model))
    loss = source.loss_of(loss)
    is_double = _made_real(model, source, plan, world)
    refuse_division(plan, model, batch, loss)
    graph = in_precision(_graph_of(model, batch, plan.microbatch_sizes[0]), plan)
    saved = frozenset(model.state_dict(keep_vars=True))
    specs = _specs(model, layout.mesh.group(world.rank, DATA), world.rank, optimizer.decays)
    servers = layout.servers_of(world.rank)
    groups, parameters = build_groups(list(specs.values()), world.device, layout.zero, world.rank, plan.bucket_bytes, servers)
    choose_sums(plan, world, groups)
    with torch.no_grad():
        for name, p in model.named_parameters():
            parameters[name].copy_(p)
    place(model, parameters, {})
    draw = Draw(seed=seed)
    module = _Module(model, batch, loss, layout, is_double, draw, world.rank)
    sharding = _sharding_of(graph, layout.data)
    stage = Stage(0, (), tuple(v.value for v in graph.variables), (), (), ("loss",))
    local = LocalStage(module, tuple(v.value for v in graph.inputs), (), (), ("loss",), sharding.forms)
    blocks = {b.name: (b, full_spans(b.tensor.shape)) for b in graph.buffers}
    program = program_of(plan, (stage,), world)
    buffers = dict(model.named_buffers())
    return Parts(graph, sharding, (stage,), program, {0: local}, parameters, specs, groups, buffers, blocks, {}, draw, saved=saved)


def keep_replicated(model: nn.Module, source: Source, plan: Plan, batch: Any, world: World) -> ByItself:
    """Materialize `model` in place and average its gradients over ranks; `batch` holds the arguments of a call with the global batch.

    Raises:
        Infeasible: shards of the batch would train something else than the full batch. ModelError: gradients depend on more than the
            model's parameters: hooks on parameters, or parameters of other modules.
    """
    data = plan.layout.data
    is_double = _made_real(model, source, plan, world)
    with in_modes(model, training_modes(model)):
        outputs = outputs_of_parts(plan, model, batch) if data > 1 else {}
    parameters = dict(model.named_parameters())
    trainable = {name: p for name, p in parameters.items() if p.requires_grad}
    exchange = None
    if data > 1 and trainable:
        specs = _specs(model, world.everyone.ranks, world.rank, lambda shape: True)
        groups, _ = build_groups([spec for spec in specs.values() if spec.trainable], world.device, 0, world.rank, plan.bucket_bytes)
        for group in groups:
            group.data = torch.empty(0)  # weights stay in the model's own tensors
        means = any(output.dim is None and output.learns for output in outputs.values())
        per_sample_outputs = [path for path, output in outputs.items() if output.dim is not None and output.learns]
        exchange = Exchange(groups, trainable, world, uses_differ=True, at_end=means, outputs=per_sample_outputs)
    if world.rank == 0:
        description = f"each of data={data} ranks holds all of it and a part of the samples" if data > 1 else "it runs as it is"
        print(f"weft: {plan.model} could not be captured ({plan.uncaptured}), so {description}", file=sys.stderr, flush=True)
    return ByItself(model, plan, world, is_double, model.forward, parameters, outputs, exchange, Draw(seed=torch.initial_seed()))


def _made_real(model: nn.Module, source: Source, plan: Plan, world: World) -> bool:
    """Materialize the model on this rank's device in the plan's precision; return whether its code itself is float64."""
    layout = plan.layout
    check_uncaptured(layout, plan.uncaptured)
    if layout.num_ranks != world.num_ranks:
        raise Infeasible(f"the layout {layout} needs {layout.num_ranks} ranks, {world.num_ranks} were started")
    refuse_hooks(model)
    if source.deferred is not None:
        realize(source.deferred, model)
    model.to(world.device)
    is_double_model = is_double(model)
    if layout.precision == "float64":
        widened(model)
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.sparse = False  # gradients are stored in dense flat buffers
    return is_double_model


def _specs(model: nn.Module, ranks: tuple[int, ...], rank: int, decays: Callable[[tuple[int, ...]], bool]) -> dict[str, LocalParameter]:
    """Return specs of the parameters, replicated on `ranks`; backward completes the last one first."""
    return {
        name: LocalParameter(
            name, tuple(p.shape), full_spans(p.shape), p.dtype, p.requires_grad, ranks if p.requires_grad else (rank,),
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
    for path, x in leaves(batch):
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
def _drawing(draw: Draw, part: int, device: torch.device) -> Iterator[None]:
    """Seed draws in a block by the step and the shard of samples; the loop's own generators are restored after it."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(draw.generator(torch.device("cpu"), 0, part).initial_seed())
        yield


class _Module(nn.Module):
    """The user's module and loss as one module, called with the tensors of the local batch in order."""

    def __init__(self, model: nn.Module, batch: Any, loss: Loss | None, layout: Layout, is_double: bool, draw: Draw, part: int) -> None:
        super().__init__()
        self.model, self._batch, self._loss, self._share = model, batch, loss, 1.0 / layout.data
        self._double, self._is_double, self._draw, self._part = layout.precision == "float64", is_double, draw, part

    def forward(self, *tensors: Tensor) -> tuple[Tensor]:
        values = iter(tensors)
        new = {path: next(values) if isinstance(leaf, Tensor) else leaf for path, leaf in leaves(self._batch)}
        batch = rebuild(self._batch, new)
        device = next((x.device for x in tensors if x.is_cuda), torch.device("cpu"))
        with _drawing(self._draw, self._part, device), doubled(self._double, self._is_double):  # float64 as in the serial reference
            try:
                return (call(self.model, batch, self._loss) * self._share,)
            except RuntimeError as error:
                if torch.is_grad_enabled() or "does not require grad" not in str(error):
                    raise
            with torch.enable_grad():  # the model computes gradients itself, in evaluation too: a differential equation
                return (call(self.model, batch, self._loss).detach() * self._share,)


@dataclass(frozen=True)
class ByItself:
    """The replica of a module in a plain loop that was not captured (`run/loop/module`).

    `parameters`: those that require gradients are reduced over ranks.
    """

    model: nn.Module
    plan: Plan
    world: World
    is_double: bool
    called: Callable[..., Any]
    held: Mapping[str, nn.Parameter]
    outputs: Mapping[str, Output]
    exchange: Exchange | None
    draw: Draw
    expects: Expects = field(default_factory=Expects)

    def check(self) -> None:
        """Raise UsageError if a trained parameter is not reduced, or batch norm would use statistics of a shard of the batch."""
        if self.plan.layout.data == 1 or self.expects.global_batch:
            return
        for name, p in self.model.named_parameters():
            if p.requires_grad and self.held.get(name) is not p:
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
        num_local, share = self._samples((args, kwargs))
        args, kwargs = self._moved(args), self._moved(kwargs)
        device, layout = self.world.device, self.plan.layout
        user_dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None  # the user's own
        autocast = products_of(layout.precision) or user_dtype
        self.draw.step += 1
        drawing = nullcontext() if layout.data == 1 or self.expects.global_batch else _drawing(self.draw, self.world.rank, device)
        double = doubled(layout.precision == "float64", self.is_double)
        with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None), double, drawing:
            output = self.called(*args, **kwargs)
        is_local = self.exchange is None or self.expects.global_batch  # then every rank computes the global batch, or nothing is reduced
        return output if is_local else self._joined(output, num_local, share)

    def _samples(self, batch: Any) -> tuple[int, float]:
        """Return this rank's number of samples, and its ratio to an equal share. Batches not from `weft.shard` count as equal shares."""
        num_local = next((x.shape[0] for _, x in leaves(batch) if isinstance(x, Tensor) and x.dim()), 1)
        num_global = count_samples(batch)
        return num_local, num_local * self.plan.layout.data / num_global if num_global not in (0, num_local) else 1.0

    def _moved(self, batch: Any) -> Any:
        """Return arguments on this rank's device, in float64 if that is the precision."""
        double = self.plan.layout.precision == "float64"

        def moved(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return x.to(self.world.device, torch.float64 if double and x.is_floating_point() else x.dtype)

        return rebuild(batch, {path: moved(x) for path, x in leaves(batch)})

    def _joined(self, output: Any, have: int, share: float) -> Any:
        """Return the output with means averaged over ranks and hooks that start the reduction in backward on every rank.

        Gradients are weighted by this rank's `share` of the samples, since the loop averages over them."""
        assert self.exchange is not None
        outputs = {path: x for path, x in leaves(output) if isinstance(x, Tensor)}
        learns = torch.is_grad_enabled() and any(p.requires_grad for p in self.held.values())
        if self.model.training and learns and outputs.keys() != self.outputs.keys():
            raise ModelError(
                f"the model returned the tensors {', '.join(self.outputs) or 'none'} of the batch that it was divided with, and now "
                f"{', '.join(outputs) or 'none'} on rank {self.world.rank}: call it with the same arguments (batch= may be a dict of what "
                "forward takes by name), and return the same tensors always"
            )
        new: dict[str, Any] = dict(leaves(output))
        means = [path for path, spec in self.outputs.items() if spec.dim is None and path in outputs and outputs[path].is_floating_point()]
        if means:
            reduced = self._means({path: outputs[path] for path in means}, have, learns)
            new.update((path, private.writable(counted(x, share))) for path, x in reduced.items())
        for path, spec in self.outputs.items():
            if spec.dim is not None and spec.learns and learns and path in outputs:
                x = outputs[path]
                x = x if x.requires_grad else x.detach().requires_grad_()  # a data-dependent branch: it has a gradient on other ranks
                x.register_hook(partial(self.exchange.count, path, x.shape[spec.dim] / share))  # type: ignore[no-untyped-call]
                new[path] = private.writable(counted(x, share))
        return rebuild(output, new)

    def _means(self, losses: Mapping[str, Tensor], have: int, learns: bool) -> dict[str, Tensor]:
        """Return means over all samples, in one all-reduce so that all ranks make equally many; gradients are averaged over ranks."""
        weight = torch.ones(1, dtype=torch.float64, device=self.world.device)
        flat = torch.cat([*(x.reshape(-1).to(torch.float64) for x in losses.values()), weight]) * have
        starts_reduction = learns and any(self.outputs[path].learns for path in losses)
        flat = flat.detach().requires_grad_() if starts_reduction and not flat.requires_grad else flat
        flat = redistribute(flat, P, D, self.world.everyone)
        flat = flat[:-1] / flat[-1].detach()
        if starts_reduction:
            flat.register_hook(lambda grad: self.exchange.begin())  # type: ignore[no-untyped-call, union-attr]
        parts = torch.split(flat, [x.numel() for x in losses.values()])
        return {path: part.reshape(x.shape).to(x.dtype) for (path, x), part in zip(losses.items(), parts, strict=True)}

    def of_copy(self, copied: nn.Module, memo: Mapping[int, Any]) -> ByItself:
        """Return a replica for a copy of the module, which reduces no gradients."""
        original_forward, parameters = partial(type(copied).forward, copied), dict(copied.named_parameters())
        return replace(self, model=copied, called=original_forward, held=parameters, exchange=None)

    def pieces(self) -> list[Piece]:
        """Return the full state dict as shards, of which rank 0's are saved."""
        return replicated_pieces(self.model, self.world)

    def full_state(self) -> dict[str, Tensor] | None:
        """Return the state dict on rank 0, None elsewhere."""
        state = {name: x.detach().cpu().clone() for name, x in self.model.state_dict().items()}
        return state if self.world.rank == 0 else None


def replicated_pieces(model: nn.Module, world: World) -> list[Piece]:
    """Return checkpoint shards of the parameters and state dict buffers of a replicated model."""
    first, state = world.rank == 0, model.state_dict(keep_vars=True)
    weights = [full_piece(name, "parameter", p.detach(), owner=first) for name, p in model.named_parameters()]
    return weights + [full_piece(name, "buffer", b, owner=first) for name, b in model.named_buffers() if name in state]
