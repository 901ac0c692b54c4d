"""Views and rearrangements: reshape, permute, slice, split, concatenate, expand; which input dimension becomes which output dimension."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod

from shardwise.ops.operator import Operator
from shardwise.ops.record import ALIASES_GRADIENT, SAVES_INTEGERS, Backward, Op, Output, Shape, View
from shardwise.ops.rule import BLOCKED, FusedLabel, LabelRanges, Labels, Rule, broadcast_labels, leading_labels, shardable_labels
from shardwise.ops.saved_tensors import integer_inputs
from shardwise.ops.vocabulary import AutocastPolicy, CostKind, GradientMemory, Linearity, LoweringKind, ViewKind


def _reshape_groups(source: Shape, target: Shape) -> list[tuple[list[int], list[int]]]:
    """Return groups of dimensions larger than one on both sides of a reshape whose products agree; no trailing remainder."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(source) and j < len(target):
        i0, j0 = i, j
        a, b = source[i], target[j]
        i, j = i + 1, j + 1
        while a != b:
            if a < b and i < len(source):
                a, i = a * source[i], i + 1
            elif j < len(target):
                b, j = b * target[j], j + 1
            else:
                return groups
        groups.append(([k for k in range(i0, i) if source[k] > 1], [k for k in range(j0, j) if target[k] > 1]))
    return [(read, written) for read, written in groups if read and written]


def reshape_labels(source: Shape, target: Shape) -> tuple[Labels, Labels]:
    """Return labels of a reshape: dimensions are grouped where their products agree; the outermost of a group can be sharded.

    >>> reshape_labels((4, 32, 64), (4, 32, 8, 8))
    (('d0', 'd1', 'd2'), ('d0', 'd1', 'd2', ''))
    """
    source_labels, target_labels = [BLOCKED] * len(source), [BLOCKED] * len(target)
    for number, (read, written) in enumerate(_reshape_groups(source, target)):
        source_labels[read[0]] = target_labels[written[0]] = f"d{number}"
    return tuple(source_labels), tuple(target_labels)


def _dim_argument(op: Operator, position: int, default: int, rank: int, key: str = "dim") -> int:
    value = op.args[position] if len(op.args) > position else dict(op.kwargs).get(key, default)
    return int(value) % max(rank, 1)  # type: ignore[call-overload,no-any-return]


def _reshape_rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule:
    source, target = reshape_labels(ins[0], outs[0])
    # Only the shape of a second tensor (view_as) is read.
    return Rule((source, *([None] * (len(ins) - 1))), (target,))


def _permute_rule(order: Callable[[Operator, int], list[int]]) -> Callable[[Operator, list[Shape], list[Shape]], Rule]:
    def rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule:
        labels = shardable_labels(ins[0])
        return Rule((labels,), (tuple(labels[i] for i in order(op, len(labels))),))

    return rule


def _transpose_order(op: Operator, rank: int) -> list[int]:
    order = list(range(rank))
    if not order:  # torch allows swapping dimensions of a scalar
        return order
    a, b = _dim_argument(op, 1, 0, rank, "dim0"), _dim_argument(op, 2, 1, rank, "dim1")
    order[a], order[b] = order[b], order[a]
    return order


def _permute_order(op: Operator, rank: int) -> list[int]:
    dims = op.args[1]
    return [int(d) % rank for d in dims]  # type: ignore[attr-defined]


def _movedim_order(op: Operator, rank: int) -> list[int]:
    sources, targets = ([int(d) % rank for d in (a if isinstance(a, tuple) else (a,))] for a in op.args[1:3])
    order = [i for i in range(rank) if i not in sources]
    for target, source in sorted(zip(targets, sources, strict=True)):
        order.insert(target, source)
    return order


def _expand_rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule:
    out = shardable_labels(outs[0])
    return Rule((broadcast_labels(out, outs[0], ins[0]), *([None] * (len(ins) - 1))), (out,))


def _slice_rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule:
    dim = _dim_argument(op, 1, 0, len(ins[0]))
    labels = shardable_labels(ins[0], (dim,) if ins[0][dim] != outs[0][dim] else ())
    return Rule((labels,), (labels,))


