"""One replica of a small GPT under torchft, for `bench/faults/fault_peers`: of one process, whose peers go on without it.

In: the folder of a run, this replica's number, the lighthouse's address, steps. Out: as `bench/peers/elastic_ddp`, a record of steps
for each replica. Gradients are averaged over the replicas that live; one that comes again gets its state from them.
"""

from __future__ import annotations

import math
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from bench.common.processes import free_port
from bench.peers.elastic_ddp import BATCH, MODEL, TIMEOUT_S, Orders, batch_of
from shardwise.zoo import gpt
from shardwise.zoo.resolve import resolve


def main(folder: Path, replica: int, lighthouse: str, steps: int) -> None:
    """Train."""
    torch.set_num_threads(1)
    orders = Orders(folder, replica, f"steps-{replica}.bin")
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    torch.manual_seed(0)
    built = resolve(MODEL).make()
    orders.model = built
    inner = torch.optim.AdamW(built.parameters(), lr=1e-3)

    def load(state: dict[str, Any]) -> None:
        built.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    limit = timedelta(seconds=TIMEOUT_S)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit), load_state_dict=load,
        state_dict=lambda: {"model": built.state_dict(), "optimizer": inner.state_dict()}, min_replica_size=1, timeout=limit,
        quorum_timeout=timedelta(seconds=60), rank=0, world_size=1, store_addr="127.0.0.1", store_port=port, lighthouse_addr=lighthouse,
        replica_id=f"replica_{replica}", hostname="127.0.0.1",
    )  # fmt: skip
    model, optimizer = DistributedDataParallel(manager, built), Optimizer(manager, inner)
    next(built.parameters()).register_post_accumulate_grad_hook(orders.hook("in backward"))
    data = torch.frombuffer(bytearray((folder / "text.txt").read_bytes()), dtype=torch.uint8)
    while manager.current_step() < steps:
        step = orders.step = manager.current_step()
        orders.log(step, 0)
        happened = orders.at("before its step")
        optimizer.zero_grad()
        tokens = batch_of(step, data)[replica * BATCH // 2 : (replica + 1) * BATCH // 2]
        loss = gpt.compute_loss(model(tokens[:, :-1]), {"labels": tokens[:, 1:]})
        loss = loss * math.nan if happened == "nan" else loss
        loss.backward()
        orders.at("between gradients and update")
        optimizer.step()
        if manager.current_step() > step:
            orders.log(step, 1)
            with (folder / f"losses-{replica}").open("a") as file:
                file.write(f"{step} {float(loss.detach())!r}\n")
    manager.shutdown(wait=False)
    del store


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
