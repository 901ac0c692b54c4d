"""Summary of a pipeline schedule: time, bubble, utilisation and memory in microbatches. In: a checked program, and the times of a stage's
forward and backward. Out: a `Summary`. Not modelled: unequal stages, and gradient reduction.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.errors import UsageError
from shardwise.plan.ir.program import Compute, ComputeOp, Program, Value
from shardwise.plan.ir.timeline import COMPUTE_LANE, Timeline
from shardwise.simulate.clock import simulate
from shardwise.simulate.memory import in_flight

EXAMPLE = "f=1,b=2"
_MIN_TIME = 1e-30  # smaller times would overflow or underflow in sums and ratios
_LETTERS = {"f": "a forward", "b": "a backward", "w": "its weights part", "c": "a transfer"}


@dataclass(frozen=True, slots=True)
class MicrobatchTimes:
    """Times of one microbatch on all of a rank's stages, in any unit.

    `backward`: the full backward, or its input part if `weights` is given; by default each part is half. `transfer`: of an
    activation or its gradient between two ranks.

    >>> MicrobatchTimes.parse("f=1,b=2,w=1").time_of(ComputeOp.B), MicrobatchTimes.parse("f=1,b=2").time_of(ComputeOp.W)
    (3.0, 1.0)
    """

    forward: float
    backward: float
    weights: float | None = None
    transfer: float = 0.0

    @classmethod
    def parse(cls, text: str) -> MicrobatchTimes:
        """Read `f=1,b=2,w=1,c=0.1`.

        Raises:
            UsageError: an unknown or repeated letter, no number, f or b missing, or no time above zero.
        """
        times: dict[str, float] = {}
        for word in text.replace(",", " ").split():
            key, eq, value = word.partition("=")
            if not eq or key not in _LETTERS:
                raise UsageError(f"--times word {word!r} is not f=, b=, w= or c= with a number; for example {EXAMPLE}")
            if key in times:
                raise UsageError(f"--times {text!r} gives {key} ({_LETTERS[key]}) twice")
            try:
                times[key] = float(value)
            except ValueError:
                raise UsageError(f"--times {word}: {value!r} is not a number; for example {key}=1.5") from None
            if not (times[key] == 0 or _MIN_TIME <= times[key] <= 1 / _MIN_TIME):
                raise UsageError(f"--times {word}: a time is 0 or from {_MIN_TIME:g} to {1 / _MIN_TIME:g}, in any unit")
        if missing := [f"{key} ({_LETTERS[key]})" for key in "fb" if key not in times]:
            raise UsageError(f"--times {text!r} lacks {' and '.join(missing)}; for example {EXAMPLE}")
        if not times["f"] + times["b"] + times.get("w", 0.0):
            raise UsageError(f"--times {text!r}: nothing takes any time; for example {EXAMPLE}")
        return cls(times["f"], times["b"], times.get("w"), times.get("c", 0.0))

    def time_of(self, op: ComputeOp) -> float:
        """Return the time of one operation."""
        half = self.backward / 2
        match op:
            case ComputeOp.F | ComputeOp.R:
                return self.forward
            case ComputeOp.B:
                return self.backward + (self.weights or 0.0)
            case ComputeOp.I:
                return half if self.weights is None else self.backward
            case ComputeOp.W:
                return half if self.weights is None else self.weights


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of a schedule.

    `bubble` is the idle fraction of all ranks' time, as of every timeline; `bubble_in_window` that within the ranks' own windows (Qi et
    al.): they differ where ranks start and end one after another. `peak_in_flight` and `weights_held` are by rank, in units of one rank's
    share of the model: with two stages per rank each counts half.
    """

    timeline: Timeline
    time: float
    bubble: float
    bubble_in_window: float
    peak_in_flight: tuple[float, ...]
    weights_held: tuple[float, ...]


def summarize_schedule(program: Program, times: MicrobatchTimes, chunks: int = 1) -> Summary:
    """Summarize a program in which every rank has `chunks` equal stages (of each replica).

    >>> from shardwise.schedules import build
    >>> summary = summarize_schedule(build("1f1b", 4, 8), MicrobatchTimes(1, 2))
    >>> summary.time, summary.peak_in_flight
    (33.0, (4, 3, 2, 1))
    """

    def compute_s(action: Compute) -> float:
        return seconds[action.op]

    def transfer_s(value: Value, source: int, to: int) -> float:
        return times.transfer if value.name in ("x", "g") else 0.0

    seconds = {op: times.time_of(op) / chunks for op in ComputeOp}
    timeline = simulate(program, compute_s, transfer_s)
    return Summary(
        timeline,
        timeline.total_s,
        timeline.bubble,
        bubble_in_window(timeline),
        tuple(_share_of_rank(count, chunks) for count in in_flight(program)),
        tuple(_share_of_rank(len(stages), chunks) for stages in program.stages_of),
    )


def _share_of_rank(count: int, chunks: int) -> float:
    return count // chunks if count % chunks == 0 else count / chunks


def window_s(timeline: Timeline, rank: int) -> float:
    """Seconds from a rank's first compute to the end of its last action."""
    return _windows_s(timeline)[rank]


def bubble_in_window(timeline: Timeline) -> float:
    """Return the mean idle fraction of the ranks within the longest rank's window, 0 to 1.

    Qi et al., ICLR 2024, section 5.3: 1 - m(F + I + W) / longest, where all ranks have equal work.
    """
    longest_s = max(_windows_s(timeline), default=0.0)
    if not longest_s:
        return 0.0
    return 1 - sum(timeline.busy_s(rank) for rank in range(timeline.num_ranks)) / (timeline.num_ranks * longest_s)


def _windows_s(timeline: Timeline) -> list[float]:
    starts, ends = [float("inf")] * timeline.num_ranks, [float("-inf")] * timeline.num_ranks
    for span in timeline.spans:
        if span.lane == COMPUTE_LANE:
            starts[span.rank] = min(starts[span.rank], span.start_s)
        if span.lane != "send":  # a send occupies the link, after its rank has ended
            ends[span.rank] = max(ends[span.rank], span.end_s)
    return [end - start if start <= end else 0.0 for start, end in zip(starts, ends, strict=True)]
