"""A replica of one operator on one worker, as Ray Serve runs it. In: what it computes, its batch. Out: answers.

Emulated, it answers no sooner than its worker would, by the profile: so a plan for many machines runs on one.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.serve.workflow import Operator, Variant
from weft.world.current import token

if TYPE_CHECKING:
    from weft.deploy.receiver import Receiver


def planned_s(batches: Sequence[tuple[int, float]], size: int) -> float:
    """Seconds of a batch by a profile, between its sizes on a line.

    >>> planned_s(((1, 0.1), (5, 0.3)), 3)
    0.2
    """
    return float(np.interp(size, [b for b, _ in batches], [s for _, s in batches]))


class Replica:
    """Computes batches one after another, in a thread, so that Ray Serve sees that it lives while it works."""

    def __init__(self, operator: Operator, variant: Variant, folder: str, worker: str, how: dict[str, Any]) -> None:
        """`how`: `batch`, `wait_s`, `threads`; `slower`, by what the profile's seconds are multiplied, 0 where nothing is emulated;
        `weights`, the file of new weights; `elsewhere`, whether trainers may be on other machines."""
        from ray import serve

        self._how, self._worker, self._batches = how, worker, variant.batches(worker)
        self._run: Any = None
        self._free_at_s = 0.0
        self._receiver: Receiver | None = None
        if variant.model or variant.call:
            from weft.deploy.computes import computing

            operation = computing(operator, variant, folder)
            self._run = operation.run
            if operation.module is not None:
                from weft.deploy.receiver import Receiver

                host = _node_ip() if how["elsewhere"] else ""
                self._receiver = Receiver(operation.module, host, token(), Path(how["weights"]))
            import torch

            torch.set_num_threads(how["threads"])

        @serve.batch(max_batch_size=how["batch"], batch_wait_timeout_s=how["wait_s"])
        async def together(came: list[tuple[tuple[Any, ...], float]]) -> list[Any]:
            return await self._answer(came)

        self._together: Any = together

    async def __call__(self, request: tuple[Any, ...]) -> Any:
        return await self._together((request, time.monotonic()))

    async def _answer(self, came: list[tuple[tuple[Any, ...], float]]) -> list[Any]:
        requests = [request for request, _ in came]
        answers = await asyncio.to_thread(self._computed, requests) if self._run is not None else [None] * len(requests)
        if self._how["slower"]:
            # A worker begins when the last of a batch is there and the batch before is done, however late this process wakes up.
            begun = max(self._free_at_s, *(at for _, at in came))
            self._free_at_s = begun + self._how["slower"] * planned_s(self._batches, len(came))
            await asyncio.sleep(max(0.0, self._free_at_s - time.monotonic()))
        return list(answers)

    def _computed(self, requests: list[tuple[Any, ...]]) -> Any:
        with self._receiver.lock if self._receiver is not None else nullcontext():
            return self._run(requests)

    def address(self) -> tuple[str, int] | None:
        """Where new weights are taken; None of what has none."""
        return self._receiver.address if self._receiver is not None else None

    def pid(self) -> int:
        """Of its process."""
        return os.getpid()

    def check_health(self) -> None:
        """That this is called at all says that the process answers."""


def _node_ip() -> str:
    """Of this process' node, as Ray's other nodes reach it."""
    import ray

    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
