"""Functions of `import shardwise`: plan, parallelize, verify and simulate a model. They combine the library's parts and hold no state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardwise.report.notebook  # noqa: F401 - registers how notebooks show plans and timelines
from shardwise.api_loop import auto_parallelize, shard, unbounded_cluster
from shardwise.capture.capture import Loss
from shardwise.capture.eager_trial import run_eagerly_once
from shardwise.capture.nesting import batch_size_of
from shardwise.cluster.cluster import Cluster
from shardwise.collectives import build as build_collective
from shardwise.cost.step_time.heterogeneous import build_pricer
from shardwise.errors import ModelError, UsageError
from shardwise.model.graph import Graph
from shardwise.model.sharding.sharding import Shards
from shardwise.model.stages.stages import check_trains
from shardwise.plan.compatibility import SPLIT_BY_LENGTH, SPLIT_FIXED
from shardwise.plan.ir.custom_collective import collective_text_of
from shardwise.plan.ir.custom_schedule import actions_of, read_actions
from shardwise.plan.ir.patterns import expand_shards
from shardwise.plan.ir.timeline import Timeline
from shardwise.plan.layout import Layout
from shardwise.plan.layout_words import CHOICES
from shardwise.plan.plan import LayoutCandidate, Plan, Prediction
from shardwise.plan.plan_file import format_plan, parse_plan, read_plan
from shardwise.report.progress import show_progress
from shardwise.run.engine import DeviceOptions, Engine
from shardwise.run.rank_agreement import check_model_agrees, synchronize_generators
from shardwise.run.rank_model.capture_cache import truncate_batch
from shardwise.run.rank_model.model_source import CachedModelSource, ModelSource
from shardwise.run.state.optimizer import OptimizerSpec
from shardwise.run.uncaptured.trial import check_data_parallel
from shardwise.run.verify.verification import Verification
from shardwise.run.verify.verify import verify_plan
from shardwise.solve.moves.splits import position_dims, with_splits
from shardwise.solve.reasons import explain_choices
from shardwise.solve.search import check_layout, price, search, simulate_time, step_timeline
from shardwise.solve.stragglers import straggler_steps
from shardwise.solve.uncaptured import plan_without_graph
from shardwise.train.trials import PlanTrial, describe_trial, fastest_plan, select_distinct_candidates, try_plans, try_plans_in_world
from shardwise.units import parse_bytes
from shardwise.world.launch.current import current_world
from shardwise.world.launch.rank_settings import apply_launch_settings
from shardwise.world.world import World
from shardwise.zoo.resolve import resolve
from shardwise.zoo.resolved import ResolvedModel

Model = ResolvedModel | nn.Module | Callable[[], nn.Module] | str
ModelSubject = tuple[str, nn.Module | Callable[[], nn.Module], Any, Loss | None]


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The request for a plan; fields as the parameters of `plan`.

    `sequence`: as of a model by name, for trials; `say`: called with each of their results; `world`: existing ranks, of which this is rank
    0 and the others `follow_trials`, that run them.
    """

    cluster: Cluster
    layout: Layout | None = None
    constraints: str | Sequence[str] = ""
    objective: str = "time"
    like: Plan | None = None
    source: ModelSource | None = None
    device_memory: float = 0.0
    optimizer: OptimizerSpec | str | Mapping[str, Any] = "adamw"
    trials: int = 0
    sequence: int | None = None
    say: Callable[[str], object] = lambda line: None
    world: World | None = None


