"""What kernels keep for backward, and take in it, besides what the graph says. In: a graph, an operator. Out: bytes.

Of accelerators nothing is counted besides. Of torch's kernels for processors it was found by watching them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from weft.cost.devices.convolutions import (
    FULL,
    NEVER,
    Filling,
    TorchKernel,
    columns_bytes,
    filling,
    relaid_bytes,
    torch_kernel,
    workspace_bytes,
)
from weft.cost.devices.recurrent import lstm_bytes
from weft.model.graph import DTYPE_BYTES, Graph, Operator, Tensor
from weft.model.sharding.sharding import Sharding
from weft.model.storage.strides import Layouts, viewed
from weft.model.work import Work
from weft.ops import record_of
from weft.ops.attention import drops_scores, mask_of
from weft.ops.recurrent import RECURRENT_KEEPS, num_layers

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Beside:
    """Bytes that one operator's backward takes besides, also where torch makes a convolution itself (`by_torch`), where it is not cut over
    ranks (`alone`) and where it is (`spread`); and gradients of its weights, before they are added up."""

    working: float = 0.0
    by_torch: float = 0.0
    alone: float = 0.0
    spread: float = 0.0
    weights: float = 0.0


class KernelMemory:
    """Of a graph's operators; `grads`: values that have a gradient, `held`: that are no activations.

    `copied`: operators whose results are no views, as the graph has them. `keeps_as_read`: what moves before it is read is kept as read.
    `is_half`: what the graph has in float32 is of 16 bits, as frameworks for accelerators train.
    """

    copied: frozenset[str] = frozenset()
    keeps_as_read = False
    is_half = True

    def __init__(self, graph: Graph, grads: frozenset[str], held: frozenset[str]) -> None:
        self.graph, self.grads, self.held = graph, grads, held

    def work(self, op: Operator, tensors: Tensors, done: Work) -> Work:
        """The operator's work with what it keeps besides."""
        return done

    def rows(self, op: Operator) -> frozenset[str]:
        """Values that it copies into rows, and keeps so."""
        return frozenset()

    def mask(self, op: Operator, tensors: Tensors) -> str:
        """The mask that it keeps as what is added to scores."""
        return ""

    def beside(self, op: Operator, tensors: Tensors, read: Tensors, done: Work) -> Beside:
        """What its backward takes. `read`: operands in another dtype than they have."""
        return Beside()

    def convolution(self, op: Operator, tensors: Tensors, sharding: Sharding | None) -> tuple[Filling, TorchKernel]:
        """How a convolution fills a rank's vectors, and when torch makes it itself."""
        return FULL, NEVER


class ProcessorMemory(KernelMemory):
    """Of torch's kernels for processors."""

    keeps_as_read = True
    is_half = False

    def __init__(self, graph: Graph, grads: frozenset[str], held: frozenset[str]) -> None:
        super().__init__(graph, grads, held)
        self._layouts = Layouts(graph)
        self.copied = self._layouts.copied

    def work(self, op: Operator, tensors: Tensors, done: Work) -> Work:
        if not self.grads.intersection(op.outputs):
            return replace(done, keeps=(), extra_bytes=0.0) if op.name in self._layouts.composed else done
        if op.name in self._layouts.composed:
            keeps, more = self._composed(op, tensors)
            return replace(done, keeps=keeps, extra_bytes=more)
        record, out, more = record_of(op), tensors[op.outputs[0]], 0.0
        if record.keeps_normalised:  # RMS norm
            more = out.size_bytes
        elif record.recurrence is not None and not record.recurrence.is_cell:  # but for an LSTM, 7 outputs in all
            counted = RECURRENT_KEEPS * out.size_bytes * num_layers(op, tensors)
            more = (lstm_bytes(op, tensors) if record.recurrence.states == 2 else 7.0 / RECURRENT_KEEPS * counted) - counted
        return replace(done, extra_bytes=done.extra_bytes + more) if more else done

    def _composed(self, op: Operator, tensors: Tensors) -> tuple[tuple[str, ...], float]:
        """The values that attention keeps where it is composed of products and a softmax (`_scaled_dot_product_attention_math`), and bytes
        of what is no value of the graph.

        Those are copies of queries and keys, each times the root of the scale; of values where their heads do not lie one behind another;
        the weights, which with dropout are dropped again in backward. Of what is narrower than float32 there are wide copies instead.
        """
        query, key, value = (tensors[v] for v in op.inputs[:3])
        wide = 4.0 / DTYPE_BYTES[query.dtype] if query.dtype == "bfloat16" else 1.0
        scores = wide * query.size_bytes / query.shape[-1] * key.shape[-2]
        more = scores + wide * (query.size_bytes + key.size_bytes)
        shape = value.shape
        if wide > 1 or (not drops_scores(op) and viewed(shape, self._layouts.of(op.inputs[2]), (prod(shape[:-2]), *shape[-2:])) is None):
            return (), more + wide * value.size_bytes
        return (op.inputs[2],), more

    def rows(self, op: Operator) -> frozenset[str]:
        return self._layouts.copies(op)

    def mask(self, op: Operator, tensors: Tensors) -> str:
        mask = mask_of(op) if op.name not in self._layouts.composed else None
        return mask if mask is not None and tensors[mask].dtype == "bool" else ""

    def beside(self, op: Operator, tensors: Tensors, read: Tensors, done: Work) -> Beside:
        learned = [v for v in op.inputs if v in self.held and v in self.grads]
        weights = float(sum(tensors[v].size_bytes for v in learned))
        relaid = columns = alone = spread = 0.0
        turned = self._turned(op, tensors)
        if done.kind == "convolution":
            last = self._layouts.has_channels_last(op.inputs[0])
            relaid, columns = relaid_bytes(op, tensors, self.grads, last), columns_bytes(op, tensors)
            weights *= 2  # made in a layout of their own first
        weights = max(weights, sum(tensors[v].size_bytes + self.graph.tensors[v].size_bytes for v in read if v in learned))
        if done.kind == "convolution" and last:
            weights += workspace_bytes(op, tensors)
        if record_of(op).over_samples and op.inputs[0] in self.grads:
            # It makes as much again as its input's gradient; `weft.lower.kernels.statistics`, of many ranks, does not, but
            # computes in float32.
            alone = float(tensors[op.inputs[0]].size_bytes)
            spread = 4 * alone if tensors[op.inputs[0]].dtype == "bfloat16" else 0.0
        return Beside(turned + relaid, turned + columns, alone, spread, weights)

    def _turned(self, op: Operator, tensors: Tensors) -> float:
        """Where the gradient comes in another order than what was kept lies in: kernels that go over memory as it lies have it copied;
        oneDNN's of GELU has what it makes copied, too."""
        return record_of(op).turned * tensors[op.outputs[0]].size_bytes if self._layouts.turned(op) else 0.0

    def convolution(self, op: Operator, tensors: Tensors, sharding: Sharding | None) -> tuple[Filling, TorchKernel]:
        return filling(op, tensors, sharding, self.grads), torch_kernel(op, tensors, sharding)
