"""Service plans as TOML files, as `weft serve plan -o` writes them; reading returns an equal plan."""

from __future__ import annotations

from typing import Any

from weft.cluster import toml
from weft.errors import ConfigError
from weft.plan.toml_text import quoted, quoted_key
from weft.serve.assign import Ask, Choice, Placed, Share

KIND = "weft serve plan"


def format_placed(placed: Placed, workflow: str, machines: str = "") -> str:
    """Format a plan as TOML; `workflow` and `machines`: the files that it was made for."""
    ask = placed.ask
    lines = [
        f'kind = "{KIND}"',
        f"workflow = {quoted(workflow)}",
        *([f"cluster = {quoted(machines)}"] if machines else []),
        f"rate = {ask.rate!r}  # requests/s",
        f"accuracy = {ask.accuracy!r}  # at least; the choice has {placed.accuracy:g}",
        f"latency_s = {ask.latency_s!r}  # 0: throughput alone",
        f"percentile = {ask.percentile!r}",
        f"shared = {str(ask.shared).lower()}",
        f"most_spot = {ask.most_spot!r}",
        "",
        "[prediction]",
        f"accuracy = {placed.accuracy!r}",
        f"compute_per_hour = {placed.compute_per_hour!r}  # dollars",
        f"communication_per_hour = {placed.communication_per_hour!r}",
        f"latency_s = {placed.latency_s!r}",
        f"bound_gap = {placed.bound_gap!r}",
    ]
    for choice in placed.choices:
        lines += ["", f"[operator.{quoted_key(choice.operator)}]", f"variant = {quoted(choice.variant)}"]
        rows: dict[str, list[str]] = {}
        for s in choice.shares:
            values = f"machines = {s.machines!r}, load = {s.load!r}, batch = {s.batch}, busy = {s.busy!r}"
            rows.setdefault(s.worker, []).append(f"{{ {values} }}")
        for worker, shares in rows.items():  # several shares of a worker differ in utilisation
            several = f"[{', '.join(shares)}]"
            lines.append(f"workers.{quoted_key(worker)} = {shares[0] if len(shares) == 1 else several}")
    return "\n".join(lines) + "\n"


def parse_placed(text: str, where: str = "plan") -> tuple[Placed, str, str]:
    """Parse (plan, file of its workflow, file of its machines or "").

    Raises:
        ConfigError: no such file, or an incomplete one.
    """
    data = toml.parse(text, where)
    if data.get("kind") != KIND:
        raise ConfigError(f"{where} is no plan of a workflow: it has no kind = {KIND!r}; `weft serve plan WORKFLOW.toml -o` writes one")
    try:
        ask = Ask(
            rate=data["rate"], accuracy=data["accuracy"], latency_s=data["latency_s"], percentile=data["percentile"],
            shared=data["shared"], most_spot=data["most_spot"],
        )  # fmt: skip
        choices = tuple(_choice(name, row) for name, row in data["operator"].items())
        p = data["prediction"]
        placed = Placed(ask, p["accuracy"], choices, p["compute_per_hour"], p["communication_per_hour"], p["latency_s"], p["bound_gap"])
        return placed, data["workflow"], data.get("cluster", "")
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{where} lacks {error}; `weft serve plan WORKFLOW.toml -o` writes a whole one") from error


def _choice(name: str, row: dict[str, Any]) -> Choice:
    shares = ((worker, s) for worker, value in row["workers"].items() for s in (value if isinstance(value, list) else [value]))
    return Choice(name, row["variant"], tuple(Share(w, s["machines"], s["load"], s["batch"], s["busy"]) for w, s in shares))