def plan(  # noqa: PLR0913
    model: Model,
    batch: Any = None,
    *,
    loss: Loss | None = None,
    cluster: Cluster | str = "here",
    layout: Layout | str | None = None,
    constraints: str | Sequence[str] = "",
    objective: str = "time",
    like: Plan | None = None,
    source: ModelSource | None = None,
    device_memory: float | str = 0,
    trials: int = 0,
    optimizer: OptimizerSpec | str | Mapping[str, Any] = "adamw",
) -> Plan:
    """Choose the fastest plan for a model on a cluster, or price the given `layout`.

    Args:
        model: a module, a function that builds one, a `ResolvedModel`, or MODEL as on the command line ("gpt-10m", "file.py:make").
        batch: the global batch, a tuple or dict of tensors with samples in dimension 0, or their number for a named model.
        loss: `loss(output, batch)` -> scalar; without it the output is the loss or has `.loss`. With it the model is called with as
            many items of the batch as its forward takes, so targets may follow the inputs.
        like: a plan whose layout, shards and stages are used.
        device_memory: memory limit of a rank, 2e9 or "2GiB"; 0 is all of the device's.
        trials: for a model by name, the number of plans, predicted to be fastest, that run some steps on this machine; the fastest
            measured one is taken. 0 or 1: by prediction alone. Not with `layout`.
        optimizer: as for `parallelize`; its state is counted.

    Raises:
        Infeasible: nothing fits, with the numbers. ModelError: the model cannot be built or called.
        UsageError: trials of a model without a name, or for another machine.

    >>> import shardwise
    >>> chosen = shardwise.plan("gpt-tiny", 8, cluster="1xcpu-2", layout="data=2")
    >>> str(chosen.layout), len(chosen.replicated_operators)
    ('data=2 tensor=1 pipeline=1', 0)
    """
    by_name = isinstance(model, str)
    if isinstance(model, str):
        model = resolve(model, batch if isinstance(batch, int) else None)
    if source is None and isinstance(model, ResolvedModel) and (batch is None or isinstance(batch, int)):
        source = CachedModelSource.from_model(model.make)
        batch = batch_shapes(model, model.default_batch if batch is None else batch, source, loss)
    subject = subject_of(model, batch, loss)
    machines = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    if trials > 1 and not by_name:
        raise UsageError('trials start processes that make the model anew, by its name: give it as text, "file.py:factory" for your own')
    request = PlanRequest(
        machines, Layout.parse(layout) if isinstance(layout, str) else layout, constraints, objective, like=like, source=source,
        device_memory=parse_bytes(device_memory), optimizer=optimizer, trials=trials,
    )  # fmt: skip
    return plan_with_trials(subject, request)


def plan_with_trials(subject: ModelSubject, request: PlanRequest) -> Plan:
    """Plan a subject; where no layout is given, by the request's trials."""
    with show_progress(f"planning {subject[0]} on {request.cluster.name}"):
        chosen = plan_subject(subject, request)
    if request.layout is not None:
        return chosen
    return choose_by_trials(chosen, request, lambda layout: plan_subject(subject, replace(request, layout=layout)))


def batch_shapes(model: ResolvedModel, size: int, source: CachedModelSource, loss: Loss | None = None) -> Any:
    """Build a batch of `size` samples: fake tensors where the model can be captured, since values take memory and time, else real ones."""
    assert source.deferred is not None
    try:
        with source.deferred.fake_mode:
            fake_batch = (model.empty_batch or model.batch)(size)
        source.capture(fake_batch, loss or model.loss, size)
    except (ModelError, RuntimeError):
        return model.batch(size)
    return fake_batch


