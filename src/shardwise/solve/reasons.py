"""Explain a plan in plain words with numbers: each choice against the best candidate that differs in that key, and which candidates to
show.

Nothing is stated that was not priced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from shardwise.cluster.cluster import Cluster
from shardwise.plan.bound import describe_bound
from shardwise.plan.layout import Layout
from shardwise.plan.plan import LayoutCandidate, Prediction
from shardwise.units import format_bytes, format_seconds

MAX_SHOWN = 12  # candidates that the plan lists
EXPLAINED_KEYS = (
    "inner", "data", "branch", "neighbours", "tensor", "context", "attention", "spatial", "grid", "sequence_parallel", "sample_parallel",
    "pipeline", "microbatches", "schedule", "chunks", "expert", "zero", "shard", "recompute", "segment", "offload", "precision", "threads",
    "scatter", "loss_chunks",
)  # fmt: skip
# Part of the step time that each key affects most, with its words.
STEP_PART_OF_KEY = {
    "inner": ("pipeline", "the pipeline's bubble and transfers"),
    "data": ("gradients", "summing gradients"),
    "branch": ("gradients", "summing gradients"),
    "neighbours": ("gradients", "summing gradients"),
    "tensor": ("tensor", "collectives inside layers"),
    "context": ("tensor", "collectives inside layers"),
    "attention": ("tensor", "collectives inside layers"),
    "spatial": ("tensor", "collectives inside layers"),
    "pipeline": ("pipeline", "the pipeline's bubble and transfers"),
    "microbatches": ("pipeline", "the pipeline's bubble and transfers"),
    "precision": ("compute", "compute"),
    "threads": ("compute", "compute"),
    "zero": ("optimizer", "the optimizer"),
    "scatter": ("gradients", "summing gradients"),
    "shard": ("gradients", "summing gradients"),
    "recompute": ("compute", "compute"),
    "schedule": ("pipeline", "the pipeline's bubble and transfers"),
    "chunks": ("pipeline", "the pipeline's bubble and transfers"),
    "grid": ("tensor", "collectives inside layers"),
    "sequence_parallel": ("tensor", "collectives inside layers"),
    "sample_parallel": ("tensor", "collectives inside layers"),
    "expert": ("tensor", "collectives inside layers"),
    "offload": ("compute", "compute"),
    "loss_chunks": ("compute", "compute"),
}


def explain_choices(
    layout: Layout,
    prediction: Prediction,
    candidates: Sequence[LayoutCandidate],
    refused: Sequence[LayoutCandidate],
    cluster: Cluster,
    by_hand: bool,
    bound_s: float = 0.0,
) -> tuple[tuple[str, str], ...]:
    """Return one sentence for each key that had a choice; for a layout by hand, where its time goes.

    Args:
        candidates: what fits, the best first. refused: the nearest to the choice first. bound_s: proven bound of the step; 0: unknown.
    """
    parts = dict(prediction.parts)
    step = prediction.step_time_s
    rows = [("step", prediction.time_breakdown)]
    rows.append(("bound", describe_bound(step, step / bound_s - 1 if bound_s else None, by_hand)))
    if by_hand:
        return (*rows, ("layout", "given by hand; nothing else was tried"))
    compared_keys: dict[str, str] = {}  # of what was said once, the key that it was said of
    for key in EXPLAINED_KEYS:
        if key == "segment":
            rows += _explain_segment(layout, prediction, candidates, refused)
            continue
        chosen = getattr(layout, key)
        if layout.inner and key in ("data", "tensor"):  # those of the first stage
            continue
        compared = candidates
        if key == "inner" and chosen:
            compared = [c for c in candidates if not c.layout.inner]
        if key == "grid":  # a line against grids of as many tensor ranks
            compared = [c for c in candidates if (c.layout.tensor, not c.layout.grid) == (layout.tensor, bool(layout.grid))]
        alternative = next((c for c in compared if getattr(c.layout, key) != chosen and c.prediction is not None), None)
        if alternative is not None and alternative.prediction is not None:
            compared_by = compared_keys.setdefault(str(alternative.layout), key)
            rows.append((key, _compare_with(key, layout, parts, step, alternative, "" if compared_by == key else compared_by)))
            continue
        if key in ("grid", "inner"):
            continue
        barred = next((c for c in refused if getattr(c.layout, key) != chosen and c.note), None)
        if barred is not None:
            note = barred.note.partition(";")[0]
            compared_by = compared_keys.setdefault(note, key)
            nearest = f"The nearest: {note}" if compared_by == key else f"The nearest is that of {compared_by}"
            rows.append((key, f"{key}={chosen}: nothing else was priced and fits. {nearest}"))
    rows.append(("memory", f"{format_bytes(prediction.memory.total)} {_describe_capacity(layout, cluster)}"))
    return tuple(rows)


def _describe_capacity(layout: Layout, cluster: Cluster) -> str:
    """Describe what devices have; in a mixed cluster each kind's own, which a stage on it is held to."""
    if cluster.parts and layout.pipeline > 1:
        own = ", ".join(f"{part.name} {format_bytes(part.memory_of(layout.num_ranks))}" for part in cluster.parts)
        return f"on the fullest device, each held to what it has itself: {own}"
    return f"of {format_bytes(cluster.memory_of(layout.num_ranks))} on the fullest device"


