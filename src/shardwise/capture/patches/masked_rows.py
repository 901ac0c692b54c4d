"""Rows that a mask selects: `cross_entropy(logits[mask], labels[mask])`.

Torch: the number of rows depends on the mask, a data-dependent shape.
Wanted: masked losses, sums and means over all rows, so that every shape is fixed. Operators between must be row-wise, and have finite
    values and derivatives for finite inputs, since unselected rows go through them too: no logarithms, quotients or roots. Anything else
    is refused as data-dependent; so are rows that are written back (`out[mask] = f(x[mask])`), whose computation for all rows may cost many
    times as much (experts).
Test: tests/ranks/run/test_picked.py
Until: not known
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from shardwise.capture.fakes import written_arguments
from shardwise.capture.patches.assertions import without_assertions
from shardwise.capture.patches.patch import Patch

aten: Any = torch.ops.aten

_ROW_WISE = frozenset(
    """
    add.Tensor sub.Tensor mul.Tensor add.Scalar sub.Scalar mul.Scalar rsub.Scalar neg.default abs.default square.default relu.default
    gelu.default silu.default tanh.default sigmoid.default softplus.default leaky_relu.default clamp.default clamp_min.default
    clamp_max.default hardtanh.default clone.default detach.default detach_.default alias.default contiguous.default zeros_like.default
    ones_like.default full_like.default to.dtype _to_copy.default where.self where.ScalarOther where.ScalarSelf masked_fill.Scalar eq.Tensor
    eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar le.Tensor le.Scalar gt.Tensor gt.Scalar ge.Tensor ge.Scalar logical_not.default
    logical_and.default logical_or.default bitwise_not.default bitwise_and.Tensor bitwise_or.Tensor
    """.split()
)
_DIVISIONS = ("div.Tensor", "div.Scalar")
# The position of their dimension argument, which must not be the row dimension.
_DIM_ARGUMENTS = {
    "softmax.int": 1,
    "log_softmax.int": 1,
    "unsqueeze.default": 1,
    "squeeze.dim": 1,
    "select.int": 1,
    "slice.Tensor": 1,
    "gather.default": 1,
    "argmax.default": 1,
}
_OVER_DIMS = ("mean.dim", "sum.dim_IntList")
_LOSSES = (
    "mse_loss.default",
    "l1_loss.default",
    "smooth_l1_loss.default",
    "huber_loss.default",
    "binary_cross_entropy_with_logits.default",
)
_CLASS_LOSSES = ("cross_entropy_loss.default", "nll_loss_nd.default", "nll_loss.default")
_MEAN, _SUM = 1, 2  # torch's numbers of reductions


@dataclass(frozen=True, slots=True)
class _MaskedRows:
    """The source of a node: all rows [N, ...], and the mask [N] of the selected ones."""

    full: Node
    mask: Node


def _rewrite_masked_rows(module: GraphModule) -> None:
    """Rewrite masked rows of a module and its blocks in place, as far as possible."""
    if any(_row_shape(node) is not None and not _has_fixed_shape(_value_of(node)) for node in module.graph.nodes):
        try:
            rewriting = _MaskedRowRewriter(module.graph)
        except NotImplementedError:  # tensors without accessible storage (vmap)
            return
        rewriting.run()
    for child in module.children():
        if isinstance(child, GraphModule):  # a block without gradients
            _rewrite_masked_rows(child)


class _MaskedRowRewriter:
    """Rewrites one graph; tracks by node: masked rows, positions (row indices), and numbers of rows."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._rows: dict[Node, _MaskedRows] = {}
        self._tuples: dict[Node, list[_MaskedRows] | Node] = {}  # rows of each member, or the mask whose positions the first member has
        self._positions: dict[Node, Node] = {}
        self._counts: dict[Node, Node] = {}
        self._replaced: set[Node] = set()
        for node in graph.nodes:
            _storages_of(node)
        self._written = _written_storages(graph)
        self._current_node: Node | None = None

    def run(self) -> None:
        """Propagate masked rows from their selection to their reductions."""
        for node in list(self._graph.nodes):
            if node.op != "call_function":
                continue
            self._current_node = node
            name = str(node.target).removeprefix("aten.")
            if self._is_written(node) or self._record_pick(node, name):
                continue
            rows = [self._rows[x] for x in node.all_input_nodes if x in self._rows]
            if not rows:
                self._rewrite_division(node, name)
            elif all(self._equivalent(r.mask, rows[0].mask) for r in rows):
                self._follow_rows(node, name, rows[0].mask)
        for node in reversed(list(self._graph.nodes)):
            if not node.users and (node in self._replaced or node in self._rows or node in self._tuples or node in self._positions):
                self._graph.erase_node(node)

    def _is_written(self, node: Node) -> bool:
        """Return whether the memory of a node is written anywhere: then its value depends on when it is read."""
        return not _storages_of(node).isdisjoint(self._written)

    def _equivalent(self, a: Any, b: Any) -> bool:
        """Return whether two nodes are equal computations of equal values."""
        if a is b or not isinstance(a, Node) or not isinstance(b, Node):
            return a is b or (not isinstance(a, Node) and not isinstance(b, Node) and type(a) is type(b) and a == b)
        if self._is_written(a) or self._is_written(b) or not a.op == b.op == "call_function" or a.target is not b.target:
            return False
        pure = str(a.target).removeprefix("aten.") in _PURE_OPERATORS and len(a.args) == len(b.args) and a.kwargs == b.kwargs
        return pure and all(self._equivalent(x, y) for x, y in zip(a.args, b.args, strict=True))

    def _insert_call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Insert a call before the current node."""
        assert self._current_node is not None
        with self._graph.inserting_before(self._current_node):
            node: Node = self._graph.call_function(target, args, kwargs)
        values = torch.fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        mode = next(n.meta["val"].fake_mode for n in node.all_input_nodes)
        with mode:
            value = target(*values[0], **values[1])
        node.meta = {**self._current_node.meta, "val": value}
        return node

    def _record_pick(self, node: Node, name: str) -> bool:
        """Record a node that selects rows or computes their positions; return whether it is one."""
        if name in ("nonzero.default", "nonzero_numpy.default", "where.default"):
            mask = node.args[0]
            if isinstance(mask, Node) and _is_mask(mask) and _value_of(mask).dim() == 1:
                if name == "nonzero.default":
                    self._positions[node] = mask
                else:
                    self._tuples[node] = mask
            return True
        source = node.args[0] if node.args else None
        if node.target is operator.getitem:
            members = self._tuples.get(source) if isinstance(source, Node) else None
            if isinstance(members, list):
                self._rows[node] = members[node.args[1]]  # type: ignore[index]
            elif members is not None:
                self._positions[node] = members
            return members is not None
        if isinstance(source, Node) and source in self._positions:
            if name in ("squeeze.dim", "squeeze.default", "select.int", "view.default", "reshape.default", "flatten.using_ints"):
                self._positions[node] = self._positions[source]
            return True
        if name in ("index.Tensor", "masked_select.default", "index_select.default"):
            return self._pick_rows(node, name)
        return False

    def _pick_rows(self, node: Node, name: str) -> bool:
        source = node.args[0]
        at = node.args[1] if name != "index_select.default" else node.args[2]
        if name == "index.Tensor":
            indices = list(at)  # type: ignore[arg-type]
            if any(x is not None for x in indices[1:]):
                return False
            at = indices[0]
        if not isinstance(at, Node) or not isinstance(source, Node) or source in self._rows:
            return False
        if self._is_written(source) or self._is_written(at):
            return False
        if at in self._positions:
            mask = self._positions[at]
            if (name == "index_select.default" and node.args[1] != 0) or _value_of(mask).shape[0] != _value_of(source).shape[0]:
                return False
            self._rows[node] = _MaskedRows(source, mask)
            return True
        if not _is_mask(at) or name == "index_select.default":
            return False
        dims, source_value = _value_of(at).dim(), _value_of(source)
        if _value_of(at).shape != source_value.shape[:dims] or (name == "masked_select.default" and dims != source_value.dim()):
            return False
        if dims == 1:
            self._rows[node] = _MaskedRows(source, at)
            return True
        count = _value_of(at).numel()
        full = self._insert_call(aten.reshape.default, source, [count, *source_value.shape[dims:]])
        masks = (rows.mask for rows in self._rows.values())
        equal = next(
            (mask for mask in masks if _unflattened_mask(mask) is not None and self._equivalent(_unflattened_mask(mask), at)), None
        )
        self._rows[node] = _MaskedRows(full, equal or self._insert_call(aten.reshape.default, at, [count]))
        return True

    def _follow_rows(self, node: Node, name: str, mask: Node) -> None:
        """Propagate masked rows through a node, or rewrite it."""
        if name == "sym_size.int" and node.args[1] == 0:
            self._counts[node] = mask
            return
        if name in ("mean.default", "sum.default") or (name in _OVER_DIMS and not self._is_within_rows(node)):
            self._rewrite_reduction(node, name, mask)
            return
        if name in _CLASS_LOSSES:
            self._rewrite_class_loss(node, mask)
            return
        if name in _LOSSES:
            self._rewrite_loss(node, mask)
            return
        if name == "broadcast_tensors.default":
            members = node.args[0]
            if all(m in self._rows for m in members) and len({_value_of(self._rows[m].full).shape for m in members}) == 1:  # type: ignore[union-attr, index]
                self._tuples[node] = [self._rows[m] for m in members]  # type: ignore[union-attr, index]
            return
        if name in ("view.default", "reshape.default"):
            rest = _row_shape(node)
            source = self._rows[node.args[0]]  # type: ignore[index]
            if rest is not None and _value_of(node).shape[0] == _value_of(node.args[0]).shape[0]:
                self._rows[node] = _MaskedRows(
                    self._insert_call(aten.reshape.default, source.full, [_value_of(source.full).shape[0], *rest]), mask
                )
            return
        if self._is_row_wise(node, name) and _row_shape(node) is not None and self._other_inputs_broadcast(node):
            args, kwargs = self._arguments_of_all_rows(node)
            if name == "gather.default" and node.args[2] in self._rows:  # unselected rows may have invalid indices
                args = (*args[:2], self._fill_unselected(args[2], mask, 0))
            self._rows[node] = _MaskedRows(self._insert_call(node.target, *args, **kwargs), mask)

    def _is_row_wise(self, node: Node, name: str) -> bool:
        """Return whether an operator is row-wise, with finite values and derivatives."""
        if name in ("linear.default", "layer_norm.default"):
            ok = [x for x in node.all_input_nodes if x in self._rows] == [node.args[0]] and _value_of(node).dim() > 1
            ok = ok and (name == "linear.default" or len(node.args[1]) < _value_of(node).dim())  # type: ignore[arg-type]
        elif name in _DIM_ARGUMENTS:
            dims = _value_of(node.args[0]).dim() + (name == "unsqueeze.default")
            dim = node.args[_DIM_ARGUMENTS[name]] if len(node.args) > 1 else 0
            ok = isinstance(dim, int) and dim % dims != 0
        elif name in _DIVISIONS:
            ok = isinstance(node.args[1], int | float) and node.args[1] != 0
        elif name in _OVER_DIMS:
            ok = True
        elif name == "pow.Tensor_Scalar":
            ok = isinstance(node.args[1], int) and node.args[1] > 0
        else:
            ok = name in _ROW_WISE
        return ok and all(math.isfinite(x) for x in (*node.args, *node.kwargs.values()) if isinstance(x, float))

    def _is_within_rows(self, node: Node) -> bool:
        """Return whether a reduction is within rows."""
        dims = _value_of(self._rows[node.args[0]].full).dim()  # type: ignore[index]
        return bool(node.args[1]) and all(dim % dims for dim in node.args[1])  # type: ignore[union-attr]

    def _arguments_of_all_rows(self, node: Node) -> tuple[Any, Mapping[str, Any]]:
        """Return the arguments of a node with all rows in place of masked ones."""
        arguments = torch.fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: self._rows[n].full if n in self._rows else n)
        return arguments[0], arguments[1]

    def _other_inputs_broadcast(self, node: Node) -> bool:
        """Return whether all other inputs broadcast over rows."""
        if "linear" in str(node.target) or "layer_norm" in str(node.target):
            return True
        dims = _value_of(node).dim()
        values = [_value_of(x) for x in node.all_input_nodes if x not in self._rows]
        return all(isinstance(x, torch.Tensor) and _has_fixed_shape(x) and (x.dim() < dims or x.shape[0] == 1) for x in values)

    def _fill_unselected(self, full: Node, mask: Node, value: float) -> Node:
        """Fill the unselected rows with a value."""
        shape = [_value_of(full).shape[0], *([1] * (_value_of(full).dim() - 1))]
        unset = self._insert_call(aten.logical_not.default, mask)
        return self._insert_call(
            aten.masked_fill.Scalar, full, self._insert_call(aten.view.default, unset, shape) if len(shape) > 1 else unset, value
        )

    def _replace_node(self, node: Node, new: Node) -> None:
        node.replace_all_uses_with(new)
        self._replaced.add(node)

    def _reduce_selected(self, full: Node, mask: Node, mean: bool, first: bool = False) -> Node:
        """Return the sum or mean over the selected rows. `first`: over rows alone, not within them."""
        filled = self._fill_unselected(full, mask, 0)
        total = self._insert_call(aten.sum.dim_IntList, filled, [0]) if first else self._insert_call(aten.sum.default, filled)
        if not mean:
            return total
        row_size = 1 if first else _value_of(full)[0].numel()
        count = self._insert_call(aten.sum.default, mask)
        return self._insert_call(aten.div.Tensor, total, self._insert_call(aten.mul.Tensor, count, row_size) if row_size > 1 else count)

    def _rewrite_reduction(self, node: Node, name: str, mask: Node) -> None:
        first = "dim" in name
        if (first and (list(node.args[1]) != [0] or len(node.args) > 2)) or node.kwargs.get("dtype") is not None:  # type: ignore[arg-type]
            return
        self._replace_node(node, self._reduce_selected(self._rows[node.args[0]].full, mask, "mean" in name, first))  # type: ignore[index]

    def _rewrite_class_loss(self, node: Node, mask: Node) -> None:
        arguments = _arguments_by_name(node)
        scores, classes = arguments["self"], arguments["target"]
        if scores not in self._rows or classes not in self._rows or _value_of(classes).is_floating_point():
            return
        filled = self._fill_unselected(self._rows[classes].full, mask, arguments["ignore_index"])
        loss = self._insert_call(node.target, self._rows[scores].full, filled, *list(arguments.values())[2:])
        if arguments["reduction"]:
            self._replace_node(node, loss)
        else:
            self._rows[node] = _MaskedRows(loss, mask)

    def _rewrite_loss(self, node: Node, mask: Node) -> None:
        arguments = _arguments_by_name(node)
        reduction = arguments["reduction"]
        arguments = {key: self._rows[x].full if isinstance(x, Node) and x in self._rows else x for key, x in arguments.items()} | {
            "reduction": 0
        }
        if _value_of(arguments["self"]).shape != _value_of(arguments["target"]).shape:
            return
        loss = self._insert_call(node.target, *arguments.values())
        if reduction:
            self._replace_node(node, self._reduce_selected(loss, mask, reduction == _MEAN))
        else:
            self._rows[node] = _MaskedRows(loss, mask)

    def _rewrite_division(self, node: Node, name: str) -> None:
        """Rewrite a division by the number of rows."""
        by = node.args[1] if name in ("div.Tensor", "div.Scalar") else None
        if isinstance(by, Node) and by in self._counts:
            self._replace_node(
                node, self._insert_call(aten.div.Tensor, node.args[0], self._insert_call(aten.sum.default, self._counts[by]))
            )


def _arguments_by_name(node: Node) -> dict[str, Any]:
    """Return the arguments of a node by name, in order, defaults included."""
    arguments = dict(node.kwargs)
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    return {a.name: node.args[i] if i < len(node.args) else arguments.get(a.name, a.default_value) for i, a in enumerate(schema)}


def _value_of(node: Any) -> Any:
    return node.meta.get("val")


def _is_mask(node: Node) -> bool:
    value = _value_of(node)
    return isinstance(value, torch.Tensor) and value.dtype is torch.bool and value.dim() > 0 and _has_fixed_shape(value)


def _has_fixed_shape(x: torch.Tensor) -> bool:
    return all(isinstance(n, int) for n in x.shape)


def _row_shape(node: Node) -> list[int] | None:
    """Return the shape of a row; None if it is not fixed."""
    value = _value_of(node)
    if not isinstance(value, torch.Tensor) or not value.dim() or not all(isinstance(n, int) for n in value.shape[1:]):
        return None
    return list(value.shape[1:])


def _unflattened_mask(mask: Node) -> Node | None:
    """Return the mask of several dimensions that a mask was reshaped from; None without one."""
    source = mask.args[0] if str(mask.target) == "aten.reshape.default" else None
    return source if isinstance(source, Node) else None


def _storages_of(node: Node) -> set[int]:
    """Return the storages of the results of a node."""
    value = _value_of(node)
    return {id(x.untyped_storage()) for x in (value if isinstance(value, tuple | list) else (value,)) if isinstance(x, torch.Tensor)}


def _written_storages(graph: Graph) -> set[int]:
    """Return the storages written anywhere in a graph; blocks that write count as writing all their inputs."""
    written: set[int] = set()
    for node in graph.nodes:
        blocks = [x for x in node.all_input_nodes if x.op == "get_attr" and isinstance(_submodule_of(graph, x), GraphModule)]
        if blocks and any(written_arguments(n.target) for x in blocks for n in _submodule_of(graph, x).graph.nodes):
            written.update(*(_storages_of(x) for x in node.all_input_nodes))
        elif written_arguments(node.target):
            targets = [node.args[i] for i, _ in written_arguments(node.target) if i < len(node.args)]
            written.update(*(_storages_of(x) for x in targets if isinstance(x, Node)))
    return written


def _submodule_of(graph: Graph, node: Node) -> Any:
    return getattr(graph.owning_module, str(node.target), None)


_PURE_OPERATORS = _ROW_WISE | {"view.default", "reshape.default"}


def _rewrite_program(module: GraphModule) -> None:
    _rewrite_masked_rows(module)
    without_assertions(module)  # of masked rows, unused now


PATCH = Patch(rewrite_program=_rewrite_program)