def choose_by_trials(chosen: Plan, request: PlanRequest, plan_of: Callable[[Layout], Plan]) -> Plan:
    """Run some steps of the best candidates here and return the fastest plan; its reasons list the measured times.

    Args:
        plan_of: a layout as a plan of the same model, batch and machines. In the request's world, plans for as many ranks are tried.

    Raises:
        UsageError: the cluster is not this machine, or another objective than time. Infeasible: no candidate runs.
    """
    cluster, world, limit = request.cluster, request.world, request.device_memory
    if request.trials < 2 or chosen.uncaptured:
        return chosen
    if request.objective != "time":
        raise UsageError(f"trials find the fastest plan, and the objective is {request.objective}; leave one of them out")
    if world is None and not is_this_machine(cluster):
        raise UsageError(f"trials run on this machine, and {cluster.name} is another; leave them out, or plan for --cluster here")
    candidates: Sequence[LayoutCandidate] = chosen.candidates
    if world is not None:
        candidates = [c for c in candidates if c.layout.num_ranks == world.num_ranks]
    distinct = select_distinct_candidates(candidates, request.trials)
    plans = [chosen if c.layout == chosen.layout else plan_of(c.layout) for c in distinct]
    if world is None:
        results = try_plans(plans, request.sequence, device=cluster.kind.torch, device_memory=limit, say=request.say)
    elif len(plans) > 1:
        results = try_plans_in_world(world, plans, request.sequence, device_memory=limit)
    else:
        return chosen
    return _plan_of_fastest_trial(chosen, results, cluster)


def is_this_machine(cluster: Cluster) -> bool:
    """Return whether the cluster is one machine of this machine's kind."""
    return cluster.num_devices <= cluster.node_size and (cluster.kind.shares_hosts or cluster.num_devices <= torch.cuda.device_count())


def _plan_of_fastest_trial(chosen: Plan, trials: Sequence[PlanTrial], cluster: Cluster) -> Plan:
    """Return the plan of the fastest trial, with the candidates of `chosen` and reasons."""
    best = fastest_plan(trials)
    words = "; ".join(describe_trial(trial) for trial in trials)
    best_reasons = chosen.reasons
    if best is not chosen:
        fitting, refused = ([c for c in chosen.candidates if bool(c.note) is barred] for barred in (False, True))
        assert best.prediction is not None
        best_reasons = explain_choices(best.layout, best.prediction, fitting, refused, cluster, by_hand=False)
    return replace(best, candidates=chosen.candidates, reasons=(*best_reasons, ("trials", f"the fastest by the clock: {words}")))


def plan_subject(subject: ModelSubject, request: PlanRequest) -> Plan:
    """Plan a subject by prediction alone."""
    name, make, inputs, loss = subject
    machines, by_hand, like = request.cluster.with_memory_limit(request.device_memory), request.layout, request.like
    source = request.source or ModelSource.from_model(make)
    words = request.constraints if isinstance(request.constraints, str) else " ".join(request.constraints)
    size = batch_size_of(inputs)
    graph, why_not_captured = None, ""
    try:
        graph = source.capture(inputs, loss, size).graph
    except ModelError as error:
        count, why_not_captured = sum(p.numel() for p in source.model.parameters()), str(error)
        eager_result = run_eagerly_once(source.model, source.deferred, inputs, loss, source.loss_of, error)
    if graph is None:  # beside the handler: a refusal is an error of its own

        def trial(plan: Plan) -> None:
            if eager_result is not None:
                check_data_parallel(plan, eager_result, inputs, source.loss_of(loss))

        return plan_without_graph(count, why_not_captured, machines, size, name, words, by_hand, trial)
    check_trains(graph)
    states, objective = len(OptimizerSpec.of(request.optimizer).slots), request.objective
    if like is not None:
        cuts = _expanded_shards(like, graph)
        chosen = search(graph, machines, size, name, "", like.layout, objective, shards=cuts, stages=like.stages, optimizer_states=states)
    else:
        chosen = search(graph, machines, size, name, words, by_hand, objective, optimizer_states=states)
    if chosen.layout.split != SPLIT_BY_LENGTH:
        return chosen

    def at(length: int) -> Graph:
        positions, _ = position_dims(graph, chosen.layout.data * chosen.layout.context)
        return ModelSource(source.model, source.deferred).capture(truncate_batch(inputs, positions, length), loss, size).graph

    return with_splits(chosen, machines, graph, at, _expanded_shards(chosen, graph), states)


