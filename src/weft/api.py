"""Functions of `import weft`: plan, parallelize, verify and simulate a model. They combine the library's parts and hold no state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import weft.report.notebook  # noqa: F401 - registers how notebooks show plans and timelines
from weft.api_loop import any_cluster, auto_parallelize, shard
from weft.capture.capture import Loss
from weft.capture.nesting import batch_size_of
from weft.capture.once import called_once
from weft.cli.progress import progress
from weft.cluster.cluster import Cluster
from weft.collectives import build as build_collective
from weft.errors import ModelError, UsageError
from weft.model.graph import Graph
from weft.model.sharding.sharding import Shards
from weft.model.stages.stages import check_trains
from weft.plan.beside import FIXED, LENGTHS
from weft.plan.custom_schedule import actions_of, read_actions
from weft.plan.layout import Layout
from weft.plan.patterns import expand_all
from weft.plan.plan import Candidate, Plan, Prediction
from weft.plan.plan_file import format_plan, parse_plan, read_plan
from weft.plan.schedule_sizes import SCHEDULES
from weft.plan.timeline import Timeline
from weft.run.build import Source, Traced
from weft.run.engine import Engine, OnDevice
from weft.run.forms import shortened
from weft.run.proof.verification import Verification
from weft.run.proof.verify import verify_plan
from weft.run.rank_agreement import check_model_agrees, synchronize_generators
from weft.run.state.optimizer import OptimizerSpec
from weft.run.uncaptured.trial import refuse_division
from weft.solve.mixed import pricer_of
from weft.solve.reasons import reasons
from weft.solve.search import check_layout, clocked, price, search, step_timeline
from weft.solve.splits import positions_of, with_splits
from weft.solve.stragglers import straggler_steps
from weft.solve.uncaptured import without_graph
from weft.train.trials import Trial, distinct, fastest, trial_words, try_all, try_in
from weft.units import parse_bytes
from weft.world.current import current_world
from weft.world.world import World
from weft.zoo.resolve import resolve
from weft.zoo.resolved import Resolved

Model = Resolved | nn.Module | Callable[[], nn.Module] | str
Subject = tuple[str, nn.Module | Callable[[], nn.Module], Any, Loss | None]


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
    source: Source | None = None,
    device_memory: float | str = 0,
    trials: int = 0,
    optimizer: OptimizerSpec | str | Mapping[str, Any] = "adamw",
) -> Plan:
    """Choose the fastest plan for a model on a cluster, or price the given `layout`.

    Args:
        model: a module, a function that builds one, a `Resolved`, or MODEL as on the command line ("gpt-10m", "file.py:make").
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

    >>> import weft
    >>> chosen = weft.plan("gpt-tiny", 8, cluster="1xcpu-2", layout="data=2")
    >>> str(chosen.layout), len(chosen.replicated_operators)
    ('data=2 tensor=1 pipeline=1', 0)
    """
    by_name = isinstance(model, str)
    if isinstance(model, str):
        model = resolve(model, batch if isinstance(batch, int) else None)
    if source is None and isinstance(model, Resolved) and (batch is None or isinstance(batch, int)):
        source = Traced.of(model.make)
        batch = shapes_of(model, model.default_batch if batch is None else batch, source, loss)
    subject = subject_of(model, batch, loss)
    machines = Cluster.parse(cluster) if isinstance(cluster, str) else cluster

    def of(layout: Layout | str | None) -> Plan:
        return _planned(
            subject, machines, layout, constraints=constraints, objective=objective, like=like, source=source, device_memory=device_memory,
            optimizer=optimizer,
        )  # fmt: skip

    if trials > 1 and not by_name:
        raise UsageError('trials start processes that make the model anew, by its name: give it as text, "file.py:factory" for your own')
    with progress(f"planning {subject[0]} on {machines.name}"):
        chosen = of(layout)
    if layout is not None:
        return chosen
    return tried(chosen, trials, of, machines, objective=objective, device_memory=parse_bytes(device_memory))


def shapes_of(model: Resolved, size: int, source: Traced, loss: Loss | None = None) -> Any:
    """Build a batch of `size` samples: fake tensors where the model can be captured, since values take memory and time, else real ones."""
    assert source.deferred is not None
    try:
        with source.deferred.fake_mode:
            fake_batch = (model.form or model.batch)(size)
        source.capture(fake_batch, loss or model.loss, size)
    except (ModelError, RuntimeError):
        return model.batch(size)
    return fake_batch


def tried(  # noqa: PLR0913
    chosen: Plan,
    trials: int,
    plan_of: Callable[[Layout], Plan],
    cluster: Cluster,
    sequence: int | None = None,
    *,
    objective: str = "time",
    device_memory: float = 0.0,
    say: Callable[[str], object] = lambda line: None,
    world: World | None = None,
) -> Plan:
    """Run some steps of the `trials` best candidates here and return the fastest plan; its reasons list the measured times.

    Args:
        plan_of: a layout as a plan of the same model, batch and machines. sequence: as of the model. say: called with each result.
        world: existing ranks, of which this is rank 0 and the others `follow`; plans for as many ranks are tried on them.

    Raises:
        UsageError: the cluster is not this machine, or another objective than time. Infeasible: no candidate runs.
    """
    if trials < 2 or chosen.uncaptured:
        return chosen
    if objective != "time":
        raise UsageError(f"trials find the fastest plan, and the objective is {objective}; leave one of them out")
    if world is None and not runs_here(cluster):
        raise UsageError(f"trials run on this machine, and {cluster.name} is another; leave them out, or plan for --cluster here")
    candidates: Sequence[Candidate] = chosen.candidates
    if world is not None:
        candidates = [c for c in candidates if c.layout.num_ranks == world.num_ranks]
    plans = [chosen if c.layout == chosen.layout else plan_of(c.layout) for c in distinct(candidates, trials)]
    if world is None:
        return _fastest(chosen, try_all(plans, sequence, device=cluster.kind.torch, device_memory=device_memory, say=say), cluster)
    return _fastest(chosen, try_in(world, plans, sequence, device_memory=device_memory), cluster) if len(plans) > 1 else chosen


def runs_here(cluster: Cluster) -> bool:
    """Return whether the cluster is one machine of this machine's kind."""
    return cluster.num_devices <= cluster.node_size and (cluster.kind.shares_hosts or cluster.num_devices <= torch.cuda.device_count())


