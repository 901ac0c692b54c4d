"""Compilation of a lowered module by torch.compile: runs of torch operators between shardwise's own kernels and collectives.

Weights that are gathered for one layer (ZeRO-3) are inputs of its compiled code, which reads their memory when it is called: so layers are
compiled inside of what gathers them, and what is saved for backward is the weight itself, whose memory comes and goes.
"""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch.fx.passes.split_module import split_module

from shardwise.lower.torch_calls import is_operator_call

MIN_OPERATORS = 2  # operators in a run that is worth compiling


def compile_runs(module: fx.GraphModule) -> fx.GraphModule:
    """Return a module with compiled runs.

    >>> graph = fx.symbolic_trace(lambda x: torch.ops.aten.relu.default(torch.ops.aten.exp.default(x)))
    >>> [type(one).__name__ for one in compile_runs(graph).children()]
    ['OptimizedModule']
    """
    runs = _number_runs(module.graph)
    split = split_module(module, module, lambda node: runs[node], keep_original_order=True)
    for name, run in list(split.named_children()):
        if (
            isinstance(run, fx.GraphModule)
            and sum(_is_torch_operator(n) and n.target is not operator.getitem for n in run.graph.nodes) >= MIN_OPERATORS
        ):
            setattr(split, name, torch.compile(run, fullgraph=True, dynamic=False))
    return split


def _is_torch_operator(node: fx.Node) -> bool:
    return is_operator_call(node) or node.target is operator.getitem


def _number_runs(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return the number of each node's run: consecutive nodes that are all torch operators, or all custom."""
    runs: dict[fx.Node, int] = {}
    run, is_torch = 0, None
    for node in graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        if node.target is not operator.getitem and _is_torch_operator(node) != is_torch:
            run, is_torch = run + 1, _is_torch_operator(node)
        runs[node] = run
    return runs
