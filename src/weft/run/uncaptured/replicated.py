"""Models that could not be captured: the whole module on every rank, each with its share of the samples.

In: a plan with `uncaptured` set, so only `data` applies, and in an engine `zero` up to 2 and `microbatches`. Out: for an engine the same
`Parts` as of a captured model, with one operator that is the module itself and its loss; for a plain loop how the module computes
(`run/loop/module`): its own code, on this rank's samples, and an exchange of gradients.

That ranks with parts of the samples train what one process does is tried first (`run/uncaptured/trial`). What is a mean over samples is
then the mean of all ranks on each of them, the loss of an engine and what a module returns in a loop; what it returns of each sample is
this rank's. Random numbers that it draws belong to the step and the rank's part; those that the loop draws stay alike.

Not modelled: losses that are such a mean for the batch that was tried, and are not for others; numbers that are no tensors
(`loss.item()`), which are this rank's.
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
    """The parts of a model that runs whole on every rank.

    Raises:
        Infeasible: a layout that divides more than samples, or samples that do not divide.
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
    """Make `model` real in place and let its gradients be averaged; `batch` is what it is called with, with the whole batch's samples.

    Raises:
        Infeasible: parts of the samples would train something else than all of them. ModelError: gradients that depend on more than what
            ranks sum: hooks on parameters, parameters that are none of the model's.
    """
    data = plan.layout.data
    is_double = _made_real(model, source, plan, world)
    with in_modes(model, training_modes(model)):
        outputs = outputs_of_parts(plan, model, batch) if data > 1 else {}
    held = dict(model.named_parameters())
    trained = {name: p for name, p in held.items() if p.requires_grad}
    exchange = None
    if data > 1 and trained:
        specs = _specs(model, world.everyone.ranks, world.rank, lambda shape: True)
        groups, _ = build_groups([spec for spec in specs.values() if spec.trainable], world.device, 0, world.rank, plan.bucket_bytes)
        for group in groups:
            group.data = torch.empty(0)  # weights stay where the model has them
        means = any(output.dim is None and output.learns for output in outputs.values())
        rows = [path for path, output in outputs.items() if output.dim is not None and output.learns]
        exchange = Exchange(groups, trained, world, uses_differ=True, at_end=means, outputs=rows)
    if world.rank == 0:
        each = f"each of data={data} ranks holds all of it and a part of the samples" if data > 1 else "it runs as it is"
        print(f"weft: {plan.model} could not be captured ({plan.uncaptured}), so {each}", file=sys.stderr, flush=True)
    return ByItself(model, plan, world, is_double, model.forward, held, outputs, exchange, Draw(seed=torch.initial_seed()))


def _made_real(model: nn.Module, source: Source, plan: Plan, world: World) -> bool:
    """Give the model memory on this rank's device, in the plan's precision; returns whether it is of float64 as it is written."""
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
            module.sparse = False  # gradients lie in buffers with others, which are dense
    return is_double_model


def _specs(model: nn.Module, ranks: tuple[int, ...], rank: int, decays: Callable[[tuple[int, ...]], bool]) -> dict[str, LocalParameter]:
    """The model's parameters, whole on each of `ranks`; backward completes the last first."""
    return {
        name: LocalParameter(
            name, tuple(p.shape), full_spans(p.shape), p.dtype, p.requires_grad, ranks if p.requires_grad else (rank,),
            rank == ranks[0], True, decays(tuple(p.shape)), (), -number,
        )
        for number, (name, p) in enumerate(model.named_parameters())
    }  # fmt: skip


def _graph_of(model: nn.Module, batch: Any, size: int) -> Graph:
    """What a graph says of tensors, without operators: parameters, buffers and inputs, for microbatches of `size` samples."""

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
    """Over data ranks samples lie in pieces, the loss as summands, and gradients are summed."""
    if data == 1:
        return Sharding({}, {}, {value: {} for value in graph.tensors}, {}, {}, (), ())
    forms: dict[str, Mapping[str, Placement]] = {v.value: {DATA: R} for v in graph.variables}
    forms |= {v.value: {DATA: Shard(0)} for v in graph.inputs if v.batched} | {"loss": {DATA: P}}
    forms |= {v.value: {DATA: D} for v in graph.parameters if v.trainable}
    return Sharding({DATA: data}, {}, forms, {}, {v.value: (DATA,) for v in graph.parameters if v.trainable}, (), ())