def _fastest(chosen: Plan, trials: Sequence[Trial], cluster: Cluster) -> Plan:
    """Return the plan of the fastest trial, with the candidates of `chosen` and reasons."""
    best = fastest(trials)
    words = "; ".join(trial_words(trial) for trial in trials)
    best_reasons = chosen.reasons
    if best is not chosen:
        fitting, refused = ([c for c in chosen.candidates if bool(c.note) is barred] for barred in (False, True))
        assert best.prediction is not None
        best_reasons = reasons(best.layout, best.prediction, fitting, refused, cluster, by_hand=False)
    return replace(best, candidates=chosen.candidates, reasons=(*best_reasons, ("trials", f"the fastest by the clock: {words}")))


def _planned(  # noqa: PLR0913
    subject: Subject,
    cluster: Cluster | str = "here",
    layout: Layout | str | None = None,
    *,
    constraints: str | Sequence[str] = "",
    objective: str = "time",
    like: Plan | None = None,
    source: Source | None = None,
    device_memory: float | str = 0,
    optimizer: OptimizerSpec | str | Mapping[str, Any] = "adamw",
) -> Plan:
    """Plan a resolved subject; arguments as of `plan`."""
    name, make, inputs, loss = subject
    machines = (Cluster.parse(cluster) if isinstance(cluster, str) else cluster).limited(parse_bytes(device_memory))
    by_hand = Layout.parse(layout) if isinstance(layout, str) else layout
    source = source or Source.of(make)
    words = constraints if isinstance(constraints, str) else " ".join(constraints)
    size = batch_size_of(inputs)
    try:
        graph = source.capture(inputs, loss, size).graph
    except ModelError as error:
        count = sum(p.numel() for p in source.model.parameters())
        eager_result = called_once(source.model, source.deferred, inputs, loss, source.loss_of, error)

        def trial(plan: Plan) -> None:
            if eager_result is not None:
                refuse_division(plan, eager_result, inputs, source.loss_of(loss))

        return without_graph(count, str(error), machines, size, name, words, by_hand, trial)
    check_trains(graph)
    states = len(OptimizerSpec.of(optimizer).slots)
    if like is not None:
        cuts = _shards(like, graph)
        chosen = search(graph, machines, size, name, "", like.layout, objective, shards=cuts, stages=like.stages, optimizer_states=states)
    else:
        chosen = search(graph, machines, size, name, words, by_hand, objective, optimizer_states=states)
    if chosen.layout.split != LENGTHS:
        return chosen

    def at(length: int) -> Graph:
        positions, _ = positions_of(graph, chosen.layout.data * chosen.layout.context)
        return Source(source.model, source.deferred).capture(shortened(inputs, positions, length), loss, size).graph

    return with_splits(chosen, machines, graph, at, _shards(chosen, graph), states)


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
        world: this rank's world; by default the one it was started in (`weft.launch`, torchrun, srun), or one rank alone.
        seed: of initial weights, where `model` is a function: they equal `torch.manual_seed(seed); model()` bit for bit.
        compile: as compile=on in the layout.
        device_memory: memory limit of this rank, 2e9 or "2GiB"; 0 is all of the device's. It is planned for and enforced.

    Raises:
        Infeasible: the plan is for another number of ranks, or nothing fits. OutOfMemory: more than `device_memory` is needed.
        UsageError: ranks have modules with different weights.

    >>> import torch, weft
    >>> x, y = torch.randn(8, 4), torch.randn(8, 2)
    >>> def error(output, batch):
    ...     return torch.nn.functional.mse_loss(output, batch[1])
    >>> engine = weft.parallelize(lambda: torch.nn.Linear(4, 2), (x, y), loss=error, plan="data=1", seed=0)
    >>> engine.step((x, y)).loss > engine.step((x, y)).loss
    True
    """
    world = world or current_world()
    subject = subject_of(model, batch, loss)
    _, make, inputs, loss = subject
    if isinstance(make, nn.Module):
        check_model_agrees(make, world)
    if seed is None:
        synchronize_generators(world)
    limit = parse_bytes(device_memory)
    chosen = planned_for(subject, plan, cluster, world, limit, optimizer)
    if compile:
        chosen = replace(chosen, layout=replace(chosen.layout, compile="on"))
    return Engine(chosen, make, inputs, loss, world, optimizer, seed=seed, device=OnDevice(limit))


def planned_for(
    subject: Subject,
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
    wanted = _agreed(wanted, world) if isinstance(wanted, str) else wanted
    state = torch.random.get_rng_state()
    try:
        if wanted is not None and wanted.split == FIXED:
            return _planned(subject, any_cluster(), wanted, optimizer=optimizer)

        def of_rank_0() -> str:
            ranks = f"ranks={world.num_ranks}" if wanted is None else ""
            return format_plan(_planned(subject, cluster, wanted, constraints=ranks, device_memory=device_memory, optimizer=optimizer))

        # Rank 0 chooses for all: another host's measurements may lead to another plan.
        return parse_plan(world.told(of_rank_0))
    finally:
        torch.random.set_rng_state(state)


def _agreed(text: str, world: World) -> Layout:
    """Parse a layout; a schedule file is read by rank 0 and broadcast, so that all ranks run the same and only rank 0 needs it."""
    name = next((word.removeprefix("schedule=") for word in text.replace(",", " ").split() if word.startswith("schedule=")), "")
    if not name or name in SCHEDULES:
        return Layout.parse(text)
    actions = world.told(lambda: actions_of(name))
    return Layout.parse(text, {name: actions} if actions else {})


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
    source = Traced.of(make)
    actions = None if schedule is None else (Path(schedule).name, read_actions(schedule))
    plans = [_verified(wanted, subject, source, actions, dtype) for wanted in wanted_layouts]  # all before any rank starts
    torch.random.set_rng_state(state)
    with progress(f"comparing {len(plans)} layouts with the serial model"):
        results = [
            verify_plan(
                plan, make, inputs, loss, source, device=device, cut_everything=cut_everything, steps=steps, seed=seed, tolerance=tolerance,
                optimizer=optimizer, device_memory=parse_bytes(device_memory),
            )
            for plan in plans
        ]  # fmt: skip
    return results[0] if wanted_layouts is not layout else Verification.together(results)


def _verified(
    wanted: Layout | Plan | str | Path, subject: Subject, source: Source, actions: tuple[str, str] | None, dtype: str | None
) -> Plan:
    """Return the plan to verify for a layout in any form. `actions`: (name, text) of a schedule in place of the layout's."""
    if isinstance(wanted, Path) or (isinstance(wanted, str) and wanted.endswith(".toml")):
        wanted = read_plan(wanted)
    layout = wanted.layout if isinstance(wanted, Plan) else Layout.parse(wanted) if isinstance(wanted, str) else wanted
    layout = layout.with_schedule(*actions) if actions is not None else layout
    if dtype is None:
        dtype = layout.precision if isinstance(wanted, str) and "precision=" in wanted else "float64"
    if not isinstance(wanted, Plan):
        wanted = _planned(subject, any_cluster(), replace(layout, precision="float32"), source=source)
    return replace(wanted, layout=replace(layout, precision=dtype))


