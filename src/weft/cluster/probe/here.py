"""Measurement of this machine as a `Cluster`. In: its fingerprint. Out: the cluster. [torch]"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch

from weft.cluster.cluster import BESIDES, SCORES, WEIGHTS, Cluster, Device, Level, Link, Speed, Table
from weft.cluster.probe.machine import cpu_model, memory_bytes, num_cores, num_waiting
from weft.cluster.probe.operators import CHANNELS, NARROW, SAMPLES, TAPS, WIDE, few_rows
from weft.cluster.probe.rank import measure_alone, measure_rank
from weft.cluster.probe.transfers import measure_messages
from weft.cluster.probe.waits import measure_waits

BUSY = "while the machine was busy"
LEAST_SHARE = 0.85  # minimum share of its cores that a rank gets while it multiplies; below it the machine was busy
MESSAGE_RANKS = (2, 4)
NOISE = 0.1  # fraction of a figure below which the remainder after subtracting another is noise


def measure_here(mark: str, quick: bool) -> Cluster:
    """Measure this machine and store the fingerprint `mark`: its GPUs, or its cores if it has none."""
    return _of_gpus(mark) if torch.cuda.device_count() else _of_processor(mark, quick)


def _of_gpus(mark: str) -> Cluster:
    """Measure the GPUs of one host: their products and copies; links are assumed, NVLink if peers can access each other."""
    count = torch.cuda.device_count()
    properties = torch.cuda.get_device_properties(0)
    figures = measure_alone(torch.device("cuda", 0))
    torch.cuda.empty_cache()  # this process may start ranks that need its memory
    peers = count > 1 and torch.cuda.can_device_access_peer(0, 1)
    link = Link(3.4e-6, 250e9 if peers else 12e9, source="assumed: peer access" if peers else "assumed: no peer access, through the host")
    speed = _speed(1, 0, figures)
    return Cluster(
        "here",
        _device(properties.name, "gpu", speed, float(properties.total_memory), 0.8e9),
        (Level("node", count, link),),
        speeds=(speed,) if count == 1 else tuple(_speed(ranks, 0, figures) for ranks in range(1, count + 1)),
        fingerprint=mark,
    )


def _of_processor(mark: str, quick: bool) -> Cluster:
    from weft.world.launch import Launcher

    usable = num_cores()
    busy = num_waiting()
    source = "measured"
    if busy >= usable:
        source += f" {BUSY} (load {busy:.1f} on {usable} cores); measure again when it is idle"
    ranks = min(max(2, usable), 4) if quick else min(max(4, usable), 8)
    message_ranks = MESSAGE_RANKS if quick or usable < 8 else (*MESSAGE_RANKS, 8)
    with Launcher(preload=(measure_rank.__module__, measure_messages.__module__, measure_waits.__module__)) as launcher:
        ranks_measured = launcher.launch(measure_rank, ranks, usable, quick)
        waits = launcher.launch(measure_waits, min(usable, ranks))[0] if min(usable, ranks) > 1 else 0.0
        message_tables = [table for count in message_ranks for table in launcher.launch(measure_messages, count, quick)[0]]
    share = min(share for result in ranks_measured for *_, share in result["speeds"])
    if BUSY not in source and share < LEAST_SHARE:
        source += f" {BUSY} (ranks got {share:.0%} of their cores); measure again when it is idle"
    speeds = tuple(
        replace(speed, waits=waits if speed.ranks > 1 else 0.0)
        for speed in _speeds([speed for result in ranks_measured for speed in result["speeds"]])
    )
    tables = tuple(Table(name, n, _rising(dict(points))) for name, n, points in sorted(message_tables, key=lambda table: table[:2]))
    all_reduce = next(t for t in tables if t.collective == "all_reduce" and t.ranks == 2)
    size, seconds = all_reduce.points[-1]
    single_core = next(s for s in speeds if (s.ranks, s.threads) == (1, 1))
    return Cluster(
        "here",
        _device(cpu_model(), "cpu", single_core, memory_bytes() / usable, ranks_measured[0]["scratch"], source),
        (Level("node", usable, Link(all_reduce.points[0][1] / 2, size / seconds, source="measured between two ranks")),),
        speeds=speeds,
        tables=tables,
        fingerprint=mark,
    )


def _speeds(measured: Iterable[tuple[int, int, dict[str, float], float]]) -> tuple[Speed, ...]:
    """Return one speed per setting (ranks, threads), of the slowest rank, for which the others wait."""
    speeds: dict[tuple[int, int], dict[str, float]] = {}
    for ranks, threads, figures, _ in measured:
        slowest = speeds.setdefault((ranks, threads), dict(figures))
        slowest.update({key: max(slowest[key], s) for key, s in figures.items()})
    alone = speeds[1, 1]
    for (ranks, _), slowest in speeds.items():
        if ranks == 1:
            # More threads never slow a large operator down on an idle machine; if they did, something else ran.
            slowest.update({key: min(s, alone[key]) for key, s in slowest.items()})
    return tuple(_speed(*key, speeds[key]) for key in sorted(speeds))


def _device(name: str, kind: str, speed: Speed, memory: float, scratch: float, source: str = "measured") -> Device:
    """Return a device whose peak is its measured rate."""
    return Device(name, kind, speed.flops, memory, speed.memory_bandwidth_bytes_per_s, 1.0, speed.launch_s, scratch, source)


def _speed(ranks: int, threads: int, seconds: Mapping[str, float]) -> Speed:
    """Convert the seconds per unit of each benchmark case to a `Speed`."""
    seconds = dict(seconds)
    for first, coefficient, dependent, units in _pairs(seconds, threads):
        seconds[first], seconds[dependent] = apart(seconds[first], coefficient, seconds[dependent], units)
    flops = tuple((key.partition(".")[2], 1 / s) for key, s in seconds.items() if key.startswith("linear."))
    rates = tuple((key, 1 / s) for key, s in seconds.items() if not key.startswith(("linear.", "launch", "elementwise")))
    return Speed(ranks, threads, flops, 1 / seconds["elementwise"], seconds["launch"], rates)


def _pairs(seconds: Mapping[str, float], threads: int) -> Iterator[tuple[str, float, str, float]]:
    """Yield pairs of cases that each include work of the other: the arguments of `separate_times`, with names in place of seconds."""
    for key in sorted(seconds):
        suffix = key.partition(".")[2]
        if key.startswith(SCORES):  # an element of a head is 4 FLOPs of a score
            yield f"attention.{suffix}", 1 / (4 * WIDE), key, 4 * NARROW
        elif key.startswith(BESIDES):  # 6 FLOPs an element, tap and channel for the bytes of 5 elements
            each = 6 * CHANNELS / (5 * (2 if suffix.endswith("bfloat16") else 4))
            yield suffix, 1 / (each * TAPS), key, each
        elif key.startswith(WEIGHTS):
            yield f"{suffix}.float32", 2 / (SAMPLES * threads) if suffix == "recurrent" else 0.0, key, few_rows(suffix)


def apart(first: float, beside: float, other: float, units: float) -> tuple[float, float]:
    """Solve `first` = x + beside y and `other` = units x + y for (x, y), with lower bounds of `NOISE` times the measurement.

    >>> [round(s, 9) for s in apart(3.0 + 0.5 * 2.0, 0.5, 0.25 * 3.0 + 2.0, 0.25)], apart(1.0, 0.0, 4.0, 8.0)
    ([3.0, 2.0], (1.0, 0.4))
    """
    x = max((first - beside * other) / (1 - beside * units), NOISE * first)
    return x, max(other - units * x, NOISE * other)


def _rising(seconds: Mapping[int, float]) -> tuple[tuple[float, float], ...]:
    """Return rising (bytes, seconds): times of fewer bytes are capped by those of more, since longer ones are pauses of the system.

    >>> _rising({4096: 1e-5, 65536: 3e-3, 1 << 20: 1e-3})
    ((4096.0, 1e-05), (65536.0, 0.001), (1048576.0, 0.001))
    """
    points: list[tuple[float, float]] = []
    fastest = math.inf
    for size in sorted(seconds, reverse=True):
        fastest = min(fastest, max(seconds[size], 1e-9))
        points.append((float(size), fastest))
    return tuple(points[::-1])
