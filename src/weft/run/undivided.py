"""A model that could not be captured, in a plain training loop: all of it on every rank, each with its own samples.

In: a module and a plan of data ranks alone. Out: the same module object with real weights, whose forward is the user's own code and whose
gradients are averaged over ranks while `loss.backward()` runs (`weft.run.exchange`), whatever path the code takes on each of them.

That ranks with parts of the samples train what one process does is tried first (`weft.run.outputs`). What the model returns of each
sample is this rank's; what it returns of all of them, a loss, is their mean on every rank. Random numbers that forward draws are other
ones on every rank, and those that the loop draws stay alike.

Not modelled: numbers that are no tensors (`loss.item()`), which are this rank's.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.capture.init import realize
from weft.capture.modes import in_modes, training_modes
from weft.capture.nesting import leaves, rebuild
from weft.capture.refused import refuse_hooks
from weft.errors import Infeasible, ModelError, UsageError
from weft.lower.double import doubled, is_double, widened
from weft.lower.redistribute import redistribute
from weft.plan.placement import D, P
from weft.plan.plan import Plan
from weft.run.build import Source
from weft.run.divided import OWN
from weft.run.exchange import Exchange
from weft.run.outputs import Output, outputs_of_parts
from weft.run.parameters import LocalParameter, build_groups, share
from weft.world import private
from weft.world.world import Group, World

_STREAM = 0x9E3779B97F4A7C15  # apart from what a seed itself draws


def keep_whole(model: nn.Module, source: Source, plan: Plan, batch: Any, world: World) -> None:
    """Make `model` real in place and let its gradients be averaged; `batch` is what it is called with, with the whole batch's samples.

    Raises:
        Infeasible: parts of the samples would train something else than all of them. ModelError: gradients that depend on more than what
            ranks sum: hooks on parameters, parameters that are none of the model's.
    """
    refuse_hooks(model)
    layout = plan.layout
    if layout.num_ranks != world.num_ranks:
        raise Infeasible(f"the layout {layout} needs {layout.num_ranks} ranks, {world.num_ranks} were started")
    if source.deferred is not None:
        realize(source.deferred, model)
    model.to(world.device)
    own = is_double(model)
    if layout.precision == "float64":
        widened(model)
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.sparse = False  # gradients lie in buffers with others, which are dense
    with in_modes(model, training_modes(model)):
        outputs = outputs_of_parts(plan, model, batch) if layout.data > 1 else {}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    exchange, over = None, None
    if layout.data > 1 and trained:
        over = world.group(layout.mesh.group(world.rank, "data"))
        exchange = _exchange(trained, plan, world, over, outputs)
    held = dict(model.named_parameters())
    Undivided(model, plan, world, own, model.forward, held, frozenset(trained), outputs, exchange, over).bind()
    if world.rank == 0:
        each = f"each of data={layout.data} ranks holds all of it and a part of the samples" if layout.data > 1 else "it runs as it is"
        print(f"weft: {plan.model} could not be captured ({plan.uncaptured}), so {each}", file=sys.stderr, flush=True)


def _exchange(trained: Mapping[str, nn.Parameter], plan: Plan, world: World, over: Group, outputs: Mapping[str, Output]) -> Exchange:
    """What averages the gradients of the model's own parameters."""
    last = len(trained)
    specs = [
        LocalParameter(
            name, tuple(p.shape), (0,) * p.dim(), tuple(p.shape), p.dtype, True, over.ranks, over.index == 0, True, True, (), i - last
        )
        for i, (name, p) in enumerate(reversed(list(trained.items())))
    ]  # fmt: skip
    groups, _ = build_groups(specs, world.device, 0, world.rank, plan.bucket_bytes)
    for group in groups:
        group.data = torch.empty(0)  # weights stay where the model has them
    sums = [over for _ in groups]
    share(groups, sums)
    means = any(output.dim is None and output.learns for output in outputs.values())
    rows = [path for path, output in outputs.items() if output.dim is not None and output.learns]
    return Exchange(groups, dict(trained), sums, unlike=True, late=means, outputs=rows)


