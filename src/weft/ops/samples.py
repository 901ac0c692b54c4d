"""Factor rules of operators that do the same for each matrix, row or signal of a stack, and of some with arguments of their own kind.

In: an operator and the shapes of its tensors. Out: its `Rule`; None where this call of it is another matter.
"""

from __future__ import annotations

from collections.abc import Callable

from weft.ops.operator import Operator, Ref
from weft.ops.rule import BLOCKED, Labels, Rule
from weft.ops.views import named

Shape = tuple[int, ...]
Made = Callable[[Operator, list[Shape], list[Shape]], Rule | None]


def _lead(shape: Shape, count: int) -> Labels:
    """Labels of the first `count` dimensions; the others come whole."""
    return named(shape, range(count, len(shape)))


def _matrices(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """Inverses, determinants, factors, solutions: each matrix of a stack by itself."""
    count = len(ins[0]) - 2
    if (
        count < 0
        or any(len(s) != len(ins[0]) or s[:count] != ins[0][:count] for s in ins)
        or any(s[:count] != ins[0][:count] for s in outs)
    ):
        return None
    return Rule(tuple(_lead(s, count) for s in ins), tuple(_lead(s, count) for s in outs))


def _signals(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """Short-time Fourier transforms: each signal by itself, and one window for all."""
    if len(ins[0]) <= (2 if op.target.startswith("aten.istft") else 1):
        return None
    return Rule((_lead(ins[0], 1), *((BLOCKED,) * len(s) for s in ins[1:])), tuple(_lead(s, 1) for s in outs))


def _row_loss(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """Losses of rows (pairs, triplets, margins between classes): one number a row, and the mean, the sum or all of those."""
    position = {"triplet_margin_loss": 7, "multi_margin_loss": 5, "multilabel_margin_loss": 2, "cosine_embedding_loss": 4}
    name = op.target.split(".")[1]
    given = op.args[position[name]] if len(op.args) > position[name] else dict(op.kwargs).get("reduction", 1)
    rows = ins[: 3 if name in ("triplet_margin_loss", "cosine_embedding_loss") else 2]  # weights of classes stand behind them
    if len(ins[0]) != 2 or any(s[0] != ins[0][0] for s in rows if s) or any(not s for s in rows):
        return None
    label = "n" if ins[0][0] > 1 else BLOCKED
    labels = tuple((label, *(BLOCKED,) * (len(s) - 1)) if i < len(rows) else (BLOCKED,) * len(s) for i, s in enumerate(ins))
    return Rule(labels, ((label,) if given == 0 else (),), {"n": "average"} if given == 1 and label else {})


def _between(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """Cosines and distances of two tensors along one dimension, which goes or stays with size 1."""
    rank = max(map(len, ins))
    dim = -1
    if op.target.split(".")[1] == "cosine_similarity":
        given = op.args[2] if len(op.args) > 2 else dict(op.kwargs).get("dim", 1)
        dim = int(given)  # type: ignore[call-overload]
    elif ins[0] != ins[1]:
        return None
    if not rank:
        return None
    aligned = [(1,) * (rank - len(s)) + s for s in ins]
    full = tuple(map(max, *aligned))
    labels = named(full, (dim % rank,))
    rows = [
        tuple(x if n == m else BLOCKED for x, n, m in zip(labels, s, full, strict=True))[rank - len(i) :]
        for s, i in zip(aligned, ins, strict=True)
    ]
    kept = labels if len(outs[0]) == rank else tuple(x for i, x in enumerate(labels) if i != dim % rank)
    return Rule(tuple(rows), (kept,))


def _windows(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """`x.unfold(dim, size, step)`: windows along one dimension, whose elements come last."""
    dim = int(op.args[1]) % max(len(ins[0]), 1)  # type: ignore[call-overload]
    labels = named(ins[0], (dim,))
    return Rule((labels,), ((*labels, BLOCKED),))


def _diagonal(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """The diagonal of two dimensions comes last."""
    given = dict(op.kwargs)
    rank = len(ins[0])
    dims = [int(op.args[i] if len(op.args) > i else given.get(f"dim{i - 1}", i - 2)) % rank for i in (2, 3)]  # type: ignore[call-overload]
    labels = named(ins[0], dims)
    return Rule((labels,), ((*(x for i, x in enumerate(labels) if i not in dims), BLOCKED),))


def _spread(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """`diag_embed` at its defaults: the last dimension becomes the diagonal of a matrix."""
    if len(op.args) > 2 or op.kwargs:
        return None
    return Rule((_lead(ins[0], len(ins[0]) - 1),), (_lead(outs[0], len(ins[0]) - 1),))


def _grid(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """`meshgrid`: each tensor has a dimension of its own."""
    if any(len(s) != 1 for s in ins):
        return None
    labels = [f"d{i}" if s[0] > 1 else BLOCKED for i, s in enumerate(ins)]
    across = list(labels)
    if dict(op.kwargs).get("indexing") == "xy" and len(labels) > 1:
        across[:2] = across[1::-1]
    return Rule(tuple((x,) for x in labels), tuple(tuple(across) for _ in outs))


def _weight_norm(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """Directions and lengths along `dim`: each slice by its own norm."""
    dim = int(op.args[2] if len(op.args) > 2 else 0) % len(ins[0])  # type: ignore[call-overload]
    if len(ins[1]) != len(ins[0]) or ins[1][dim] != ins[0][dim]:
        return None
    labels = tuple("d" if i == dim and n > 1 else BLOCKED for i, n in enumerate(ins[0]))
    return Rule((labels, labels), (labels,))


def _sorted_into(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """`bucketize(x, bounds)` and `searchsorted(bounds, x)`: each element by itself, of one row of bounds or of each row by its own."""
    at = 0 if op.target.split(".")[1] == "bucketize" else 1
    if len(ins) == 2 and len(ins[0]) == len(ins[1]) > 1:
        return Rule((named(ins[0], (-1 % len(ins[0]),)), named(ins[1])), (named(outs[0]),)) if at else None
    if len(ins) != 2 or len(ins[1 - at]) != 1:
        return None
    rows = [named(outs[0])] * 2
    rows[1 - at] = (BLOCKED,)
    return Rule(tuple(rows), (named(outs[0]),))


def _tensor_product(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """`tensordot`: pairs of dimensions are contracted, the others follow each other."""
    dims = [[int(d) % len(s) for d in given] for given, s in zip(op.args[2:4], ins, strict=True)]  # type: ignore[attr-defined]
    rows = []
    for place, shape in enumerate(ins):
        names = [f"k{dims[place].index(i)}" if i in dims[place] else f"d{place}.{i}" for i in range(len(shape))]
        rows.append(tuple(x if n > 1 else BLOCKED for x, n in zip(names, shape, strict=True)))
    return Rule(tuple(rows), (tuple(x for row, gone in zip(rows, dims, strict=True) for i, x in enumerate(row) if i not in gone),))


def _ctc(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """Losses of [time, sample, class] against [sample, position], and lengths of both: each sample by itself."""
    n = "n" if outs[0][0] > 1 else BLOCKED
    return Rule(((BLOCKED, n, BLOCKED), (n, BLOCKED), (n,), (n,)), ((n,),))


def _ctc_lengths(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """Lengths of targets, each held against how many are there."""
    n = "n" if outs[0][0] > 1 else BLOCKED
    return Rule(((n,), (n,)), ((n,),))


def _matrix_norm(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """Norms over one dimension or two, which go or stay with size 1."""
    default = (-2, -1) if op.target.split(".")[1] == "linalg_matrix_norm" else None
    dims = (*op.args, None, None)[2] if len(op.args) > 2 else dict(op.kwargs).get("dim", default)
    over = tuple(range(len(ins[0]))) if dims is None else dims if isinstance(dims, tuple) else (dims,)
    gone = [int(d) % max(len(ins[0]), 1) for d in over]
    labels = named(ins[0], gone)
    kept = labels if len(outs[0]) == len(labels) else tuple(x for i, x in enumerate(labels) if i not in gone)
    return Rule((labels,), (kept,)) if len(kept) == len(outs[0]) else None


def _kron(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """A block for every element of the first: its dimensions lead those of the result."""
    if len(ins[0]) != len(ins[1]):
        return None
    firsts = named(ins[0])
    seconds = tuple(f"e{i}" if n > 1 and not firsts[i] else BLOCKED for i, n in enumerate(ins[1]))
    return Rule((firsts, seconds), (tuple(a or b for a, b in zip(firsts, seconds, strict=True)),))


def _masked_scatter(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """Places take what the source has in order, so that samples go on where those before them end."""
    if len(ins[0]) < 1 or len(ins[1]) != len(ins[0]) or ins[1][0] != ins[0][0] or outs[0] != ins[0] or ins[0][0] == 1:
        return None
    rows = tuple(("n", *(BLOCKED,) * (len(s) - 1)) for s in ins[:2])
    return Rule((*rows, (BLOCKED,) * len(ins[2])), (rows[0],), {"n": "counted"})


def _bags(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """Sums and means of rows of a table: which rows belong to which bag is told by offsets, features are each by themselves."""
    if len(op.args) <= 4 or op.args[4] not in (0, 1):
        return None
    table = (BLOCKED, "e" if ins[0][1] > 1 else BLOCKED)
    whole = tuple((BLOCKED,) * len(s) for s in outs[1:])  # which bag each index is in
    return Rule((table, *((BLOCKED,) * len(s) for s in ins[1:])), (table, *whole), {"e": "apart"} if table[1] else {})


def masked_put(op: Operator, ins: list[Shape], kinds: list[str]) -> Rule | None:
    """`x[mask] = value` by a mask of x's first dimensions, with a value that is alike wherever the mask is true."""
    accumulate = op.args[3] if len(op.args) > 3 else False
    places = op.args[1]
    if accumulate or len(ins) != 3 or kinds[1] != "bool" or not (isinstance(places, tuple) and isinstance(places[0], Ref)):
        return None
    lead = len(ins[1])
    full, value = ins[0], ins[2]
    if ins[1] != full[:lead] or len(value) > len(full) - lead:
        return None
    labels = named(full)
    extra = len(full) - len(value)
    last = tuple(labels[i + extra] if n == full[i + extra] else BLOCKED for i, n in enumerate(value))
    return Rule((labels, labels[:lead], last), (labels,))


_OF_MATRICES = """
    linalg_inv inverse linalg_inv_ex linalg_det det logdet slogdet linalg_slogdet linalg_solve linalg_cholesky cholesky linalg_cholesky_ex
    linalg_qr linalg_svd linalg_svdvals linalg_eigh linalg_eigvalsh linalg_solve_triangular cholesky_solve cholesky_inverse linalg_pinv
    matrix_exp linalg_matrix_exp linalg_matrix_power
    """.split()
OF_SAMPLES: dict[str, Made] = {
    **dict.fromkeys(_OF_MATRICES, _matrices),
    **dict.fromkeys(("stft", "istft"), _signals),
    **dict.fromkeys(("triplet_margin_loss", "multi_margin_loss", "multilabel_margin_loss", "cosine_embedding_loss"), _row_loss),
    **dict.fromkeys(("cosine_similarity", "pairwise_distance"), _between),
    **dict.fromkeys(("bucketize", "searchsorted"), _sorted_into),
    "unfold": _windows,
    "diagonal": _diagonal,
    "diag_embed": _spread,
    "meshgrid": _grid,
    "_weight_norm": _weight_norm,
    "tensordot": _tensor_product,
    **dict.fromkeys(("linalg_norm", "linalg_matrix_norm"), _matrix_norm),
    "kron": _kron,
    "masked_scatter": _masked_scatter,
    "embedding_bag": _bags,
    "ctc_loss": _ctc,
    "ctc_lengths": _ctc_lengths,
}
OWN = {"weft.ctc_loss.default", "weft.ctc_lengths.default"}  # operators that are not torch's and have a rule