def parallelize(  # noqa: PLR0913
    model: Model,
    batch: Any = None,
    *,
    loss: Loss | None = None,
    optimizer: OptimizerSpec | str | Mapping[str, Any] = "adamw",
    plan: Plan | Layout | str | None = None,
    cluster: Cluster | str = "here",
    world: World | None = None,
    seed: int | None = None,
    compile: bool = False,
    device_memory: float | str = 0,
) -> Engine:
    """Build an engine that trains this rank's shards of the model. Every rank calls it with the same arguments.

    Args:
        plan: a `Plan`, a layout by hand ("data=2 tensor=2"), a plan file ("plan.toml"), or None to choose one for all ranks here.
        world: this rank's world; by default the one it was started in (`shardwise.launch`, torchrun, srun), or one rank alone.
        seed: of initial weights, where `model` is a function: they equal `torch.manual_seed(seed); model()` bit for bit.
        compile: as compile=on in the layout.
        device_memory: memory limit of this rank, 2e9 or "2GiB"; 0 is all of the device's. It is planned for and enforced.

    Raises:
        Infeasible: the plan is for another number of ranks, or nothing fits. OutOfMemory: more than `device_memory` is needed.
        UsageError: ranks have modules with different weights.

    >>> import torch, shardwise
    >>> x, y = torch.randn(8, 4), torch.randn(8, 2)
    >>> def error(output, batch):
    ...     return torch.nn.functional.mse_loss(output, batch[1])
    >>> engine = shardwise.parallelize(lambda: torch.nn.Linear(4, 2), (x, y), loss=error, plan="data=1", seed=0)
    >>> engine.step((x, y)).loss > engine.step((x, y)).loss
    True
    """
    world = world or current_world()
    apply_launch_settings(world)
    subject = subject_of(model, batch, loss)
    _, make, inputs, loss = subject
    if isinstance(make, nn.Module):
        check_model_agrees(make, world)
    if seed is None:
        synchronize_generators(world)
    limit = parse_bytes(device_memory)
    chosen = plan_for_world(subject, plan, cluster, world, limit, optimizer)
    if compile:
        chosen = replace(chosen, layout=replace(chosen.layout, compile="on"))
    return Engine(chosen, make, inputs, loss, world, optimizer, seed=seed, device=DeviceOptions(limit))


def plan_for_world(
    subject: ModelSubject,
    wanted: Plan | Layout | str | None,
    cluster: Cluster | str,
    world: World,
    device_memory: float,
    optimizer: OptimizerSpec | str | Mapping[str, Any],
) -> Plan:
    if isinstance(wanted, Plan):
        return wanted
    if isinstance(wanted, str) and wanted.endswith(".toml"):
        return read_plan(wanted)
    wanted = _broadcast_layout(wanted, world) if isinstance(wanted, str) else wanted
    state = torch.random.get_rng_state()
    try:
        if wanted is not None and wanted.split == SPLIT_FIXED:
            return plan_subject(subject, PlanRequest(unbounded_cluster(), wanted, optimizer=optimizer))

        def of_rank_0() -> str:
            machines = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
            ranks = f"ranks={world.num_ranks}" if wanted is None else ""
            request = PlanRequest(machines, wanted, ranks, device_memory=device_memory, optimizer=optimizer)
            return format_plan(plan_subject(subject, request))

        # Rank 0 chooses for all: another host's measurements may lead to another plan.
        return parse_plan(world.broadcast_text(of_rank_0))
    finally:
        torch.random.set_rng_state(state)


def _broadcast_layout(text: str, world: World) -> Layout:
    """Parse a layout; files that it names are read by rank 0 and broadcast, so that all ranks run the same and only rank 0 needs them."""
    words = dict(word.split("=", 1) for word in text.replace(",", " ").split() if "=" in word)
    files = {}
    for key, read in (("schedule", actions_of), ("all_reduce", collective_text_of)):
        name = words.get(key, "")
        if name and name not in CHOICES[key] and (actions := world.broadcast_text(lambda read=read, name=name: read(name))):  # type: ignore[misc]
            files[name] = actions
    return Layout.parse(text, files)