def _explain_segment(
    layout: Layout, prediction: Prediction, candidates: Sequence[LayoutCandidate], refused: Sequence[LayoutCandidate]
) -> Sequence[tuple[str, str]]:
    """Explain why layers are recomputed in segments, where they are."""
    if layout.segment == 1:
        return ()
    text = (
        f"segment={layout.segment}: {layout.segment} layers at a time are recomputed, and only the input of the first of them is saved, "
        "which takes as long as one at a time"
    )
    single = next((c for c in (*candidates, *refused) if c.layout == replace(layout, segment=1)), None)
    if single is not None and single.prediction is not None:
        text += f"; with segment=1 the fullest device needs {format_bytes(single.prediction.memory.total)}, and now "
        text += format_bytes(prediction.memory.total)
    elif single is not None and single.note:
        text += f"; with segment=1 it does not fit: {single.note.partition(';')[0]}"
    return (("segment", text),)


def _format_key(key: str, layout: Layout) -> str:
    """Format a key of a layout as it is written: a grid is the arrangement of the tensor ranks."""
    if key == "inner" and not layout.inner:
        return "stages of as many ranks each" if layout.pipeline > 1 else "one stage"
    return f"tensor={layout.grid or layout.tensor}" if key == "grid" else f"{key}={getattr(layout, key)}"


def _compare_with(key: str, layout: Layout, parts: dict[str, float], step: float, other: LayoutCandidate, compared_by: str) -> str:
    """Compare the choice of a key with the best plan of another value; `compared_by`: the key whose row has compared this plan already."""
    assert other.prediction is not None
    seconds = other.prediction.step_time_s
    ratio = seconds / step
    name, words = STEP_PART_OF_KEY[key]
    other_s = dict(other.prediction.parts).get(name, 0.0)
    text = f"{_format_key(key, layout)}: the best priced plan with {_format_key(key, other.layout)} "
    text += f"is that of {compared_by}" if compared_by else f"takes {format_seconds(seconds)} a step"
    if compared_by:
        return text
    if ratio > 1.005:
        text += f", {ratio:.2f} times as long"
    elif ratio > 0.995:
        text += ", the same within half a per cent"
    if abs(other_s - parts.get(name, 0.0)) > 0.002 * step:
        text += f"; {words} would take {format_seconds(other_s)} and not {format_seconds(parts.get(name, 0.0))}"
    return text + f" ({other.layout})"


def num_differences(one: Layout, other: Layout) -> int:
    """Number of keys in which two layouts differ, without `lend` and `begins`, which follow from the others, and `segment` where
    recomputation differs."""
    derived = {"lend", "begins"} if one.recompute == other.recompute else {"lend", "begins", "segment"}
    return sum(f.name not in derived and getattr(one, f.name) != getattr(other, f.name) for f in fields(Layout))


def distinct_candidates(candidates: Sequence[LayoutCandidate]) -> list[LayoutCandidate]:
    """Return the candidates without those whose prediction is an earlier one's: the same plan under another name, whose keys do nothing."""
    by_prediction: dict[object, LayoutCandidate] = {}
    for candidate in candidates:
        by_prediction.setdefault(candidate.prediction, candidate)
    return list(by_prediction.values())


def select_shown(candidates: Sequence[LayoutCandidate]) -> list[LayoutCandidate]:
    """Return the best few candidates, and the best with every other value of every key, so that every choice can be compared."""
    shown = list(candidates[:3])
    covered = {value for c in shown for value in _key_values(c.layout)}
    for candidate in candidates[3:]:
        new = _key_values(candidate.layout) - covered
        if new and len(shown) < MAX_SHOWN:
            covered |= new
            shown.append(candidate)
    return shown


def _key_values(layout: Layout) -> set[tuple[str, object]]:
    """Return every key with its value; of stages with different arrangements only that they have them."""
    inner = bool(layout.inner)
    return {(f.name, inner if f.name == "inner" else getattr(layout, f.name)) for f in fields(Layout) if f.name != "begins"}