def _slice_scatter_rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule:
    """Return the rule of slice_scatter and select_scatter: args (x, source, dim, ...)."""
    dim = _dim_argument(op, 2, 0, len(ins[0]))
    labels = shardable_labels(ins[0], (dim,))
    return Rule((labels, labels if len(ins[1]) == len(ins[0]) else labels[:dim] + labels[dim + 1 :]), (labels,))


def _cat_rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule:
    dim = _dim_argument(op, 1, 0, len(outs[0]))
    labels = shardable_labels(outs[0], (dim,))
    return Rule(tuple(labels if len(s) == len(labels) else (BLOCKED,) * len(s) for s in ins), (labels,))


def _stack_rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule:
    dim = _dim_argument(op, 1, 0, len(outs[0]))
    labels = shardable_labels(ins[0])
    return Rule(tuple(labels for _ in ins), ((*labels[:dim], BLOCKED, *labels[dim:]),))


def _split_rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule:
    dim = _dim_argument(op, 2, 0, len(ins[0]))
    labels = shardable_labels(ins[0], (dim,))
    return Rule((labels,), tuple(labels for _ in outs))


def _select_rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule:
    """Return the rule of `select`, and of `unbind`, which selects each entry of a dimension."""
    dim = _dim_argument(op, 1, 0, len(ins[0]))
    labels = shardable_labels(ins[0], (dim,))
    return Rule((labels,), tuple(labels[:dim] + labels[dim + 1 :] for _ in outs))


def _repeat_rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule:
    extra = len(outs[0]) - len(ins[0])
    labels = [f"d{i}" if ins[0][i] == outs[0][i + extra] and ins[0][i] > 1 else BLOCKED for i in range(len(ins[0]))]
    return Rule((tuple(labels),), (tuple([BLOCKED] * extra + labels),))


def _repeat_interleave_rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule:
    """Return the rule of a constant number of repeats in place: equal shards of the input give equal shards of the output."""
    if not isinstance(op.args[1], int) or len(ins[0]) != len(outs[0]) or "output_size" in dict(op.kwargs) or len(ins) > 1:
        return Rule(((BLOCKED,) * len(ins[0]), *([None] * (len(ins) - 1))), ((BLOCKED,) * len(outs[0]),))
    labels = shardable_labels(ins[0])
    return Rule((labels,), (labels,))


def _unfold_rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """Return the rule of `x.unfold(dim, size, step)`: windows along one dimension, with their elements last."""
    dim = int(op.args[1]) % max(len(ins[0]), 1)  # type: ignore[call-overload]
    labels = shardable_labels(ins[0], (dim,))
    return Rule((labels,), ((*labels, BLOCKED),))


def _diagonal_rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """Return the rule of a diagonal of two dimensions, which becomes the last one."""
    options = dict(op.kwargs)
    rank = len(ins[0])
    dims = [int(op.args[i] if len(op.args) > i else options.get(f"dim{i - 1}", i - 2)) % rank for i in (2, 3)]  # type: ignore[call-overload]
    labels = shardable_labels(ins[0], dims)
    return Rule((labels,), ((*(x for i, x in enumerate(labels) if i not in dims), BLOCKED),))


def _diag_embed_rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """Return the rule of `diag_embed` at its defaults: the last dimension becomes the diagonal of a matrix."""
    if len(op.args) > 2 or op.kwargs:
        return None
    return Rule((leading_labels(ins[0], len(ins[0]) - 1),), (leading_labels(outs[0], len(ins[0]) - 1),))


def _meshgrid_rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """Return the rule of `meshgrid`: each tensor has its own dimension."""
    if any(len(s) != 1 for s in ins):
        return None
    labels = [f"d{i}" if s[0] > 1 else BLOCKED for i, s in enumerate(ins)]
    output_labels = list(labels)
    if dict(op.kwargs).get("indexing") == "xy" and len(labels) > 1:
        output_labels[:2] = output_labels[1::-1]
    return Rule(tuple((x,) for x in labels), tuple(tuple(output_labels) for _ in outs))


def _reversed_order(op: Operator, rank: int) -> list[int]:
    return list(range(rank))[::-1]


def _last_two_order(op: Operator, rank: int) -> list[int]:
    return [*range(rank - 2), rank - 1, rank - 2]


