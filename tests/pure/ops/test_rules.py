"""The notation of factor rules, and rules whose answer depends on an operator's arguments."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.model.graph import Operator, Ref, Tensor
from shardwise.ops import RECORDS, Rule, parse, rule_of
from shardwise.ops.views import reshape_labels


def rule(target: str, *args: object, outs: tuple[tuple[int, ...], ...]) -> Rule | None:
    """The rule of one call; tuples of the form ("x", shape) among `args` are tensors."""
    tensors: dict[str, Tensor] = {}

    def arg(a: object) -> object:
        if isinstance(a, Tensor):
            name = f"x{len(tensors)}"
            tensors[name] = a
            return Ref(name)
        return tuple(arg(i) for i in a) if isinstance(a, tuple) else a

    given_args = tuple(arg(a) for a in args)
    outputs = tuple(f"y{i}" for i in range(len(outs)))
    tensors.update({n: Tensor(s, "float32") for n, s in zip(outputs, outs, strict=True)})
    return rule_of(Operator("y", target, given_args, (), outputs, "y"), tensors)


def f(*shape: int) -> Tensor:
    return Tensor(shape, "float32")


def test_a_star_stands_for_what_is_left() -> None:
    found = parse("b* i, o i, o -> b* o", [(2, 3, 4), (5, 4), (5,)], [(2, 3, 5)])
    assert found == Rule((("b-2", "b-1", "i"), ("o", "i"), ("o",)), (("b-2", "b-1", "o"),))
    assert found.labels == ("b-2", "b-1", "o", "i")
    assert parse("b* i, o i -> b* o", [(4,), (5, 4)], [(5,)]) == Rule((("i",), ("o", "i")), (("o",),))


def test_an_argument_that_is_not_given_has_no_entry() -> None:
    found = parse("b* i, o i, o -> b* o", [(3, 4), (5, 4), None], [(3, 5)])
    assert found is not None
    assert len(found.inputs) == 2


def test_what_is_broadcast_stays_whole() -> None:
    found = parse("n m, n m -> n m", [(4, 1), (4, 6)], [(4, 6)])
    assert found == Rule((("n", ""), ("n", "m")), (("n", "m"),))
    assert parse("n -> n", [(1,)], [(1,)]) == Rule((("",),), (("",),)), "a dimension of one cannot be cut"


def test_dimensions_that_may_be_missing_are_left_out_outermost_first() -> None:
    text, x = "b* h s d, b* h? s? t -> b* h s d", (2, 3, 4, 5)
    rows = [found.inputs[1] if (found := parse(text, [x, mask], [x])) else None for mask in ((6,), (4, 6), (3, 4, 6), (2, 3, 4, 6))]
    assert rows == [("t",), ("s", "t"), ("h", "s", "t"), ("b-1", "h", "s", "t")]
    assert parse(text.replace("?", ""), [x, (4, 6)], [x]) is None


@pytest.mark.parametrize(
    ("text", "kernels"),
    [
        ("n/ c^, n/ -> ", {"n": "average", "c": "vocabulary"}),
        ("n+ c -> n c", {"n": "statistics"}),
        ("n+ c s+* -> n c s*", {"n": "statistics", "s-2": "statistics", "s-1": "statistics"}),
    ],
)
def test_marks_name_kernels(text: str, kernels: dict[str, str]) -> None:
    entries = text.partition("->")[0].split(",")
    shapes = [(4, 6), (4,)] if len(entries) == 2 else [(4, 6, 2, 2)] if "*" in text else [(4, 6)]
    out = () if text.endswith("-> ") else shapes[0]
    found = parse(text, shapes, [out])
    assert found is not None
    assert found.kernels == kernels
    assert {label for row in found.inputs if row for label in row} >= set(kernels), "marks are not part of the label"


def test_blocked_dimensions_have_no_label() -> None:
    assert parse("b* !s !d -> b* !s !d", [(2, 3, 4)], [(2, 3, 4)]) == Rule((("b-1", "", ""),), (("b-1", "", ""),))
    assert parse("n !c !s* -> n !c !s*", [(2, 3, 4, 5)], [(2, 3, 4, 5)]) == Rule((("n", "", "", ""),), (("n", "", "", ""),))


def test_an_input_whose_values_are_not_read_may_lie_anyhow() -> None:
    found = parse("n, _ -> n", [(4,), (7, 7)], [(4,)])
    assert found is not None
    assert found.inputs == (("n",), None)


@pytest.mark.parametrize(("text", "ins", "outs"), [("n k, k m -> n m", [(3,), (3, 4)], [(4,)]), ("n -> n", [(3, 4)], [(3, 4)])])
def test_ranks_that_do_not_fit_have_no_rule(text: str, ins: list[tuple[int, ...]], outs: list[tuple[int, ...]]) -> None:
    assert parse(text, ins, outs) is None


def test_every_line_of_the_table_can_be_read() -> None:
    """Labels of an output come from an input; a kernel's label is a label."""
    lines = {name: (op.rule,) if isinstance(op.rule, str) else op.rule for name, op in RECORDS.items() if isinstance(op.rule, str | tuple)}
    assert len(lines) > 60
    for name, texts in lines.items():
        for text in texts:
            left, _, right = text.partition("->")
            shapes = []
            for side in (left, right):
                shapes.append([(4,) * len([*entry.split(), *("*" for w in entry.split() if w.endswith("*"))]) for entry in side.split(",")])
            found = parse(text, shapes[0], shapes[1])
            assert found is not None, name
            labels = {x for row in found.inputs if row is not None for x in row}
            assert {x for row in found.outputs for x in row} <= labels | {""}, name
            assert set(found.kernels) <= labels, name


