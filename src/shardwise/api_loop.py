"""`shardwise.auto_parallelize` and `shardwise.shard`: parallelize a model in a plain training loop, which keeps its backward and
optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, overload

from torch import Tensor, nn
from torch.utils.data import DataLoader

from shardwise.capture.capture import forward_arguments
from shardwise.capture.initialization import DeferredInit, deferred_model
from shardwise.capture.nesting import batch_size_of
from shardwise.capture.unsupported_models import refuse_scripts
from shardwise.cluster.cluster import Cluster
from shardwise.errors import Infeasible, ModelError, UsageError
from shardwise.model.graph import Graph
from shardwise.plan.ir.axis import sample_axes
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.plan.plan_file import format_plan, parse_plan
from shardwise.run.loop.cumulative_statistics import trace_without_counters
from shardwise.run.loop.earlier_parameters import EarlierParameters
from shardwise.run.loop.shard_module import shard_module
from shardwise.run.rank_agreement import check_model_agrees, synchronize_generators
from shardwise.run.rank_model.model_source import CachedModelSource, ModelSource
from shardwise.solve.search import search
from shardwise.solve.uncaptured import plan_without_graph
from shardwise.train.data.loader import ShardedLoader
from shardwise.train.data.peek_first_batch import first_batch
from shardwise.world.launch.current import DataParallelCoordinate, current_data_coordinate, current_world, set_data_coordinate
from shardwise.world.launch.rank_settings import apply_launch_settings
from shardwise.world.world import World

if TYPE_CHECKING:
    from shardwise.run.engine import Engine

Module = TypeVar("Module", bound=nn.Module)


def unbounded_cluster() -> Cluster:
    """Return a cluster with unlimited memory, for searches of shards and stages in which prices do not matter."""
    machine = Cluster.parse("1xcpu-2")
    return replace(machine, device=replace(machine.device, memory_bytes=1e18))


@overload
def auto_parallelize(
    model: Module,
    batch: Any,
    *,
    plan: Plan | Layout | str | None = None,
    cluster: Cluster | str = "here",
    world: World | None = None,
    largest: Any = None,
) -> Module: ...


@overload
def auto_parallelize(
    *,
    batch: Any,
    plan: Plan | Layout | str | None = None,
    cluster: Cluster | str = "here",
    world: World | None = None,
    largest: Any = None,
) -> AbstractContextManager[None]: ...


def auto_parallelize(
    model: Any = None,
    batch: Any = None,
    *,
    plan: Plan | Layout | str | None = None,
    cluster: Cluster | str = "here",
    world: World | None = None,
    largest: Any = None,
) -> Any:
    """Parallelize the model that is built in the block, or an existing one in place: afterwards it holds this rank's shards only.

    `batch`: a global batch as the loader yields it, or a `DataLoader`, whose first batch is taken without changing the state of random
    number generators; the model is called with its first tensors (or keywords), the rest are targets. A layout without a pipeline is
    chosen for all ranks, or `plan` gives it ("data=2 zero=3"). An existing `model` is returned; optimizers of it may have been made before.
    `largest`: a batch as large as any in the loop (the longest sequences), for which the chosen plan has memory. A model that is built
    in the block never allocates more than this rank's shards.

    Raises:
        UsageError: no batch; ranks with different models.

    >>> import torch, shardwise
    >>> with shardwise.auto_parallelize(batch=(torch.randn(8, 4), torch.randn(8, 2)), plan="data=1"):
    ...     net = torch.nn.Linear(4, 2)
    >>> for x, y in shardwise.shard([(torch.randn(8, 4), torch.randn(8, 2))]):
    ...     torch.nn.functional.mse_loss(net(x), y).backward()
    >>> list(net.weight.grad.shape)
    [2, 4]
    >>> shardwise.auto_parallelize(torch.nn.Linear(4, 2), (torch.randn(8, 4),), plan="data=1")
    Linear(in_features=4, out_features=2, bias=True)
    """
    world = world or current_world()
    apply_launch_settings(world)
    if model is not None and not isinstance(model, nn.Module) and batch is None:
        model, batch = None, model  # the batch alone, in order
    if batch is None:
        raise UsageError("a batch is needed to see what the model does: shardwise.auto_parallelize(batch=...), samples in dimension 0")
    if isinstance(batch, DataLoader):
        batch = first_batch(batch)

    def finish(model: nn.Module, deferred: DeferredInit | None) -> None:
        refuse_scripts(model)
        with EarlierParameters(model).followed():
            divide(model, deferred)

    def divide(model: nn.Module, deferred: DeferredInit | None) -> None:
        check_model_agrees(model, world)
        source, inputs = _choose_arguments(model, batch, deferred)
        most = None if largest is None else _arguments_like(inputs, model, largest)
        with trace_without_counters(model):
            chosen = _plan_without_pipeline(model, source, (inputs, most), plan, cluster, world)
            shard_module(model, source, chosen, inputs, world)
        peers = chosen.layout.mesh.group(world.rank, *sample_axes(chosen.layout.mesh.stage_axes))
        world.name_waits()
        set_data_coordinate(DataParallelCoordinate(peers.index(world.rank), chosen.layout.data, world, peers))

    if model is None:
        return _divide_when_built(finish, world)
    synchronize_generators(world)
    finish(model, None)
    return model


@contextmanager
def _divide_when_built(finish: Callable[[nn.Module, DeferredInit], None], world: World) -> Iterator[None]:
    synchronize_generators(world)
    with deferred_model(finish):
        yield


def _plan_without_pipeline(
    model: nn.Module,
    source: ModelSource,
    batches: tuple[Any, Any],
    wanted: Plan | Layout | str | None,
    cluster: Cluster | str,
    world: World,
) -> Plan:
    """Return `wanted` as a plan, or choose one for all ranks. `batches`: an example, and the largest or None."""
    if isinstance(wanted, Plan):
        return wanted
    batch, largest = batches
    size = batch_size_of(batch)
    name = type(model).__name__
    try:
        graph = source.capture(batch, None, size, outputs=True).graph
    except ModelError as error:
        # Not tried here: dividing the module runs it.
        count = sum(p.numel() for p in model.parameters())
        asked = (Layout.parse(wanted) if isinstance(wanted, str) else wanted) or Layout(data=world.num_ranks)
        return plan_without_graph(count, str(error), unbounded_cluster(), size, name, layout=asked)
    if wanted is not None:
        layout = Layout.parse(wanted) if isinstance(wanted, str) else wanted
        return search(graph, unbounded_cluster(), size, name, layout=layout, is_plain_loop=True)
    most = (
        None
        if largest is None
        else CachedModelSource(model, source.deferred).capture(largest, None, batch_size_of(largest), outputs=True).graph
    )
    return parse_plan(world.broadcast_text(lambda: format_plan(_best_without_pipeline(graph, size, name, cluster, world.num_ranks, most))))


def _best_without_pipeline(
    graph: Graph, size: int, name: str, cluster: Cluster | str, num_ranks: int, largest: Graph | None = None
) -> Plan:
    """Choose the fastest layout without a pipeline, each with the lowest ZeRO stage with which the batch and the `largest` fit.

    The plan's predicted memory is that of the `largest`. Raises Infeasible where none fits."""
    machines = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    plans: list[Plan] = []
    refused: list[str] = []

    def of(layout: Layout) -> Plan:
        plan = search(graph, machines, size, name, layout=layout, is_plain_loop=True)
        if largest is None or plan.prediction is None:
            return plan
        most = search(largest, machines, largest.batch_size, name, layout=layout, is_plain_loop=True).prediction
        return plan if most is None else replace(plan, prediction=replace(plan.prediction, memory=most.memory))

    for tensor in (t for t in range(1, num_ranks + 1) if num_ranks % t == 0):
        data = num_ranks // tensor
        for zero in (0, 1, 2, 3) if data > 1 else (0,):
            try:
                plans.append(of(Layout(data=data, tensor=tensor, zero=zero)))
                break
            except Infeasible as error:
                refused.append(str(error))
    if not plans:
        raise Infeasible(f"no layout of {num_ranks} ranks without a pipeline fits: {refused[0]}")
    return min(plans, key=lambda p: p.prediction.step_time_s if p.prediction else float("inf"))


