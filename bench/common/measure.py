"""Measures contenders beside each other: all are started, then take turns for a few steps, round after round.

In: a case and contenders. Out: a Series for each that ran, and the reason for each that did not. The order turns by one every round, so
that no contender always follows the same one. Interruptions of the machine fall on neighbours alike; ratios are taken within a round.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from bench.common.arithmetic import Series
from bench.common.case import Case, Contender
from bench.common.processes import ContenderFailed, Running, missing, peers_python


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure: `rounds` of `steps` each, after `warm` steps that do not count."""

    rounds: int = 7
    steps: int = 2
    warm: int = 2

    def __post_init__(self) -> None:
        if min(self.rounds, self.steps, self.warm) < 1:
            raise ValueError(f"rounds={self.rounds} steps={self.steps} warm={self.warm}; each is at least 1")


Say = Callable[[str], None]
Name = TypeVar("Name")


def start(case: Case, contenders: Sequence[Contender], say: Say) -> tuple[dict[str, Running], dict[str, str]]:
    """Start all that can be started: (running by name, reason by name for the others)."""
    running: dict[str, Running] = {}
    skipped: dict[str, str] = {}
    for contender in contenders:
        python = peers_python() if contender.needs else sys.executable
        reason = missing(python, contender.needs)
        if reason:
            skipped[contender.name] = f"not installed here ({reason}); scripts/bench train --install-peers"
            continue
        one = Running(case, contender, python)
        try:
            one.wait_ready()
            running[contender.name] = one
            say(f"  {contender.name} is ready")
        except ContenderFailed as error:
            one.close()
            skipped[contender.name] = str(error)
            say(f"  {contender.name} does not run: {error}")
    return running, skipped


def turn(names: Sequence[Name], by: int) -> list[Name]:
    """The order of a round: one name later every time.

    >>> turn(["a", "b", "c"], 1)
    ['b', 'c', 'a']
    """
    at = by % len(names) if names else 0
    return [*names[at:], *names[:at]]


def seconds_a_step(step: Callable[[], Any], steps: int, wait: Callable[[], Any]) -> float:
    """Of `steps` calls one after another; `wait` returns when everything before it is done, on every rank."""
    wait()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    wait()
    return (time.perf_counter() - began) / steps


def in_turns(ways: Mapping[str, Callable[[], Any]], rounds: int, steps: int, wait: Callable[[], Any]) -> list[dict[str, float]]:
    """[round] -> seconds a step of each way; all take turns in these processes, and a round before the first does not count."""
    found = []
    for number in range(-1, rounds):
        found.append({name: seconds_a_step(ways[name], steps, wait) for name in turn(list(ways), max(0, number))})
    return found[1:]


def measure(
    case: Case, contenders: Sequence[Contender], effort: Effort, say: Say, profile: str = ""
) -> tuple[dict[str, Series], dict[str, str]]:
    """Series by name of what ran, reasons by name of what did not. One that fails half-way is dropped whole."""
    running, skipped = start(case, contenders, say)
    seconds: dict[str, list[float]] = {n: [] for n in running}
    cpu: dict[str, list[float]] = {n: [] for n in running}
    losses: dict[str, list[float]] = {n: [] for n in running}
    memory: dict[str, int] = {}
    try:
        for number in range(-1, effort.rounds):
            for name in turn(list(running), number):
                steps = effort.warm if number < 0 else effort.steps
                last = number == effort.rounds - 1
                label = f"{profile}/{name.replace(' ', '_').replace(',', '')}-{case.model}" if profile and last else ""
                try:
                    block = running[name].run(steps, label)
                except ContenderFailed as error:
                    skipped[name] = str(error)
                    running.pop(name).close()
                    say(f"  {name} stopped: {error}")
                    continue
                losses[name] += block.losses
                memory[name] = block.memory_bytes
                if number >= 0:
                    seconds[name].append(block.seconds / steps)
                    cpu[name].append(block.cpu_seconds / steps)
            if number >= 0:
                say(f"  round {number + 1} of {effort.rounds}: " + ", ".join(f"{n} {seconds[n][-1]:.3f}" for n in running))
        by_name = {c.name: c for c in contenders}
        return {
            name: Series(
                name,
                tuple(seconds[name]),
                tuple(cpu[name]),
                tuple(losses[name]),
                memory[name],
                str(one.about.get("plan", "")),
                str(one.about.get("precision", by_name[name].precision)),
                by_name[name].settings,
                float(one.about.get("predicted_s", 0.0)),
            )
            for name, one in running.items()
        }, skipped
    finally:
        for one in running.values():
            one.close()
