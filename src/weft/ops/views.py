"""Factor rules of operators that move dimensions about: which input dimension is which output dimension."""

from __future__ import annotations

from collections.abc import Callable, Container
from math import prod

from weft.ops.operator import Operator, Ref, Tensor
from weft.ops.rule import BLOCKED, Labels, Rule

Shape = tuple[int, ...]


def reshape(source: Shape, target: Shape) -> tuple[Labels, Labels]:
    """Labels of a reshape: dimensions are grouped where their products agree, and the outermost of a group can be cut.

    >>> reshape((4, 32, 64), (4, 32, 8, 8))
    (('d0', 'd1', 'd2'), ('d0', 'd1', 'd2', ''))
    """
    left, right = [BLOCKED] * len(source), [BLOCKED] * len(target)
    i = j = label = 0
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
                return tuple(left), tuple(right)
        lead_in = next((k for k in range(i0, i) if source[k] > 1), None)
        lead_out = next((k for k in range(j0, j) if target[k] > 1), None)
        if lead_in is not None and lead_out is not None:
            left[lead_in] = right[lead_out] = f"d{label}"
            label += 1
    return tuple(left), tuple(right)


def named(shape: Shape, whole: Container[int] = ()) -> Labels:
    """A label for each dimension that can be cut; those in `whole` cannot."""
    return tuple(f"d{i}" if size > 1 and i not in whole else BLOCKED for i, size in enumerate(shape))


def _dim(op: Operator, position: int, default: int, rank: int, key: str = "dim") -> int:
    value = op.args[position] if len(op.args) > position else dict(op.kwargs).get(key, default)
    return int(value) % max(rank, 1)  # type: ignore[call-overload,no-any-return]


