"""An open-loop load generator: Poisson arrivals at a fixed rate, independent of the answers, with a limit on requests in flight."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

ANSWER_TIMEOUT_S = 120.0


@dataclass
class LoadResult:
    """`latency_s` of answered requests; `answers`: (request number, answer); `num_refused` by full queues; `failures`: reasons of all
    others; `num_skipped`: not sent, since too many were in flight."""

    duration_s: float = 0.0
    num_sent: int = 0
    latency_s: list[float] = field(default_factory=list)
    answers: list[tuple[int, Any]] = field(default_factory=list)
    num_refused: int = 0
    num_skipped: int = 0
    failures: list[str] = field(default_factory=list)

    def percentile_s(self, percentile: float) -> float:
        """Latency percentile (0 to 1) in seconds."""
        return float(np.quantile(self.latency_s, percentile)) if self.latency_s else float("nan")

    @property
    def rate(self) -> float:
        """Answers per second."""
        return len(self.latency_s) / self.duration_s if self.duration_s else 0.0


@dataclass(frozen=True)
class RequestLoad:
    """`rate` requests/s for `duration_s` seconds, at most `max_in_flight` at once."""

    rate: float
    duration_s: float
    max_in_flight: int = 500
    seed: int = 0

    def send_times_s(self) -> list[float]:
        """Seconds after the start at which requests are sent."""
        rng, at, times = random.Random(self.seed), 0.0, list[float]()
        while (at := at + rng.expovariate(self.rate)) < self.duration_s:
            times.append(at)
        return times


def send(
    url: str, bodies: Sequence[bytes], load: RequestLoad, timed_actions: Sequence[tuple[float, Callable[[], object]]] = ()
) -> LoadResult:
    """Send a load and wait for all answers. `timed_actions`: (seconds after the start, action)."""
    return asyncio.run(_send(url, bodies, load, timed_actions))


def encode_request(values: Mapping[str, Any]) -> bytes:
    """Encode a request: arrays by source as safetensors; empty without values."""
    from safetensors.numpy import save  # here: an extra

    return save({name: np.ascontiguousarray(value) for name, value in values.items()}) if values else b""


async def _send(
    url: str, bodies: Sequence[bytes], load: RequestLoad, timed_actions: Sequence[tuple[float, Callable[[], object]]]
) -> LoadResult:
    import aiohttp  # here: an extra

    answers, tasks = LoadResult(), set[asyncio.Task[None]]()
    limit = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=limit, connector=aiohttp.TCPConnector(limit=0)) as session:
        begun, number = time.monotonic(), 0
        actions = [asyncio.ensure_future(_act_later(delay, act)) for delay, act in timed_actions]
        for at in load.send_times_s():
            await asyncio.sleep(max(0.0, begun + at - time.monotonic()))
            if len(tasks) >= load.max_in_flight:
                answers.num_skipped += 1
                continue
            task = asyncio.ensure_future(_send_one(session, url, bodies[number % len(bodies)], number % len(bodies), answers))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            number += 1
        await asyncio.sleep(max(0.0, begun + load.duration_s - time.monotonic()))
        answers.num_sent, answers.duration_s = number, time.monotonic() - begun
        await asyncio.gather(*tasks, *actions)
    return answers


async def _act_later(delay: float, act: Callable[[], object]) -> None:
    await asyncio.sleep(delay)
    await asyncio.to_thread(act)


async def _send_one(session: Any, url: str, body: bytes, number: int, answers: LoadResult) -> None:
    begun = time.monotonic()
    try:
        async with session.post(url, data=body, headers={"content-type": "application/x-safetensors"}) as response:
            text = await response.text()
            if response.status == 200:
                answers.latency_s.append(time.monotonic() - begun)
                answers.answers.append((number, json.loads(text)["answer"]))
            elif response.status == 503:
                answers.num_refused += 1
            else:
                answers.failures.append(f"{response.status}: {text[:300]}")
    except Exception as error:
        answers.failures.append(f"{type(error).__name__}: {error}")
