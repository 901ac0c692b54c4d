"""Measurement of this machine as a `Cluster`. In: its fingerprint. Out: the cluster. [torch]"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch

from shardwise.cluster.cluster import (
    SCORE_RATE,
    TRAFFIC_RATE,
    WEIGHT_RATE,
    Cluster,
    ClusterLevel,
    Device,
    MeasuredTable,
    NetworkLink,
    Speed,
)
from shardwise.cluster.probe.machine import cpu_model, machine_fingerprint, memory_bytes, num_cores, num_waiting_processes
from shardwise.cluster.probe.operators import CHANNELS, NARROW, SAMPLES, TAPS, WIDE, flops_per_weight_byte
from shardwise.cluster.probe.rank import measure_alone, measure_rank
from shardwise.cluster.probe.transfers import measure_messages

BUSY_NOTE = "while the machine was busy"
MIN_CORE_SHARE = 0.85  # minimum share of its cores that a rank gets while it multiplies; below it the machine was busy
MESSAGE_RANKS = (2, 4)
NOISE = 0.1  # fraction of a figure below which the remainder after subtracting another is noise


def fingerprint_rates(version: int) -> str:
    """Return the fingerprint of what is measured here: of the machine, and of the user's own matmul precision."""
    from shardwise.world.launch.launch import overriding_precision  # here: measuring GPUs starts no ranks

    users = overriding_precision()
    return machine_fingerprint(version, users) if users else machine_fingerprint(version)


def measure_here(mark: str, quick: bool) -> Cluster:
    """Measure this machine and store the fingerprint `mark`: its GPUs, or its cores if it has none."""
    return _measure_gpus(mark) if torch.cuda.device_count() else _measure_processor(mark, quick)


def _measure_gpus(mark: str) -> Cluster:
    """Measure the GPUs of one host: their products and copies; links are assumed, NVLink if peers can access each other."""
    count = torch.cuda.device_count()
    properties = torch.cuda.get_device_properties(0)
    figures = measure_alone(torch.device("cuda", 0))
    torch.cuda.empty_cache()  # this process may start ranks that need its memory
    peers = count > 1 and torch.cuda.can_device_access_peer(0, 1)
    link = NetworkLink(
        3.4e-6, 250e9 if peers else 12e9, source="assumed: peer access" if peers else "assumed: no peer access, through the host"
    )
    speed = _measured_speed(1, 0, figures)
    return Cluster(
        "here",
        _measured_device(properties.name, "gpu", speed, float(properties.total_memory), 0.8e9),
        (ClusterLevel("node", count, link),),
        speeds=(speed,) if count == 1 else tuple(_measured_speed(ranks, 0, figures) for ranks in range(1, count + 1)),
        fingerprint=mark,
    )


def _measure_processor(mark: str, quick: bool) -> Cluster:
    from shardwise.world.launch.launch import Launcher  # here: measuring GPUs starts no ranks
    from shardwise.world.launch.watch import LaunchOptions
    from shardwise.world.world import TRANSPORT

    usable = num_cores()
    busy = num_waiting_processes()
    source = "measured"
    if busy >= usable:
        source += f" {BUSY_NOTE} (load {busy:.1f} on {usable} cores); measure again when it is idle"
    ranks = min(max(2, usable), 4) if quick else min(max(4, usable), 8)
    message_ranks = MESSAGE_RANKS if quick or usable < 8 else (*MESSAGE_RANKS, 8)
    options = LaunchOptions(env={TRANSPORT: ""})  # the machine's own: one that a run was asked for may divide other numbers of ranks
    with Launcher(preload=(measure_rank.__module__, measure_messages.__module__, measure_waits.__module__)) as launcher:
        launch = partial(launcher.launch, options=options)
        ranks_measured = launch(measure_rank, ranks, usable, quick)
        waits = launch(measure_waits, min(usable, ranks))[0] if min(usable, ranks) > 1 else 0.0
        message_tables = [table for count in message_ranks for table in launch(measure_messages, count, quick)[0]]
    share = min(share for result in ranks_measured for *_, share in result["speeds"])
    if BUSY_NOTE not in source and share < MIN_CORE_SHARE:
        source += f" {BUSY_NOTE} (ranks got {share:.0%} of their cores); measure again when it is idle"
    speeds = tuple(
        replace(speed, waits=waits if speed.ranks > 1 else 0.0)
        for speed in _slowest_speeds([speed for result in ranks_measured for speed in result["speeds"]])
    )
    tables = tuple(
        MeasuredTable(name, n, _monotone_points(dict(points))) for name, n, points in sorted(message_tables, key=lambda table: table[:2])
    )
    all_reduce = next(t for t in tables if t.collective == "all_reduce" and t.ranks == 2)
    size, seconds = all_reduce.points[-1]
    single_core = next(s for s in speeds if (s.ranks, s.threads) == (1, 1))
    return Cluster(
        "here",
        _measured_device(cpu_model(), "cpu", single_core, memory_bytes() / usable, ranks_measured[0]["scratch"], source),
        (ClusterLevel("node", usable, NetworkLink(all_reduce.points[0][1] / 2, size / seconds, source="measured between two ranks")),),
        speeds=speeds,
        tables=tables,
        fingerprint=mark,
    )


