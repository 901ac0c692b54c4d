"""`shardwise estimate`: time, money, energy and memory of training a model on a cluster for a number of tokens or epochs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli import options
from shardwise.cli.output import CommandOutput, open_output
from shardwise.errors import Infeasible, UsageError
from shardwise.report.tables import TextTable, memory_table, parts_table
from shardwise.units import format_bytes, format_count, format_flops, format_percent, parse_count

if TYPE_CHECKING:
    from shardwise.cli.pricing_context import PricingContext
    from shardwise.plan.plan import Plan
    from shardwise.report.economy import WorkUnit

EPOCHS = 90  # of ImageNet-1k, as He et al. 2015 and most after them train
STATE_BYTES_PER_PARAMETER = 16  # float32, or mixed precision with float32 weights: weights, gradients, two moments of Adam
TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022, section 3.4
# Tokens a step by parameters: Brown et al. 2020, table 2.1, rounded.
BATCH_TOKENS = ((2e9, 5e5), (1e10, 2e6), (float("inf"), 4e6))
BATCH_IMAGES = 1024
YEAR_S = 365.25 * 86400
FASTEST = ("bfloat16", "float16", "float32")
_TOKENS = "Tokens to train on: 300e9 or 300B; by default 20 a parameter."
_EPOCHS = "Passes over ImageNet-1k, for models of images."
_GPUS = "This many of the devices only."


@dataclass(frozen=True, slots=True)
class TrainingWork:
    """Amount of training: `samples` in all, a description in `words`, and the `assumption`, if it was not given."""

    samples: float
    words: str
    assumption: str = ""


def estimate(  # noqa: PLR0913
    model: options.Model,
    cluster: options.ClusterText = "here",
    tokens: Annotated[str | None, typer.Option("--tokens", metavar="N", help=_TOKENS, show_default=False)] = None,
    epochs: Annotated[float | None, typer.Option("--epochs", metavar="N", help=_EPOCHS, show_default=False)] = None,
    batch: options.Batch = None,
    sequence: options.Sequence = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, metavar="N", help=_GPUS, show_default=False)] = None,
    constrain: options.Constraints = None,
    as_json: options.Json = False,
) -> None:
    """Say how long training takes, and what it costs.

    The best plan is searched and its price multiplied: time, money, energy, memory by part, and what was assumed. Where the model does
    not fit, it says so, and gives the time that the arithmetic alone would take.

    \b
    Example:
      shardwise estimate gpt-175b --cluster 128xdgx-a100-80 --tokens 300e9 --batch 1536
      shardwise estimate gpt-175b --cluster dgx-a100-80 --gpus 1 --tokens 300e9
    """
    with open_output(as_json) as out:
        from shardwise.cli.pricing_context import pricing_context_of_name  # here: the command starts fast
        from shardwise.cluster.resize import resize_cluster
        from shardwise.zoo.listing import check_model_text

        check_model_text(model)
        machines = options.load_cluster(cluster, out)
        if gpus is not None:
            machines = resize_cluster(machines, gpus)
        show_estimate(pricing_context_of_name(model, machines, batch, sequence), model, batch, tokens, epochs, constrain or (), out)


def show_estimate(
    first: PricingContext,
    model: str,
    batch: int | None,
    tokens: str | None,
    epochs: float | None,
    constrain: Sequence[str],
    out: CommandOutput,
) -> None:
    """Show time and cost of training a pricing context's model; arguments as of the verb, without `batch` a usual one."""
    from shardwise.report.economy import work_unit  # here: the command starts fast
    from shardwise.solve.constraints import parse_constraints

    parse_constraints(" ".join(constrain))  # contradictory constraints are an error, not a model that does not fit
    machines, unit = first.cluster, work_unit(first.graph)
    size, assumed_batch = (batch, "") if batch is not None else default_batch_size(first.graph.num_parameters, unit, machines.num_devices)
    setting = first if size == first.batch_size else first.with_changes(batch_size=size)
    work = training_work(tokens, epochs, unit, first.graph.num_parameters)
    flops = _training_flops(setting, work)
    with out.working(f"planning {model} on {machines.name}"):
        plan, refused = _plan_or_refusal(setting, constrain)
    fits = plan is not None and plan.prediction is not None
    state_bytes = STATE_BYTES_PER_PARAMETER * first.graph.num_parameters
    estimate = (
        _estimate_by_plan(plan, setting, work) if plan is not None and fits else _estimate_by_arithmetic(setting, flops, plan, refused)
    )
    assumptions = [a for a in (work.assumption, assumed_batch) if a] + estimate.assumptions
    assumptions.append("no failures, restarts, evaluations or waiting for data")
    rows = (
        ("model", f"{model}, {format_count(first.graph.num_parameters)} parameters"),
        ("model state", f"{state_bytes / 1e9:,.4g} GB: {STATE_BYTES_PER_PARAMETER} bytes a parameter, of weights, gradients and Adam"),
        ("machines", f"{machines.name}: {machines.num_devices} x {machines.device.name}"),
        ("work", f"{work.words}; {flops:.3g} FLOP"),
        *estimate.rows,
    )
    _show_tables(out, rows, plan, estimate, assumptions)
    out.answer(
        {
            "model": model, "cluster": machines.name, "num_devices": machines.num_devices, "fits": fits, "reason": refused,
            "layout": str(plan.layout) if plan is not None else None, "batch_size": size, "samples": work.samples,
            "tokens": work.samples * unit.tokens_per_sample or None, "flops": flops, "model_state_bytes": state_bytes,
            "time_s": estimate.time_s, "usd": estimate.usd, "kwh": estimate.kwh, **_prediction_record(plan), "assumptions": assumptions,
        }
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _TrainingCost:
    """Time and cost of training; `usd` and `kwh` are None where price or power are not known."""

    time_s: float
    usd: float | None
    kwh: float | None
    rows: list[tuple[str, str]]
    assumptions: list[str]
    note: str = ""


def _estimate_by_arithmetic(setting: PricingContext, flops: float, plan: Plan | None, refused: str) -> _TrainingCost:
    """Estimate from the FLOPs alone, for a model that does not fit, or that could not be captured and so has no prediction."""
    from shardwise.report.economy import power_w, usd_per_hour  # here: the command starts fast

    machines = setting.cluster
    seconds, rate_assumption = compute_bound(setting, flops)
    rows = [
        ("fits", f"no: {refused}" if refused else "not known: the model could not be captured"),
        ("arithmetic alone", format_duration(seconds)),
    ]
    usd = machines.price_per_hour * seconds / 3600 if machines.price_per_hour else None
    kwh = machines.power_w * seconds / 3.6e6 if machines.power_w else None
    price = machines.price_per_hour if plan is None else usd_per_hour(machines, plan.layout)
    paid = _cost_assumptions(usd, price, kwh, machines.power_w if plan is None else power_w(machines, plan.layout))
    return _TrainingCost(
        seconds, usd, kwh, rows, [rate_assumption, *paid], "as if memory were endless and nothing but matrix products took time"
    )


def _estimate_by_plan(plan: Plan, setting: PricingContext, work: TrainingWork) -> _TrainingCost:
    """Estimate training by a plan's predicted step time."""
    from shardwise.report.economy import power_w, training_bill, usd_per_hour  # here: the command starts fast

    machines, p, size = setting.cluster, plan.prediction, setting.batch_size
    assert p is not None
    cost = training_bill(machines, plan.layout, p, size, work.samples)
    used, num_nodes = machines.nodes_of(plan.layout.num_ranks), machines.num_nodes
    have = format_bytes(machines.memory_of(plan.layout.num_ranks))
    rows = [
        ("layout", str(plan.layout)),
        ("time to train", f"{format_duration(cost.time_s)}, {work.samples / size:,.0f} steps of {p.step_time_s:.3g} s"),
        ("MFU", format_percent(p.mfu)),
        ("memory", f"{format_bytes(p.memory.total)} of {have} on the fullest device"),
    ]
    unused = [f"{used} of {num_nodes} machines are used, and only these are paid for"] if used < num_nodes else []
    paid = _cost_assumptions(cost.usd, usd_per_hour(machines, plan.layout), cost.kwh, power_w(machines, plan.layout))
    return _TrainingCost(cost.time_s, cost.usd, cost.kwh, rows, [*unused, *_plan_assumptions(plan, setting), *paid])


def _plan_or_refusal(setting: PricingContext, constraints: Sequence[str]) -> tuple[Plan | None, str]:
    try:
        return setting.plan(constraints), ""
    except Infeasible as error:
        return None, str(error)


def _show_tables(
    out: CommandOutput, rows: tuple[tuple[str, str], ...], plan: Plan | None, estimate: _TrainingCost, assumptions: list[str]
) -> None:
    from shardwise.report.economy import format_kwh, format_usd  # here: the command starts fast

    paid = (
        ("money", format_usd(estimate.usd) or "price not known"),
        ("energy", f"{format_kwh(estimate.kwh)} kWh" if estimate.kwh else "power not known"),
    )
    out.table(TextTable("Estimate", ("", ""), (*rows, *paid), note=estimate.note))
    if plan is not None and plan.prediction is not None:
        out.table(memory_table(plan.prediction.memory, plan.protection_bytes))
        out.table(parts_table(plan.prediction))
    out.table(TextTable("Assumed", ("",), tuple((a,) for a in assumptions)))


def _cost_assumptions(usd: float | None, price: float | None, kwh: float | None, watts: float | None) -> list[str]:
    """Describe what money and energy assume, where they are known."""
    assumptions = []
    if usd:
        assumptions.append(f"${price:,.2f} an hour: list price on demand in the catalogue, no discounts")
    if kwh and watts:
        assumptions.append(f"{watts / 1000:,.4g} kW all the time: the machines' highest power, cooling and network besides not counted")
    return assumptions


def training_work(tokens: str | None, epochs: float | None, unit: WorkUnit, num_parameters: int) -> TrainingWork:
    """Return the amount of training, as given or by the usual defaults.

    Raises:
        UsageError: tokens for images, epochs for text, or nothing to do.
    """
    if unit.tokens_per_sample:
        if epochs is not None:
            raise UsageError(f"--epochs {epochs:g} is for models of images; this one reads tokens, use --tokens 300e9")
        count = parse_count(tokens) if tokens is not None else TOKENS_PER_PARAMETER * num_parameters
        if count <= 0:
            raise UsageError(f"--tokens {tokens}: train on at least 1 token")
        assumption = (
            "" if tokens is not None else f"{TOKENS_PER_PARAMETER} tokens a parameter (Hoffmann et al. 2022): --tokens says another number"
        )
        return TrainingWork(count / unit.tokens_per_sample, f"{format_count(count)} tokens", assumption)
    if tokens is not None:
        raise UsageError(f"--tokens {tokens} is for models of text; this one reads no tokens, use --epochs 90")
    passes = epochs if epochs is not None else EPOCHS
    if not 0 < passes < float("inf"):
        raise UsageError(f"--epochs {passes:g}: train for more than 0 epochs")
    assumption = "" if epochs is not None else f"{EPOCHS} epochs of ImageNet-1k: --epochs says another number"
    return TrainingWork(passes * unit.samples, f"{passes:g} epochs of {unit.samples:,.0f} samples", assumption)


def default_batch_size(num_parameters: int, unit: WorkUnit, num_devices: int) -> tuple[int, str]:
    """Return a usual batch size, a power of two with at least one sample per device up to 4,096; and the assumption in words."""
    if unit.tokens_per_sample:
        wanted = next(t for limit, t in BATCH_TOKENS if num_parameters < limit) / unit.tokens_per_sample
    else:
        wanted = BATCH_IMAGES
    size = 1
    while size < wanted or (size < num_devices and size < 4096):
        size *= 2
    return size, f"{size} samples a step, usual for a model of this size: --batch says another number"


def compute_bound(setting: PricingContext, flops: float) -> tuple[float, str]:
    """Seconds of the FLOPs at the rate that large matrix products reach; and the assumption in words."""
    device = setting.cluster.device
    have = dict(device.peak_flops)
    precision = next((p for p in FASTEST if p in have), next(iter(have)))
    rate = have[precision] * device.matmul_efficiency
    seconds = flops / (rate * setting.cluster.num_devices)
    return seconds, f"{format_flops(rate)}/s a device: {format_percent(device.matmul_efficiency)} of {device.name}'s {precision} peak"


def format_duration(seconds: float) -> str:
    """Format the duration of a training.

    >>> format_duration(90 * 60), format_duration(34 * 86400), format_duration(172.3 * YEAR_S)
    ('1.50 hours', '34.0 days', '172 years')
    """
    for unit, length in (("years", YEAR_S), ("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= (2 * length if unit == "years" else length):
            count = seconds / length
            return f"{count:,.{0 if count >= 99.95 else 1 if count >= 9.995 else 2}f} {unit}"
    return f"{seconds:.3g} seconds"


def _training_flops(setting: PricingContext, work: TrainingWork) -> float:
    from shardwise.model.work import model_flops  # here: the command starts fast

    return model_flops(setting.graph) * work.samples / setting.graph.batch_size


def _plan_assumptions(plan: Plan, setting: PricingContext) -> list[str]:
    device = setting.cluster.device
    return [
        f"{plan.layout.precision} matrix products at {format_flops(device.peak(plan.layout.precision))}/s peak, "
        f"of which large ones reach {format_percent(device.matmul_efficiency)}",
        "AdamW with two moments a parameter; MFU counts the model's own FLOPs, recomputation not",
    ]


def _prediction_record(plan: Plan | None) -> dict[str, object]:
    """Return the prediction of a step as a record; all None without a plan."""
    from shardwise.report.tables import PARTS  # here: the command starts fast

    if plan is None or plan.prediction is None:
        memory = ("memory_bytes", "protection_bytes", "copies_bytes", "saving_bytes")
        return dict.fromkeys((*memory, "step_time_s", "step_time_parts_s", "mfu"))
    p = plan.prediction
    return {
        "memory_bytes": {name: getattr(p.memory, name) for name in PARTS} | {"total": p.memory.total},
        "protection_bytes": plan.protection_bytes,
        "copies_bytes": p.memory.buddy_copy_bytes,
        "saving_bytes": p.memory.async_save_bytes,
        "step_time_s": p.step_time_s,
        "step_time_parts_s": dict(p.parts),
        "mfu": p.mfu,
    }
