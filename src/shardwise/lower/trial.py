"""Trial of every operator of a sharded graph, lowered for several ranks, on tensors without data, before anything runs.

In: a graph, its sharding, the precision. Out: what fails: operators whose kernel raises on the shards that it would get, forward or
backward, or returns other shapes than the sharding says; and those that need all operands in one dtype under autocast. Equal calls on equal
shards are tried once, so that a network of many layers costs as much as one layer, and a layout of many ranks as a few.

Not tried: elementwise operators, matrix products and norms, whose shards follow from their rules alone; what depends on values (masks,
numbers of selected rows), users' own autograd functions, and operators with no rule of shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx

from shardwise.capture.fakes import DATA_DEPENDENT_ERRORS, FAKE_TENSOR_ERRORS, fake_mode, silence_fake_tensor_log
from shardwise.errors import ShardwiseError
from shardwise.lower.call import OperatorCall
from shardwise.lower.kernels.randomness import DrawState
from shardwise.lower.lowering import Lowering, Nodes, groups_of
from shardwise.lower.operator_lowering import lower_operator
from shardwise.lower.torch_calls import describe_constants, lower_arguments, torch_operator
from shardwise.model.dims.expert_rows import expert_rows
from shardwise.model.dims.fused_dims import find_fused_dims
from shardwise.model.gradients import values_needing_gradient
from shardwise.model.graph import Graph, Operator, writes_buffer
from shardwise.model.sharding.sharding import Sharding
from shardwise.ops import is_elementwise, is_random, record_of
from shardwise.ops.vocabulary import LoweringKind, MatmulKind
from shardwise.plan.ir.mesh import Mesh
from shardwise.plan.ir.placement import Placement, has_single_owner
from shardwise.plan.ir.precision import PRECISIONS, Precision
from shardwise.world.comm.group import Group
from shardwise.world.recorder import CollectiveRecorder

MAX_RANKS = 8  # ranks of a layout that are all tried; of more, the first, the last and those next to the first along each axis
_Attempt = tuple[tuple[torch.dtype, ...], str, bool]  # dtypes of the outputs, error, whether operands had to have one dtype
UNDECIDED = (NotImplementedError, *FAKE_TENSOR_ERRORS, *DATA_DEPENDENT_ERRORS)


@dataclass(frozen=True, slots=True)
class OperatorFailure:
    """An operator that cannot run on a rank's shards. `axes`: those that shard it; none where its dtypes do not go together."""

    op: Operator
    axes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    reason: str


@dataclass(frozen=True)
class TrialResult:
    """The first failure of a trial, if any; and the operators whose operands must be cast to one dtype under autocast."""

    failure: OperatorFailure | None = None
    promoted: frozenset[str] = frozenset()


def _move_nothing(*_: object) -> None:
    """Stand for a collective on tensors without data: it has happened when it is called."""


_TRIAL_TRANSPORT = SimpleNamespace(
    widens=lambda dtype: True, **dict.fromkeys(("all_reduce", "all_gather", "exchange", "send", "receive"), _move_nothing)
)


@cache
def _make_recorder() -> CollectiveRecorder:
    return CollectiveRecorder()


@dataclass(frozen=True)
class _TrialWorld:
    """The groups of one rank that is tried."""

    rank: int

    def group(self, ranks: tuple[int, ...]) -> Group:
        return Group(ranks, self.rank, _make_recorder(), torch.device("cpu"), lambda *_: (_TRIAL_TRANSPORT, "trial"))


def try_operators(graph: Graph, sharding: Sharding, precision: str, local_statistics: tuple[str, ...] = ()) -> TrialResult:
    """Run every operator of the graph once for each different shard, forward and backward, on tensors without data."""
    one = PRECISIONS[precision]
    if not sharding.sizes and not one.product_dtype:
        return TrialResult()
    mesh = Mesh(tuple(sharding.sizes.items()))
    trial = _OperatorTrial(graph, sharding, one)
    failure = None
    with fake_mode(), silence_fake_tensor_log():
        for rank in _ranks_to_try(mesh):
            lowering = Lowering(
                graph=graph,
                sharding=sharding,
                groups=groups_of(graph, sharding, mesh, _TrialWorld(rank)),
                device=torch.device("cpu"),
                draw_state=DrawState(),
                local_statistics=local_statistics,
                precision=one,
            )
            failure = failure or trial.try_rank(lowering)
    return TrialResult(failure, frozenset(trial.promoted))


