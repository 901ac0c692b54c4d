"""What was measured, as a `Cluster`. In: the fingerprint to keep with it. Out: this machine. [torch]"""

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
LEAST_SHARE = 0.85  # of its cores that a rank gets while it multiplies, or others ran
MESSAGE_RANKS = (2, 4)
NOISE = 0.1  # part of a figure, below which what is left of it after another was taken off says nothing


def measure_here(mark: str, quick: bool) -> Cluster:
    """This machine with the fingerprint `mark`: its GPUs, or its cores where it has none."""
    return _of_gpus(mark) if torch.cuda.device_count() else _of_processor(mark, quick)


def _of_gpus(mark: str) -> Cluster:
    """GPUs of one host: their own products and copies measured, their links as NVLink where peers see each other."""
    count = torch.cuda.device_count()
    properties = torch.cuda.get_device_properties(0)
    figures = measure_alone(torch.device("cuda", 0))
    torch.cuda.empty_cache()  # this process may start ranks and wait for them, and they need its memory
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
    said = "measured"
    if busy >= usable:
        said += f" {BUSY} (load {busy:.1f} on {usable} cores); measure again when it is idle"
    ranks = min(max(2, usable), 4) if quick else min(max(4, usable), 8)
    together = MESSAGE_RANKS if quick or usable < 8 else (*MESSAGE_RANKS, 8)
    with Launcher(preload=(measure_rank.__module__, measure_messages.__module__, measure_waits.__module__)) as launcher:
        ranks_measured = launcher.launch(measure_rank, ranks, usable, quick)
        waits = launcher.launch(measure_waits, min(usable, ranks))[0] if min(usable, ranks) > 1 else 0.0
        told = [table for count in together for table in launcher.launch(measure_messages, count, quick)[0]]
    share = min(share for result in ranks_measured for *_, share in result["speeds"])
    if BUSY not in said and share < LEAST_SHARE:
        said += f" {BUSY} (ranks got {share:.0%} of their cores); measure again when it is idle"
    speeds = tuple(
        replace(speed, waits=waits if speed.ranks > 1 else 0.0)
        for speed in _speeds([speed for result in ranks_measured for speed in result["speeds"]])
    )
    tables = tuple(Table(name, n, _rising(dict(points))) for name, n, points in sorted(told, key=lambda table: table[:2]))
    reduce = next(t for t in tables if t.collective == "all_reduce" and t.ranks == 2)
    size, seconds = reduce.points[-1]
    one = next(s for s in speeds if (s.ranks, s.threads) == (1, 1))
    return Cluster(
        "here",
        _device(cpu_model(), "cpu", one, memory_bytes() / usable, ranks_measured[0]["scratch"], said),
        (Level("node", usable, Link(reduce.points[0][1] / 2, size / seconds, source="measured between two ranks")),),
        speeds=speeds,
        tables=tables,
        fingerprint=mark,
    )


def _speeds(measured: Iterable[tuple[int, int, dict[str, float], float]]) -> tuple[Speed, ...]:
    """One for each setting of (ranks, threads), of what each rank measured in it: ranks wait for the slowest of them."""
    speeds: dict[tuple[int, int], dict[str, float]] = {}
    for ranks, threads, figures, _ in measured:
        slowest = speeds.setdefault((ranks, threads), dict(figures))
        slowest.update({key: max(slowest[key], s) for key, s in figures.items()})
    alone = speeds[1, 1]
    for (ranks, _), slowest in speeds.items():
        if ranks == 1:
            # More threads never make a large operator slower where nothing else runs; if they did, something else ran.
            slowest.update({key: min(s, alone[key]) for key, s in slowest.items()})
    return tuple(_speed(*key, speeds[key]) for key in sorted(speeds))


def _device(name: str, kind: str, speed: Speed, memory: float, scratch: float, source: str = "measured") -> Device:
    """A device whose peak is what it was measured to reach."""
    return Device(name, kind, speed.flops, memory, speed.memory_bandwidth_bytes_per_s, 1.0, speed.launch_s, scratch, source)


def _speed(ranks: int, threads: int, seconds: Mapping[str, float]) -> Speed:
    """Seconds a unit of each case of `operators` as a `Speed`."""
    seconds = dict(seconds)
    for first, beside, other, units in _pairs(seconds, threads):
        seconds[first], seconds[other] = apart(seconds[first], beside, seconds[other], units)
    flops = tuple((key.partition(".")[2], 1 / s) for key, s in seconds.items() if key.startswith("linear."))
    rates = tuple((key, 1 / s) for key, s in seconds.items() if not key.startswith(("linear.", "launch", "elementwise")))
    return Speed(ranks, threads, flops, 1 / seconds["elementwise"], seconds["launch"], rates)


def _pairs(seconds: Mapping[str, float], threads: int) -> Iterator[tuple[str, float, str, float]]:
    """Cases that hold some of what another one measures, as `apart` takes them, with their names in place of seconds."""
    for key in sorted(seconds):
        of = key.partition(".")[2]
        if key.startswith(SCORES):  # an element of a head is 4 FLOPs of a score
            yield f"attention.{of}", 1 / (4 * WIDE), key, 4 * NARROW
        elif key.startswith(BESIDES):  # 6 FLOPs an element, tap and channel for the bytes of 5 elements
            each = 6 * CHANNELS / (5 * (2 if of.endswith("bfloat16") else 4))
            yield of, 1 / (each * TAPS), key, each
        elif key.startswith(WEIGHTS):
            yield f"{of}.float32", 2 / (SAMPLES * threads) if of == "recurrent" else 0.0, key, few_rows(of)


def apart(first: float, beside: float, other: float, units: float) -> tuple[float, float]:
    """(x, y) of `first` = x + beside y and `other` = units x + y. Neither is below the part of its measurement that noise is.

    >>> [round(s, 9) for s in apart(3.0 + 0.5 * 2.0, 0.5, 0.25 * 3.0 + 2.0, 0.25)], apart(1.0, 0.0, 4.0, 8.0)
    ([3.0, 2.0], (1.0, 0.4))
    """
    x = max((first - beside * other) / (1 - beside * units), NOISE * first)
    return x, max(other - units * x, NOISE * other)


def _rising(seconds: Mapping[int, float]) -> tuple[tuple[float, float], ...]:
    """(bytes, seconds), rising. Fewer bytes take no longer than more: where they seem to, the system paused (over gloo for milliseconds).

    >>> _rising({4096: 1e-5, 65536: 3e-3, 1 << 20: 1e-3})
    ((4096.0, 1e-05), (65536.0, 0.001), (1048576.0, 0.001))
    """
    points: list[tuple[float, float]] = []
    least = math.inf
    for size in sorted(seconds, reverse=True):
        least = min(least, max(seconds[size], 1e-9))
        points.append((float(size), least))
    return tuple(points[::-1])
