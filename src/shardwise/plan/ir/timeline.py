"""Timeline: spans of what happened when, per rank and lane. Simulations and measurements have the same type.

Spans are in seconds from the start of the step. Computes totals, busy and idle shares, a trace for Perfetto, JSON, and the comparison of
two timelines kind by kind. Not modelled: why a span waited.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from shardwise.errors import UsageError
from shardwise.plan.ir.notebook_html import render_html
from shardwise.units import format_seconds

FORMAT_VERSION = 1
COMPUTE_LANE = "compute"
STEP_LANE = "step"  # of a predicted step besides its program: exposed gradient reductions, the optimizer, the rest
TENSOR_LANE = "tensor"  # of a predicted step: collectives inside layers beside its computes


class Span(NamedTuple):
    """One thing on one lane of one rank. A tuple, since a timeline may have a million.

    Lanes of a program: "compute", "send", "recv", "collective", "offload", "load"; kinds: the op of the action, "send", "recv". A
    predicted step has what is beside its computes on the lane "tensor", the rest on "step". A measurement may have more.
    """

    rank: int
    lane: str
    name: str
    start_s: float
    end_s: float
    kind: str

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, repr=False)
class Timeline:
    """Spans of `num_ranks` ranks, with a `name`.

    >>> timeline = Timeline("two ranks", 2, (Span(0, "compute", "0F0", 0, 1, "F"), Span(1, "compute", "1F0", 1, 2, "F")))
    >>> timeline.total_s, timeline.busy(0), timeline.bubble
    (2, 0.5, 0.5)

    Raises:
        UsageError: a span of a rank out of range, or that ends before it starts.
    """

    name: str
    num_ranks: int
    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        for span in self.spans:
            if not 0 <= span.rank < self.num_ranks:
                raise UsageError(f"timeline {self.name}: span {span.name} is of rank {span.rank}, there are {self.num_ranks} ranks")
            if not span.start_s <= span.end_s:
                raise UsageError(f"timeline {self.name}: span {span.name} of rank {span.rank} goes from {span.start_s} s to {span.end_s} s")

    def __repr__(self) -> str:
        return f"Timeline({self.name}: {self.num_ranks} ranks, {len(self.spans)} spans, {format_seconds(self.total_s)})"

    def _repr_html_(self) -> str:
        return render_html(self)

    @cached_property
    def start_s(self) -> float:
        return min((span.start_s for span in self.spans), default=0.0)

    @cached_property
    def end_s(self) -> float:
        return max((span.end_s for span in self.spans), default=0.0)

    @cached_property
    def is_step(self) -> bool:
        """Return whether it is a whole step, with what follows its program."""
        return any(span.lane == STEP_LANE for span in self.spans)

    @cached_property
    def program(self) -> Timeline:
        """Return the timeline without spans that are no actions of its program, as a run measures it."""
        return Timeline(self.name, self.num_ranks, tuple(span for span in self.spans if span.lane not in (STEP_LANE, TENSOR_LANE)))

    @property
    def total_s(self) -> float:
        """Seconds from the first start to the last end."""
        return self.end_s - self.start_s

    @cached_property
    def lanes(self) -> tuple[tuple[str, ...], ...]:
        """Return [rank] -> its lanes, compute first, the others in the order in which they appear."""
        by_rank: list[dict[str, None]] = [{} for _ in range(self.num_ranks)]
        for span in self.spans:
            by_rank[span.rank][span.lane] = None
        return tuple(tuple(sorted(names, key=lambda lane: lane != COMPUTE_LANE)) for names in by_rank)

    def busy_s(self, rank: int, lane: str = COMPUTE_LANE) -> float:
        """Seconds in which `lane` of `rank` has at least one span; overlapping spans count once."""
        return self._busy_s.get((rank, lane), 0.0)

    @cached_property
    def _busy_s(self) -> dict[tuple[int, str], float]:
        by_lane: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
        for span in self.spans:
            by_lane[span.rank, span.lane].append((span.start_s, span.end_s))
        return {key: _covered_s(times) for key, times in by_lane.items()}

    def busy(self, rank: int, lane: str = COMPUTE_LANE) -> float:
        """Fraction of the total in which the lane is busy, 0 to 1."""
        return self.busy_s(rank, lane) / self.total_s if self.total_s else 0.0

    @property
    def bubble(self) -> float:
        """Fraction of all ranks' time in which they do not compute, 0 to 1."""
        if not self.total_s or not self.num_ranks:
            return 0.0
        return 1 - sum(self.busy_s(rank) for rank in range(self.num_ranks)) / (self.num_ranks * self.total_s)

    def to_json(self) -> str:
        """Return one line of JSON; `from_json` reads it back exactly."""
        spans = [list(span) for span in self.spans]
        head = {"kind": "shardwise timeline", "format_version": FORMAT_VERSION, "name": self.name, "num_ranks": self.num_ranks}
        return json.dumps({**head, "columns": list(Span._fields), "spans": spans})

    @classmethod
    def from_json(cls, text: str) -> Timeline:
        """Parse the text of `to_json`.

        Raises:
            UsageError: text that is not a timeline, or of a newer format.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise UsageError(f"a timeline that is not JSON: line {error.lineno}: {error.msg}") from None
        except (ValueError, RecursionError) as error:  # huge numbers or nesting
            raise UsageError(f"a timeline that cannot be read: {error}") from None
        if not isinstance(data, dict) or data.get("kind") != "shardwise timeline":
            raise UsageError('JSON that is not a timeline: it has no "kind": "shardwise timeline"')
        version = data.get("format_version")
        if version != FORMAT_VERSION:
            raise UsageError(
                f"timeline of format version {version}; this shardwise reads version {FORMAT_VERSION}, use the shardwise that wrote it"
            )
        try:
            spans = tuple(_parse_span(row) for row in data["spans"])
            return cls(str(data["name"]), int(data["num_ranks"]), spans)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"timeline with a part that cannot be read: {error!r}") from None

    def to_perfetto(self) -> str:
        """Return trace-event JSON for ui.perfetto.dev or chrome://tracing: ranks are processes, lanes are threads; microseconds."""
        events: list[dict[str, object]] = []
        thread: dict[tuple[int, str], int] = {}
        for rank, lanes in enumerate(self.lanes):
            events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
            events.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
            for number, lane in enumerate(lanes):
                thread[rank, lane] = number
                events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": lane}})
        for span in self.spans:
            events.append(
                {
                    "ph": "X",
                    "name": span.name,
                    "cat": span.kind,
                    "pid": span.rank,
                    "tid": thread[span.rank, span.lane],
                    "ts": (span.start_s - self.start_s) * 1e6,
                    "dur": span.duration_s * 1e6,
                }
            )
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"name": self.name}})


