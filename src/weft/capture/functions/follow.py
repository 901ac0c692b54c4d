"""The factor rule of a user's own function, followed through its forward and its backward.

In: the function's operators on whole tensors, and on pieces of them. Out: which dimensions can be cut so that the same code, run on every
rank's pieces alone, makes pieces (or summands) of what it makes of the whole, gradients included.

Nothing is guessed: a dimension is cut only where the same operators come out on the pieces as on the whole, one by one, with the same
constants, and each of them hands on, by its own factor rule, pieces, summands or what is whole. So a size that the code reads as a number
is seen, as a constant that differs; where it only scales what passes (a mean, a division by the number of rows) that is followed, too.

Not modelled: what would need a collective inside of the function; such a dimension stays whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isclose
from typing import NamedTuple

from weft.capture.functions.trace import Joint
from weft.model.dims.labels import by_label
from weft.model.graph import Operator, Ref, Tensor
from weft.model.joined import Joined
from weft.ops import Op, by_elements, draws, record_of, rule_of
from weft.ops.linear import together
from weft.ops.rule import BLOCKED, Labels, Rule

AVERAGE, SUMMANDS = "average", "summands"  # what cutting a label leaves that no output has



class Form(NamedTuple):
    """How a piece's value lies to the whole's: R the same, P a summand, S the piece of dimension `dim`; times n**power besides."""

    kind: str
    dim: int = -1
    power: int = 0


Places = Mapping[int, int]  # number of an input -> the dimension of it that is cut
Cut = Callable[[Places, int], Sequence[tuple[Joint, Joint]]]  # cut into n: the function on whole tensors and on pieces, each way it may run


def rule_by_following(full: Joint, cut: Cut) -> Rule:
    """The factor rule; labels are f0, f1, ... in the order of the outputs' dimensions."""
    inputs, outputs = ([list((BLOCKED,) * len(full.tensors[v].shape)) for v in group] for group in (full.inputs, full.outputs))
    kernels: dict[str, str] = {}
    count = 0
    for places in _candidates(full):
        size = next(full.tensors[full.inputs[i]].shape[d] for i, d in places.items())
        ways = _ways(size)
        rules = [_both(pairs, places, n) for n in ways for pairs in (cut(places, n),)]
        if not rules or rules[0] is None or any(one != rules[0] for one in rules):
            continue
        label = f"f{count}"
        count += 1
        for i, dim in places.items():
            inputs[i][dim] = label
        for row, form in zip(outputs, rules[0], strict=True):
            if form.kind == "S":
                row[form.dim] = label
        if any(form.kind == "P" for form in rules[0]):
            kernels[label] = AVERAGE if rules[0][0].power else SUMMANDS
    return Rule(tuple(map(tuple, inputs)), tuple(map(tuple, outputs)), kernels)


