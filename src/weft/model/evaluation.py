"""Whether a model computes in evaluation what it computes in training, apart from dropout and the statistics of batch norm.

In: the graphs of both. Out: where they first differ, and which writes of training are made in evaluation, too. Evaluation runs the
training graph with dropout switched off and batch norm by its running statistics; a model that does anything else when it
evaluates must be told apart, never evaluated as something it is not.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.model.graph import Arg, Graph, Operator, Ref
from weft.model.propagate import writes_buffer

_DROPS = {"dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"}
# Positions of arguments that say whether an operator trains, or how much it drops.
_MODES = {"batch_norm": (5,), "instance_norm": (5,), "scaled_dot_product_attention": (4,)} | dict.fromkeys(
    ("lstm", "gru", "rnn_tanh", "rnn_relu"), (5, 6)
)


def difference(training: Graph, evaluation: Graph) -> str:
    """The site at which the two first compute something else; empty where they are the same."""
    ours, theirs = _essence(training), _essence(evaluation)
    for (site, mine), (other_site, other) in zip(ours, theirs, strict=False):
        if mine != other:
            return site or other_site
    if len(ours) != len(theirs):
        return (ours if len(ours) > len(theirs) else theirs)[min(len(ours), len(theirs))][0]
    return ""


def _essence(graph: Graph) -> list[tuple[str, tuple[object, ...]]]:
    """(site, what is computed) of every operator that the results depend on, dropout left out; values are named by where they come from."""
    needed = {graph.loss, *graph.outputs}
    kept: list[Operator] = []
    for op in reversed(graph.operators):
        if needed.intersection(op.outputs):
            needed.update(op.inputs)
            kept.append(op)
    names: dict[str, object] = {v.value: v.name for v in graph.variables}
    found: list[tuple[str, tuple[object, ...]]] = []
    for op in reversed(kept):
        packet = op.target.split(".")[1]
        if packet in _DROPS:
            names[op.outputs[0]] = names[op.inputs[0]]
            continue
        args = tuple(None if i in _MODES.get(packet, ()) else _named(arg, names) for i, arg in enumerate(op.args))
        for i, value in enumerate(op.outputs):
            names[value] = (len(found), i)
        while args and args[-1] is None:
            args = args[:-1]  # what has its default may be left out
        found.append((op.site, (op.target, args, tuple((k, _named(a, names)) for k, a in op.kwargs))))
    results = tuple(names[value] for value in (graph.loss, *graph.outputs) if value in names)
    return [*found, ("the result", results)]


def _named(arg: Arg, names: dict[str, object]) -> object:
    if isinstance(arg, Ref):
        return ("value", names[arg.value])
    if isinstance(arg, tuple | list):
        return tuple(_named(item, names) for item in arg)
    return arg


def kept_writes(training: Graph, evaluation: Graph) -> frozenset[str] | None:
    """Names of the operators of `training` that write a buffer or a parameter in evaluation, too; None where that makes other writes.

    Counts and running means are written by code that asks whether it trains; a norm that is forced on weights need not be.
    """
    known: dict[object, int] = {}
    ours, theirs = _written(training, known), [key for key, _ in _written(evaluation, known)]
    found = set()
    for key in theirs:
        name = next((name for other, name in ours if other == key), None)
        if name is None:
            return None
        found.add(name)
    return frozenset(found)


def _written(graph: Graph, known: dict[object, int]) -> Iterator[tuple[int, str]]:
    """(what is computed and written, name) of every write, in order; `known`: a number for everything that is computed."""
    placed = {v.value: v for v in (*graph.parameters, *graph.buffers)}
    names: dict[str, object] = {v.value: v.name for v in graph.variables}
    for op in graph.operators:
        packet = op.target.split(".")[1]
        if packet in _DROPS:
            names[op.outputs[0]] = names[op.inputs[0]]
            continue
        args = tuple(None if i in _MODES.get(packet, ()) else _named(arg, names) for i, arg in enumerate(op.args))
        while args and args[-1] is None:
            args = args[:-1]
        key = known.setdefault((op.target, args, tuple((k, _named(a, names)) for k, a in op.kwargs)), len(known))
        names.update({value: (key, i) for i, value in enumerate(op.outputs)})
        if writes_buffer(op, placed):
            yield key, op.name