def _reshape(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule:
    left, right = reshape(ins[0], outs[0])
    # A second tensor (view_as) only lends its shape.
    return Rule((left, *([None] * (len(ins) - 1))), (right,))


def _permute(order: Callable[[Operator, int], list[int]]) -> Callable[[Operator, list[Shape], list[Shape]], Rule]:
    def rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule:
        labels = named(ins[0])
        return Rule((labels,), (tuple(labels[i] for i in order(op, len(labels))),))

    return rule


def _swapped(op: Operator, rank: int) -> list[int]:
    order = list(range(rank))
    if not order:  # a number, which torch swaps with itself
        return order
    a, b = _dim(op, 1, 0, rank, "dim0"), _dim(op, 2, 1, rank, "dim1")
    order[a], order[b] = order[b], order[a]
    return order


def _permuted(op: Operator, rank: int) -> list[int]:
    dims = op.args[1]
    return [int(d) % rank for d in dims]  # type: ignore[attr-defined]


def _moved(op: Operator, rank: int) -> list[int]:
    sources, targets = ([int(d) % rank for d in (a if isinstance(a, tuple) else (a,))] for a in op.args[1:3])
    order = [i for i in range(rank) if i not in sources]
    for target, source in sorted(zip(targets, sources, strict=True)):
        order.insert(target, source)
    return order


def _expand(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule:
    extra = len(outs[0]) - len(ins[0])
    out = [f"d{i}" if size > 1 else BLOCKED for i, size in enumerate(outs[0])]
    source = tuple(out[i + extra] if ins[0][i] == outs[0][i + extra] else BLOCKED for i in range(len(ins[0])))
    return Rule((source, *([None] * (len(ins) - 1))), (tuple(out),))


def _sliced(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule:
    dim = _dim(op, 1, 0, len(ins[0]))
    labels = list(named(ins[0]))
    if ins[0][dim] != outs[0][dim]:
        labels[dim] = BLOCKED
    return Rule((tuple(labels),), (tuple(labels),))


def _select(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule:
    dim = _dim(op, 1, 0, len(ins[0]))
    labels = list(named(ins[0]))
    labels[dim] = BLOCKED
    return Rule((tuple(labels),), (tuple(labels[:dim] + labels[dim + 1 :]),))


def _scattered(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule:
    """slice_scatter and select_scatter: args (x, source, dim, ...)."""
    dim = _dim(op, 2, 0, len(ins[0]))
    labels = list(named(ins[0]))
    labels[dim] = BLOCKED
    source = tuple(labels) if len(ins[1]) == len(ins[0]) else tuple(labels[:dim] + labels[dim + 1 :])
    return Rule((tuple(labels), source), (tuple(labels),))


def _cat(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule:
    dim = _dim(op, 1, 0, len(outs[0]))
    labels = named(outs[0], (dim,))
    return Rule(tuple(labels if len(s) == len(labels) else (BLOCKED,) * len(s) for s in ins), (labels,))


def _stack(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule:
    dim = _dim(op, 1, 0, len(outs[0]))
    labels = list(named(ins[0]))
    return Rule(tuple(tuple(labels) for _ in ins), ((*labels[:dim], BLOCKED, *labels[dim:]),))


def _split(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule:
    dim = _dim(op, 2, 0, len(ins[0]))
    labels = named(ins[0], (dim,))
    return Rule((labels,), tuple(labels for _ in outs))


def _unbind(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule:
    dim = _dim(op, 1, 0, len(ins[0]))
    labels = list(named(ins[0]))
    labels[dim] = BLOCKED
    return Rule((tuple(labels),), tuple(tuple(labels[:dim] + labels[dim + 1 :]) for _ in outs))


def _repeat(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule:
    extra = len(outs[0]) - len(ins[0])
    labels = [f"d{i}" if ins[0][i] == outs[0][i + extra] and ins[0][i] > 1 else BLOCKED for i in range(len(ins[0]))]
    return Rule((tuple(labels),), (tuple([BLOCKED] * extra + labels),))


def _repeat_interleave(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule:
    """Every row so many times in place, so that equal parts of the rows are equal parts of what comes out."""
    if not isinstance(op.args[1], int) or len(ins[0]) != len(outs[0]) or "output_size" in dict(op.kwargs) or len(ins) > 1:
        return Rule(((BLOCKED,) * len(ins[0]), *([None] * (len(ins) - 1))), ((BLOCKED,) * len(outs[0]),))
    labels = named(ins[0])
    return Rule((labels,), (labels,))


def _transformed(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """Fourier transforms: every dimension but those that are transformed."""
    name, rank = op.target.split(".")[1], len(ins[0])
    last: tuple[int, ...] = (-2, -1) if name.endswith("2") else tuple(range(rank)) if name.endswith("n") else (-1,)
    sizes = op.args[1] if len(op.args) > 1 else None
    default = tuple(range(-len(sizes), 0)) if isinstance(sizes, tuple) and name.endswith("n") else last
    given = op.args[2] if len(op.args) > 2 else dict(op.kwargs).get("dim", None)
    dims = default if given is None or given == () else given if isinstance(given, tuple) else (given,)
    touched = {int(d) % rank for d in dims}
    labels = named(ins[0], touched)
    return Rule((labels,), (labels,))


def _padded(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule:
    """A dimension padded by (+1, -1) keeps its size but not its rows: what is padded is read from the argument."""
    pads = op.args[1]
    rank = len(ins[0])
    touched = {rank - 1 - i // 2 for i, p in enumerate(pads) if p}  # type: ignore[arg-type,var-annotated]
    labels = named(ins[0], touched)
    return Rule((labels,), (labels,))


_FOURIER = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft", "fft2", "ifft2", "rfft2", "irfft2", "fftn", "ifftn", "rfftn", "irfftn")
VIEWS: dict[str, Callable[[Operator, list[Shape], list[Shape]], Rule | None]] = {
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as"), _reshape),
    **dict.fromkeys(("ravel", "atleast_1d", "atleast_2d", "atleast_3d"), _reshape),
    "transpose": _permute(_swapped),
    "swapaxes": _permute(_swapped),
    "swapdims": _permute(_swapped),
    "permute": _permute(_permuted),
    **dict.fromkeys(("movedim", "moveaxis"), _permute(_moved)),
    **dict.fromkeys(("t", "numpy_T", "matrix_H"), _permute(lambda op, rank: list(range(rank))[::-1])),
    **dict.fromkeys(("mT", "mH", "adjoint"), _permute(lambda op, rank: [*range(rank - 2), rank - 1, rank - 2])),
    "expand": _expand,
    "expand_as": _expand,
    "broadcast_to": _expand,
    "slice": _sliced,
    "narrow": _sliced,
    "narrow_copy": _sliced,
    "select": _select,
    "slice_scatter": _scattered,
    "select_scatter": _scattered,
    "cat": _cat,
    "concat": _cat,
    "stack": _stack,
    "split": _split,
    "split_with_sizes": _split,
    "chunk": _split,
    "tensor_split": _split,
    "unbind": _unbind,
    "repeat": _repeat,
    "tile": _repeat,
    "repeat_interleave": _repeat_interleave,
    **dict.fromkeys((f"fft_{name}" for name in _FOURIER), _transformed),
    "pad": _padded,
    "constant_pad_nd": _padded,
}


def index(op: Operator, tensors: dict[str, Tensor]) -> Rule | None:
    """`x[:, idx, ...]`: dimensions that are not indexed pass through when the indices stand side by side; indices come whole."""
    source = op.args[0]
    indices = op.args[1]
    if not isinstance(source, Ref) or not isinstance(indices, tuple):
        return None
    shape = tensors[source.value].shape
    places = [i for i, item in enumerate(indices) if item is not None]
    if not places or places != list(range(places[0], places[-1] + 1)):
        return None
    given = [tensors[indices[i].value] for i in places]
    if any(t.dtype == "bool" for t in given):
        return None
    inner = max(len(t.shape) for t in given)
    labels = [BLOCKED if i in places else f"d{i}" if n > 1 else BLOCKED for i, n in enumerate(shape)]
    # With a single index tensor its own dimensions can be cut too: each element looks up its own row.
    own = [f"i{k}" if n > 1 else BLOCKED for k, n in enumerate(given[0].shape)] if len(given) == 1 else [BLOCKED] * inner
    out = labels[: places[0]] + own + labels[places[-1] + 1 :]
    rows = [tuple(own) if len(given) == 1 else (BLOCKED,) * len(t.shape) for t in given]
    if prod(tensors[op.outputs[0]].shape) == 0 or len(out) != len(tensors[op.outputs[0]].shape):
        return None
    return Rule((tuple(labels), *rows), (tuple(out),))
