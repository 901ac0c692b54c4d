"""How much of a model each axis divides. In: this rank's parts of a plan. Out: per axis the share of parameters and of FLOPs.

One meaning for every axis: of a whole W the rank that has most along the axis keeps the part h, where the other axes divide nothing; an
even division over n ranks would leave it W / n. The share that is divided is (1 - h / W) / (1 - 1 / n): 1 where all ranks along the axis
have equally much, 0 where one of them has everything.

`parameters` counts elements. `tensor` divides those that are cut over tensor ranks; a grid also has each of its axes by itself. `pipeline`
divides them among stages. `data` divides none but with ZeRO, which divides what is kept of them: optimizer state, then gradients, then the
weights themselves. Of what ranks own (branches) that of the one with most counts. `flops` counts the forward's products as `model.work`
does, and the bytes that operators move where a model has none; an operator counts as divided over an axis where each rank computes its
part of it, and a pipeline's stages divide them. What is cut into pieces that differ counts as divided.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from weft.model.work import operator_bytes, operator_flops
from weft.plan.axis import DATA, axis_of
from weft.plan.grid import AXES as GRID
from weft.plan.placement import R, is_owned, is_shard
from weft.plan.plan import Plan
from weft.run.training_parts import Parts

Share = tuple[float, int, int | None]  # size, into how many pieces it is cut, the one rank that has it
Division = dict[str, dict[str, float]]  # axis -> {"parameters": share, "flops": share}


def division_of(plan: Plan, parts: Parts) -> Division:
    """The shares of every axis that has more than one rank, outermost first; all ranks find the same."""
    layout, graph = plan.layout, parts.graph
    shardings = parts.shardings or (parts.sharding,)
    stages_of = parts.program.stages_of
    sizes = {name: max(s.sizes.get(name, 1) for s in shardings) for name in dict.fromkeys(name for s in shardings for name in s.sizes)}
    tensor = [name for name in sizes if axis_of(name).cuts_weights and not axis_of(name).cuts_channels]
    axes = {name: (name,) for name in sizes if name not in tensor or len(tensor) > 1} | {"tensor": tuple(tensor)}
    axes = {name: those for name, those in axes.items() if prod(sizes.get(a, 1) for a in those) > 1}
    division: Division = {}
    weighed = {op.name: operator_flops(op, graph.tensors) for op in graph.operators}
    if not any(weighed.values()):
        weighed = {op.name: float(operator_bytes(op, graph.tensors)) for op in graph.operators}
    ranks_of = {stage.index: [r for r, those in enumerate(stages_of) if stage.index in those] for stage in parts.stages}
    holders = {v.value: parts.holders(v.value) for v in graph.parameters}
    # A value that no operator makes more of than one stage reads (a mask) is made by each; it counts once.
    at = {op.name: stage.index for stage in reversed(parts.stages) for op in stage.operators}
    if layout.pipeline > 1:
        held = [float(sum(v.tensor.size for v in graph.parameters if r in holders[v.value])) for r in range(layout.pipeline)]
        computed = [sum(weighed[name] / len(ranks_of[s]) for name, s in at.items() if r in ranks_of[s]) for r in range(layout.pipeline)]
        division["pipeline"] = {
            "parameters": _even(max(held), graph.num_parameters, layout.pipeline),
            "flops": _even(max(computed), sum(weighed[name] for name in at), layout.pipeline),
        }

    def parameters(over: tuple[str, ...]) -> Iterable[Share]:
        for v in graph.parameters:
            sharding = shardings[holders[v.value][0]]
            forms = {axis: sharding.forms[v.value].get(axis, R) for axis in over}
            cut = [axis for axis, form in forms.items() if is_shard(form)]
            if layout.zero and v.trainable:
                cut += [axis for axis in over if axis_of(axis).cuts_samples and axis in sharding.gradients.get(v.value, ())]
            owner = next((form.rank for form in forms.values() if is_owned(form)), None)
            yield float(v.tensor.size), prod(sharding.sizes[axis] for axis in cut), owner

    def flops(over: tuple[str, ...]) -> Iterable[Share]:
        for name, stage in at.items():
            sharding = shardings[ranks_of[stage][0]]
            owner = next((region.ranks[name] for region in sharding.regions if region.axis in over and name in region.ranks), None)
            yield weighed[name], prod(sharding.sizes[axis] for axis in over if sharding.ops[name].get(axis, "")), owner

    for name, over in axes.items():
        n = prod(sizes[a] for a in over)
        is_replicated = plan.uncaptured and name == DATA  # every rank runs the module on its own samples
        division[name] = {
            "parameters": _even(*_kept(parameters(over)), n),
            "flops": 1.0 if is_replicated else _even(*_kept(flops(over)), n),
        }
    return division


def warnings(plan: Plan, shares: Division, cut_everything: bool = False) -> tuple[str, ...]:
    """One sentence for every axis whose ranks all do the same, so that equality says nothing about it."""
    said = []
    layout = plan.layout
    for axis, share in shares.items():
        if axis in GRID:
            continue
        number = dict(layout.axes).get(axis) or layout.tensor
        if axis_of(axis).cuts_samples and layout.zero and not share["parameters"] and share["flops"]:
            said.append(f"zero={layout.zero} divides no parameter over {axis}={number}, so nothing is proven about it")
        if share["flops"]:
            continue
        what = "no product" if share["parameters"] else "no parameter and no product"
        if not axis_of(axis).cuts:  # stages
            remedy = "let stages begin elsewhere (stages in a plan file)"
        elif axis_of(axis).cuts_samples:
            remedy = "see which operators are computed whole for want of a rule"
        elif cut_everything:
            remedy = "no rule cuts this model so; verify sizes that divide by it"
        else:
            remedy = "--cut-everything (cut_everything=True) cuts wherever the rules allow"
        said.append(f"{axis}={number} divides {what} of this model (0 %), so that it is equal proves nothing about {axis}: {remedy}")
    return tuple(said)


def _kept(parts: Iterable[Share]) -> tuple[float, float]:
    """(what the rank has that has most, what there is)."""
    listed = list(parts)
    owned: dict[int, float] = {}
    for size, ways, owner in listed:
        if owner is not None:
            owned[owner] = owned.get(owner, 0.0) + size / ways
    return sum(size / ways for size, ways, owner in listed if owner is None) + max(owned.values(), default=0.0), sum(s for s, *_ in listed)


def _even(most: float, total: float, n: int) -> float:
    """(1 - h / W) / (1 - 1 / n), within rounding."""
    if not total:
        return 0.0
    return min(1.0, max(0.0, round((1 - most / total) / (1 - 1 / n), 12)))
