"""What is known of an operator stands in its record: no file outside `ops` asks for one by its name.

A file *asks* where it compares with a name, or keeps names in a table; calls that it makes are no questions. Those that rewrite what torch
does, or run it, name what they rewrite.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.ops import RECORDS

ROOT = Path(__file__).parents[3] / "src" / "shardwise"
# Kernels, also over a field, and what draws as they do; capture, which rewrites calls; modes and tensors of our own that stand between
# torch and the user's code; measurements of single operators; models.
MAY = (
    "ops/", "lower/kernels/", "run/uncaptured/eager_draws.py", "run/loop/global_reductions.py", "run/uncaptured/trial.py",
    "lower/float64_mode.py", "capture/exported.py", "capture/fx_reader.py", "capture/functional.py", "capture/autograd_functions/trace.py",
    "capture/initialization/", "capture/patches/", "cluster/probe/", "run/prove/", "zoo/",
)  # fmt: skip
NAMES = {name.split(".")[1] for name in RECORDS}
# Operators whose names are words of ours besides: kinds of work, collectives, layout keys.
WORDS = set(
    """
    all batch_norm cat chunk clip complex convolution copy expand fill full gather index inner linear log matmul max mean min narrow norm pad
    repeat reshape scatter slice softmax split stack sum t to topk view zero
    """.split()
)
QUESTIONS = ("startswith", "endswith", "removeprefix", "removesuffix", "split", "get", "frozenset", "set", "fromkeys")


def asks(text: str) -> Iterator[tuple[int, str]]:
    """Lines in which a file asks for an operator by its name, and the name."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        for part in _asking(node):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield from ((part.lineno, name) for name in _operators(part.value))
            elif isinstance(part, ast.Attribute) and re.match(r"(torch\.ops\.)?aten\.\w+", ast.unparse(part)):
                yield part.lineno, ast.unparse(part)


def _asking(node: ast.AST) -> Iterator[ast.AST]:
    """Expressions that are compared, looked up, or kept in a table that is no argument of a call."""
    if isinstance(node, ast.Compare):
        for side in (node.left, *node.comparators):
            yield from side.elts if isinstance(side, ast.Tuple | ast.List | ast.Set) else [side]
    elif isinstance(node, ast.Dict):
        yield from (key for key in node.keys if key is not None)
    elif isinstance(node, ast.Set):
        yield from node.elts
    elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple | ast.List):
        yield from (item for item in node.value.elts if isinstance(item, ast.Constant))
    elif isinstance(node, ast.MatchValue):
        yield node.value
    elif isinstance(node, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""
        if called in QUESTIONS:
            for arg in node.args:
                yield from arg.elts if isinstance(arg, ast.Tuple | ast.List | ast.Set) else [arg]
        if called == "split" and isinstance(node.func, ast.Attribute):
            yield node.func.value


def _operators(text: str) -> Iterator[str]:
    words = text.split()
    if len(words) > 1:
        named = [word for word in words if word in NAMES]
        yield from named if 2 * len(named) >= len(words) else ()
    elif (text.startswith("aten.") and text != "aten.") or (text.partition(".")[0] in NAMES and text not in WORDS):
        yield text


def wrong(text: str, file: str) -> list[str]:
    if file.startswith(MAY):
        return []
    return [f"{file}:{line} asks for {name}; that belongs into a record of `ops`" for line, name in asks(text)]


def test_no_file_outside_of_ops_asks_for_an_operator_by_its_name() -> None:
    files = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))
    complaints = [line for file in files for line in wrong((ROOT / file).read_text(), file)]
    assert not complaints, "\n" + "\n".join(complaints)


@pytest.mark.parametrize("place", MAY)
def test_who_may_ask_does(place: str) -> None:
    """A place that asks no more leaves the list."""
    files = (path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).as_posix().startswith(place))
    assert any(next(asks(path.read_text()), None) for path in files)


@pytest.mark.parametrize(
    "text",
    [
        'if op.target == "aten.linear.default": pass',
        'if name in ("bmm", "baddbmm"): pass',
        'if name.startswith("conv1d"): pass',
        '_RESHAPES = frozenset("view reshape flatten".split())',
        '_SAME = {"relu": 1}',
        '_MANY = ("conv2d", "topk")',
        "_VIEWS = {torch.ops.aten.t.default}",
        "if node.target is aten.view.default: pass",
        'match name:\n    case "layer_norm": pass',
        'x = positions.get("cross_entropy_loss")',
    ],
)
def test_a_question_is_seen(text: str) -> None:
    assert wrong(text, "cost/operators/sharded_inventory.py")


@pytest.mark.parametrize(
    "text",
    [
        '"""linear and conv2d"""',
        'Operator(out, "aten.mul.Tensor", args, (), (out,), site)',
        "node(torch.ops.aten.reshape.default, (x, shape))",
        'if work.kind == "convolution": pass',
        'if reduce in ("sum", "max"): pass',
    ],
)
def test_a_call_and_a_word_are_none(text: str) -> None:
    assert not wrong(text, "lower/local.py")


def test_every_record_is_of_one_operator_or_of_several_that_are_alike() -> None:
    assert len({id(record) for record in RECORDS.values()}) < len(RECORDS)
    assert all(name.removeprefix("aten.") in record.names.split() for name, record in RECORDS.items())


@pytest.mark.parametrize(
    "names",
    [
        "sub subtract", "mul multiply", "div divide true_divide", "neg negative", "abs absolute", "clamp clip", "gt greater",
        "ne not_equal",
        "movedim moveaxis", "transpose swapaxes swapdims", "cat concat concatenate", "flatten ravel", "inverse linalg_inv",
    ],
)  # fmt: skip
def test_names_that_torch_has_for_one_operator_have_one_record(names: str) -> None:
    """Products by `torch.multiply` kept both of their operands, and sums by `torch.subtract` passed no summands."""
    assert len({id(RECORDS[f"aten.{name}"]) for name in names.split()}) == 1
