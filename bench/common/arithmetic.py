"""From seconds to rows and verdicts: ratios by round, their median and spread, targets met or missed.

In: seconds a step of every contender in every round. Out: rows as `scripts/bench --json` writes them. Only standard library, so that
it is tested without measuring anything. Not modelled: significance; the spread over rounds is shown instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

SAME_LOSS = 1e-3  # relative, over all steps in float32; orders of summation alone reach 1e-5


@dataclass(frozen=True, slots=True)
class Series:
    """One contender's figures: wall and processor seconds a step by round (all ranks' processor time together), losses by step."""

    name: str
    seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    memory_bytes: int = 0  # largest resident set of a rank
    plan: str = ""
    precision: str = "float32"
    settings: str = "equal"
    predicted: float = 0.0  # seconds a step by shardwise's plan; 0 for peers

    def __post_init__(self) -> None:
        if not self.seconds or min(self.seconds) <= 0:
            raise ValueError(f"{self.name}: {len(self.seconds)} rounds, seconds {self.seconds}; every round takes time")

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def missed(self) -> float:
        """By what part of the measured time the prediction is off; below 0 it is too low.

        >>> Series("shardwise", (0.8, 1.0, 1.2), predicted=0.9).missed
        -0.1
        """
        return round(self.predicted / self.median - 1, 6)


@dataclass(frozen=True, slots=True)
class Row:
    """shardwise beside one peer. `ratio` is the peer's time over shardwise's, so more than 1 means shardwise is better; median over
    rounds."""

    case: str
    shardwise: float
    peer: float
    peer_name: str
    ratio: float
    unit: str = "s/step"
    kind: str = ""
    ratio_min: float = 0.0
    ratio_max: float = 0.0
    cpu_ratio: float = 0.0
    rounds: int = 0
    shardwise_name: str = "shardwise"
    shardwise_plan: str = ""
    precision: str = "float32"
    peer_precision: str = "float32"
    settings: str = "equal"
    peer_settings: str = "equal"
    loss_difference: float = 0.0


def ratios(shardwise: Sequence[float], peer: Sequence[float]) -> list[float]:
    """The peer's time over shardwise's, round by round: what disturbs one round disturbs both.

    >>> ratios([1.0, 2.0], [1.5, 2.0])
    [1.5, 1.0]
    """
    if len(shardwise) != len(peer):
        raise ValueError(f"{len(shardwise)} rounds of shardwise beside {len(peer)} of the peer; only rounds measured together are compared")
    return [theirs / ours for ours, theirs in zip(shardwise, peer, strict=True)]


def loss_difference(a: Sequence[float], b: Sequence[float]) -> float:
    """Largest difference of two loss curves, relative to the first, over the steps that both have; infinite if there are none."""
    shared = list(zip(a, b, strict=False))
    return max((abs(x - y) / abs(x) for x, y in shared), default=float("inf"))


def row(case: str, kind: str, shardwise: Series, peer: Series) -> Row:
    """Compare one contender of shardwise's with one peer's, both measured in the same rounds."""
    by_round = ratios(shardwise.seconds, peer.seconds)
    cpu = ratios(shardwise.cpu_seconds, peer.cpu_seconds) if shardwise.cpu_seconds and peer.cpu_seconds else [0.0]
    return Row(
        case=case,
        shardwise=shardwise.median,
        peer=peer.median,
        peer_name=peer.name,
        ratio=median(by_round),
        kind=kind,
        ratio_min=min(by_round),
        ratio_max=max(by_round),
        cpu_ratio=median(cpu),
        rounds=len(by_round),
        shardwise_name=shardwise.name,
        shardwise_plan=shardwise.plan,
        precision=shardwise.precision,
        peer_precision=peer.precision,
        settings=shardwise.settings,
        peer_settings=peer.settings,
        loss_difference=loss_difference(peer.losses, shardwise.losses),
    )


@dataclass(frozen=True, slots=True)
class Target:
    """What has to hold for every row that `applies`: ratio at least `at_least`."""

    name: str
    at_least: float
    applies: Callable[[Row], bool]


@dataclass(frozen=True, slots=True)
class Verdict:
    """`met` is None where nothing was measured; then `why` says so. Otherwise `ratio` is the worst row's."""

    target: str
    at_least: float
    met: bool | None
    ratio: float
    case: str
    why: str = ""

    @property
    def word(self) -> str:
        return {True: "met", False: "missed", None: "not measured"}[self.met]


def judge(targets: Sequence[Target], rows: Sequence[Row], skipped: Mapping[str, str] | None = None) -> list[Verdict]:
    """One verdict a target and model (the part of `case` before the comma), by the worst of its rows."""
    verdicts = []
    reasons = "; ".join(f"{name}: {reason}" for name, reason in (skipped or {}).items())
    for target in targets:
        found = [r for r in rows if target.applies(r)]
        models = dict.fromkeys(r.case.partition(",")[0] for r in found)
        if not models:
            verdicts.append(Verdict(target.name, target.at_least, None, 0.0, "", reasons or "no such row in this run"))
        for model in models:
            worst = min((r for r in found if r.case.partition(",")[0] == model), key=lambda r: r.ratio)
            met = worst.ratio >= target.at_least
            why = f"{worst.shardwise:.3f} s beside {worst.peer:.3f} s of {worst.peer_name}"
            verdicts.append(Verdict(target.name, target.at_least, met, worst.ratio, worst.case, why))
    return verdicts


def wrong(rows: Sequence[Row], skipped: Mapping[str, str], name: Callable[[Row], str] = lambda r: r.case) -> list[str]:
    """What must not be: shardwise that does not run, or loss curves that part. `name`: what a row is called."""
    out = [f"{contender}: {reason}" for contender, reason in skipped.items() if contender.startswith("shardwise")]
    return out + [
        f"{name(r)}: the losses of {r.shardwise_name} and {r.peer_name} differ by {r.loss_difference:.1e}, more than {SAME_LOSS:.0e}"
        for r in rows
        if not r.loss_difference <= SAME_LOSS
    ]


def as_json(header: Mapping[str, Any], rows: Sequence[Row], verdicts: Sequence[Verdict], skipped: Mapping[str, str]) -> dict[str, Any]:
    """The object that `--json FILE` holds."""
    return {
        "header": dict(header),
        "rows": [asdict(r) for r in rows],
        "targets": [asdict(v) | {"word": v.word} for v in verdicts],
        "skipped": dict(skipped),
    }
