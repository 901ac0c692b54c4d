"""A replica of one operator on one worker, as a Ray Serve deployment that batches requests.

When emulating, it delays answers to the time of its worker by the profile, so that a plan for many machines runs on one.
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

from shardwise.serve.placement.workflow import OperatorVariant, WorkflowOperator
from shardwise.world.launch.current import run_token

if TYPE_CHECKING:
    from shardwise.serve.deploy.weight_receiver import WeightReceiver


def profiled_batch_s(batches: Sequence[tuple[int, float]], size: int) -> float:
    """Seconds of a batch by a profile, linearly interpolated between its sizes.

    >>> profiled_batch_s(((1, 0.1), (5, 0.3)), 3)
    0.2
    """
    return float(np.interp(size, [b for b, _ in batches], [s for _, s in batches]))


class OperatorReplica:
    """Computes batches one after another in a thread, so that health checks are answered meanwhile."""

    def __init__(self, operator: WorkflowOperator, variant: OperatorVariant, folder: str, worker: str, options: dict[str, Any]) -> None:
        """`options`: `batch`, `wait_s`, `threads`; `slower`: factor on the profile's seconds when emulating, 0 without; `weights`: file of
        the newest weights; `elsewhere`: whether trainers may be on other machines."""
        from ray import serve  # here: an extra

        self._options, self._worker, self._batches = options, worker, variant.batches(worker)
        self._run: Any = None
        self._free_at_s = 0.0
        self._receiver: WeightReceiver | None = None
        if variant.model or variant.call:
            from shardwise.serve.deploy.operator_runtime import load_operator  # here: a replica that emulates needs no torch

            operation = load_operator(operator, variant, folder)
            self._run = operation.run
            if operation.module is not None:
                from shardwise.serve.deploy.weight_receiver import WeightReceiver  # here: likewise

                host = _node_ip() if options["elsewhere"] else ""
                self._receiver = WeightReceiver(operation.module, host, run_token(), Path(options["weights"]))
            import torch  # here: slow to import

            torch.set_num_threads(options["threads"])

        @serve.batch(max_batch_size=options["batch"], batch_wait_timeout_s=options["wait_s"])
        async def answer_batch(arrivals: list[tuple[tuple[Any, ...], float]]) -> list[Any]:
            return await self._answer(arrivals)

        self._batched_answer: Any = answer_batch

    async def __call__(self, request: tuple[Any, ...]) -> Any:
        return await self._batched_answer((request, time.monotonic()))

    async def _answer(self, arrivals: list[tuple[tuple[Any, ...], float]]) -> list[Any]:
        requests = [request for request, _ in arrivals]
        answers = await asyncio.to_thread(self._compute, requests) if self._run is not None else [None] * len(requests)
        if self._options["slower"]:
            # A worker starts once the last request of a batch has arrived and the previous batch is done, however late this wakes up.
            start_s = max(self._free_at_s, *(arrival_s for _, arrival_s in arrivals))
            self._free_at_s = start_s + self._options["slower"] * profiled_batch_s(self._batches, len(arrivals))
            await asyncio.sleep(max(0.0, self._free_at_s - time.monotonic()))
        return list(answers)

    def _compute(self, requests: list[tuple[Any, ...]]) -> Any:
        with self._receiver.lock if self._receiver is not None else nullcontext():
            return self._run(requests)

    def address(self) -> tuple[str, int] | None:
        """Return the address that receives new weights; None if the operator is no model."""
        return self._receiver.address if self._receiver is not None else None

    def pid(self) -> int:
        """Return the id of this process."""
        return os.getpid()

    def check_health(self) -> None:
        """Do nothing: a returning call shows Ray Serve that the process is alive."""


def _node_ip() -> str:
    """Return the address of this node, as reachable from Ray's other nodes."""
    import ray  # here: an extra

    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