def _ranks_to_try(mesh: Mesh) -> list[int]:
    """Return the ranks that are tried: all of a few; of many, those at an edge of every axis or next to one."""
    if mesh.num_ranks <= MAX_RANKS:
        return list(range(mesh.num_ranks))
    edges = [{axis: 0 for axis, _ in mesh.axes}, {axis: n - 1 for axis, n in mesh.axes}]
    edges += [{**edges[0], axis: at} for axis, n in mesh.axes for at in {1, n // 2, n - 1} if at < n]
    return sorted({mesh.rank_at(at) for at in edges})


@dataclass
class _OperatorTrial:
    graph: Graph
    sharding: Sharding
    precision: Precision
    promoted: set[str] = field(default_factory=set)
    results: dict[object, _Attempt] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.state = self.graph.state
        self.needs_gradient = values_needing_gradient(self.graph)
        self.ragged = {value for value, _ in expert_rows(self.graph)}

    def try_rank(self, lowering: Lowering) -> OperatorFailure | None:
        """Try all operators of the rank of `lowering`; return the first failure."""
        dtypes = {value: getattr(torch, t.dtype) for value, t in self.graph.tensors.items()}
        narrow = bool(self.precision.product_dtype)
        dtypes.update({v.value: lowering.dtype(v.value) for v in self.graph.parameters if narrow})
        for op in self.graph.operators:
            labels = {axis: label for axis, label in self.sharding.labels[op.name].items() if label}
            if not (labels or narrow) or not _needs_trial(op) or self._is_off_rank(op, lowering):
                if narrow:
                    dtypes.update({v: lowering.dtype(v) for v in op.outputs})
                continue
            call = _ShardedCall.of(lowering, op, tuple(labels), [dtypes[v] for v in op.inputs])
            key = (call.key, tuple(v in self.needs_gradient for v in op.inputs))
            if key not in self.results:
                self.results[key] = self._try(lowering, op, call)
            found, error, promoted = self.results[key]
            dtypes.update(zip(op.outputs, found, strict=False))
            if promoted:
                self.promoted.add(op.name)
            if error:
                return OperatorFailure(op, tuple(labels), call.input_shapes, error)
        return None

    def _is_off_rank(self, op: Operator, lowering: Lowering) -> bool:
        rows = (*self.sharding.input_placements[op.name], *(self.sharding.placements[v] for v in op.outputs))
        at = lowering.coordinates
        return any(form is not None and has_single_owner(form) and form.rank != at[axis] for row in rows for axis, form in row.items())

    def _try(self, lowering: Lowering, op: Operator, call: _ShardedCall) -> _Attempt:
        """Return the dtypes of the outputs, what fails (empty: nothing), and whether all operands had to have one dtype."""
        expected = tuple(lowering.dtype(v) for v in op.outputs)
        error: Exception | None = None
        for promoted in (False, True) if self.precision.product_dtype else (False,):
            one = replace(lowering, sharding=replace(self.sharding, promoted=frozenset({op.name}))) if promoted else lowering
            try:
                return self._run(one, op, call), "", promoted
            except UNDECIDED:
                return expected, "", False
            except ShardwiseError:
                raise
            except Exception as raised:  # torch's own, of any class: a shape, a dtype, an argument
                error = error or raised
        return expected, _first_line(error) if error is not None and self._runs_unsharded(op) else "", False

    def _run(self, lowering: Lowering, op: Operator, call: _ShardedCall) -> tuple[torch.dtype, ...]:
        """Run an operator on a rank's shards, forward and backward; return the dtypes of its outputs. Raises what torch raises."""
        inputs = [
            _make_empty_tensor(shape, dtype, lowering.device, v in self.needs_gradient)
            for v, shape, dtype in zip(op.inputs, call.input_shapes, call.input_dtypes, strict=True)
        ]
        nodes = Nodes()
        placeholders = [nodes.graph.placeholder(f"x{i}") for i in range(len(inputs))]
        node = lower_operator(OperatorCall.from_operator(lowering, nodes, op, placeholders), writes_buffer(op, self.state))
        autocast = getattr(torch, self.precision.product_dtype) if self.precision.product_dtype else None
        with torch.enable_grad(), torch.autocast("cpu", autocast) if autocast else nullcontext():
            outputs = _run_nodes(nodes.graph, inputs, node)
        for value, out, shape in zip(op.outputs, outputs, call.output_shapes, strict=False):
            if tuple(out.shape) != shape and value not in self.ragged:
                raise ValueError(f"it gives {list(out.shape)} where {list(shape)} follows from its shards")
        if not writes_buffer(op, self.state):
            _run_backward(outputs, inputs)
        return tuple(out.dtype for out in outputs)

    def _runs_unsharded(self, op: Operator) -> bool:
        """Return whether the operator runs as it was traced, on tensors without data; otherwise a failure says nothing."""
        tensors = self.graph.tensors
        cpu = torch.device("cpu")
        inputs = [_make_empty_tensor(tensors[v].shape, getattr(torch, tensors[v].dtype), cpu, v in self.needs_gradient) for v in op.inputs]
        args, kwargs = lower_arguments(op, inputs, cpu)
        try:
            with torch.enable_grad():
                out = torch_operator(op.target)(*args, **kwargs)
            if not writes_buffer(op, self.state):
                _run_backward(out if isinstance(out, (list, tuple)) else [out], inputs)
        except Exception:  # it says nothing about shards
            return False
        return not is_random(op)


_BY_SHAPE_ALONE = frozenset(
    {
        LoweringKind.BATCH_NORM, LoweringKind.GROUP_NORM, LoweringKind.INSTANCE_NORM, LoweringKind.CROSS_ENTROPY, LoweringKind.NLL,
        LoweringKind.DROPOUT, LoweringKind.ATTENTION, LoweringKind.EXPERT_DISPATCH, LoweringKind.EXPERT_MATMUL, LoweringKind.EXPERT_COMBINE,
    }
)  # fmt: skip


def _needs_trial(op: Operator) -> bool:
    """Return whether an operator's shards may be of no use to its kernel: it takes sizes, windows, or indices."""
    record = record_of(op)
    is_product = record.product.kind in (MatmulKind.LINEAR, MatmulKind.WEIGHT, MatmulKind.BATCHED) and record.windows is None
    return (
        op.function is None and not is_elementwise(op) and not is_product and not is_random(op) and record.lowering not in _BY_SHAPE_ALONE
    )


@dataclass(frozen=True)
class _ShardedCall:
    """An operator's call on one rank. `key`: equal for calls that need one trial."""

    input_shapes: tuple[tuple[int, ...], ...]
    input_dtypes: tuple[torch.dtype, ...]
    output_shapes: tuple[tuple[int, ...], ...]
    key: object

    @classmethod
    def of(cls, lowering: Lowering, op: Operator, axes: tuple[str, ...], dtypes: Sequence[torch.dtype]) -> _ShardedCall:
        sharding, tensors, at = lowering.sharding, lowering.graph.tensors, lowering.coordinates

        def shape_of(value: str, row: Mapping[str, Placement | None]) -> tuple[int, ...]:
            placed = {axis: form for axis, form in row.items() if form is not None}
            return sharding.local_shape(value, tensors[value].shape, placed, at)

        rows = sharding.input_placements[op.name]
        inputs = tuple(shape_of(v, row) for v, row in zip(op.inputs, rows, strict=True))
        outputs = tuple(shape_of(v, sharding.placements[v]) for v in op.outputs)
        labels = {axis: sharding.labels[op.name][axis] for axis in axes}
        rule = find_fused_dims(lowering.graph).rules.get(op.name) if axes else None
        record = record_of(op)
        special = (
            record.lowering in (LoweringKind.SLICE, LoweringKind.HIDDEN_UNITS)
            or record.windows is not None
            or (rule is not None and any(label in rule.kernels for label in labels.values()))
        )
        whole = tuple(tensors[v].shape for v in (*op.inputs, *op.outputs))
        signature = (
            op.target,
            describe_constants(op.args),
            describe_constants(tuple(value for _, value in op.kwargs)),
            op.autocast,
            whole,
            repr(rows),
            tuple(labels.items()),
        )
        return cls(inputs, tuple(dtypes), outputs, (signature, inputs, tuple(dtypes), tuple(at[a] for a in axes) if special else ()))


def _run_nodes(graph: fx.Graph, inputs: Sequence[Tensor], result: fx.Node) -> list[Tensor]:
    values: dict[fx.Node, Any] = {}
    remaining = iter(inputs)
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = next(remaining)
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
    out = values[result]
    return list(out) if isinstance(out, (list, tuple)) else [out]


def _run_backward(outputs: Sequence[Any], inputs: Sequence[Tensor]) -> None:
    roots = [out for out in outputs if isinstance(out, Tensor) and out.requires_grad]
    leaves = [x for x in inputs if x.requires_grad]
    if roots and leaves:
        torch.autograd.grad(roots, leaves, [torch.ones_like(x) for x in roots], allow_unused=True)


def _make_empty_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device, requires_grad: bool) -> Tensor:
    return torch.empty(
        tuple(shape), dtype=dtype, device=device, requires_grad=requires_grad and (dtype.is_floating_point or dtype.is_complex)
    )


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split("\n")[0].split())[:300] or type(error).__name__