def _part_labels(dim: int, ins: list[Shape], outs: list[Shape], starts: Sequence[int]) -> tuple[FusedLabel, ...]:
    """Return the fused label of slices of one dimension that begin at `starts`."""
    outputs = tuple((len(ins) + i, dim, ((start, start + out[dim]),)) for i, (start, out) in enumerate(zip(starts, outs, strict=True)))
    return (FusedLabel(f"d{dim}", ((0, dim, ((0, ins[0][dim]),)), *outputs)),)


def _split_labels(op: Operator, ins: list[Shape], outs: list[Shape]) -> tuple[FusedLabel, ...]:
    dim = _dim_argument(op, 2, 0, len(ins[0]))
    return _part_labels(dim, ins, outs, [0, *accumulate(out[dim] for out in outs[:-1])]) if outs else ()


def _slice_labels(op: Operator, ins: list[Shape], outs: list[Shape]) -> tuple[FusedLabel, ...]:
    """Return the label of `slice(x, dim, start, stop, step)` and `narrow(x, dim, start, length)`."""
    dim, arguments = _dim_argument(op, 1, 0, len(ins[0])), (*op.args, *(None,) * 5)
    length, step = ins[0][dim], 1 if op.target.startswith("aten.narrow") else arguments[4]
    start = 0 if arguments[2] is None else arguments[2]
    if not isinstance(start, int) or step not in (None, 1) or ins[0][dim] == outs[0][dim]:
        return ()
    start = max(0, min(length, start + length if start < 0 else start))
    return _part_labels(dim, ins, outs, [start])


def _select_labels(op: Operator, ins: list[Shape], outs: list[Shape]) -> tuple[FusedLabel, ...]:
    """Return the label of `select`, which takes one entry of a dimension, or `unbind`, which takes each separately."""
    dim = _dim_argument(op, 1, 0, len(ins[0]))
    length = ins[0][dim]
    at = int(op.args[2]) % length if len(outs) == 1 and len(op.args) > 2 and isinstance(op.args[2], int) else None
    ends = range(1, length) if at is None else range(max(1, at), min(length, at + 2))
    return (FusedLabel(f"d{dim}", ((0, dim, ((0, length),)),), tuple(ends)),)


def _inner_labels(op: Operator, ins: list[Shape], outs: list[Shape]) -> tuple[FusedLabel, ...]:
    """Return labels of a reshape that splits or merges a dimension whose outer factors are split entry by entry: an inner factor can be
    sharded, and its dimension on the other side is as many runs of it."""
    along = []
    for label, (read, written) in enumerate(_reshape_groups(ins[0], outs[0])):
        for group, number, shape, other in ((written, len(ins), outs[0], (0, read[0])), (read, 0, ins[0], (len(ins), written[0]))):
            for i in range(1, len(group) if len(read) == 1 or len(written) == 1 else 0):
                runs: LabelRanges = ((0, shape[group[i]]),)
                outer = group[:i]
                places = ((*other, runs * prod(shape[d] for d in outer)), (number, group[i], runs))
                along.append(FusedLabel(f"d{label}", places, split_dims=tuple((number, d) for d in outer)))
    return tuple(along)


def _permutation_record(names: str, order: Callable[[Operator, int], list[int]]) -> Op:
    return Op(
        names, _permute_rule(order), linear=Linearity.JOINT, kind=CostKind.VIEW, view=View(permutation=order), backward=ALIASES_GRADIENT,
    )  # fmt: skip