def simulate(
    plan: Plan,
    model: Model | None = None,
    batch: Any = None,
    *,
    loss: Loss | None = None,
    cluster: Cluster | str | None = None,
    source: Source | None = None,
) -> Timeline:
    """Simulate one step of a plan, with the predicted step time. `model` and `cluster` default to those that the plan names."""
    return simulated(plan, model, batch, loss=loss, cluster=cluster, source=source)[1]


def simulated(
    plan: Plan,
    model: Model | None = None,
    batch: Any = None,
    *,
    loss: Loss | None = None,
    cluster: Cluster | str | None = None,
    source: Source | None = None,
    steps: int = 1,
    mean_delay: float = 0.0,
) -> tuple[Prediction, Timeline]:
    """Return the prediction of a step and the timeline of `steps`; arguments as of `simulate`. Data-parallel replicas are late by
    `mean_delay` of a step on average (`solve/stragglers`)."""
    _, make, inputs, loss = subject_of(model if model is not None else plan.model, batch if batch is not None else plan.batch_size, loss)
    machines = cluster if isinstance(cluster, Cluster) else Cluster.parse(cluster or plan.cluster)
    check_layout(plan.layout, machines, plan.batch_size)
    graph = (source or Source.of(make)).capture(inputs, loss, plan.batch_size).graph
    pricer = pricer_of(graph, machines, plan.batch_size, 2, _shards(plan, graph))
    priced = clocked(pricer, price(pricer, plan.layout, plan.stages))
    if steps == 1 and not mean_delay:
        return priced.prediction, step_timeline(pricer, priced)
    return priced.prediction, straggler_steps(pricer, priced, steps, mean_delay)


