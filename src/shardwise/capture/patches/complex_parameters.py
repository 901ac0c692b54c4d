"""Trained complex parameters.

Torch: a graph reads them as complex numbers; torch's optimizers view them as pairs of real ones.
Wanted: pairs in the graph too, for reduction, updates and storage, with a view as complex before they are read.
Test: tests/torch/capture/test_untraceable.py::test_complex_weights_are_trained_as_torch_trains_them_and_handed_out_as_they_were
Until: not known
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.capture.patches.patch import Patch
from shardwise.model.graph import Arg, Graph, Operator, Ref, Tensor, written_buffers

_REAL = {"complex64": "float32", "complex128": "float64"}


def _split_complex_parameters(graph: Graph) -> Graph:
    """Return `graph` with each trained complex parameter as `[..., 2]` real numbers; parameters that are written stay complex."""
    written = written_buffers(graph)
    pairs = {v.value for v in graph.parameters if v.trainable and v.tensor.dtype in _REAL and v.value not in written}
    if not pairs:
        return graph
    tensors = dict(graph.tensors)
    views: list[Operator] = []
    parameters = []
    for v in graph.parameters:
        if v.value not in pairs:
            parameters.append(v)
            continue
        real = Tensor((*v.tensor.shape, 2), _REAL[v.tensor.dtype])
        parameters.append(replace(v, tensor=real, is_complex_pairs=True))
        tensors[v.value], pair = real, f"{v.value}_joined"
        tensors[pair] = v.tensor
        views.append(Operator(pair, "aten.view_as_complex.default", (Ref(v.value),), (), (pair,), f"{v.name}/view_as_complex"))

    def arg(a: Arg) -> Arg:
        if isinstance(a, tuple):
            return tuple(arg(item) for item in a)
        return Ref(f"{a.value}_joined") if isinstance(a, Ref) and a.value in pairs else a

    def with_complex_inputs(op: Operator) -> Operator:
        return replace(op, args=tuple(arg(a) for a in op.args), kwargs=tuple((k, arg(a)) for k, a in op.kwargs))

    operators: list[Operator] = []
    waiting = {op.inputs[0]: op for op in views}
    for op in graph.operators:
        for value in op.inputs:
            if value in waiting:  # right before the first read, so that a stage may begin anywhere before
                operators.append(waiting.pop(value))
        operators.append(with_complex_inputs(op))
    return replace(graph, parameters=tuple(parameters), operators=tuple(operators), tensors=tensors)


PATCH = Patch(rewrite_graph=_split_complex_parameters)
