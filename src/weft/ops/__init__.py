"""Factor rules: in how many ways each operator can be split. In: an operator and its tensors. Out: its `Rule`, or None.

An operator without a rule is replicated by whoever asks, and reported by name; it is never split by a guess.
"""

from __future__ import annotations

from weft.ops.operator import Arg, Operator, Ref, Tensor
from weft.ops.rule import BLOCKED, Labels, Rule, parse
from weft.ops.samples import OF_SAMPLES, OWN, masked_put
from weft.ops.table import ALONG_DIM, CELLS, FACTORIES, LOSSES, NOTATION, POINTWISE, REDUCED_AT, REDUCTIONS, SHAPED_LIKE
from weft.ops.views import VIEWS, index

__all__ = ["BLOCKED", "Labels", "Rule", "of_elements", "parse", "rule_of"]

Shape = tuple[int, ...]


def rule_of(op: Operator, tensors: dict[str, Tensor]) -> Rule | None:
    """The factor rule of one operator at its shapes; None where it has none, or one that does not speak of each of its tensors.

    A tensor may stand where most calls have a number: where a slice begins, where to split.
    """
    rule = _rule_of(op, tensors)
    spoken = rule is not None and len(rule.inputs) == len(op.inputs) and len(rule.outputs) == len(op.outputs)
    return rule if spoken else None


def _rule_of(op: Operator, tensors: dict[str, Tensor]) -> Rule | None:
    if op.function is not None:
        return op.function.rule
    if not op.target.startswith("aten.") and op.target not in OWN:
        return None  # an operator of somebody else's, whatever its name
    name = op.target.split(".")[1]
    ins = [tensors[v].shape for v in op.inputs]
    outs = [tensors[v].shape for v in op.outputs]
    if name in FACTORIES:
        return Rule(tuple(None for _ in ins), tuple((BLOCKED,) * len(s) for s in outs))
    if name in SHAPED_LIKE:
        return Rule((None,) * len(ins), tuple((BLOCKED,) * len(s) for s in outs))
    if name in POINTWISE:
        return _cast_alike(ins, outs) if name == "type_as" or op.target == "aten.to.other" else _pointwise(ins, outs)
    if name in VIEWS and ins:
        return VIEWS[name](op, ins, outs)
    if name in OF_SAMPLES and ins and op.target.startswith("aten.") != (f"weft.{name}.default" in OWN):
        return OF_SAMPLES[name](op, ins, outs)
    if name == "index_put":
        return masked_put(op, ins, [tensors[v].dtype for v in op.inputs])
    if name in ALONG_DIM:
        return _along_dim(op, name, ins, outs)
    if name in REDUCTIONS:
        return _reduction(op, name, ins, outs, tensors[op.inputs[0]].is_float)
    if name in LOSSES or name in REDUCED_AT:
        return _loss(op, ins, outs)
    if name in ("layer_norm", "rms_norm"):
        return _normalized(op, ins, outs)
    if name == "renorm":
        return _renormed(op, ins)
    if name == "index":
        return index(op, tensors)
    if name == "matmul":
        return _matmul(ins, outs)
    if name == "einsum":
        return _einsum(op, ins, outs)
    if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        return _recurrent(op, ins, outs)
    if name in CELLS:
        return _cell(ins, outs, 2 if name == "lstm_cell" else 1)
    if name == "cross_entropy_loss":
        return _cross_entropy(op, ins, outs)
    if name in ("nll_loss", "nll_loss_nd"):
        return _nll(op, ins, outs)
    for text in NOTATION.get(name, ()):
        found = parse(text, _given(op, text, tensors), outs)
        if found is not None:
            return _adjust(op, name, found, ins)
    return None


def of_elements(ins: list[Shape], outs: list[Shape]) -> Rule:
    """The rule of whatever makes each element of its results from the elements at its own (broadcast) place."""
    return _pointwise(ins, outs)