def comm_hook(name: str = "auto", process_group: Any = None) -> tuple[Any, Any]:
    """Return a DDP communication hook: `model.register_comm_hook(*weft.comm_hook("butterfly"))`.

    Gradients are then all-reduced by an algorithm of weft's over its own connections, and divided by the number of ranks, as in DDP.

    Args:
        name: `auto` (shared memory where all ranks are on one host, and inside the hosts where they are not), `native`, or an
            algorithm: `ring`, `tree`, `double_tree`, `recursive_doubling`, `halving_doubling` (also called `butterfly`), `naive`,
            `parameter_server`, `hierarchical`.
        process_group: as given to DDP; None for torch's default group.

    Returns:
        (state, hook) for `DistributedDataParallel.register_comm_hook`. All ranks must call it, equally often.

    Raises:
        UsageError: an unknown name (names the nearest), or torch's process group is not initialised.
    """
    from weft.world.comm_hook import comm_hook as build_hook

    return build_hook(name, build_collective, process_group)


def _shards(plan: Plan, graph: Graph) -> dict[str, Shards]:
    """Return the plan's shards with patterns expanded."""
    return expand_all(plan.shards, (v.name for v in (*graph.parameters, *graph.buffers)))


def subject_of(model: Model, batch: Any, loss: Loss | None) -> Subject:
    """Return (name, module or factory, batch of tensors, loss) of a model in any form."""
    if isinstance(model, str):
        model = resolve(model, batch if isinstance(batch, int) else None)
    if isinstance(model, Resolved):
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
