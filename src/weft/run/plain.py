"""A model divided for a plain training loop: `net(x)`, `loss.backward()`, `opt.step()` stay the user's.

In: a module and a plan without a pipeline. Out: the same module object, whose parameters are this rank's blocks and whose forward
is the lowered graph. Gradients are exchanged while backward runs and are complete when `loss.backward()` returns. A model that could not
be captured stays whole (`weft.run.undivided`).

The loss is the user's, over this rank's samples, so gradients are averaged over the ranks that sum them: that is the gradient of the mean
over all samples where the loss is a mean over samples, and of whatever else the user makes of weights alone (a penalty on their norm). What
the model itself computes is exact over the whole batch (batch norm included), since what it makes of a weight counts as often as it is
then divided by.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from weft.capture.fakes import fake_mode
from weft.capture.modes import Modes, training_modes
from weft.capture.nesting import BatchForm
from weft.errors import Infeasible, UsageError
from weft.plan.mesh import Mesh
from weft.plan.placement import is_shard
from weft.plan.plan import Plan
from weft.run.build import Parts, Source, Traced, build
from weft.run.captures import captured_in
from weft.run.cut import CutParameter, Whole
from weft.run.cut_optimizer import guard_optimizers
from weft.run.divided import OWN, Captures, Divided, cut_what_is_loaded
from weft.run.exchange import Exchange
from weft.run.optimizer import OptimizerSpec
from weft.run.original import Original
from weft.run.parameters import share
from weft.run.plain_state import divided_of
from weft.run.undivided import keep_whole
from weft.world.world import World


def divide(model: nn.Module, source: Source, plan: Plan, batch: Any, world: World) -> None:
    """Divide `model` in place under `plan`; `batch` is what it is called with, with the whole batch's samples.

    Raises:
        Infeasible: a plan with a pipeline, microbatches, ZeRO, compressed gradients or staleness, which need the engine; a model that could
            not be captured, whose parts would train something else than the whole.
    """
    layout = plan.layout
    if layout.num_stages > 1 or layout.microbatches > 1 or layout.zero or layout.compress != "none" or layout.staleness:
        raise Infeasible(f"{layout}: a plain loop owns its backward and its optimizer, so only data and tensor apply; use weft.parallelize")
    if plan.uncaptured:
        keep_whole(model, source, plan, batch, world)
        return
    parts = build(plan, source, batch, None, world, OptimizerSpec(), torch.initial_seed(), outputs=True)
    pairs = [v.name for v in parts.graph.parameters if v.pairs]
    if pairs:
        raise Infeasible(f"parameter {pairs[0]} is complex, which a plain loop's optimizer cannot be given in parts; use weft.parallelize")
    _mark_cut(parts, world, layout.mesh)
    original = Original(model, OWN, fake_mode() if source.deferred is None else source.deferred.fake_mode)
    _place(model, parts)

    form = BatchForm.of(batch)

    def capture(modes: Modes, called: Any) -> Parts:
        # What a source has captured is of one batch.
        alike = form.with_tensors_of(called) is form
        given, of = (batch, source) if alike else (called, Traced(source.model, source.deferred))
        with original.back():
            return captured_in(modes, parts, plan, of, given, None, world, parts.draw, outputs=True)

    captures = Captures({(training_modes(model), form.tensors): parts}, capture)
    Divided(model, parts, plan, batch, world, inspect.signature(model.forward), captures).bind()
    cut_what_is_loaded(model, parts)
    sums = [world.group(g.sum_ranks) if len(g.sum_ranks) > 1 else None for g in parts.groups]
    share(parts.groups, sums)
    Exchange(parts.groups, parts.parameters, sums)


def full_state_dict(model: nn.Module) -> dict[str, Tensor] | None:
    """Parameters and buffers of the whole of a divided model under its own names, on rank 0; None elsewhere. Every rank calls it.

    Raises:
        UsageError: a model that is not divided.
    """
    divided = divided_of(model)
    if divided is None:
        raise UsageError(
            f"{type(model).__name__} is not divided: give the module that was built under weft.auto_parallelize; "
            "an engine has full_state_dict() of its own"
        )
    return divided.full_state()


def _mark_cut(parts: Parts, world: World, mesh: Mesh) -> None:
    """Let parameters that are cut know it."""
    values = {v.name: v.value for v in parts.graph.parameters}
    for name, spec in parts.specs.items():
        if spec.shape != spec.global_shape:
            forms = parts.sharding.forms[values[name]]
            cuts = tuple((form.dim, world.group(mesh.group(world.rank, axis))) for axis, form in forms.items() if is_shard(form))
            whole = Whole(name, spec.global_shape, cuts)
            if (whole.offsets, whole.part) != (spec.offsets, spec.shape):
                raise AssertionError(f"{name} is cut {whole.places}, and lies at {spec.offsets}")
            guard_optimizers()
            marked = CutParameter.of(parts.parameters[name], whole)
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