def _given(op: Operator, text: str, tensors: dict[str, Tensor]) -> list[Shape | None]:
    """Shapes of the leading arguments that a line of notation speaks of; None for one that is absent or no tensor."""
    given: list[Shape | None] = []
    kwargs = dict(op.kwargs)
    entries = text.partition("->")[0].count(",") + 1
    extra: list[Arg] = [kwargs[k] for k in ("attn_mask", "weight", "bias") if k in kwargs]
    for position in range(entries):
        arg: Arg = op.args[position] if position < len(op.args) else extra.pop(0) if extra else None
        given.append(tensors[arg.value].shape if isinstance(arg, Ref) else None)
    return given


def _pointwise(ins: list[Shape], outs: list[Shape]) -> Rule:
    rank = len(outs[0])
    out = tuple(f"d{i}" if n > 1 else BLOCKED for i, n in enumerate(outs[0]))
    rows = []
    for shape in ins:
        extra = rank - len(shape)
        rows.append(tuple(out[i + extra] if n == outs[0][i + extra] else BLOCKED for i, n in enumerate(shape)))
    return Rule(tuple(rows), tuple(out for _ in outs))


def _cast_alike(ins: list[Shape], outs: list[Shape]) -> Rule:
    """Of the second tensor, whatever its shape, only the dtype is read."""
    first = _pointwise(ins[:1], outs)
    return Rule((*first.inputs, *(None for _ in ins[1:])), first.outputs)


def _dims(op: Operator, position: int, rank: int) -> list[int] | None:
    """The reduced dimensions: None means all; none of a scalar, which torch lets count as one."""
    value = op.args[position] if len(op.args) > position else dict(op.kwargs).get("dim")
    if value is None or value == ():
        return None
    items = value if isinstance(value, tuple) else (value,)
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in items):
        return None
    return [int(i) % rank for i in items] if rank else []


