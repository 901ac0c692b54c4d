"""Matrix products and their variants: each contracts a label, so that sharding it leaves partial sums."""

from __future__ import annotations

from collections import Counter
from math import prod

from shardwise.ops.operator import Operator
from shardwise.ops.record import Backward, Op, Product, Shape, Tensors, WeightGradient
from shardwise.ops.rule import BLOCKED, Labels, Rule, broadcast_labels, shardable_labels
from shardwise.ops.saved_tensors import added_product_operands, listed_operands, product_operands
from shardwise.ops.vocabulary import AutocastPolicy, CostKind, Linearity, MatmulKind, Reduction


def _product_flops(op: Operator, tensors: Tensors) -> float:
    """FLOPs: 2 x output size x contracted dimension."""
    first = tensors[op.inputs[0]].shape
    return 2.0 * tensors[op.outputs[0]].size * (first[-1] if first else 1)


def _added_product_flops(op: Operator, tensors: Tensors) -> float:
    first = tensors[op.inputs[1]].shape
    return 2.0 * tensors[op.outputs[0]].size * (first[-1] if first else 1)


def _einsum_flops(op: Operator, tensors: Tensors) -> float:
    """FLOPs: 2 x the product space for two operands; one such product for each further operand."""
    shapes = [tensors[v].shape for v in op.inputs]
    sizes: dict[str, int] = {}
    for term, shape in zip(str(op.args[0]).replace(" ", "").partition("->")[0].split(","), shapes, strict=False):
        head, dots, tail = term.partition("...")
        names = [*head, *(f"_{i}" for i in range(len(shape) - len(head) - len(tail))), *tail] if dots else [*term]
        sizes.update(zip(names, shape, strict=False))
    return 2.0 * prod(sizes.values()) * max(1, len(shapes) - 1)


def _matmul_rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """Return the rule of matrices, broadcast batches of them, and vectors, which lack the dimension that is not contracted."""
    firsts, seconds = ("k",) if len(ins[0]) == 1 else ("n", "k"), ("k",) if len(ins[1]) == 1 else ("k", "m")
    ends = firsts[:-1] + seconds[1:]
    rank = len(outs[0]) - len(ends)
    batch = [f"b{i}" if n > 1 else BLOCKED for i, n in enumerate(outs[0][:rank])]

    def row(shape: Shape, last: tuple[str, ...]) -> Labels:
        lead, tail = shape[: len(shape) - len(last)], shape[len(shape) - len(last) :]
        return (*broadcast_labels(batch, outs[0][:rank], lead), *(x if n > 1 else BLOCKED for x, n in zip(last, tail, strict=True)))

    out = (*batch, *(x if n > 1 else BLOCKED for x, n in zip(ends, outs[0][rank:], strict=True)))
    return Rule((row(ins[0], firsts), row(ins[1], seconds)), (out,))


def _einsum_rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    terms, right = _expand_equation(str(op.args[0]).replace(" ", ""), ins)
    if any(len(set(t)) != len(t) for t in terms):
        return None
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, ins, strict=True):
        for x, n in zip(term, shape, strict=True):
            sizes[x] = max(sizes.get(x, 1), n)

    def row(term: str, shape: Shape) -> Labels:
        return tuple(x if n == sizes[x] and n > 1 else BLOCKED for x, n in zip(term, shape, strict=True))

    return Rule(tuple(row(t, s) for t, s in zip(terms, ins, strict=True)), (row(right, outs[0]),))


def _einsum_autocast(op: Operator, tensors: Tensors) -> AutocastPolicy:
    """Return the policy of a product if torch contracts dimensions of two terms; it permutes, sums or multiplies elements otherwise."""
    terms, right = _expand_equation(str(op.args[0]).replace(" ", ""), [tensors[v].shape for v in op.inputs])
    long = Counter(x for term, v in zip(terms, op.inputs, strict=True) for x, n in set(zip(term, tensors[v].shape, strict=True)) if n > 1)
    return AutocastPolicy.LOW_PRECISION if any(n > 1 and x not in right for x, n in long.items()) else AutocastPolicy.NONE