OPS = (
    Op(
        "view reshape _unsafe_view", _reshape_rule, along=_inner_labels, linear=Linearity.JOINT, kind=CostKind.VIEW,
        view=View(ViewKind.RESHAPE), output=Output(shape_at=1), backward=ALIASES_GRADIENT,
    ),
    Op(
        "flatten ravel unflatten squeeze unsqueeze", _reshape_rule, along=_inner_labels, linear=Linearity.JOINT, kind=CostKind.VIEW,
        view=View(ViewKind.RESHAPE), backward=ALIASES_GRADIENT,
    ),
    Op(
        "view_as", _reshape_rule, along=_inner_labels, linear=Linearity.JOINT, kind=CostKind.VIEW, view=View(ViewKind.RESHAPE),
        backward=Backward(gradient=GradientMemory.ALIAS, num_differentiable=1), autocast=AutocastPolicy.FIRST_OPERAND,
    ),
    Op(
        "reshape_as", _reshape_rule, linear=Linearity.JOINT, view=View(ViewKind.RESHAPE),
        backward=Backward(gradient=GradientMemory.ALIAS, num_differentiable=1), autocast=AutocastPolicy.FIRST_OPERAND,
    ),
    Op("atleast_1d atleast_2d atleast_3d", _reshape_rule, linear=Linearity.JOINT),
    _permutation_record("transpose swapaxes swapdims", _transpose_order),
    _permutation_record("permute", _permute_order),
    _permutation_record("movedim moveaxis", _movedim_order),
    _permutation_record("t numpy_T", _reversed_order),
    Op("matrix_H", _permute_rule(_reversed_order), linear=Linearity.JOINT),
    _permutation_record("mT", _last_two_order),
    Op("mH adjoint", _permute_rule(_last_two_order), linear=Linearity.JOINT),
    Op("expand", _expand_rule, linear=Linearity.JOINT, kind=CostKind.VIEW, view=View(ViewKind.EXPAND), output=Output(shape_at=1)),
    Op(
        "expand_as", _expand_rule, linear=Linearity.JOINT, kind=CostKind.VIEW, view=View(ViewKind.EXPAND),
        backward=Backward(num_differentiable=1), autocast=AutocastPolicy.FIRST_OPERAND,
    ),
    Op("broadcast_to", _expand_rule, linear=Linearity.JOINT, kind=CostKind.VIEW, view=View(ViewKind.EXPAND)),
    Op(
        "slice narrow", _slice_rule, along=_slice_labels, linear=Linearity.JOINT, kind=CostKind.VIEW,
        view=View(ViewKind.SLICE, mixes_positions=True), lowering=LoweringKind.SLICE,
    ),
    Op("narrow_copy", _slice_rule, linear=Linearity.JOINT),
    Op("select unbind", _select_rule, along=_select_labels, linear=Linearity.JOINT, kind=CostKind.VIEW, view=View(ViewKind.SLICE)),
    Op(
        "split split_with_sizes chunk tensor_split", _split_rule, along=_split_labels, linear=Linearity.JOINT, kind=CostKind.VIEW,
        view=View(ViewKind.SLICE), lowering=LoweringKind.SLICE,
    ),
    Op(
        "slice_scatter select_scatter", _slice_scatter_rule, linear=Linearity.JOINT, backward=SAVES_INTEGERS, lowering=LoweringKind.SCATTER,
        autocast=AutocastPolicy.FIRST_OPERAND,
    ),
    Op("diagonal_scatter as_strided_scatter", autocast=AutocastPolicy.FIRST_OPERAND),
    Op(
        "cat concat concatenate", _cat_rule, linear=Linearity.JOINT, view=View(mixes_positions=True, concatenates=True),
        backward=Backward(integer_inputs, GradientMemory.ALIAS),
    ),
    Op("stack", _stack_rule, linear=Linearity.JOINT, view=View(concatenates=True), backward=Backward(integer_inputs, GradientMemory.ALIAS)),
    Op("repeat", _repeat_rule, linear=Linearity.JOINT, view=View(ViewKind.REPEAT), backward=SAVES_INTEGERS),
    Op("tile", _repeat_rule, linear=Linearity.JOINT, view=View(ViewKind.REPEAT)),
    Op("repeat_interleave", _repeat_interleave_rule, linear=Linearity.JOINT, backward=SAVES_INTEGERS),
    Op("unfold", _unfold_rule, kind=CostKind.VIEW),
    Op("diagonal", _diagonal_rule, kind=CostKind.VIEW),
    Op("diag_embed", _diag_embed_rule),
    Op("meshgrid", _meshgrid_rule, kind=CostKind.VIEW, autocast=AutocastPolicy.PER_OPERAND),
    Op("identity", kind=CostKind.VIEW, view=View(ViewKind.ALIAS), backward=ALIASES_GRADIENT),
    Op("as_strided", lowering=LoweringKind.CONTIGUOUS),
)  # fmt: skip
