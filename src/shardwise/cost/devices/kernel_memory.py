"""Memory that kernels save for backward and use during it beyond the graph's own tensors. In: a graph, an operator. Out: bytes.

On accelerators there is none. For torch's CPU kernels it was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf, prod

from shardwise.cost.devices.convolutions import (
    NEVER,
    NO_PADDING,
    ChannelPadding,
    TorchKernel,
    channel_padding,
    columns_bytes,
    layout_copy_bytes,
    torch_kernel,
    workspace_bytes,
)
from shardwise.cost.devices.recurrent import is_lstm, lstm_backward_bytes, lstm_bytes
from shardwise.model.graph import DTYPE_BYTES, Graph, Operator, Tensor
from shardwise.model.sharding.sharding import Sharding
from shardwise.model.strides.strides import GraphStrides, view_strides
from shardwise.model.work import OperatorWork, kind_of
from shardwise.ops import record_of
from shardwise.ops.attention import attention_mask_of, has_score_dropout
from shardwise.ops.recurrent import RECURRENT_SAVED_FACTOR, RECURRENT_WORKSPACE, num_layers
from shardwise.ops.vocabulary import CostKind

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class BackwardWorkspace:
    """Workspace bytes of one operator's backward; with torch's own convolution kernel (`torch_bytes`); added if it is not sharded
    (`unsharded_bytes`) or is (`sharded_bytes`); and gradients of its weights before accumulation."""

    working_bytes: float = 0.0
    torch_bytes: float = 0.0
    unsharded_bytes: float = 0.0
    sharded_bytes: float = 0.0
    weight_bytes: float = 0.0


class KernelMemory:
    """Kernel memory of a graph's operators; `grads`: values that have a gradient, `persistent_values`: values that are no activations.

    `materialized`: values that are copies although the graph has them as views. `saves_as_read`: a redistributed operand is saved as read.
    `is_half`: the graph's float32 tensors are 16-bit, as in frameworks for accelerators.
    """

    materialized: frozenset[str] = frozenset()
    saves_as_read = False
    is_half = True

    def __init__(self, graph: Graph, grads: frozenset[str], held: frozenset[str]) -> None:
        self.graph, self.grads, self.persistent_values = graph, grads, held

    def work(self, op: Operator, tensors: Tensors, done: OperatorWork) -> OperatorWork:
        """Return the operator's work with the additional saved tensors."""
        return done

    def row_copies(self, op: Operator) -> frozenset[str]:
        """Return values that the operator copies into contiguous rows and saves as such."""
        return frozenset()

    def saved_mask(self, op: Operator, tensors: Tensors) -> str:
        """Return the boolean mask that the operator saves as an additive one; "" if none."""
        return ""

    def workspace(self, op: Operator, tensors: Tensors, read: Tensors, done: OperatorWork) -> BackwardWorkspace:
        """Return the workspace of its backward. `read`: operands that are cast to another dtype."""
        return BackwardWorkspace()

    def sharded_copy_bytes(self, op: Operator, tensors: Tensors, sharding: Sharding, num_shards: float) -> float:
        """Return by how much a rank's workspace exceeds its share of `workspace`, where an operator's work has so many shards."""
        return 0.0

    def convolution_kernel(self, op: Operator, tensors: Tensors, sharding: Sharding | None) -> tuple[ChannelPadding, TorchKernel]:
        """Return the channel padding of a convolution, and when torch's own kernel computes it."""
        return NO_PADDING, NEVER