@dataclass(frozen=True, slots=True)
class KindDifference:
    """One kind of span in two timelines: numbers of spans, their total seconds, and their ratio."""

    kind: str
    count_a: int
    count_b: int
    seconds_a: float
    seconds_b: float

    @property
    def ratio(self) -> float:
        """Seconds per span of b over a; nan where either has none or a takes no time."""
        if not self.count_a or not self.count_b or not self.seconds_a:
            return float("nan")
        return (self.seconds_b / self.count_b) / (self.seconds_a / self.count_a)


def compare(a: Timeline, b: Timeline) -> tuple[KindDifference, ...]:
    """Compare kind by kind, in order of the kinds' first appearance in `a`, then `b`; for example simulated against measured."""
    kinds = dict.fromkeys(span.kind for span in (*a.spans, *b.spans))
    totals_a, totals_b = _per_kind(a.spans), _per_kind(b.spans)
    return tuple(KindDifference(kind, totals_a[kind][0], totals_b[kind][0], totals_a[kind][1], totals_b[kind][1]) for kind in kinds)


def _per_kind(spans: Iterable[Span]) -> dict[str, tuple[int, float]]:
    totals: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for span in spans:
        count, seconds = totals[span.kind]
        totals[span.kind] = (count + 1, seconds + span.duration_s)
    return totals


def _covered_s(times: list[tuple[float, float]]) -> float:
    total, until = 0.0, float("-inf")
    for start, end in sorted(times):
        if end > until:
            total += end - max(start, until)
            until = end
    return total


def _parse_span(row: list[object]) -> Span:
    rank, lane, name, start_s, end_s, kind = row
    return Span(int(rank), str(lane), str(name), float(start_s), float(end_s), str(kind))  # type: ignore[call-overload, arg-type]