def _along_dim(op: Operator, name: str, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """Every dimension but the one that the operator works along; all tensors must agree in size there."""
    places = {"topk": 2, "kthvalue": 2, "roll": 2, "diff": 2, "rot90": 2, "cross": 2, "linalg_cross": 2}
    position = 2 if name.endswith("_backward_data") else places.get(name, 1)
    dims = _dims(op, position, len(ins[0])) or ([len(ins[0]) - 1] if name in ("topk", "sort", "glu", "argsort", "kthvalue") else None)
    if dims is None:
        return None
    reduces = name in ("logsumexp", "kthvalue") and len(outs[0]) != len(ins[0])
    shapes = [*ins, *([] if reduces else outs)]
    if any(len(s) != len(ins[0]) for s in shapes) and name not in ("index_select", "index_add", "index_copy", "index_fill"):
        return None
    labels = tuple(
        f"d{i}" if i not in dims and n > 1 and all(len(s) != len(ins[0]) or s[i] == n for s in shapes) else BLOCKED
        for i, n in enumerate(ins[0])
    )
    rows = tuple(labels if len(s) == len(ins[0]) else (BLOCKED,) * len(s) for s in ins)
    if reduces:
        return Rule(rows, tuple(tuple(x for i, x in enumerate(labels) if i not in dims) for _ in outs))
    return Rule(rows, tuple(labels for _ in outs))


def _reduction(op: Operator, name: str, ins: list[Shape], outs: list[Shape], is_float: bool) -> Rule | None:
    """Kept dimensions pass through. A sum over a cut dimension is a partial sum, a mean an average, of extremes ranks compare their own;
    the rest come whole."""
    if len(ins) > 1:  # max(x, y) of two tensors
        return None if "quantile" in name else _pointwise(ins, outs)
    rank = len(ins[0])
    position = 2 if name in ("norm", "linalg_vector_norm", "quantile", "nanquantile") else 1
    dims = _dims(op, position, rank)
    if dims is None:
        dims = list(range(rank))
    keeps = len(outs[0]) == rank and rank > 0
    extreme = is_float and (name in ("amax", "amin") or (name in ("max", "min") and len(op.args) == 1))
    contracted = name in ("sum", "mean", "nansum", "count_nonzero") or extreme
    labels = tuple(f"d{i}" if n > 1 and (i not in dims or contracted) else BLOCKED for i, n in enumerate(ins[0]))
    kept = (
        tuple(BLOCKED if i in dims else labels[i] for i in range(rank)) if keeps else tuple(labels[i] for i in range(rank) if i not in dims)
    )
    if any(len(kept) != len(o) for o in outs):
        return None
    kernel = "average" if name == "mean" else "extreme"
    kernels = {labels[i]: kernel for i in dims if labels[i]} if name == "mean" or extreme else {}
    return Rule((labels,), tuple(kept for _ in outs), kernels)


def _loss(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """mean or sum over all elements (reduction 1 or 2), or none (0)."""
    position = REDUCED_AT.get(op.target.split(".")[1], 2)
    reduction = op.args[position] if len(op.args) > position else dict(op.kwargs).get("reduction", 1)
    if outs[0] or reduction == 0:
        return _pointwise(ins, outs)
    rank = max(len(s) for s in ins)
    full = next(s for s in ins if len(s) == rank)
    labels = tuple(f"d{i}" if n > 1 else BLOCKED for i, n in enumerate(full))
    rows = []
    for s in ins:
        extra = rank - len(s)
        rows.append(tuple(labels[i + extra] if n == full[i + extra] else BLOCKED for i, n in enumerate(s)))
    return Rule(tuple(rows), ((),), {x: "average" for x in labels if x} if reduction == 1 else {})


def _nll(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """Log-probabilities (classes come whole) of targets. The mean over rows without class weights, over samples; sums; nothing reduced."""
    reduction = op.args[3] if len(op.args) > 3 else dict(op.kwargs).get("reduction", 1)
    if len(ins[0]) < 2 or len(ins[1]) != len(ins[0]) - 1 or (reduction == 1 and len(ins) != 2):
        return None
    rows = tuple(f"n{i}" if size > 1 and (i == 0 or reduction != 1) else BLOCKED for i, size in enumerate(ins[1]))
    weights = ((BLOCKED,),) if len(ins) > 2 else ()
    kernels = {"n0": "average"} if reduction == 1 and rows[0] else {} if reduction == 0 else {x: "summands" for x in rows if x}
    return Rule(((rows[0], BLOCKED, *rows[1:]), rows, *weights), (rows if reduction == 0 else (),), kernels)


def _normalized(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """The dimensions of `normalized_shape`, the last ones, come whole; weights, which have that shape, too."""
    over = op.args[1] if len(op.args) > 1 else ()
    if not isinstance(over, tuple):
        return None
    lead = len(ins[0]) - len(over)
    labels = tuple(f"b{i - lead}" if i < lead and n > 1 else BLOCKED for i, n in enumerate(ins[0]))
    return Rule((labels, *((BLOCKED,) * len(s) for s in ins[1:])), (labels,))


def _renormed(op: Operator, ins: list[Shape]) -> Rule | None:
    """Every piece along `dim` by its own norm, which is over all other dimensions."""
    dim = op.args[2] if len(op.args) > 2 else dict(op.kwargs).get("dim")
    if not isinstance(dim, int):
        return None
    labels = tuple("d" if i == dim % len(ins[0]) and n > 1 else BLOCKED for i, n in enumerate(ins[0]))
    return Rule((labels,), (labels,))


def _matmul(ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """Matrices, stacks of them that broadcast, and vectors, which lack the dimension that is not contracted."""
    firsts, seconds = ("k",) if len(ins[0]) == 1 else ("n", "k"), ("k",) if len(ins[1]) == 1 else ("k", "m")
    ends = firsts[:-1] + seconds[1:]
    rank = len(outs[0]) - len(ends)
    batch = [f"b{i}" if n > 1 else BLOCKED for i, n in enumerate(outs[0][:rank])]

    def row(shape: Shape, last: tuple[str, ...]) -> Labels:
        lead, tail = shape[: len(shape) - len(last)], shape[len(shape) - len(last) :]
        extra = rank - len(lead)
        stacked = [batch[i + extra] if n == outs[0][i + extra] else BLOCKED for i, n in enumerate(lead)]
        return (*stacked, *(x if n > 1 else BLOCKED for x, n in zip(last, tail, strict=True)))

    out = (*batch, *(x if n > 1 else BLOCKED for x, n in zip(ends, outs[0][rank:], strict=True)))
    return Rule((row(ins[0], firsts), row(ins[1], seconds)), (out,))


def _einsum(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    terms, right = _spelled(str(op.args[0]).replace(" ", ""), ins)
    if any(len(set(t)) != len(t) for t in terms):
        return None
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, ins, strict=True):
        for x, n in zip(term, shape, strict=True):
            sizes[x] = max(sizes.get(x, 1), n)

    def row(term: str, shape: Shape) -> Labels:
        return tuple(x if n == sizes[x] and n > 1 else BLOCKED for x, n in zip(term, shape, strict=True))

    return Rule(tuple(row(t, s) for t, s in zip(terms, ins, strict=True)), (row(right, outs[0]),))


def _spelled(equation: str, ins: list[Shape]) -> tuple[list[str], str]:
    """The terms and the result of an einsum's equation, with letters for its dots, and a result where it leaves it out.

    >>> _spelled("...i,ij->...j", [(4, 2, 3), (3, 5)])
    (['ABi', 'ij'], 'ABj')
    """
    left, _, right = equation.partition("->")
    terms = left.split(",")
    free = [x for x in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz" if x not in equation]
    counts = [len(shape) - len(term.replace("...", "")) if "..." in term else 0 for term, shape in zip(terms, ins, strict=True)]
    dots = "".join(free[: max(counts, default=0)])
    if "->" not in equation:
        letters = "".join(terms).replace(".", "")
        right = "..." * bool(dots) + "".join(sorted(x for x in set(letters) if letters.count(x) == 1))
    spelled = [term.replace("...", dots[len(dots) - n :]) for term, n in zip(terms, counts, strict=True)]
    return spelled, right.replace("...", dots)


def _cell(ins: list[Shape], outs: list[Shape], num_states: int) -> Rule | None:
    """One step of a recurrence: samples can be cut, weights come whole."""
    if any(len(s) != 2 for s in ins[: 1 + num_states]):
        return None
    x = ("b" if ins[0][0] > 1 else BLOCKED, BLOCKED)
    return Rule((*[x] * (1 + num_states), *((BLOCKED,) * len(s) for s in ins[1 + num_states :])), tuple(x for _ in outs))


def _recurrent(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """Samples can be cut; states are (layers, samples, width), weights come whole. Packed sequences have no rule."""
    if len(ins[0]) != 3 or not isinstance(op.args[-1], bool):
        return None
    batch_first = bool(op.args[-1])
    num_states = 2 if op.target.split(".")[1] == "lstm" else 1
    x = ("b", BLOCKED, BLOCKED) if batch_first else (BLOCKED, "b", BLOCKED)
    state = (BLOCKED, "b", BLOCKED)
    rows: list[Labels] = [x] + [state] * num_states + [(BLOCKED,) * len(s) for s in ins[1 + num_states :]]
    return Rule(tuple(rows), (x, *([state] * num_states)))


def _adjust(op: Operator, name: str, rule: Rule, ins: list[Shape]) -> Rule | None:
    """What notation cannot say: groups of convolutions, options that couple dimensions."""
    if name.startswith("conv"):
        transposed = "transpose" in name
        position = 7 if transposed else 6
        groups = op.args[position - (1 if transposed else 0)] if len(op.args) > position - (1 if transposed else 0) else 1
        if groups != 1:
            # Cut samples only; a depthwise convolution could be cut by channel, with its own number of groups.
            return _only(rule, {"n"})
        return rule
    if name == "embedding":
        by_frequency, sparse = (*op.args[3:5], False, False)[:2]
        if by_frequency:  # gradients are divided by how often an index occurs, in all of the batch
            return _only(rule, {"e"})
        return _only(rule, set(rule.labels) - {"v"}) if sparse else rule
    if name == "batch_norm" and not (len(op.args) > 5 and op.args[5] is True):
        return Rule(rule.inputs, rule.outputs, {})  # evaluation: running statistics are constants
    if name == "instance_norm":
        running = [a for a in op.args[3:5] if isinstance(a, Ref)]
        if running and len(op.args) > 5 and op.args[5] is True:
            return _only(rule, set())  # what is kept is the mean over all samples
        return _only(rule, {"n"}) if len(ins) > 1 else rule
    if name == "scaled_dot_product_attention":
        return _attention(op, rule, ins)
    return rule


def _only(rule: Rule, keep: set[str]) -> Rule:
    def row(labels: Labels) -> Labels:
        return tuple(x if x in keep else BLOCKED for x in labels)

    kernels = {x: k for x, k in rule.kernels.items() if x in keep}
    return Rule(tuple(None if i is None else row(i) for i in rule.inputs), tuple(row(o) for o in rule.outputs), kernels)


def _cross_entropy(op: Operator, ins: list[Shape], outs: list[Shape]) -> Rule | None:
    """The mean over rows, or their sum, whose classes may be cut where they have no weights and no smoothing; or nothing reduced.

    A target that has classes, too, is probabilities, and its mean is over all rows, whatever they weigh.
    """
    weight = op.args[2] if len(op.args) > 2 else None
    reduction = op.args[3] if len(op.args) > 3 else dict(op.kwargs).get("reduction", 1)
    smoothing = op.args[5] if len(op.args) > 5 else dict(op.kwargs).get("label_smoothing", 0.0)
    weights = ((BLOCKED,),) if isinstance(weight, Ref) else ()
    if len(ins[0]) < 2:
        return None
    if ins[1] == ins[0]:
        rows = tuple(f"n{i}" if size > 1 else BLOCKED for i, size in enumerate((ins[0][0], *ins[0][2:])))
        both = (rows[0], BLOCKED, *rows[1:])
        return Rule((both, both, *weights), (rows if reduction == 0 else (),), {x: "average" for x in rows if x} if reduction == 1 else {})
    if len(ins[1]) != len(ins[0]) - 1:
        return None
    # Of an image's or a sequence's rows the mean is divided by samples only.
    rows = tuple(f"n{i}" if size > 1 and (i == 0 or reduction != 1) else BLOCKED for i, size in enumerate(ins[1]))
    whole_classes = weight is not None or smoothing or reduction == 0 or len(ins[0]) > 2 or ins[0][1] == 1
    classes = BLOCKED if whole_classes else "c"
    kernels = {"c": "vocabulary"} if classes else {}
    if reduction == 1 and rows[0]:
        kernels["n0"] = "average"
    return Rule(((rows[0], classes, *rows[1:]), rows, *weights), (rows if reduction == 0 else (),), kernels)


def _attention(op: Operator, rule: Rule, ins: list[Shape]) -> Rule:
    """Heads of grouped-query attention differ in number: the head label is on all of them, each cut into the same parts."""
    rows = list(rule.inputs)
    heads = [i for i, s in enumerate(ins[:3]) if len(s) >= 4]
    for i in heads:
        row = list(rows[i] or ())
        row[-3] = "h" if ins[i][-3] > 1 else BLOCKED
        rows[i] = tuple(row)
    out = list(rule.outputs[0])
    if len(out) >= 4 and out[-3]:
        out[-3] = "h"
    if any("h" not in (rows[i] or ()) for i in heads):
        # One key head for all query heads: cutting queries needs every rank's whole key.
        return (
            Rule(tuple(rows), (tuple(out),))
            if all(ins[i][-3] > 1 for i in heads)
            else _only(Rule(tuple(rows), (tuple(out),)), set(rule.labels) - {"h"})
        )
    return Rule(tuple(rows), (tuple(out),))