def verify(  # noqa: PLR0913
    model: Model | Path,
    layout: Layout | Plan | str | Path | Sequence[Layout | Plan | str] | None = None,
    batch: Any = None,
    *,
    loss: Loss | None = None,
    steps: int = 2,
    dtype: str | None = None,
    tolerance: float | None = None,
    device: str = "cpu",
    optimizer: str = "adamw",
    seed: int = 0,
    sequence: int | None = None,
    device_memory: float | str = 0,
    schedule: str | Path | None = None,
    cut_everything: bool = False,
) -> Verification:
    """Start the layout's ranks and compare the parallel run with the serial one, in `dtype`, over `steps` steps.

    Args:
        model, batch, loss: as for `plan`. Or a plan file ("plan.toml"), which names its model, batch and layout.
        layout: as text, a `Plan` or a plan file, whose shards and stages are then verified; or several of these, for which the model is
            captured once. By default "data=2".
        dtype: of both runs; by default the precision in a layout's text, or float64.
        tolerance: largest relative error; 1e-9 in float64 by default, in 16 bits 4 times the measured noise of serial runs.
        device_memory: as for `parallelize`, of the parallel run. schedule: a file of actions, the same as `schedule=FILE` in the layout.
        cut_everything: shard weights wherever the rules allow, even where it does not pay; small models are otherwise not sharded.

    Returns:
        Worst errors, and in `divided` the share of the model that each axis shards; for several layouts each in `layouts`.

    Raises:
        RankError: a rank failed. ProgramError: a schedule of the user's own is refuted. Infeasible, LayoutError, ModelError: as for `plan`.
    """
    if str(model).endswith(".toml"):
        if layout is not None:
            raise UsageError(f"{model} is a plan, which has a layout of its own; give its model with other layouts")
        layout = read_plan(str(model))
        model, batch = layout.model, layout.batch_size if batch is None else batch
    wanted_layouts = layout if isinstance(layout, Sequence) and not isinstance(layout, str) else ["data=2" if layout is None else layout]
    if isinstance(model, str):
        model = resolve(model, batch if isinstance(batch, int) else None, sequence)
    assert not isinstance(model, Path)
    subject = subject_of(model, batch, loss)
    _, make, inputs, loss = subject
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    source = CachedModelSource.from_model(make)
    actions = None if schedule is None else (Path(schedule).name, read_actions(schedule))
    plans = [plan_to_verify(wanted, subject, source, actions, dtype) for wanted in wanted_layouts]  # all before any rank starts
    torch.random.set_rng_state(state)
    with show_progress(f"comparing {len(plans)} layouts with the serial model"):
        results = [
            verify_plan(
                plan, make, inputs, loss, source, device=device, cut_everything=cut_everything, steps=steps, seed=seed, tolerance=tolerance,
                optimizer=optimizer, device_memory=parse_bytes(device_memory),
            )
            for plan in plans
        ]  # fmt: skip
    return results[0] if wanted_layouts is not layout else Verification.combine(results)


def plan_to_verify(
    wanted: Layout | Plan | str | Path, subject: ModelSubject, source: ModelSource, actions: tuple[str, str] | None, dtype: str | None
) -> Plan:
    """Return the plan to verify for a layout in any form. `actions`: (name, text) of a schedule in place of the layout's."""
    if isinstance(wanted, Path) or (isinstance(wanted, str) and wanted.endswith(".toml")):
        wanted = read_plan(wanted)
    layout = wanted.layout if isinstance(wanted, Plan) else Layout.parse(wanted) if isinstance(wanted, str) else wanted
    layout = layout.with_schedule(*actions) if actions is not None else layout
    if dtype is None:
        dtype = layout.precision if isinstance(wanted, str) and "precision=" in wanted else "float64"
    if not isinstance(wanted, Plan):
        wanted = plan_subject(
            subject, PlanRequest(unbounded_cluster(), replace(layout, precision="float32", gradients="float32"), source=source)
        )
    gradients = layout.gradients if dtype == layout.precision else "float32"
    return replace(wanted, layout=replace(layout, precision=dtype, gradients=gradients))