class ProcessorMemory(KernelMemory):
    """Memory of torch's CPU kernels."""

    saves_as_read = True
    is_half = False

    def __init__(self, graph: Graph, grads: frozenset[str], held: frozenset[str]) -> None:
        super().__init__(graph, grads, held)
        self._layouts = GraphStrides(graph)
        # Weights that are held in 16 bits; their gradients are summed in 32.
        self._narrowed = frozenset(v.value for v in graph.parameters if v.tensor.dtype != graph.tensors[v.value].dtype)
        self.materialized = self._layouts.copied_values

    def work(self, op: Operator, tensors: Tensors, done: OperatorWork) -> OperatorWork:
        if not self.grads.intersection(op.outputs):
            return replace(done, saved=(), extra_bytes=0.0) if op.name in self._layouts.composed_attention else done
        if op.name in self._layouts.composed_attention:
            keeps, added = self._saved_by_math_attention(op, tensors)
            return replace(done, saved=keeps, extra_bytes=added)
        record, out, added = record_of(op), tensors[op.outputs[0]], 0.0
        if record.backward.saves_normalized:  # RMS norm
            added = out.size_bytes
        elif record.recurrence is not None and not record.recurrence.is_cell:  # 7 outputs in all, except for an LSTM
            counted_bytes = RECURRENT_SAVED_FACTOR * out.size_bytes * num_layers(op, tensors)
            added = (lstm_bytes(op, tensors) if is_lstm(op) else 7.0 / RECURRENT_SAVED_FACTOR * counted_bytes) - counted_bytes
        return replace(done, extra_bytes=done.extra_bytes + added) if added else done

    def _saved_by_math_attention(self, op: Operator, tensors: Tensors) -> tuple[tuple[str, ...], float]:
        """Return (values that math attention saves, bytes of saved tensors that are no value of the graph), for attention composed of
        products and a softmax (`_scaled_dot_product_attention_math`).

        Those bytes are copies of queries and keys, each times the root of the scale; of values whose heads are not contiguous;
        and attention weights, whose dropout is recomputed in backward. Tensors narrower than float32 are saved as wide copies instead.
        """
        query, key, value = (tensors[v] for v in op.inputs[:3])
        wide = 4.0 / DTYPE_BYTES[query.dtype] if query.dtype == "bfloat16" else 1.0
        scores = wide * query.size_bytes / query.shape[-1] * key.shape[-2]
        more = scores + wide * (query.size_bytes + key.size_bytes)
        shape = value.shape
        if wide > 1 or (
            not has_score_dropout(op)
            and view_strides(shape, self._layouts.strides_of(op.inputs[2]), (prod(shape[:-2]), *shape[-2:])) is None
        ):
            return (), more + wide * value.size_bytes
        return (op.inputs[2],), more

    def row_copies(self, op: Operator) -> frozenset[str]:
        return self._layouts.row_copies(op)

    def saved_mask(self, op: Operator, tensors: Tensors) -> str:
        mask = attention_mask_of(op) if op.name not in self._layouts.composed_attention else None
        return mask if mask is not None and tensors[mask].dtype == "bool" else ""

    def workspace(self, op: Operator, tensors: Tensors, read: Tensors, done: OperatorWork) -> BackwardWorkspace:
        trainable = [v for v in op.inputs if v in self.persistent_values and v in self.grads]
        weights = float(sum(tensors[v].size_bytes for v in trainable))
        layout_bytes = column_bytes = unsharded = sharded = 0.0
        transposed = self._transpose_copy_bytes(op, tensors)
        if done.kind == "convolution":
            channels_last = self._layouts.has_channels_last(op.inputs[0])
            layout_bytes, column_bytes = layout_copy_bytes(op, tensors, self.grads, channels_last), columns_bytes(op, tensors)
            weights *= 2  # computed in a blocked layout first
        weights = max(weights, sum(tensors[v].size_bytes + self.graph.tensors[v].size_bytes for v in read if v in trainable))
        weights = max(weights, sum(tensors[v].size_bytes + 4.0 * tensors[v].size for v in self._narrowed.intersection(trainable)))
        if done.kind == "convolution" and channels_last:
            weights += workspace_bytes(op, tensors)
        if is_lstm(op):  # of one layer at a time; the rest of the formula has gates and states of all
            columns, weights = lstm_backward_bytes(op, tensors)
            transposed += columns - RECURRENT_WORKSPACE * tensors[op.outputs[0]].size_bytes
        if record_of(op).statistics.over_samples and op.inputs[0] in self.grads:
            # It allocates its input's gradient twice; `shardwise.lower.kernels.statistics`, over many ranks, does not, but computes in
            # float32.
            unsharded = float(tensors[op.inputs[0]].size_bytes)
            sharded = 4 * unsharded if tensors[op.inputs[0]].dtype == "bfloat16" else 0.0
        return BackwardWorkspace(transposed + layout_bytes, transposed + column_bytes, unsharded, sharded, weights)

    def sharded_copy_bytes(self, op: Operator, tensors: Tensors, sharding: Sharding, num_shards: float) -> float:
        """Of copies in oneDNN's layout: each operand is sharded as it is read, and channels are padded on every rank."""
        if num_shards in (1, inf) or kind_of(op) != CostKind.CONVOLUTION or not self.grads.intersection(op.outputs):
            return 0.0
        channels_last = self._layouts.has_channels_last(op.inputs[0])
        local, whole = (layout_copy_bytes(op, tensors, self.grads, channels_last, cut) for cut in (sharding, None))
        return local - whole / num_shards

    def _transpose_copy_bytes(self, op: Operator, tensors: Tensors) -> float:
        """Return the bytes copied because the gradient's strides differ from the saved tensor's; oneDNN's GELU copies its result, too."""
        return record_of(op).backward.transpose_copies * tensors[op.outputs[0]].size_bytes if self._layouts.transposes_saved(op) else 0.0

    def convolution_kernel(self, op: Operator, tensors: Tensors, sharding: Sharding | None) -> tuple[ChannelPadding, TorchKernel]:
        return channel_padding(op, tensors, sharding, self.grads), torch_kernel(op, tensors, sharding)