@contextmanager
def _drawing(draw: Draw, part: int, device: torch.device) -> Iterator[None]:
    """A block that draws what belongs to the step, the microbatch and the `part` of the samples, and leaves the loop's numbers alone."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(draw.generator(torch.device("cpu"), 0, part).initial_seed())
        yield


class _Module(nn.Module):
    """The user's module and loss, called with the local batch's tensors in order."""

    def __init__(self, model: nn.Module, batch: Any, loss: Loss | None, layout: Layout, is_double: bool, draw: Draw, part: int) -> None:
        super().__init__()
        self.model, self._batch, self._loss, self._share = model, batch, loss, 1.0 / layout.data
        self._double, self._is_double, self._draw, self._part = layout.precision == "float64", is_double, draw, part

    def forward(self, *tensors: Tensor) -> tuple[Tensor]:
        values = iter(tensors)
        new = {path: next(values) if isinstance(leaf, Tensor) else leaf for path, leaf in leaves(self._batch)}
        batch = rebuild(self._batch, new)
        device = next((x.device for x in tensors if x.is_cuda), torch.device("cpu"))
        with _drawing(self._draw, self._part, device), doubled(self._double, self._is_double):  # the latter as the serial reference
            try:
                return (call(self.model, batch, self._loss) * self._share,)
            except RuntimeError as error:
                if torch.is_grad_enabled() or "does not require grad" not in str(error):
                    raise
            with torch.enable_grad():  # it asks for gradients of its own, in evaluation too: a differential equation
                return (call(self.model, batch, self._loss).detach() * self._share,)


@dataclass(frozen=True)
class ByItself:
    """The way of a module in a plain loop that was not captured (`run/loop/module`).

    `called`: its own forward; `held`: its parameters, of which those that train are exchanged.
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
        """Raise where what trains now is not what is exchanged, or samples meet in statistics of a rank's part."""
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
        """What the model returns, of this rank's samples; means over samples are those of all ranks."""
        have, share = self._samples((args, kwargs))
        args, kwargs = self._moved(args), self._moved(kwargs)
        device, layout = self.world.device, self.plan.layout
        theirs = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None  # the user's, around the call
        autocast = products_of(layout.precision) or theirs
        self.draw.step += 1
        drawing = nullcontext() if layout.data == 1 or self.expects.global_batch else _drawing(self.draw, self.world.rank, device)
        double = doubled(layout.precision == "float64", self.is_double)
        with torch.autocast(device.type, dtype=autocast, enabled=autocast is not None), double, drawing:
            output = self.called(*args, **kwargs)
        alone = self.exchange is None or self.expects.global_batch  # then all ranks compute all of it
        return output if alone else self._joined(output, have, share)

    def _samples(self, batch: Any) -> tuple[int, float]:
        """Samples that this rank has, and over an equal part of all. What `weft.shard` did not give is taken for an equal part."""
        have = next((x.shape[0] for _, x in leaves(batch) if isinstance(x, Tensor) and x.dim()), 1)
        counted = count_samples(batch)
        return have, have * self.plan.layout.data / counted if counted not in (0, have) else 1.0

    def _moved(self, batch: Any) -> Any:
        """Arguments on this rank's device, in float64 where that is computed in."""
        double = self.plan.layout.precision == "float64"

        def moved(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return x.to(self.world.device, torch.float64 if double and x.is_floating_point() else x.dtype)

        return rebuild(batch, {path: moved(x) for path, x in leaves(batch)})

    def _joined(self, output: Any, have: int, share: float) -> Any:
        """The output, in which what all ranks have is their mean, and whose gradients begin the exchange on every rank. They count by this
        rank's `share` of the samples, since what the loop makes of the output is a mean over them."""
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
        means = [path for path, one in self.outputs.items() if one.dim is None and path in outputs and outputs[path].is_floating_point()]
        if means:
            joined = self._means({path: outputs[path] for path in means}, have, learns)
            new.update((path, private.writable(counted(x, share))) for path, x in joined.items())
        for path, one in self.outputs.items():
            if one.dim is not None and one.learns and learns and path in outputs:
                x = outputs[path]
                x = x if x.requires_grad else x.detach().requires_grad_()  # its code went another way here than elsewhere
                x.register_hook(partial(self.exchange.count, path, x.shape[one.dim] / share))  # type: ignore[no-untyped-call]
                new[path] = private.writable(counted(x, share))
        return rebuild(output, new)

    def _means(self, losses: Mapping[str, Tensor], have: int, learns: bool) -> dict[str, Tensor]:
        """Means over all samples, whose gradient is the mean of what ranks make of them: in one sum, for all ranks to make as many."""
        one = torch.ones(1, dtype=torch.float64, device=self.world.device)
        flat = torch.cat([*(x.reshape(-1).to(torch.float64) for x in losses.values()), one]) * have
        begins = learns and any(self.outputs[path].learns for path in losses)
        flat = flat.detach().requires_grad_() if begins and not flat.requires_grad else flat
        flat = redistribute(flat, P, D, self.world.everyone)
        flat = flat[:-1] / flat[-1].detach()
        if begins:
            flat.register_hook(lambda grad: self.exchange.begin())  # type: ignore[no-untyped-call, union-attr]
        parts = torch.split(flat, [x.numel() for x in losses.values()])
        return {path: part.reshape(x.shape).to(x.dtype) for (path, x), part in zip(losses.items(), parts, strict=True)}

    def of_copy(self, copied: nn.Module, memo: Mapping[int, Any]) -> ByItself:
        """The same of a copy, which exchanges nothing."""
        called, held = partial(type(copied).forward, copied), dict(copied.named_parameters())
        return replace(self, model=copied, called=called, held=held, exchange=None)

    def pieces(self) -> list[Piece]:
        """All of what a state dict has, of which rank 0's counts."""
        return replicated_pieces(self.model, self.world)

    def full_state(self) -> dict[str, Tensor] | None:
        """The state dict on rank 0, None elsewhere."""
        state = {name: x.detach().cpu().clone() for name, x in self.model.state_dict().items()}
        return state if self.world.rank == 0 else None


def replicated_pieces(model: nn.Module, world: World) -> list[Piece]:
    """Parameters and buffers that a state dict has of a model that is whole on every rank."""
    first, state = world.rank == 0, model.state_dict(keep_vars=True)
    weights = [full_piece(name, "parameter", p.detach(), owner=first) for name, p in model.named_parameters()]
    return weights + [full_piece(name, "buffer", b, owner=first) for name, b in model.named_buffers() if name in state]
