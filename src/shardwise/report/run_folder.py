"""Read the run folder of `shardwise train` as the content of a page.

Missing files are left out, as in an interrupted run; so are damaged lines of the metrics, which the page tells. Any other file with the
wrong content is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from shardwise.cluster.cluster import Cluster
from shardwise.errors import UsageError
from shardwise.plan.ir.metric_lines import MetricLines, read_metric_lines
from shardwise.plan.ir.timeline import Span, Timeline
from shardwise.plan.ir.toml_text import parse_json
from shardwise.plan.plan_file import read_plan
from shardwise.report.cluster_tables import cluster_tables
from shardwise.report.page import PageSubject
from shardwise.units import format_bytes, format_percent, format_seconds

PLAN, CONFIG, METRICS, TIMELINE, SAMPLE, PAGE = "plan.toml", "config.toml", "metrics.jsonl", "timeline.json", "sample.txt", "report.html"
MACHINE, SUMMARY = "machine.toml", "summary.json"

FILE_MEANINGS: tuple[tuple[str, str], ...] = (
    (PLAN, "the plan: edit it, and train, verify or simulate it"),
    (CONFIG, "the whole configuration of this run"),
    (METRICS, "one line of numbers a step"),
    (TIMELINE, "when each rank did what; opens in ui.perfetto.dev"),
    (MACHINE, "what it was planned for, as `--cluster` takes it"),
    (SAMPLE, "text that the trained model wrote"),
    (PAGE, "this page"),
    ("model.safetensors", "the trained weights, under the model's own names"),
    (SUMMARY, "the result in numbers, as `shardwise train --json` prints it"),
    ("corpus.bin", "the training text"),
    ("data", "the training data: token ids, or paths of images"),
    ("corpus.json", "source of the data, and its digest"),
    ("logs", "the last records of each rank (flight recorder)"),
    ("checkpoints", "to resume from; written atomically, with checksums"),
)


def read_folder(folder: Path) -> PageSubject:
    """Read a run folder.

    Raises:
        UsageError: no such folder, or no run folder; ConfigError: a plan that cannot be read.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; name the run folder that `shardwise train` printed, or a plan.toml")
    if not any((folder / name).exists() for name in (PLAN, METRICS, CONFIG)):
        raise UsageError(f"{folder} is not a run folder: it has none of {PLAN}, {METRICS}, {CONFIG}")
    plan = read_plan(folder / PLAN) if (folder / PLAN).exists() else None
    metrics, lines = read_metrics(folder / METRICS), _read_metric_lines(folder / METRICS)
    machine = Cluster.parse(str(folder / MACHINE)) if (folder / MACHINE).exists() else None
    timeline = folder / TIMELINE
    lead = f"{len(metrics)} steps recorded" if metrics else "no step recorded yet"
    if damage := lines.describe_damage(max((row["step"] for row, _ in lines.rows), default=0)):
        lead += f" ({METRICS}: {damage})"
    summary = _read_summary(folder / SUMMARY)
    waiting, saving, copies = straggler_words(summary), saving_words(summary), copies_words(summary)
    lead = f"{lead} in {folder.name}" + (f"; the others waited for {waiting}" if waiting else "") + (f"; {saving}" if saving else "")
    return PageSubject(
        title=f"{plan.model if plan else folder.name}",
        lead=lead + (f"; copied to another host: {copies}" if copies else ""),
        plan=plan,
        metrics=metrics,
        levels=read_levels(folder / SUMMARY),
        measured=read_trace(timeline) if timeline.exists() else None,
        machine=tuple((a, b) for a, b in cluster_tables(machine)[0].rows) if machine else (),
        memory_limit_bytes=machine.memory_of(plan.layout.num_ranks) if machine and plan else 0.0,
        files=list_files(folder),
        config=_read_text(folder / CONFIG),
        sample=_read_text(folder / SAMPLE),
        next_commands=(f"shardwise train {folder / CONFIG}      # resumes from the last checkpoint", f"shardwise simulate {folder / PLAN}"),
    )


def list_files(folder: Path) -> tuple[tuple[str, str], ...]:
    """List a run folder: name, and size with the file's meaning."""
    meanings = dict(FILE_MEANINGS)
    rows = []
    order = [name for name, _ in FILE_MEANINGS]
    for path in sorted(folder.iterdir(), key=lambda p: (order.index(p.name) if p.name in order else len(order), p.name)):
        if path.name.startswith("."):
            continue
        size_bytes = sum(p.stat().st_size for p in path.rglob("*") if p.is_file()) if path.is_dir() else path.stat().st_size
        meaning = meanings.get(path.name, "")
        rows.append((path.name + ("/" if path.is_dir() else ""), f"{format_bytes(size_bytes)}{', ' + meaning if meaning else ''}"))
    return tuple(rows)