def shard(loader: Iterable[Any], engine: Engine | None = None, *, load_whole: bool = False) -> ShardedLoader:
    """Return a loader of this data-parallel replica's samples of every batch, in every epoch; ranks along other axes get the same ones.

    Every rank iterates over the batches of the serial run; the first is compared with rank 0's. A batch need not divide evenly, and may
    have fewer samples than there are replicas. Other attributes (`len`, `.dataset`) are the loader's.

    Of a `DataLoader` each replica loads its own samples only, in the order of its samplers, which every rank runs. Whole batches are loaded
    and cut where loading draws random numbers or `collate_fn` depends on the whole batch (padding), from an `IterableDataset` and any other
    iterable, and with `load_whole`. The position in the epoch is in the checkpoints of `shardwise.save`, and a loop goes on from there.

    Raises:
        UsageError: no model has been parallelized yet, or the loader yields this rank another batch than rank 0.
    """
    where = engine or current_data_coordinate()
    if where is None:
        raise UsageError(
            "shardwise.shard shards batches by the model's layout; use it after shardwise.auto_parallelize, or give it the engine"
        )
    return ShardedLoader(loader, where, load_whole)


def _choose_arguments(model: nn.Module, batch: Any, deferred: DeferredInit | None) -> tuple[ModelSource, Any]:
    """Return the model's arguments in a loader's batch, with a source that may have captured them.

    Of a tuple those are as many as `forward` has places for (`forward(x, targets=None)`), if it can be captured with them; what is left
    over belongs to the loss, and a place with a default may not be meant for it.
    """
    needed = _model_arguments(model, batch)
    most = forward_arguments(model, batch) if isinstance(batch, tuple | list) and isinstance(needed, tuple) else needed
    if isinstance(needed, tuple) and len(needed) < len(most) and _num_needed(model):
        source = CachedModelSource(model, deferred)
        try:
            source.capture(tuple(most), None, batch_size_of(most), outputs=True)
            return source, tuple(most)
        except ModelError:
            pass  # the others have defaults
    return CachedModelSource(model, deferred), needed


def _arguments_like(inputs: Any, model: nn.Module, batch: Any) -> Any:
    """Return as many arguments of another batch as `inputs` are."""
    is_in_order = isinstance(inputs, tuple) and isinstance(batch, tuple | list)
    return tuple(batch)[: len(inputs)] if is_in_order else _model_arguments(model, batch)


def _num_needed(model: nn.Module) -> int:
    """Return how many arguments of `forward`, in order, have no default."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds and p.default is inspect.Parameter.empty for p in inspect.signature(model.forward).parameters.values())


def _model_arguments(model: nn.Module, batch: Any) -> Any:
    """Return the model's arguments in a loader's batch: the keys of a dict that `forward` names, or the leading items of a tuple."""
    if isinstance(batch, Tensor):
        return (batch,)
    if isinstance(batch, Mapping):
        names = inspect.signature(model.forward).parameters
        if names.keys() & batch.keys() or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in names.values()):
            return forward_arguments(model, batch)
        batch = tuple(batch.values())  # no key is a parameter's name: pass the values in order
    parameters = inspect.signature(model.forward).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return tuple(batch)
    # Where all have defaults (Hugging Face's models), the model is called with the first.
    return tuple(batch)[: max(_num_needed(model), 1)]
