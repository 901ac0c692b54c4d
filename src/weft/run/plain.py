"""A model divided for a plain training loop: `net(x)`, `loss.backward()`, `opt.step()` stay the user's.

In: a module and a plan without a pipeline. Out: the same module object, whose parameters are this rank's blocks and whose forward
is the lowered graph. Gradients are exchanged while backward runs and are complete when `loss.backward()` returns.

The loss is the user's, over this rank's samples, so gradients are averaged over the ranks that sum them: that is the gradient of the mean
over all samples where the loss is a mean over samples, and of whatever else the user makes of weights alone (a penalty on their norm). What
the model itself computes is exact over the whole batch (batch norm included), since what it makes of a weight counts as often as it is
then divided by.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import Infeasible, ModelError
from weft.plan.mesh import Mesh
from weft.plan.plan import Plan
from weft.run.build import Parts, Source, build, check_evaluation
from weft.run.cut import CutParameter, Whole
from weft.run.divided import Divided, cut_what_is_loaded
from weft.run.optimizer import OptimizerSpec
from weft.run.parameters import FlatGroup, share
from weft.world import private
from weft.world.world import Group, World


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
        # Here, while the module has its own parameters.
        parts.draw.kept_writes = check_evaluation(parts.graph, plan, source, batch, None, outputs=True)
    except ModelError as error:
        cannot = error
    pairs = [v.name for v in parts.graph.parameters if v.pairs]
    if pairs:
        raise Infeasible(f"parameter {pairs[0]} is complex, which a plain loop's optimizer cannot be given in parts; use weft.parallelize")
    _mark_cut(parts, world, layout.mesh)
    _place(model, parts)
    training = {name: module.training for name, module in model.named_modules()}
    Divided(model, parts, plan, batch, world, inspect.signature(model.forward), cannot, training).bind()
    cut_what_is_loaded(model, parts)
    sums = [world.group(g.sum_ranks) if len(g.sum_ranks) > 1 else None for g in parts.groups]
    share(parts.groups, sums)
    _Exchange(parts.groups, parts.parameters, sums)
    return parts


def _mark_cut(parts: Parts, world: World, mesh: Mesh) -> None:
    """Let parameters that are cut know it."""
    values = {v.name: v.value for v in parts.graph.parameters}
    for name, spec in parts.specs.items():
        if spec.shape != spec.global_shape:
            over = world.group(mesh.group(world.rank, *spec.cut_over))
            marked = CutParameter.of(parts.parameters[name], Whole(name, spec.global_shape, over))
            parts.parameters[name] = marked
            if values[name] in parts.variables:
                parts.variables[values[name]] = marked


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
    """Averages each backward's gradients over ranks while it runs, and adds them to what the parameters' `.grad` already held."""

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
                    share = 1 / len(groups[n].sum_ranks)
                    parameters[name].register_hook(self._hook(number, name, groups[n].views[name], share))  # type: ignore[no-untyped-call]

    def _hook(self, number: int, name: str, view: Tensor, share: float) -> Any:
        def arrived(grad: Tensor) -> None:
            if not self._running:
                self._begin()
            with private.as_plain():
                before = self._parameters[name].grad
                self._earlier[name] = None if before is None else before.detach().clone()
                torch.mul(grad, share, out=view)
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
        with private.as_plain():
            self._hand_over()

    def _hand_over(self) -> None:
        """Give every parameter that was used, on whatever rank, its mean; as for one process, the others' gradients stay what they were."""
        for n, group in enumerate(self._groups):
            if self._sums[n] is None:
                continue
            for name, view in group.views.items():
                p, used_here = self._parameters[name], name in self._earlier
                if not used_here and not (p.requires_grad and view.any()):
                    continue
                before = self._earlier[name] if used_here else p.grad
                if p.grad is None:
                    p.grad = view.clone()
                elif before is None:
                    p.grad.copy_(view)
                else:
                    torch.add(before, view, out=p.grad)
