"""Look-ups and indexed writes: embeddings, indexing, masked writes, binary search."""

from __future__ import annotations

from collections.abc import Container
from math import prod

from shardwise.ops.operator import Operator, Ref
from shardwise.ops.record import SAVES_INTEGERS, Backward, Op, Product, RuleOfTensors, Shape, Tensors, WeightGradient
from shardwise.ops.rule import BLOCKED, Rule, broadcast_labels, restrict_rule, shardable_labels
from shardwise.ops.vocabulary import CostKind, MatmulKind


def _index_rule(op: Operator, tensors: Tensors) -> Rule | None:
    """Return the rule of `x[:, idx, ...]`: dimensions without index pass through if the indices are adjacent; indices are not sharded."""
    source = op.args[0]
    indices = op.args[1]
    if not isinstance(source, Ref) or not isinstance(indices, tuple):
        return None
    shape = tensors[source.value].shape
    places = [i for i, item in enumerate(indices) if item is not None]
    if not places or places != list(range(places[0], places[-1] + 1)):
        return None
    index_tensors = [tensors[indices[i].value] for i in places]
    if any(t.dtype == "bool" for t in index_tensors):
        return None
    inner = max(len(t.shape) for t in index_tensors)
    labels = [BLOCKED if i in places else f"d{i}" if n > 1 else BLOCKED for i, n in enumerate(shape)]
    # The dimensions of a single index tensor can be sharded too: each element looks up its own row.
    index_labels = (
        [f"i{k}" if n > 1 else BLOCKED for k, n in enumerate(index_tensors[0].shape)] if len(index_tensors) == 1 else [BLOCKED] * inner
    )
    out = labels[: places[0]] + index_labels + labels[places[-1] + 1 :]
    rows = [tuple(index_labels) if len(index_tensors) == 1 else (BLOCKED,) * len(t.shape) for t in index_tensors]
    if prod(tensors[op.outputs[0]].shape) == 0 or len(out) != len(tensors[op.outputs[0]].shape):
        return None
    return Rule((tuple(labels), *rows), (tuple(out),))


def _masked_put_rule(op: Operator, tensors: Tensors) -> Rule | None:
    """Return the rule of `x[mask] = value` by a mask of x's leading dimensions, with one value wherever the mask is true."""
    ins = [tensors[v].shape for v in op.inputs]
    accumulate = op.args[3] if len(op.args) > 3 else False
    mask = op.args[1]
    if accumulate or len(ins) != 3 or tensors[op.inputs[1]].dtype != "bool" or not (isinstance(mask, tuple) and isinstance(mask[0], Ref)):
        return None
    lead = len(ins[1])
    full, value = ins[0], ins[2]
    if ins[1] != full[:lead] or len(value) > len(full) - lead:
        return None
    labels = shardable_labels(full)
    return Rule((labels, labels[:lead], broadcast_labels(labels, full, value)), (labels,))


def _bucket_rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """Return the rule of `bucketize(x, bounds)` and `searchsorted(bounds, x)`: elementwise, by one row of bounds or row by row."""
    at = 0 if op.target.split(".")[1] == "bucketize" else 1
    if len(ins) == 2 and len(ins[0]) == len(ins[1]) > 1:
        return Rule((shardable_labels(ins[0], (-1 % len(ins[0]),)), shardable_labels(ins[1])), (shardable_labels(outs[0]),)) if at else None
    if len(ins) != 2 or len(ins[1 - at]) != 1:
        return None
    rows = [shardable_labels(outs[0])] * 2
    rows[1 - at] = (BLOCKED,)
    return Rule(tuple(rows), (shardable_labels(outs[0]),))


def _masked_scatter_rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """Return the rule of `masked_scatter`: source elements are consumed in order, so a rank continues after the earlier ranks' samples."""
    if len(ins[0]) < 1 or len(ins[1]) != len(ins[0]) or ins[1][0] != ins[0][0] or outs[0] != ins[0] or ins[0][0] == 1:
        return None
    rows = tuple(("n", *(BLOCKED,) * (len(s) - 1)) for s in ins[:2])
    return Rule((*rows, (BLOCKED,) * len(ins[2])), (rows[0],), {"n": "counted"})


def _embedding_bag_rule(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """Return the rule of sums and means of rows of a table: offsets assign rows to bags, features are independent."""
    if len(op.args) <= 4 or op.args[4] not in (0, 1):
        return None
    table = (BLOCKED, "e" if ins[0][1] > 1 else BLOCKED)
    blocked = tuple((BLOCKED,) * len(s) for s in outs[1:])  # bag of each index
    return Rule((table, *((BLOCKED,) * len(s) for s in ins[1:])), (table, *blocked), {"e": "apart"} if table[1] else {})


def _adjust_embedding_rule(op: Operator, rule: Rule, ins: list[Shape]) -> Rule:
    by_frequency, sparse = (*op.args[3:5], False, False)[:2]
    if by_frequency:  # gradients are divided by the count of an index in the whole batch
        return restrict_rule(rule, {"e"})
    return restrict_rule(rule, set(rule.labels) - {"v"}) if sparse else rule


def _index_put_linear_in(op: Operator, zeros: Container[str]) -> tuple[str, ...] | None:
    """Return the inputs in which `index_put` of zeros is linear."""
    return op.inputs[:1] if len(op.args) == 3 and isinstance(op.args[2], Ref) and op.args[2].value in zeros else None


OPS = (
    Op(
        "embedding", "v^ e, b* -> b* e", _adjust_embedding_rule, kind=CostKind.GATHER,
        product=Product(kind=MatmulKind.LOOKUP, weight=WeightGradient(0, 1, 2, {"default": "rows"}), sparse_at=4), backward=SAVES_INTEGERS,
    ),
    Op("embedding_bag", _embedding_bag_rule, product=Product(sparse_at=5)),
    Op("index", RuleOfTensors(_index_rule), kind=CostKind.GATHER, backward=SAVES_INTEGERS),
    Op("index_put", RuleOfTensors(_masked_put_rule), linear=_index_put_linear_in, backward=SAVES_INTEGERS),
    Op("masked_scatter", _masked_scatter_rule, backward=SAVES_INTEGERS),
    Op("bucketize searchsorted", _bucket_rule, backward=Backward(non_differentiable_at=(0, 1))),
)  # fmt: skip
