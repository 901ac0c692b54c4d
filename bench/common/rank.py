"""One rank of one contender: builds, says so, then waits on a socket and runs as many steps as it is told.

Waiting is a blocked read, so that a contender costs nothing while another is measured. Messages are lines of JSON.
Started by bench.common.processes as `python -m bench.common.rank SOCKET SPEC`, with torchrun's variables in the environment.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.common.case import Case, Contender, corpus, from_text, window_starts
from shardwise.world import matmul_backend

Step = Callable[[Tensor], "Tensor | float | None"]


def batches(case: Case) -> Callable[[int], Tensor]:
    """step -> the whole batch of bytes, (batch, sequence + 1): inputs and, one further, labels."""
    text = torch.frombuffer(bytearray(corpus()), dtype=torch.uint8).long()

    def batch(step: int) -> Tensor:
        return torch.stack([text[s : s + case.sequence + 1] for s in window_starts(case, step, len(text))])

    return batch


class Line:
    """Lines of JSON to and from the process that measures."""

    def __init__(self, path: str, rank: int, num_ranks: int) -> None:
        self.rank = rank
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._reader = self._socket.makefile("r")
        self.send({"rank": rank, "num_ranks": num_ranks})

    def send(self, message: dict[str, Any]) -> None:
        self._socket.sendall((json.dumps(message) + "\n").encode())

    def receive(self) -> dict[str, Any]:
        """The next order; the end of the socket is the order to stop."""
        line = self._reader.readline()
        return json.loads(line) if line else {"do": "stop"}


def serve(line: Line, case: Case, step: Step, barrier: Callable[[], object], about: dict[str, Any]) -> None:
    """Answer orders until told to stop. All ranks begin a block together; each reports its own end, the slowest counts."""
    batch_of = batches(case)
    done = 0
    line.send({"ready": True, **about})
    while (order := line.receive())["do"] == "run":
        data = [batch_of(done + i) for i in range(order["steps"])]
        barrier()
        cpu, began = time.process_time(), time.perf_counter()
        losses = [step(x) for x in data]
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        done += len(data)
        if order.get("profile"):
            profile(step, batch_of(done), order["profile"], line.rank)
            done += 1
        line.send(
            {
                "seconds": seconds,
                "cpu_seconds": cpu,
                "losses": [None if x is None else float(x) for x in losses],
                "memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            }
        )


def profile(step: Step, data: Tensor, path: str, rank: int) -> None:
    """One more step under torch's profiler: a table by operator and a trace for Perfetto, `path` with the rank in it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as p:
        step(data)
    p.export_chrome_trace(f"{path}.rank{rank}.json")
    with open(f"{path}.rank{rank}.txt", "w") as file:
        file.write(p.key_averages().table(sort_by="self_cpu_time_total", row_limit=40))


def apply_settings(contender: Contender) -> None:
    """Threads, and for equal settings the library of matrix products, the same for all."""
    if contender.settings == "equal" or not contender.launcher:
        torch.set_num_threads(contender.threads)
    if contender.settings == "equal":
        matmul_backend.set_matmul_precision(os.environ[matmul_backend.PRODUCTS])


def join(num_ranks: int) -> None:
    """The default group over gloo, from torchrun's variables."""
    if num_ranks > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")


def main(path: str, text: str) -> None:
    case, contender = from_text(text)
    rank = int(os.environ.get("RANK", "0"))
    line = Line(path, rank, contender.num_ranks)
    try:
        apply_settings(contender)
        torch.manual_seed(case.seed)
        module = importlib.import_module(contender.module)
        join(contender.num_ranks)
        step = module.build(case, rank, contender.num_ranks, **contender.options)
        serve(line, case, step, dist.barrier if contender.num_ranks > 1 else lambda: None, {})
    except Exception:
        traceback.print_exc()
        line.send({"error": traceback.format_exc().strip().splitlines()[-1]})
        sys.stdout.flush()
        os._exit(1)
    os._exit(0)  # groups of a peer may wait for each other at exit; nothing is left to save


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
