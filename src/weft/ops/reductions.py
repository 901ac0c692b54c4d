"""Reductions, sorts and scans along dimensions: which other dimensions can be sharded, and how a sharded one is reduced."""

from __future__ import annotations

from weft.ops.keeps import behind_first, both, choices, first_and_others, others, output
from weft.ops.operator import Operator
from weft.ops.pointwise import of_elements
from weft.ops.record import ByTensors, Made, Op, Shape, Tensors
from weft.ops.rule import BLOCKED, Rule


def dims_of(op: Operator, position: int, rank: int) -> list[int] | None:
    """Return the reduced dimensions; None for all, empty for a scalar (which torch counts as one dimension)."""
    value = op.args[position] if len(op.args) > position else dict(op.kwargs).get("dim")
    if value is None or value == ():
        return None
    items = value if isinstance(value, tuple) else (value,)
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in items):
        return None
    return [int(i) % rank for i in items] if rank else []


def along(position: int = 1, last: bool = False, loose: bool = False, reduces: bool = False) -> Made:
    """Return the rule of an operator along the dimensions in argument `position` (by default all, or the `last`).

    Every other dimension can be sharded if all tensors agree in its size. `loose`: tensors may have other ranks, and are then replicated.
    `reduces`: the dimensions may be missing from the output.
    """

    def rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
        dims = dims_of(op, position, len(ins[0])) or ([len(ins[0]) - 1] if last else None)
        if dims is None:
            return None
        is_reduced = reduces and len(outs[0]) != len(ins[0])
        shapes = [*ins, *([] if is_reduced else outs)]
        if any(len(s) != len(ins[0]) for s in shapes) and not loose:
            return None
        labels = tuple(
            f"d{i}" if i not in dims and n > 1 and all(len(s) != len(ins[0]) or s[i] == n for s in shapes) else BLOCKED
            for i, n in enumerate(ins[0])
        )
        rows = tuple(labels if len(s) == len(ins[0]) else (BLOCKED,) * len(s) for s in ins)
        if is_reduced:
            return Rule(rows, tuple(tuple(x for i, x in enumerate(labels) if i not in dims) for _ in outs))
        return Rule(rows, tuple(labels for _ in outs))

    return rule


def _reduction(how: str = "", position: int = 1, several: bool = True) -> ByTensors:
    """Return the rule of a reduction: other dimensions pass through. `how` a sharded reduced dimension is combined: "sum", "mean",
    "extreme" (ranks compare their own; "whole": only where all dimensions are reduced); else it is not sharded. `several`: with two tensors
    it is elementwise."""

    def rule(op: Operator, tensors: Tensors) -> Rule | None:
        ins, outs = ([tensors[v].shape for v in values] for values in (op.inputs, op.outputs))
        if len(ins) > 1:  # max(x, y) of two tensors
            return of_elements(ins, outs) if several else None
        rank = len(ins[0])
        dims = dims_of(op, position, rank)
        if dims is None:
            dims = list(range(rank))
        keeps = len(outs[0]) == rank and rank > 0
        extreme = tensors[op.inputs[0]].is_float and (how == "extreme" or (how == "whole" and len(op.args) == 1))
        contracted = how in ("sum", "mean") or extreme
        labels = tuple(f"d{i}" if n > 1 and (i not in dims or contracted) else BLOCKED for i, n in enumerate(ins[0]))
        out = tuple(BLOCKED if i in dims else x for i, x in enumerate(labels) if keeps or i not in dims)
        if any(len(out) != len(o) for o in outs):
            return None
        kernel = "average" if how == "mean" else "extreme"
        kernels = {labels[i]: kernel for i in dims if labels[i]} if how == "mean" or extreme else {}
        return Rule((labels,), tuple(out for _ in outs), kernels)

    return ByTensors(rule)


def _running(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """Return the rule of a running sum: along a sharded dimension a rank adds the totals of earlier ranks."""
    dims = dims_of(op, 1, len(ins[0]))
    if dims is None:
        return None
    labels = tuple(f"d{i}" if n > 1 else BLOCKED for i, n in enumerate(ins[0]))
    return Rule((labels,), (labels,), {labels[i]: "running" for i in dims if labels[i]})


def _renormed(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """Return the rule of `renorm`: each slice along `dim` has its own norm over all other dimensions."""
    dim = op.args[2] if len(op.args) > 2 else dict(op.kwargs).get("dim")
    if not isinstance(dim, int):
        return None
    labels = tuple("d" if i == dim % len(ins[0]) and n > 1 else BLOCKED for i, n in enumerate(ins[0]))
    return Rule((labels,), (labels,))


OPS = (
    Op("sum", _reduction("sum"), contracts=True, linear="together", keeps=others, gradient="same"),
    Op("mean", _reduction("mean"), contracts=True, linear="together", keeps=others),
    Op("nansum count_nonzero", _reduction("sum"), contracts=True),
    Op("amax", _reduction("extreme"), extreme="largest", keeps=both, makes=1.3),
    Op("amin", _reduction("extreme"), extreme="least", keeps=both, makes=1.3),
    Op("max", _reduction("whole"), extreme="largest", keeps=choices),
    Op("min", _reduction("whole"), extreme="least", keeps=choices),
    Op("median nanmedian mode", _reduction(), keeps=choices),
    Op("any all argmax argmin var std var_mean std_mean nanmean aminmax", _reduction()),
    Op("prod", _reduction(), keeps=both, autocast="wider"),
    Op("norm linalg_vector_norm", _reduction(position=2), keeps=both),
    Op("quantile nanquantile", _reduction(position=2, several=False), autocast="wider"),
    Op("renorm", _renormed),
    Op("msort", keeps=choices),
    Op("trapezoid", keeps=others),
    Op("trace", autocast="wider"),
    Op("softmax _softmax", along(), kind="softmax", normalises=True, keeps=output, turned=1.0),
    Op("log_softmax", along(), kind="softmax", keeps=output, turned=1.0),
    Op("_log_softmax", along(), kind="softmax", keeps=output),
    Op("_safe_softmax", kind="softmax", normalises=True, keeps=output),
    Op("_softmax_backward_data _log_softmax_backward_data", along(2)),
    Op("logsumexp", along(reduces=True), kind="softmax", keeps=both),
    Op("logcumsumexp", along(), keeps=both),
    Op("cumsum", _running, keeps=others, makes=2.0),
    Op("cumprod", along(), keeps=both, makes=3.2),
    Op("cummax cummin", along(), keeps=choices),
    Op("flip", along(), shifts=True, linear="together", keeps=others),
    Op("roll", along(2), shifts=True, keeps=others),
    Op("diff", along(2), keeps=others),
    Op("rot90 cross linalg_cross", along(2)),
    Op("topk", along(2, last=True), keeps=choices, many_ways=True),
    Op("kthvalue", along(2, last=True, reduces=True), keeps=choices),
    Op("sort", along(last=True), keeps=choices),
    Op("argsort glu", along(last=True)),
    Op("fft_fftshift fft_ifftshift", along(), keeps=others),
    Op("scatter scatter_add", along(), keeps=others),
    Op("scatter_reduce", along()),
    Op("gather take_along_dim", along(), kind="gather", keeps=first_and_others, gradient="scattered"),
    Op("index_select", along(loose=True), kind="gather", keeps=others),
    Op("index_add", along(loose=True), keeps=behind_first),
    Op("index_copy index_fill", along(loose=True)),
)