@given(st.lists(st.sampled_from((1, 2, 3, 4, 6)), min_size=1, max_size=4), st.lists(st.integers(1, 12), min_size=1, max_size=4))
def test_a_reshape_labels_equal_strides_only(source: list[int], cut: list[int]) -> None:
    """Against enumeration: a labelled pair of dimensions sends each half of one to the same half of the other."""
    total = 1
    for n in source:
        total *= n
    target, left = [], total
    for n in cut:
        if left % n == 0:
            target.append(n)
            left //= n
    target.append(left)
    ins, outs = reshape_labels(tuple(source), tuple(target))
    for label in set(ins) - {""}:
        i, j = ins.index(label), outs.index(label)
        for parts in (2, 3):
            if source[i] % parts == 0 and target[j] % parts == 0:
                for flat in range(total):
                    assert place(flat, source, i) // (source[i] // parts) == place(flat, target, j) // (target[j] // parts)


def place(flat: int, shape: list[int], dim: int) -> int:
    """The index in `dim` of the element number `flat` in order."""
    for n in reversed(shape[dim + 1 :]):
        flat //= n
    return flat % shape[dim]


def test_no_rule_is_said_and_not_guessed() -> None:
    assert rule("aten.made_up.default", f(4, 4), outs=((4, 4),)) is None
    assert rule("aten.einsum.default", "ii->i", (f(4, 4),), outs=((4,),)) is None
    dots = rule("aten.einsum.default", "...a,ab->...b", (f(4, 4), f(4, 4)), outs=((4, 4),))
    assert dots == Rule((("A", "a"), ("a", "b")), (("A", "b"),))
    assert rule("aten.index.Tensor", f(4, 4), (Tensor((4, 4), "bool"),), outs=((3,),)) is None


def test_channels_of_a_convolution_in_groups_are_cut_by_groups() -> None:
    pair, zero, one = (1, 1), (0, 0), (1, 1)
    whole = rule("aten.conv2d.default", f(2, 4, 6, 6), f(8, 4, 3, 3), None, pair, zero, one, 1, outs=((2, 8, 4, 4),))
    grouped = rule("aten.conv2d.default", f(2, 4, 6, 6), f(8, 2, 3, 3), None, pair, zero, one, 2, outs=((2, 8, 4, 4),))
    assert whole is not None
    assert grouped is not None
    assert set(whole.labels) == {"n", "o", "i", "h", "w"}
    assert set(grouped.labels) == {"n", "o", "h", "w"}
    assert (grouped.kernels["o"], grouped.num_units["o"]) == ("groups", 2)  # whole groups, which take their own channels


def test_one_key_head_for_all_queries_is_cut_by_the_heads_of_queries() -> None:
    def labels(keys: int) -> set[str]:
        q, kv = f(2, 4, 6, 2), f(2, keys, 6, 2)
        found = rule("aten.scaled_dot_product_attention.default", q, kv, kv, outs=((2, 4, 6, 2),))
        assert found is not None
        return set(found.labels)

    assert labels(4) == labels(2) == labels(1) == {"b-1", "h", "s", "t"}