@dataclass(frozen=True)
class Undivided:
    """How such a module computes. `called`: its own forward; `held`: its parameters, of which `trained` are exchanged."""

    model: nn.Module
    plan: Plan
    world: World
    own: bool
    called: Callable[..., Any]
    held: Mapping[str, nn.Parameter]
    trained: frozenset[str]
    outputs: Mapping[str, Output]
    exchange: Exchange | None
    over: Group | None
    copied: bool = False
    streams: dict[str, Tensor] = field(default_factory=dict)  # the state of this rank's random numbers, by device

    def bind(self) -> None:
        """Let the module compute so."""
        self.model.forward = torch.compiler.disable(self.forward)  # type: ignore[no-untyped-call]
        self.model.__deepcopy__ = self.copy  # type: ignore[assignment]
        self.model.__reduce_ex__ = self.unsaved  # type: ignore[method-assign]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns, of this rank's samples; means over samples are those of all ranks."""
        self._check()
        args, kwargs = self._moved(args), self._moved(kwargs)
        kind, precision = self.world.device.type, self.plan.layout.precision
        theirs = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None  # the user's own, around the call
        autocast = torch.bfloat16 if precision == "bfloat16" else theirs
        with torch.autocast(kind, dtype=autocast, enabled=autocast is not None), doubled(precision == "float64", self.own), self._drawing():
            output = self.called(*args, **kwargs)
        return output if self.exchange is None else self._joined(output)

    def _moved(self, given: Any) -> Any:
        """Arguments on this rank's device, in float64 where that is computed in."""
        double = self.plan.layout.precision == "float64"

        def moved(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return x.to(self.world.device, torch.float64 if double and x.is_floating_point() else x.dtype)

        return rebuild(given, {path: moved(x) for path, x in leaves(given)})

    def _drawing(self) -> Any:
        return nullcontext() if self.plan.layout.data == 1 else _Drawing(self.streams, self.world)

    def _check(self) -> None:
        """Raise where what trains now is not what is exchanged, or samples meet in statistics of a rank's part."""
        if self.plan.layout.data == 1:
            return
        for name, p in self.model.named_parameters():
            if p.requires_grad and (name not in self.trained or self.held[name] is not p):
                if name in self.held and self.held[name] is p:
                    why = "was frozen when the model was divided, and trains now"
                else:
                    why = "was put into the model after it was divided"
                raise UsageError(f"{name} {why}, so that its gradient would not be summed over ranks: do that inside the block")
        for name, m in self.model.named_modules():
            if isinstance(m, private.BatchNorm) and m.training:
                raise UsageError(
                    f"{name} was set to train after the model was divided, and takes statistics over all samples, of which this rank has a "
                    "part; keep it in evaluation, or use one rank"
                )
        if self.copied and torch.is_grad_enabled() and any(p.requires_grad for p in self.model.parameters()):
            raise UsageError(
                "a copy of a divided model has weights of its own, whose gradients nobody sums over ranks; call it under "
                "torch.no_grad(), or after copy.requires_grad_(False)"
            )

    def _joined(self, output: Any) -> Any:
        """The output, in which what all ranks have is their mean, and whose gradients begin the exchange on every rank."""
        assert self.exchange is not None
        assert self.over is not None
        found = {path: x for path, x in leaves(output) if isinstance(x, Tensor)}
        learns = torch.is_grad_enabled() and any(p.requires_grad for p in self.held.values())
        if self.model.training and learns and found.keys() != self.outputs.keys():
            raise ModelError(
                f"the model returned the tensors {', '.join(self.outputs) or 'none'} of the batch that it was divided with, and now "
                f"{', '.join(found) or 'none'} on rank {self.world.rank}: call it with the same arguments (batch= may be a dict of what "
                "forward takes by name), and return the same tensors always"
            )
        new: dict[str, Any] = dict(leaves(output))
        means = [path for path, one in self.outputs.items() if one.dim is None and path in found and found[path].is_floating_point()]
        if means:
            new.update(self._means({path: found[path] for path in means}, learns))
        for path, one in self.outputs.items():
            if one.dim is not None and one.learns and learns and path in found:
                x = found[path]
                x = x if x.requires_grad else x.detach().requires_grad_()  # its code went another way here than elsewhere
                x.register_hook(partial(_arrived, self.exchange, path, x.shape[one.dim]))  # type: ignore[no-untyped-call]
                new[path] = x
        return rebuild(output, new)

    def _means(self, found: Mapping[str, Tensor], learns: bool) -> dict[str, Tensor]:
        """Means over ranks, whose gradient is the mean of what ranks make of them: in one sum, for all ranks to make as many."""
        assert self.exchange is not None
        assert self.over is not None
        flat = torch.cat([x.reshape(-1).to(torch.float64) for x in found.values()]) / self.over.size
        begins = learns and any(self.outputs[path].learns for path in found)
        flat = flat.detach().requires_grad_() if begins and not flat.requires_grad else flat
        flat = redistribute(flat, P, D, self.over)
        if begins:
            flat.register_hook(lambda grad, exchange=self.exchange: exchange.begin())  # type: ignore[no-untyped-call]
        parts = torch.split(flat, [x.numel() for x in found.values()])
        return {path: part.reshape(x.shape).to(x.dtype) for (path, x), part in zip(found.items(), parts, strict=True)}

    def copy(self, memo: dict[int, Any]) -> nn.Module:
        """The module with copies of its weights, for averages of them: what copy.deepcopy gives."""
        model = self.model
        made: nn.Module = model.__new__(type(model))
        memo[id(model)] = made
        made.__dict__.update(copy.deepcopy({k: v for k, v in model.__dict__.items() if k not in OWN}, memo))
        held = dict(made.named_parameters())
        replace(self, model=made, called=partial(type(made).forward, made), held=held, exchange=None, copied=True).bind()
        return made

    def unsaved(self, protocol: object) -> Any:
        """What torch.save of the module itself is told."""
        raise UsageError(
            f"{type(self.model).__name__} is divided, and what it computes with cannot be saved: save weft.full_state_dict(net), which "
            "every rank calls, and load it into a new one with load_state_dict"
        )

    def full_state(self) -> dict[str, Tensor] | None:
        """The state dict on rank 0, None elsewhere."""
        state = {name: x.detach().cpu().clone() for name, x in self.model.state_dict().items()}
        return state if self.world.rank == 0 else None


def _arrived(exchange: Exchange, path: str, rows: int, grad: Tensor) -> None:
    exchange.count(path, rows)


class _Drawing:
    """A block that draws from numbers of this rank's own, and leaves the loop's as they were."""

    def __init__(self, streams: dict[str, Tensor], world: World) -> None:
        self._streams, self._world = streams, world
        self._cuda = world.device if world.device.type == "cuda" else None

    def __enter__(self) -> None:
        self._loops = torch.random.get_rng_state(), None if self._cuda is None else torch.cuda.get_rng_state(self._cuda)
        if not self._streams:
            torch.manual_seed((torch.initial_seed() + _STREAM * (self._world.rank + 1)) % (1 << 63))
            return
        torch.random.set_rng_state(self._streams["cpu"])
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._streams["cuda"], self._cuda)

    def __exit__(self, *_: object) -> None:
        self._streams["cpu"] = torch.random.get_rng_state()
        host, cuda = self._loops
        torch.random.set_rng_state(host)
        if self._cuda is not None and cuda is not None:
            self._streams["cuda"] = torch.cuda.get_rng_state(self._cuda)
            torch.cuda.set_rng_state(cuda, self._cuda)
