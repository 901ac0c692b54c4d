"""A model divided for a plain training loop: `net(x)`, `loss.backward()`, `opt.step()` stay the user's.

In: a module and a plan without a pipeline. Out: the same module object, whose parameters are this rank's blocks and whose forward
is the lowered graph. Gradients are exchanged while backward runs and are complete when `loss.backward()` returns.

The loss is the user's, over this rank's samples, so gradients are averaged over `data`: that is the gradient of the mean over all
samples where the loss is a mean over samples. What the model itself computes is exact over the whole batch (batch norm included).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import Infeasible, ModelError
from weft.lower.redistribute import counted
from weft.model.nesting import BatchForm, batch_size_of, leaves, rebuild
from weft.plan.plan import Plan
from weft.run.build import Parts, Source, build, check_evaluation
from weft.run.optimizer import OptimizerSpec
from weft.run.parameters import FlatGroup, share
from weft.world import private
from weft.world.world import Group, World

_PLAIN = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device)


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


def _as_captured(batch: Any, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call's arguments nested as the batch that the model was captured with: by keyword or in order."""
    bound = signature.bind(*args, **kwargs)
    if not isinstance(batch, Mapping):
        if bound.kwargs:
            raise Infeasible(
                f"the model was captured with arguments in order, and is called with {', '.join(bound.kwargs)} by keyword alone"
            )
        return bound.args
    given: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            raise Infeasible(f"the model was captured with arguments by keyword, and is called with {len(value)} more in order")
        given.update(value if kind is inspect.Parameter.VAR_KEYWORD else {name: value})
    return given


def divide(model: nn.Module, source: Source, plan: Plan, batch: Any, world: World) -> Parts:
    """Divide `model` in place under `plan`; `batch` is what it is called with, with the whole batch's samples.

    Raises:
        Infeasible: a plan with a pipeline, microbatches, ZeRO, compressed gradients or staleness, which need the engine.
    """
    layout = plan.layout
    if layout.num_stages > 1 or layout.microbatches > 1 or layout.zero or layout.compress != "none" or layout.staleness:
        raise Infeasible(f"{layout}: a plain loop owns its backward and its optimizer, so only data and tensor apply; use weft.parallelize")
    parts = build(plan, source, batch, None, world, OptimizerSpec(), torch.initial_seed(), outputs=True)
    cannot: ModelError | None = None
    try:
        check_evaluation(parts.graph, plan, source, batch, None, outputs=True)  # here, while the module has its own parameters
    except ModelError as error:
        cannot = error
    _place(model, parts)
    graph, local = parts.graph, parts.only
    forms = local.forms
    structure = parts.structure
    outputs = {path: leaf for path, leaf in leaves(structure) if isinstance(leaf, Tensor)}
    others = {p: _kept(p, leaf) for p, leaf in leaves(structure) if p not in outputs}
    signature, form = inspect.signature(model.forward), BatchForm.of(batch)
    inputs = list(graph.inputs)
    autocast = torch.bfloat16 if layout.precision == "bfloat16" else None
    rows = plan.batch_size // layout.data

    def forward(*args: Any, **kwargs: Any) -> Any:
        called = _as_captured(batch, signature, args, kwargs)
        given = form.tensors_of(called)
        have = batch_size_of(called)
        if have != rows:
            raise Infeasible(
                f"the model is divided for {plan.batch_size} samples, {rows} on each of data={layout.data}, and was called with {have}; "
                "draw batches through weft.shard(loader), with drop_last=True"
            )
        for v in inputs:
            want = parts.sharding.shape(v.value, v.tensor.shape)
            if tuple(given[v.name].shape) != want:
                raise Infeasible(
                    f"{v.name} has shape {list(given[v.name].shape)}, and the model was captured with {list(want)} on each rank; "
                    "pad or cut batches to one shape"
                )
        parts.draw.step += 1
        parts.draw.evaluating = not model.training
        if cannot is not None and not model.training:
            raise cannot
        tensors = {v.value: given[v.name].to(world.device) for v in inputs}
        values = [parts.variables[v] if v in parts.variables else tensors[v] for v in local.variables]
        with torch.autocast(world.device.type, dtype=autocast, enabled=autocast is not None):
            results = local.module(*values)
        out = []
        for name, x in zip(local.results, results, strict=True):
            cut = forms[name].get("data", "R")[0] == "S"  # of a mean over one of n equal parts 1/n counts
            out.append(counted(x, 1.0 / layout.data) if cut else x)
        return rebuild(structure, others | dict(zip(outputs, out, strict=True)))

    model.forward = forward
    sums = [world.group(g.sum_ranks) if len(g.sum_ranks) > 1 else None for g in parts.groups]
    share(parts.groups, sums)
    _Exchange(parts.groups, parts.parameters, sums)
    return parts


