"""Outputs of a model in a plain loop that are no plain tensors: objects that it does not return, and sums over ranks that are under way.

A scalar that ranks sum, such as the mean loss, is returned before the sum has arrived: the first use of its value waits. Backward does
not use it, and waits when it has ended, as it does for gradients. The gradient of such an output is summed over ranks too, since each may
use it differently; where backward starts from it alone the gradient is one on every rank, and nothing is sent.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from shardwise.capture.nesting import is_literal_value, tensors_in
from shardwise.errors import ModelError
from shardwise.lower.redistribute import redistribute
from shardwise.plan.ir.placement import P, R
from shardwise.run.gradients.outside_parameters import is_backward_root, run_and_average, trace_outside_graph
from shardwise.world import private
from shardwise.world.world import CollectiveWork, Group


class UnreturnedOutput:
    """Placeholder for an output that a sharded model does not return: an object that is no nest of tensors (a key-value cache)."""

    def __init__(self, path: str, kind: str) -> None:
        self._reason = f"the output {path} is a {kind}, which a divided model does not return; switch it off in the model (use_cache=False)"

    def __repr__(self) -> str:
        return f"NotReturned({self._reason})"

    def __getattr__(self, name: str) -> Any:
        raise ModelError(self.__dict__["_reason"])

    def __getitem__(self, key: object) -> Any:
        raise ModelError(self._reason)

    def __len__(self) -> int:
        raise ModelError(self._reason)


def returnable_output(path: str, leaf: Any) -> Any:
    """Return what stands for an output that is no tensor: itself if it is a plain value."""
    return leaf if is_literal_value(leaf) else UnreturnedOutput(path, type(leaf).__name__)


# What backward, and this package, ask of a loss, none of which reads its value. Attributes by their getters.
_METADATA = (
    "dtype", "device", "shape", "ndim", "requires_grad", "grad_fn", "is_leaf", "is_sparse", "is_sparse_csr", "layout", "is_cuda",
    "is_nested", "output_nr",
)  # fmt: skip
_VALUE_FREE: frozenset[Any] = frozenset(
    [getattr(Tensor, name).__get__ for name in _METADATA]
    + [Tensor.dim, Tensor.numel, Tensor.size, Tensor.is_floating_point, Tensor.is_complex, Tensor.retain_grad, torch.ones_like]
)


class PendingOutput(Tensor):
    """An output that is being summed over ranks; a plain tensor from its first use on."""

    shardwise_work: CollectiveWork

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        backwards: dict[Any, Callable[..., None]] = {  # looked up here, since others patch them
            Tensor.backward: _run_backward,
            torch.autograd.backward: _run_backward_from_nodes,
        }
        if func in backwards:
            return backwards[func](*args, **kwargs)
        if func not in _VALUE_FREE:
            for x in tensors_in((list(args), dict(kwargs))):
                if isinstance(x, PendingOutput):
                    x.receive()
            return func(*args, **kwargs)
        with private.as_base_tensor():
            return func(*args, **kwargs)

    def receive(self) -> None:
        """Wait for the sum, and be a plain tensor."""
        with private.as_base_tensor():
            work = self.__dict__.pop("shardwise_work", None)
            self.__class__ = Tensor  # type: ignore[assignment]
            if work is not None:
                work.wait()


def _run_backward(root: Tensor, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None) -> None:
    is_usual = gradient is None and inputs is None and not (retain_graph or create_graph) and isinstance(root, PendingOutput)
    if is_usual and torch.autograd.backward in private.TRANSPARENT_BACKWARDS:
        with private.as_base_tensor():
            node, number, one = root.grad_fn, root.output_nr, torch.ones_like(root)
        outside = trace_outside_graph((), () if node is None else (node,))
        if outside.calls:
            start = None if private.has_gradient_hooks(root) else node
            run_and_average(outside, start, lambda: private.run_backward_from(node, number, one))
            return
    torch.autograd.backward(root, gradient, retain_graph, create_graph, inputs=inputs)


def _run_backward_from_nodes(tensors: Sequence[Tensor], grad_tensors: Any = None, **options: Any) -> None:
    """Run backward from the nodes of tensors, whose values it does not need."""
    gradients = list(grad_tensors) if isinstance(grad_tensors, Sequence) else [grad_tensors] * len(tensors)
    for i, x in enumerate(tensors):
        with private.as_base_tensor():
            gradients[i] = torch.ones_like(x) if gradients[i] is None and isinstance(x, PendingOutput) else gradients[i]
    edges = [torch.autograd.graph.get_gradient_edge(x) if isinstance(x, PendingOutput) else x for x in tensors]
    torch.autograd.backward(edges, gradients, **options)  # type: ignore[arg-type]


class _SummedOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, sums: list[CollectiveWork]) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        ctx.group, ctx.output = group, None
        # Of another object: a thread may still sum when the output's class has become one that waits for the sum. It need not be read.
        ctx.work = group.all_reduce(total.detach(), wait=False).without_timing()
        sums.append(ctx.work)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        private.after_backward(partial(_end_sum, ctx.work, ctx.output))
        if is_backward_root(ctx):
            return grad * ctx.group.size, None, None
        return redistribute(grad, P, R, ctx.group), None, None


def _end_sum(work: CollectiveWork, output: weakref.ref[Tensor] | None) -> None:
    work.wait()
    if isinstance(x := output() if output is not None else None, PendingOutput):
        x.receive()


def start_sum(x: Tensor, group: Group, sums: list[CollectiveWork]) -> Tensor:
    """Start to sum an output over ranks that may each use it differently; return it. `sums`: started ones, which its caller waits for
    before it starts others, since an output need not be read."""
    total: Tensor = _SummedOutput.apply(x, group, sums)  # type: ignore[no-untyped-call]
    if not sums[-1].is_done:
        total.__dict__["shardwise_work"] = sums[-1]
        total.__class__ = PendingOutput
        with private.as_base_tensor():
            node: Any = total.grad_fn
        if node is not None:
            node.output = weakref.ref(total)
    return total


def find_summed_outputs(
    module: fx.GraphModule, scalars: Collection[int], groups: Collection[Group]
) -> tuple[fx.GraphModule, dict[int, Group]]:
    """Return the graph without the sums, over one of `groups`, that it only returns, and the groups of these sums by position. `scalars`:
    positions of floating-point scalars."""
    graph, sums = fx.Graph(), dict[int, Group]()
    results = graph.graph_copy(module.graph, {})
    assert isinstance(results, tuple)
    returned = list(results)
    for i, node in enumerate(returned):
        bound = getattr(node.target, "bound", {}) if isinstance(node, fx.Node) and node.op == "call_function" else {}
        is_sum = i in scalars and (bound.get("source"), bound.get("target")) == (P, R) and bound.get("group") in groups
        if is_sum and not node.users and returned.count(node) == 1:
            returned[i], sums[i] = node.args[0], bound["group"]
            graph.erase_node(node)
    if not sums:
        return module, sums
    graph.output(tuple(returned))
    return fx.GraphModule(module, graph), sums
