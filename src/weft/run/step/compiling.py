"""A stage whose runs of torch's own operators are compiled; redistributions and kernels of weft's stand between them as they are.

In: a lowered stage's module. Out: a module with the same arguments and results. Every run is compiled whole (`fullgraph`), so no graph
breaks: where a collective or a kernel of weft's stands, a run ends. What torch's compiler has made is kept in its own cache on the disk.
"""

from __future__ import annotations

import operator

import torch
from torch import fx, nn
from torch.fx.passes.split_module import split_module

from weft.lower.local import LocalStage
from weft.world.private import is_operator

FEWEST = 2  # operators of a run that is worth a call of compiled code


def compiled(local: LocalStage) -> nn.Module:
    """The stage's module with compiled runs.

    >>> graph = fx.symbolic_trace(lambda x: torch.ops.aten.relu.default(torch.ops.aten.exp.default(x)))
    >>> stage = LocalStage(graph, ("x",), (), (), ("y",), {})
    >>> [type(one).__name__ for one in compiled(stage).children()]
    ['OptimizedModule']
    """
    module = local.module
    assert isinstance(module, fx.GraphModule)
    runs = _runs(module.graph)
    split = split_module(module, module, lambda node: runs[node], keep_original_order=True)
    for name, part in list(split.named_children()):
        if isinstance(part, fx.GraphModule) and sum(_is_torchs(n) and n.target is not operator.getitem for n in part.graph.nodes) >= FEWEST:
            setattr(split, name, torch.compile(part, fullgraph=True, dynamic=False))
    return split


def _is_torchs(node: fx.Node) -> bool:
    return node.op == "call_function" and (is_operator(node.target) or node.target is operator.getitem)


def _runs(graph: fx.Graph) -> dict[fx.Node, int]:
    """The number of the run that each node stands in: nodes one behind another that are all torch's, or all weft's."""
    runs: dict[fx.Node, int] = {}
    run, torchs = 0, None
    for node in graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        if node.target is not operator.getitem and _is_torchs(node) != torchs:
            run, torchs = run + 1, _is_torchs(node)
        runs[node] = run
    return runs