def _tensordot_autocast(op: Operator, tensors: Tensors) -> AutocastPolicy:
    """Return the policy of a product if several elements come out; torch multiplies and adds up one otherwise."""
    return AutocastPolicy.LOW_PRECISION if tensors[op.outputs[0]].size > 1 else AutocastPolicy.NONE


def _expand_equation(equation: str, ins: list[Shape]) -> tuple[list[str], str]:
    """Return terms and output of an einsum equation, with letters for its ellipsis and the implicit output written out.

    >>> _expand_equation("...i,ij->...j", [(4, 2, 3), (3, 5)])
    (['ABi', 'ij'], 'ABj')
    """
    left_side, _, right_side = equation.partition("->")
    terms = left_side.split(",")
    free = [x for x in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz" if x not in equation]
    counts = [len(shape) - len(term.replace("...", "")) if "..." in term else 0 for term, shape in zip(terms, ins, strict=True)]
    dots = "".join(free[: max(counts, default=0)])
    if "->" not in equation:
        letters = "".join(terms).replace(".", "")
        right_side = "..." * bool(dots) + "".join(sorted(x for x in set(letters) if letters.count(x) == 1))
    expanded = [term.replace("...", dots[len(dots) - n :]) for term, n in zip(terms, counts, strict=True)]
    return expanded, right_side.replace("...", dots)


def _tensordot_rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """Return the rule of `tensordot`: pairs of dimensions are contracted, the others follow each other."""
    dims = [[int(d) % len(s) for d in numbers] for numbers, s in zip(op.args[2:4], ins, strict=True)]  # type: ignore[attr-defined]
    rows = []
    for operand, shape in enumerate(ins):
        names = [f"k{dims[operand].index(i)}" if i in dims[operand] else f"d{operand}.{i}" for i in range(len(shape))]
        rows.append(tuple(x if n > 1 else BLOCKED for x, n in zip(names, shape, strict=True)))
    return Rule(tuple(rows), (tuple(x for row, summed in zip(rows, dims, strict=True) for i, x in enumerate(row) if i not in summed),))


def _kron_rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """Return the rule of `kron`: the first operand's dimensions are the outer part of the output's."""
    if len(ins[0]) != len(ins[1]):
        return None
    firsts = shardable_labels(ins[0])
    seconds = tuple(f"e{i}" if n > 1 and not firsts[i] else BLOCKED for i, n in enumerate(ins[1]))
    return Rule((firsts, seconds), (tuple(a or b for a, b in zip(firsts, seconds, strict=True)),))


def _einsum_gradient_orders(op: Operator) -> tuple[tuple[int, ...], ...]:
    """Return the dimension order, outermost first, of each operand's gradient in a product of two."""
    operands, arrow, result = str(op.args[0]).replace(" ", "").partition("->")
    terms = operands.split(",")
    if not arrow or len(terms) != 2 or "." in operands or any(len(set(t)) != len(t) for t in terms) or len(op.inputs) != 2:
        return ()
    a, b = terms
    if any(x not in result and x not in b for x in a) or any(x not in result and x not in a for x in b):
        return ()
    batch = [x for x in result if x in a and x in b]
    first_only, second_only = [x for x in result if x in a and x not in b], [x for x in result if x in b and x not in a]
    summed = sorted(x for x in a if x in b and x not in result)
    if second_only and first_only and [x for x in result if x not in batch] == [*second_only, *first_only]:  # torch swaps the operands
        return tuple(a.index(x) for x in (*batch, *summed, *first_only)), tuple(b.index(x) for x in (*batch, *second_only, *summed))
    return tuple(a.index(x) for x in (*batch, *first_only, *summed)), tuple(b.index(x) for x in (*batch, *summed, *second_only))


OPS = (
    Op(
        "linear", "b* i, o i, o -> b* o", reduction=Reduction.SUM, kind=CostKind.LINEAR,
        product=Product(_product_flops, MatmulKind.LINEAR, WeightGradient(1, 0, 2, {"default": "linear"}), bias=2, contiguous_operands=1),
        backward=Backward(product_operands, transpose_copies=1.0), autocast=AutocastPolicy.LOW_PRECISION,
    ),
    Op(
        "mm", "n k, k m -> n m", linear=Linearity.MULTILINEAR, reduction=Reduction.SUM, kind=CostKind.LINEAR,
        product=Product(_product_flops, MatmulKind.WEIGHT, WeightGradient(1, 0, 2, {"default": "product"})),
        backward=Backward(product_operands), autocast=AutocastPolicy.LOW_PRECISION,
    ),
    Op(
        "addmm", ("n m, n k, k m -> n m", "m, n k, k m -> n m"), kind=CostKind.LINEAR,
        product=Product(_added_product_flops, MatmulKind.WEIGHT, WeightGradient(2, 1, 2, {"default": "product"})),
        backward=Backward(added_product_operands), autocast=AutocastPolicy.LOW_PRECISION,
    ),
    Op(
        "bmm", "b n k, b k m -> b n m", linear=Linearity.MULTILINEAR, reduction=Reduction.SUM, kind=CostKind.LINEAR,
        product=Product(_product_flops, MatmulKind.BATCHED, WeightGradient(1, 0, 3, {"default": "stacked"})),
        backward=Backward(product_operands), autocast=AutocastPolicy.LOW_PRECISION,
    ),
    Op(
        "baddbmm", "b n m, b n k, b k m -> b n m", kind=CostKind.LINEAR, product=Product(_added_product_flops, MatmulKind.BATCHED),
        backward=Backward(added_product_operands), autocast=AutocastPolicy.LOW_PRECISION,
    ),
    Op(
        "matmul", _matmul_rule, linear=Linearity.MULTILINEAR, reduction=Reduction.SUM, kind=CostKind.LINEAR,
        product=Product(_product_flops, MatmulKind.BATCHED, WeightGradient(1, 0, 2, {"default": "product"}), contiguous_operands=2),
        backward=Backward(product_operands), autocast=AutocastPolicy.LOW_PRECISION,
    ),
    Op(
        "einsum", _einsum_rule, linear=Linearity.MULTILINEAR, reduction=Reduction.SUM, kind=CostKind.LINEAR,
        product=Product(_einsum_flops, MatmulKind.BATCHED), backward=Backward(listed_operands, gradient_dim_order=_einsum_gradient_orders),
        autocast=_einsum_autocast,
    ),
    Op(
        "mv", "n k, k -> n", linear=Linearity.MULTILINEAR, reduction=Reduction.SUM, kind=CostKind.LINEAR, product=Product(_product_flops),
        backward=Backward(product_operands),
    ),
    Op(
        "dot", "k, k -> ", linear=Linearity.MULTILINEAR, reduction=Reduction.SUM, kind=CostKind.LINEAR, product=Product(_product_flops),
        backward=Backward(product_operands),
    ),
    Op("vdot", "k, k -> ", reduction=Reduction.SUM),
    Op("inner", "b* k, m k -> b* m", reduction=Reduction.SUM),
    Op("outer", "n, m -> n m", linear=Linearity.MULTILINEAR),
    Op("kron", _kron_rule),
    Op(
        "tensordot", _tensordot_rule, reduction=Reduction.SUM, kind=CostKind.LINEAR, product=Product(_product_flops),
        backward=Backward(product_operands), autocast=_tensordot_autocast,
    ),
    Op("bilinear", "b* i, b* j, o i j, o -> b* o", reduction=Reduction.SUM, product=Product(bias=3)),
    Op("addmv", kind=CostKind.LINEAR, product=Product(_added_product_flops), backward=Backward(added_product_operands)),
    Op(
        "_grouped_mm", "!m k, !e k n, !e -> !m n", reduction=Reduction.SUM, kind=CostKind.LINEAR, product=Product(_product_flops),
        backward=Backward(product_operands),
    ),
    Op("addbmm linalg_multi_dot linalg_vecdot", autocast=AutocastPolicy.LOW_PRECISION),
    Op("corrcoef cov", autocast=AutocastPolicy.LOW_PRECISION_OUTPUT),
    Op("cdist", "b* n !d, b* m !d -> b* n m", autocast=AutocastPolicy.FLOAT32),
    Op("_cdist_forward _euclidean_dist", "b* n !d, b* m !d -> b* n m"),
)  # fmt: skip