def _ways(size: int) -> list[int]:
    """Numbers of pieces that a rule is tried with: the fewest and the most, where pieces are still larger than 1."""
    able = [n for n in range(2, min(size, 4096) + 1) if size % n == 0]
    large = [n for n in able if size // n > 1]
    return sorted({able[0], *large[-1:]}) if able else []


def _both(pairs: Sequence[tuple[Joint, Joint]], places: Places, n: int) -> list[Form] | None:
    """What the outputs are where all ways in which it may run agree; None otherwise."""
    forms: list[list[Form] | None] = [follow(full, piece, places, n) for full, piece in pairs]
    return forms[0] if forms and all(one is not None and one == forms[0] for one in forms) else None


def _candidates(full: Joint) -> list[dict[int, int]]:
    """Sets of dimensions of inputs that go together by the rules of the operators that they go through."""
    joined = Joined[tuple[str, int]]()
    tensors = dict(full.tensors)
    for op in full.operators or ():
        rule = rule_of(op, tensors)
        if rule is None:
            continue
        for places in by_label(op, rule).values():
            joined.add(places)
    for value, gradient in (*zip(full.outputs, full.seeds, strict=True), *zip(full.inputs, full.gradients, strict=True)):
        if gradient is not None:
            for dim in range(len(tensors[value].shape)):
                joined.add([(value, dim), (gradient, dim)])
    ends = [(v, d) for v in (*full.outputs, *full.inputs) for d, n in enumerate(tensors[v].shape) if n > 1]
    groups: dict[tuple[str, int], dict[int, int]] = {joined.root(at): {} for at in ends}
    twice = set()
    for i, value in enumerate(full.inputs):
        for dim, size in enumerate(tensors[value].shape):
            if size > 1:
                group = groups[joined.root((value, dim))]
                if i in group:
                    twice.add(joined.root((value, dim)))
                group[i] = dim
    sized = [(at, group) for at, group in groups.items() if group and at not in twice]
    return [g for _, g in sized if len({tensors[full.inputs[i]].shape[d] for i, d in g.items()}) == 1]


def follow(full: Joint, piece: Joint, places: Places, n: int) -> list[Form] | None:
    """What the outputs of a piece are to the whole's; None where that is not known, or gradients are not what they must be.

    The gradient of an input that is cut must be its piece, and that of one that is whole a summand.
    """
    if full.operators is None or piece.operators is None or len(full.operators) != len(piece.operators):
        return None
    if (full.inputs, full.outputs, full.seeds, full.gradients) != (piece.inputs, piece.outputs, piece.seeds, piece.gradients):
        return None
    forms = {v: Form("S", places[i]) if i in places else Form("R") for i, v in enumerate(full.inputs)}
    for name, value in full.literals.items():
        if piece.literals.get(name) != value:
            return None
        forms[name] = Form("R")
    if not _expected(full, piece, forms, full.inputs, n):
        return None
    zeros = _zeros(full)
    outputs: list[Form] | None = None
    for i, (op, other) in enumerate(zip(full.operators, piece.operators, strict=True)):
        if i == full.num_forward:
            outputs = _outputs(full, forms)
        if i >= full.num_forward and outputs is None:
            return None
        step = _step(op, other, full.tensors, piece.tensors, forms, zeros, n)
        if step is None:
            return None
        forms.update(zip(op.outputs, step, strict=True))
        if not _expected(full, piece, forms, op.outputs, n):
            return None
    if outputs is None:
        outputs = _outputs(full, forms)
    if outputs is None:
        return None
    for i, gradient in enumerate(full.gradients):
        want = Form("S", places[i]) if i in places else Form("P")
        if gradient is not None and forms[gradient] != want and not (gradient in zeros and forms[gradient].kind != "S"):
            return None
    return outputs


def is_linear(joint: Joint) -> bool:
    """Whether backward makes summands of summands, as the backward of every operator does; one that clips gradients does not."""
    if joint.operators is None:
        return False
    forms = {v: Form("R") for v in (*joint.inputs, *joint.literals)} | {seed: Form("P") for seed in joint.seeds if seed is not None}
    zeros = _zeros(joint)
    for op in joint.operators:
        step = _step(op, op, joint.tensors, joint.tensors, forms, zeros, 1)
        if step is None:
            return False
        forms.update(zip(op.outputs, step, strict=True))
    return all(gradient is None or gradient in zeros or forms[gradient] == Form("P") for gradient in joint.gradients)


def _zeros(joint: Joint) -> set[str]:
    """Values that are zero everywhere: whole, pieces and summands at once."""
    names = {name for name, value in joint.literals.items() if isinstance(value, tuple) and value[1] == 0}
    for op in joint.operators or ():
        record = record_of(op)
        passes = record.linear == "together" or record.moves in ("copy", "same")
        if record.fill == 0 or (passes and op.inputs and names.issuperset(op.inputs)):
            names.update(op.outputs)
    return names


def _outputs(full: Joint, forms: dict[str, Form]) -> list[Form] | None:
    """Forms of the outputs, each a piece or a summand, and of the gradients that come back for them."""
    forms_out = [forms[v] for v in full.outputs]
    scaled = {form.power for form in forms_out}
    if any(form.kind == "R" for form in forms_out) or not (
        scaled == {0} or (scaled == {1} and all(form.kind == "P" for form in forms_out))
    ):
        return None
    for form, seed in zip(forms_out, full.seeds, strict=True):
        if seed is not None:
            forms[seed] = form if form.kind == "S" else Form("R", power=-form.power)
    return forms_out


def _expected(full: Joint, piece: Joint, forms: Mapping[str, Form], values: Sequence[str], n: int) -> bool:
    """Whether pieces have the shapes that their forms say."""
    for value in values:
        shape, form = list(full.tensors[value].shape), forms[value]
        if form.kind == "S":
            if shape[form.dim] % n:
                return False
            shape[form.dim] //= n
        if tuple(shape) != piece.tensors[value].shape or full.tensors[value].dtype != piece.tensors[value].dtype:
            return False
    return True


def _step(
    op: Operator,
    other: Operator,
    tensors: Mapping[str, Tensor],
    pieces: Mapping[str, Tensor],
    forms: Mapping[str, Form],
    zeros: set[str],
    n: int,
) -> list[Form] | None:
    """What one operator makes; None where it is not known."""
    record = record_of(op)
    if (op.target, op.outputs, op.inputs) != (other.target, other.outputs, other.inputs) or any(v not in forms for v in op.inputs):
        return None
    scale = _scale_power(op, other, n)
    if scale is None:
        return None
    rule = rule_of(op, dict(tensors))
    ins = [forms[v] for v in op.inputs]
    read: list[tuple[Form, Labels]] = [(form, (BLOCKED,) * len(tensors[v].shape)) for form, v in zip(ins, op.inputs, strict=True)]
    if rule is not None:
        read = [(form, row) for form, row in zip(ins, rule.inputs, strict=True) if row is not None]
    cut = {row[form.dim] for form, row in read if form.kind == "S"}
    power = _power(op, forms, zeros)
    if power is None:
        return None
    power += scale
    if cut:
        (label, *others) = cut
        if others or not label or rule is None or any(label in row for form, row in read if form.kind != "S"):
            return None
        return _pieces(op, rule, label, [form for form, _ in read], power)
    if any(form.kind == "P" for form, _ in read):
        rounds = any(tensors[v].is_float for v in op.inputs) and not all(tensors[v].is_float for v in op.outputs)
        return None if rounds else [Form("P", power=power)] * len(op.outputs)  # it passes: `_power` has seen to that
    placed = [_replicated(record, rule, tensors[v].shape, pieces[v].shape, row, power) for row, v in enumerate(op.outputs)]
    # Ranks with pieces of something draw numbers of their own.
    return None if draws(op) and any(form.kind == "R" for form in placed) else placed


def _pieces(op: Operator, rule: Rule, label: str, read: list[Form], power: int) -> list[Form] | None:
    """An operator that is cut on a label."""
    if any(form.kind == "P" for form in read):
        return None
    kernel, record = rule.kernels.get(label), record_of(op)
    if kernel is not None and not (kernel == "average" and record.linear):
        return None
    placed = []
    for row in rule.outputs:
        if label in row:
            placed.append(Form("S", row.index(label), power))
        elif record.contracts and record.linear:  # of a mean each piece's is n times too large
            placed.append(Form("P", power=power + (kernel == "average")))
        else:
            return None
    return placed


def _replicated(record: Op, rule: Rule | None, full: tuple[int, ...], piece: tuple[int, ...], row: int, power: int) -> Form:
    """Of whole tensors: whole as well, or a piece of what is alike all along a dimension."""
    differ = [d for d, (a, b) in enumerate(zip(full, piece, strict=False)) if a != b]
    if len(differ) == 1 and len(full) == len(piece):
        labels: Labels = rule.outputs[row] if rule is not None else ()
        read = [r for r in (rule.inputs if rule is not None else ()) if labels[differ[0]] and labels[differ[0]] in (r or ())]
        spread = record.moves == "expand" and rule is not None and not read
        if (record.sample_invariant and record.shape_at is not None) or spread:
            return Form("S", differ[0], power)
    return Form("R", power=power)


def _power(op: Operator, forms: Mapping[str, Form], zeros: set[str]) -> int | None:
    """The power of n by which what comes out is scaled, of those of what goes in; None where a summand or a scaled value cannot pass."""
    ins = [forms[v] for v in op.inputs]
    if not any(form.power or form.kind == "P" for form in ins):
        return 0
    summands = sum(form.kind == "P" for form in ins)
    carried = together(op, zeros)
    if carried is not None:
        passing = {(forms[v].power, forms[v].kind == "P") for v in carried}
        beside = [forms[v] for v in op.inputs if v not in carried and v not in zeros]
        return passing.pop()[0] if len(passing) == 1 and not any(f.power or f.kind == "P" for f in beside) else None
    how = record_of(op).linear
    if how == "each":
        return sum(form.power for form in ins) if summands < 2 else None
    if how == "numerator" and "rounding_mode" not in dict(op.kwargs):
        if len(ins) == 1:
            return ins[0].power if isinstance(op.args[0], Ref) else None
        return ins[0].power - ins[1].power if ins[1].kind != "P" else None
    return None


def _scale_power(op: Operator, other: Operator, n: int) -> int | None:
    """The power of n by which a constant factor differs between the piece and the whole, 0 where all constants are equal, else None."""
    record = record_of(op)
    if record.shape_at is not None:  # which differs between the whole and a piece
        rest = record.shape_at + 1
        return 0 if (op.args[rest:], op.kwargs) == (other.args[rest:], other.kwargs) else None
    if (op.args, op.kwargs) == (other.args, other.kwargs):
        return 0
    factor = record.linear == "each" and by_elements(op)
    if not (factor or record.linear == "numerator") or op.kwargs != other.kwargs or len(op.args) != 2 or op.args[0] != other.args[0]:
        return None
    a, b = op.args[1], other.args[1]
    if not all(isinstance(x, int | float) and not isinstance(x, bool) and x for x in (a, b)):
        return None
    for power in (1, -1):
        if isclose(float(b), float(a) * float(n) ** power, rel_tol=1e-12):  # type: ignore[arg-type]
            return power if factor else -power
    return None