def _slowest_speeds(measured: Iterable[tuple[int, int, dict[str, float], float]]) -> tuple[Speed, ...]:
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
    return tuple(_measured_speed(ranks, threads, speeds[ranks, threads]) for ranks, threads in sorted(speeds))


def _measured_device(name: str, kind: str, speed: Speed, memory: float, scratch: float, source: str = "measured") -> Device:
    """Return a device whose peak is its measured rate."""
    return Device(name, kind, speed.flops, memory, speed.memory_bandwidth_bytes_per_s, 1.0, speed.launch_s, scratch, source)


def _measured_speed(ranks: int, threads: int, seconds: Mapping[str, float]) -> Speed:
    """Convert the seconds per unit of each benchmark case to a `Speed`."""
    seconds = dict(seconds)
    for first, coefficient, dependent, units in _coupled_cases(seconds, threads):
        seconds[first], seconds[dependent] = separate_times(seconds[first], coefficient, seconds[dependent], units)
    flops = tuple((key.partition(".")[2], 1 / s) for key, s in seconds.items() if key.startswith("linear."))
    rates = tuple((key, 1 / s) for key, s in seconds.items() if not key.startswith(("linear.", "launch", "elementwise")))
    return Speed(ranks, threads, flops, 1 / seconds["elementwise"], seconds["launch"], rates)


def _coupled_cases(seconds: Mapping[str, float], threads: int) -> Iterator[tuple[str, float, str, float]]:
    """Yield pairs of cases that each include work of the other: the arguments of `separate_times`, with names in place of seconds."""
    for key in sorted(seconds):
        suffix = key.partition(".")[2]
        if key.startswith(SCORE_RATE):  # an element of a head is 4 FLOPs of a score
            yield f"attention.{suffix}", 1 / (4 * WIDE), key, 4 * NARROW
        elif key.startswith(TRAFFIC_RATE):  # 6 FLOPs an element, tap and channel for the bytes of 5 elements
            each = 6 * CHANNELS / (5 * (2 if suffix.endswith("bfloat16") else 4))
            yield suffix, 1 / (each * TAPS), key, each
        elif key.startswith(WEIGHT_RATE):
            yield f"{suffix}.float32", 2 / (SAMPLES * threads) if suffix == "recurrent" else 0.0, key, flops_per_weight_byte(suffix)


def separate_times(first: float, beside: float, other: float, units: float) -> tuple[float, float]:
    """Solve `first` = x + beside y and `other` = units x + y for (x, y), with lower bounds of `NOISE` times the measurement.

    >>> [round(s, 9) for s in separate_times(3.0 + 0.5 * 2.0, 0.5, 0.25 * 3.0 + 2.0, 0.25)], separate_times(1.0, 0.0, 4.0, 8.0)
    ([3.0, 2.0], (1.0, 0.4))
    """
    x = max((first - beside * other) / (1 - beside * units), NOISE * first)
    return x, max(other - units * x, NOISE * other)


def _monotone_points(seconds: Mapping[int, float]) -> tuple[tuple[float, float], ...]:
    """Return rising (bytes, seconds): times of fewer bytes are capped by those of more, since longer ones are pauses of the system.

    >>> _monotone_points({4096: 1e-5, 65536: 3e-3, 1 << 20: 1e-3})
    ((4096.0, 1e-05), (65536.0, 0.001), (1048576.0, 0.001))
    """
    points: list[tuple[float, float]] = []
    fastest = math.inf
    for size in sorted(seconds, reverse=True):
        fastest = min(fastest, max(seconds[size], 1e-9))
        points.append((float(size), fastest))
    return tuple(points[::-1])


MEETINGS, ROUNDS = 10, 15
WIDTH, ROWS = 1024, 256  # of products that take some milliseconds on one core
SUMMED = 1 << 18  # float32 elements that are reduced at every synchronisation
MAX_WAIT = 0.25  # a larger fraction is due to other load


def measure_waits(world: Any) -> float:
    """Return the time added to products by an all-reduce after each, relative to their own; the all-reduces' own time is subtracted.

    Equal on every rank: times are of the slowest, with and without synchronisation in turns, and the result is the median of the ratios.
    """
    x, weight, buffer = torch.randn(ROWS, WIDTH), torch.randn(WIDTH, WIDTH), torch.zeros(SUMMED)

    def taken(computes: bool, meets: bool) -> float:
        world.world_group.barrier()
        began = time.perf_counter()
        for _ in range(MEETINGS):
            if computes:
                torch.nn.functional.gelu(x @ weight)
            if meets:
                world.world_group.all_reduce(buffer)
        slowest_s = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        world.world_group.all_reduce(slowest_s, op="max")
        return float(slowest_s)

    waits = []
    for number in range(-1, ROUNDS):  # the first maps pages and opens connections
        compute_s, both_s, all_reduce_s = taken(True, False), taken(True, True), taken(False, True)
        if number >= 0:
            waits.append((both_s - all_reduce_s) / compute_s - 1)
    return min(MAX_WAIT, max(0.0, median(waits)))