def read_metrics(path: Path) -> tuple[dict[str, float], ...]:
    """Read metrics.jsonl: numbers by name, a row for each step; texts, non-finite numbers and damaged lines are left out."""
    return tuple({key: float(x) for key, x in row.items() if _is_number(x)} for row, _ in _read_metric_lines(path).rows)


def _read_metric_lines(path: Path) -> MetricLines:
    try:
        return read_metric_lines(path.read_bytes())
    except FileNotFoundError:
        return MetricLines([], [])
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error}") from None


def read_levels(path: Path) -> tuple[tuple[str, float], ...]:
    """Read losses to compare with from the summary of a finished run: the loss of byte frequencies alone."""
    loss: Any = _read_summary(path).get("byte_frequency_loss")
    return (("byte frequencies alone", float(loss)),) if _is_number(loss) else ()


def straggler_words(summary: Mapping[str, Any]) -> str:
    """Describe stragglers, and the share of the run that the others waited for each; empty without stragglers.

    >>> straggler_words({"waited_for": {"3": 0.12}})
    'rank 3, 12.0 % of the time'
    """
    shares = summary.get("waited_for")
    if not isinstance(shares, dict):
        return ""
    return " and ".join(f"rank {rank}, {format_percent(share)} of the time" for rank, share in shares.items() if _is_number(share))


def saving_words(summary: Mapping[str, Any]) -> str:
    """Describe the cost of checkpoints, and the expected loss by a failure of all ranks; empty where nothing was saved.

    >>> saving_words({"saving": {"saves": 3, "bytes": 6e6, "waited_s": 0.2, "beside": 2, "writing_s": 1.5, "slower_s": 0.0}})
    '3 checkpoints of 1.91 MiB, for which training waited 200 ms; 1.50 s of writing beside it'
    """
    costs = summary.get("saving")
    if not isinstance(costs, dict) or not costs.get("saves"):
        return ""
    number, size = costs["saves"], format_bytes(costs["bytes"] / costs["saves"])
    words = f"{number} checkpoint{'s' if number > 1 else ''} of {size}, for which training waited {format_seconds(costs['waited_s'])}"
    if costs.get("beside"):
        words += f"; {format_seconds(costs['writing_s'])} of writing beside it"
        words += f", which made steps {format_seconds(costs['slower_s'])} longer" if costs.get("slower_s") else ""
    if costs.get("failure_loses_s") and number > 1:
        interval, loss = format_seconds(costs["every_s"]), format_seconds(costs["failure_loses_s"])
        words += f"; one every {interval}, so that a failure loses {loss} on average"
    return words


def copies_words(summary: Mapping[str, Any]) -> str:
    """Describe buddy copies of state to another host: interval, bytes of a rank, time waited; empty without copies.

    >>> copies_words({"copies": {"every": 4, "bytes": 3 << 20, "waited_s": 0.25}})
    'every 4 steps, 3.00 MiB of a rank, which waited 250 ms for it in all'
    """
    costs = summary.get("copies")
    if not isinstance(costs, dict) or not all(_is_number(costs.get(key)) for key in ("every", "bytes", "waited_s")):
        return ""
    interval = f"every {costs['every']} steps" if costs["every"] > 1 else "every step"
    return f"{interval}, {format_bytes(costs['bytes'])} of a rank, which waited {format_seconds(costs['waited_s'])} for it in all"


def _read_summary(path: Path) -> dict[str, Any]:
    try:
        data = parse_json(_read_text(path) or "{}")
    except ValueError:
        data = None
    if not isinstance(data, dict):
        raise UsageError(f"{path} is not the summary of a run; remove it, and the page does without")
    return data


def read_trace(path: Path) -> Timeline:
    """Read a timeline from its own JSON or from trace events (microseconds), as `Timeline.to_perfetto` writes them.

    Raises:
        UsageError: the file is neither.
    """
    text = _read_text(path)
    try:
        data = parse_json(text)
        if not isinstance(data, dict) or "traceEvents" not in data:
            return Timeline.from_json(text)
        events = [event for event in data["traceEvents"] if isinstance(event, dict)]
        threads = {(e["pid"], e["tid"]): str(e["args"]["name"]) for e in events if e.get("name") == "thread_name"}
        spans = tuple(_span_from_event(e, threads) for e in events if e.get("ph") == "X")
        num_ranks = 1 + max((int(e["pid"]) for e in events), default=-1)
        return Timeline(str(data.get("otherData", {}).get("name", path.stem)), num_ranks, spans)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is not a timeline that can be read: {error!r}") from None


def _span_from_event(event: Mapping[str, Any], threads: Mapping[tuple[int, int], str]) -> Span:
    start_s = float(event["ts"]) / 1e6
    lane = threads.get((event["pid"], event["tid"]), f"lane {event['tid']}")
    return Span(int(event["pid"]), lane, str(event["name"]), start_s, start_s + float(event["dur"]) / 1e6, str(event.get("cat", "")))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