def simulate(
    plan: Plan,
    model: Model | None = None,
    batch: Any = None,
    *,
    loss: Loss | None = None,
    cluster: Cluster | str | None = None,
    source: ModelSource | None = None,
) -> Timeline:
    """Simulate one step of a plan, with the predicted step time. `model` and `cluster` default to those that the plan names."""
    subject = subject_of(model if model is not None else plan.model, batch if batch is not None else plan.batch_size, loss)
    machines = cluster if isinstance(cluster, Cluster) else Cluster.parse(cluster or plan.cluster)
    return simulate_subject(plan, subject, machines, source)[1]


def simulate_subject(
    plan: Plan, subject: ModelSubject, machines: Cluster, source: ModelSource | None = None, steps: int = 1, mean_delay: float = 0.0
) -> tuple[Prediction, Timeline]:
    """Return the prediction of a plan's step and the timeline of `steps`; data-parallel replicas are late by `mean_delay` of a step on
    average (`solve/stragglers`)."""
    _, make, inputs, loss = subject
    check_layout(plan.layout, machines, plan.batch_size)
    graph = (source or ModelSource.from_model(make)).capture(inputs, loss, plan.batch_size).graph
    pricer = build_pricer(graph, machines, plan.batch_size, 2, _expanded_shards(plan, graph))
    priced = simulate_time(pricer, price(pricer, plan.layout, plan.stages))
    if steps == 1 and not mean_delay:
        return priced.prediction, step_timeline(pricer, priced)
    return priced.prediction, straggler_steps(pricer, priced, steps, mean_delay)


def comm_hook(name: str = "auto", process_group: Any = None) -> tuple[Any, Any]:
    """Return a DDP communication hook: `model.register_comm_hook(*shardwise.comm_hook("butterfly"))`.

    Gradients are then all-reduced by an algorithm of shardwise's over its own connections, and divided by the number of ranks, as in DDP.

    Args:
        name: `auto` (shared memory where all ranks are on one host, and inside the hosts where they are not), `native`, or an
            algorithm: `ring`, `tree`, `double_tree`, `recursive_doubling` (also called `butterfly`), `halving_doubling`, `naive`,
            `parameter_server`, `hierarchical`.
        process_group: as given to DDP; None for torch's default group.

    Returns:
        (state, hook) for `DistributedDataParallel.register_comm_hook`. All ranks must call it, equally often.

    Raises:
        UsageError: an unknown name (names the nearest), or torch's process group is not initialised.
    """
    from shardwise.world.comm_hook import comm_hook as build_hook  # here: only this function needs torch.distributed

    return build_hook(name, build_collective, process_group)


def _expanded_shards(plan: Plan, graph: Graph) -> dict[str, Shards]:
    """Return the plan's shards with patterns expanded."""
    return expand_shards(plan.shards, (v.name for v in (*graph.parameters, *graph.buffers)))


def subject_of(model: Model, batch: Any, loss: Loss | None) -> ModelSubject:
    """Return (name, module or factory, batch of tensors, loss) of a model in any form."""
    if isinstance(model, str):
        model = resolve(model, batch if isinstance(batch, int) else None)
    if isinstance(model, ResolvedModel):
        size = batch if isinstance(batch, int) else model.default_batch
        inputs = model.batch(size) if batch is None or isinstance(batch, int) else batch
        return model.name, model.make, inputs, loss or model.loss
    if batch is None or isinstance(batch, int):
        raise UsageError("a batch is needed to see what the model does: a tuple or dict of tensors, samples in dimension 0")
    if isinstance(batch, Tensor):
        batch = (batch,)
    name = type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", "model")
    return name, model, batch, loss


__all__ = ["auto_parallelize", "parallelize", "plan", "shard", "simulate", "verify"]
