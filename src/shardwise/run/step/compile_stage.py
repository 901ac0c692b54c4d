"""Compile a stage with `torch.compile`: runs of torch operators are compiled, collectives and custom kernels between them are not.

In: a lowered stage's module. Out: a module with the same arguments and results. Every run is compiled with `fullgraph`, so there are no
graph breaks: a run ends at a collective or a custom kernel. Compiled code is cached on disk by torch.
"""

from __future__ import annotations

import operator

import torch
from torch import fx, nn
from torch.fx.passes.split_module import split_module

from shardwise.lower.local import LocalStage
from shardwise.world.private import is_operator

MIN_OPERATORS = 2  # operators in a run that is worth compiling


def compile_runs(local: LocalStage) -> nn.Module:
    """Return the stage's module with compiled runs.

    >>> graph = fx.symbolic_trace(lambda x: torch.ops.aten.relu.default(torch.ops.aten.exp.default(x)))
    >>> stage = LocalStage(graph, ("x",), (), (), ("y",), {})
    >>> [type(one).__name__ for one in compile_runs(stage).children()]
    ['OptimizedModule']
    """
    module = local.module
    assert isinstance(module, fx.GraphModule)
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
    return node.op == "call_function" and (is_operator(node.target) or node.target is operator.getitem)


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
