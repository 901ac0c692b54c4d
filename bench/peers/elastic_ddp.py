"""What torchrun starts for `bench/faults/fault_peers`: a small GPT under DDP, saved every 20 steps by torch.distributed.checkpoint.

As a careful user writes it: a new folder for each step, committed by a rename; resuming from the newest that loads; samples that follow
from the step. In: the folder of a run. Out: as `bench/faults/fault_rank`, whose orders it follows at moments of its own.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import shutil
import signal
import struct
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

from shardwise.zoo import gpt
from shardwise.zoo.resolve import resolve

MODEL, BATCH, SEQUENCE, SAVE_EVERY = "gpt:vocabulary=256,hidden=32,layers=2,heads=2", 8, 16, 20
START_S, TIMEOUT_S = 60.0, 5.0  # of starting, and of what a step waits for, as shardwise has it by default
ENTRY = struct.Struct("<dqq")


class Orders:
    """As of `bench/faults/fault_rank`, without what needs shardwise."""

    def __init__(self, folder: Path, rank: int, log: str = "") -> None:
        path = folder / "orders.json"
        self._orders = [o for o in (json.loads(path.read_text()) if path.exists() else []) if rank in o["ranks"]]
        self._folder, self._rank, self.step = folder, rank, 0
        self.model: nn.Module | None = None
        log = log or ("steps.bin" if rank == 0 else "")
        self._log = os.open(folder / log, os.O_WRONLY | os.O_APPEND | os.O_CREAT) if log else -1

    def log(self, step: int, what: int) -> None:
        """Rank 0 writes down when a step began (0), or was told (1)."""
        if self._log >= 0:
            os.write(self._log, ENTRY.pack(time.monotonic(), step, what))

    def hook(self, moment: str) -> Callable[..., None]:
        """What a hook of a module or a gradient calls at a moment."""

        def call(*_: object) -> None:
            self.at(moment)

        return call

    def at(self, moment: str) -> str:
        """A moment has come; returns what happened that does not end the process."""
        done = ""
        for order in self._orders:
            if order["where"] == moment and order["step"] <= self.step <= order["until"]:
                mark = self._folder / f"harmed-{order['key']}-{self._rank}"
                if not mark.exists() or order["every"]:
                    if not mark.exists():
                        part = mark.with_name(f".{mark.name}")
                        part.write_text(repr(time.monotonic()))
                        part.rename(mark)
                    done = order["how"]
                    self._harm(done)
        return done

    def _harm(self, how: str) -> None:
        what, _, of = how.partition(":")
        match what:
            case "exit":
                os._exit(int(of))
            case "raise":
                raise ValueError("the batch has 7 labels for 8 samples")
            case "sleep":
                time.sleep(3600)
            case "hold":
                ctypes.PyDLL(None).sleep(3600)
            case "flip":
                assert self.model is not None
                next(self.model.parameters()).data.view(-1).view(torch.int32)[5] ^= 1 << 20
            case "nan" | "full":
                pass
            case _:
                os.kill(os.getpid(), getattr(signal, what))


def batch_of(step: int, data: Tensor) -> Tensor:
    """Windows of the text [BATCH, SEQUENCE + 1], which follow from the step."""
    draw = torch.Generator().manual_seed(step)
    starts = torch.randint(len(data) - SEQUENCE - 1, (BATCH,), generator=draw)
    return torch.stack([data[i : i + SEQUENCE + 1] for i in starts.tolist()]).long()


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, orders: Orders, group: Any) -> None:
    """A new folder, committed by a rename."""
    weights, state = get_state_dict(model, optimizer)
    temporary = folder / f"part-{step}"
    if dist.get_rank() == 0:
        shutil.rmtree(temporary, ignore_errors=True)
    dist.barrier(group=group)
    if orders.at("at a save") == "full":
        raise OSError(28, os.strerror(28))
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=str(temporary), process_group=group)
    orders.at("before a checkpoint's commit")
    dist.barrier(group=group)
    if dist.get_rank() == 0:
        temporary.rename(folder / f"step-{step:06d}")
    orders.at("after a checkpoint's commit")


def resume(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint that loads. Returns how many steps are done."""
    for path in sorted(folder.glob("step-*"), reverse=True):
        weights, state = get_state_dict(model, optimizer)
        held = {"model": weights, "optimizer": state}
        try:
            dcp.load(held, checkpoint_id=str(path))
        except BaseException as error:  # CheckpointException is none of Exception
            print(f"{path} does not load: {error!r}"[:300], flush=True)
            continue
        set_state_dict(model, optimizer, model_state_dict=held["model"], optim_state_dict=held["optimizer"])
        return int(path.name.partition("-")[2])
    return 0


def rows_until(path: Path, step: int) -> None:
    """Leave the rows up to a step in a file."""
    rows = [line for line in path.read_text().splitlines() if json.loads(line)["step"] <= step] if path.exists() else []
    path.write_text("".join(f"{row}\n" for row in rows))


def main(folder: Path, steps: int) -> None:
    """Train."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    orders = Orders(folder, rank)
    orders.at("at its start")
    orders.at("while ranks connect")
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    at = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # without it workers read the addresses of those before them
    store = dist.PrefixStore(f"attempt-{attempt}", dist.TCPStore(*at, is_master=rank == 0 and not served))
    limit = timedelta(seconds=START_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=int(os.environ["WORLD_SIZE"]), timeout=limit)
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))  # once all are there: one may start later than another
    torch.manual_seed(0)
    built = resolve(MODEL).make()
    model = DistributedDataParallel(built, process_group=group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    orders.model = built
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    start = resume(checkpoints, model, optimizer)
    data = torch.frombuffer(bytearray((folder / "text.txt").read_bytes()), dtype=torch.uint8)
    metrics = folder / "metrics.jsonl"
    if rank == 0:
        rows_until(metrics, start)
    built.register_forward_hook(orders.hook("in forward"))
    next(built.parameters()).register_post_accumulate_grad_hook(orders.hook("in backward"))
    each = BATCH // dist.get_world_size()
    for step in range(start, steps):
        orders.step = step
        orders.log(step, 0)
        orders.at("while data is taken")
        tokens = batch_of(step, data)[rank * each : (rank + 1) * each]
        happened = orders.at("before its step")
        loss = gpt.compute_loss(model(tokens[:, :-1]), {"labels": tokens[:, 1:]})
        loss = loss * math.nan if happened == "nan" else loss
        loss.backward()
        orders.at("between gradients and update")
        optimizer.step()
        orders.at("in the update")
        optimizer.zero_grad()
        total = loss.detach().clone()
        work = dist.all_reduce(total, group=group, async_op=True)
        orders.at("in a collective")
        assert work is not None
        work.wait()
        orders.at("after its step")
        if rank == 0:
            with metrics.open("a") as file:
                file.write(json.dumps({"step": step + 1, "loss": float(total) / dist.get_world_size()}) + "\n")
            orders.log(step, 1)
        if (step + 1) % SAVE_EVERY == 0:
            orders.step = step + 1
            save(checkpoints, step + 1, model, optimizer, orders, group)
    orders.step = steps
    orders.at("at the end")
    dist.barrier(group=group)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
