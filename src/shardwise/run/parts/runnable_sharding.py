"""Search of a sharding under which every operator runs: one whose kernel fails on its shards is computed whole instead.

In: a graph, a layout, a function that shards the graph. Out: the sharding, proven on tensors without data (`lower/trial`); or a refusal
that names the operator, the layout's key and the remedy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from shardwise.errors import Infeasible, LayoutError, ModelError
from shardwise.lower.trial import OperatorFailure, try_operators
from shardwise.model.graph import Graph
from shardwise.model.sharding.sharding import Sharding
from shardwise.plan.ir.axis import axis_of, layout_word
from shardwise.plan.layout import Layout

MAX_WHOLE = 16  # operators of one graph that are computed whole for want of a kernel on shards

Labels = Mapping[str, Mapping[str, str]]  # by axis and site


def shard_runnable(graph: Graph, layout: Layout, shard: Callable[[Labels], Sharding]) -> Sharding:
    """Return the sharding of `shard` under which every operator runs. `shard(labels)`: with the labels of some operators given.

    Raises:
        LayoutError: an operator fails on its shards, and cannot be computed whole.
        ModelError: an operator fails on the dtypes that autocast gives it.
    """
    labels: dict[str, dict[str, str]] = {}
    sharding, failure = shard(labels), None
    for _ in range(MAX_WHOLE):
        result = try_operators(graph, sharding, layout.precision, layout.local_statistics_axes)
        if result.failure is None:
            return replace(sharding, promoted=result.promoted) if result.promoted else sharding
        failure = result.failure
        axes = [axis for axis in failure.axes if axis_of(axis).shards_weights or axis_of(axis).shards_positions]
        if not axes:
            break
        for axis in axes:
            labels.setdefault(axis, {})[failure.op.site] = ""
        try:
            sharding = shard(labels)
        except LayoutError:
            break
    assert failure is not None
    raise _refusal_of(failure, sharding, layout)


def check_runnable(graph: Graph, sharding: Sharding, layout: Layout) -> None:
    """Raise Infeasible if an operator fails on its shards of another number of samples."""
    failure = try_operators(graph, sharding, layout.precision, layout.local_statistics_axes).failure
    if failure is not None:
        raise Infeasible(f"with microbatches of {graph.batch_size} samples {_refusal_of(failure, sharding, layout)}")


def _refusal_of(failure: OperatorFailure, sharding: Sharding, layout: Layout) -> LayoutError | ModelError:
    shapes = ", ".join(str(list(shape)) for shape in failure.shapes)
    if not failure.axes:
        return ModelError(
            f"{failure.op.site} cannot compute with the dtypes that precision={layout.precision} gives it ({failure.reason}); cast its "
            "operands to one dtype in the model, or use precision=float32"
        )
    words = list(dict.fromkeys(layout_word(axis, sharding.sizes) for axis in failure.axes))
    keys = " and ".join(word.partition("=")[0] for word in words)
    return LayoutError(
        f"{failure.op.site} cannot be computed on a rank's shards {shapes} under {' '.join(words)}: {failure.reason}; leave {keys} out, or "
        "use other numbers of ranks there"
    )
