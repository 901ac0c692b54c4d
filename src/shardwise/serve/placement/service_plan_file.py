"""Service plans as TOML files, as `shardwise serve plan -o` writes them; reading returns an equal plan."""

from __future__ import annotations

from typing import Any

from shardwise.errors import ConfigError
from shardwise.plan.ir.toml_text import parse_document, quote_key, quote_string
from shardwise.serve.placement.assignment_milp import Demand, ServicePlan, VariantChoice, WorkerShare

KIND = "shardwise serve plan"


def format_service_plan(plan: ServicePlan, workflow: str, machines: str = "") -> str:
    """Format a plan as TOML; `workflow` and `machines`: the files that it was made for."""
    ask = plan.demand
    lines = [
        f'kind = "{KIND}"',
        f"workflow = {quote_string(workflow)}",
        *([f"cluster = {quote_string(machines)}"] if machines else []),
        f"rate = {ask.rate!r}  # requests/s",
        f"accuracy = {ask.accuracy!r}  # at least; the choice has {plan.accuracy:g}",
        f"latency_s = {ask.latency_s!r}  # 0: throughput alone",
        f"percentile = {ask.percentile!r}",
        f"shared = {str(ask.allows_shared_workers).lower()}",
        f"most_spot = {ask.max_spot_share!r}",
        "",
        "[prediction]",
        f"accuracy = {plan.accuracy!r}",
        f"compute_per_hour = {plan.compute_per_hour!r}  # dollars",
        f"communication_per_hour = {plan.communication_per_hour!r}",
        f"latency_s = {plan.latency_s!r}",
        f"bound_gap = {plan.bound_gap!r}",
    ]
    for choice in plan.choices:
        lines += ["", f"[operator.{quote_key(choice.operator)}]", f"variant = {quote_string(choice.variant)}"]
        rows: dict[str, list[str]] = {}
        for s in choice.shares:
            values = f"machines = {s.machines!r}, load = {s.load!r}, batch = {s.batch}, busy = {s.utilisation!r}"
            rows.setdefault(s.worker, []).append(f"{{ {values} }}")
        for worker, shares in rows.items():  # several shares of a worker differ in utilisation
            several = f"[{', '.join(shares)}]"
            lines.append(f"workers.{quote_key(worker)} = {shares[0] if len(shares) == 1 else several}")
    return "\n".join(lines) + "\n"


def parse_service_plan(text: str, where: str = "plan") -> tuple[ServicePlan, str, str]:
    """Parse (plan, file of its workflow, file of its machines or "").

    Raises:
        ConfigError: no such file, or an incomplete one.
    """
    data = parse_document(text, where)
    if data.get("kind") != KIND:
        raise ConfigError(
            f"{where} is no plan of a workflow: it has no kind = {KIND!r}; `shardwise serve plan WORKFLOW.toml -o` writes one"
        )
    try:
        ask = Demand(
            rate=data["rate"], accuracy=data["accuracy"], latency_s=data["latency_s"], percentile=data["percentile"],
            allows_shared_workers=data["shared"], max_spot_share=data["most_spot"],
        )  # fmt: skip
        choices = tuple(_parse_choice(name, row) for name, row in data["operator"].items())
        p = data["prediction"]
        placed = ServicePlan(
            ask, p["accuracy"], choices, p["compute_per_hour"], p["communication_per_hour"], p["latency_s"], p["bound_gap"]
        )
        return placed, data["workflow"], data.get("cluster", "")
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{where} lacks {error}; `shardwise serve plan WORKFLOW.toml -o` writes a whole one") from error


def _parse_choice(name: str, row: dict[str, Any]) -> VariantChoice:
    shares = ((worker, s) for worker, value in row["workers"].items() for s in (value if isinstance(value, list) else [value]))
    return VariantChoice(name, row["variant"], tuple(WorkerShare(w, s["machines"], s["load"], s["batch"], s["busy"]) for w, s in shares))