def _kept(path: str, leaf: Any) -> Any:
    return leaf if leaf is None or isinstance(leaf, _PLAIN) else NotReturned(path, type(leaf).__name__)


def _place(model: nn.Module, parts: Parts) -> None:
    """Put this rank's blocks where the module had its parameters and buffers."""
    first: dict[int, str] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        first.setdefault(id(tensor), name)
    for module in model.modules():
        for local, p in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, local, parts.parameters[first[id(p)]])
        for local, b in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if first[id(b)] in parts.buffers:
                setattr(module, local, parts.buffers[first[id(b)]])


class _Exchange:
    """Sums each backward's gradients over ranks while it runs, and adds them to what the parameters' `.grad` already held."""

    def __init__(self, groups: Sequence[FlatGroup], parameters: dict[str, nn.Parameter], sums: Sequence[Group | None]) -> None:
        self._groups, self._parameters, self._sums = list(groups), parameters, list(sums)
        self._order = [(n, bucket) for n, group in enumerate(groups) for bucket in group.buckets]
        self._earlier: dict[str, Tensor | None] = {}
        self._left: list[int] = []
        self._next = 0
        self._works: list[Any] = []
        self._running = False
        for number, (n, bucket) in enumerate(self._order):
            for name in bucket.names:
                if sums[n] is not None:
                    parameters[name].register_hook(self._hook(number, name, groups[n].views[name]))  # type: ignore[no-untyped-call]

    def _hook(self, number: int, name: str, view: Tensor) -> Any:
        def arrived(grad: Tensor) -> None:
            if not self._running:
                self._begin()
            before = self._parameters[name].grad
            self._earlier[name] = None if before is None else before.detach().clone()
            view.copy_(grad)
            self._left[number] -= 1
            self._launch(finished=False)

        return arrived

    def _begin(self) -> None:
        self._running = True
        self._earlier.clear()
        self._left = [len(bucket.names) for _, bucket in self._order]
        self._next = 0
        private.after_backward(self._finish)

    def _launch(self, finished: bool) -> None:
        while self._next < len(self._order) and (finished or self._left[self._next] <= 0 or self._sums[self._order[self._next][0]] is None):
            n, bucket = self._order[self._next]
            over = self._sums[n]
            if over is not None:
                for name in bucket.names:
                    if name not in self._earlier:
                        self._groups[n].views[name].zero_()
                self._works.append(over.all_reduce(self._groups[n].grad[bucket.start : bucket.stop], wait=False))
            self._next += 1

    def _finish(self) -> None:
        self._running = False
        self._launch(finished=True)
        for work in self._works:
            work.wait()
        self._works.clear()
        for n, group in enumerate(self._groups):
            if self._sums[n] is None:
                continue
            for name, view in group.views.items():
                before = self._earlier.get(name)
                p = self._parameters[name]
                if p.grad is None:
                    p.grad = view.clone()
                elif before is None:
                    p.grad.copy_(view)
                else:
                    torch.add(before, view, out=p.grad)
