"""What a loop counts over its own rows, reduced or gathered over replicas, is what one process counts; so does torchmetrics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.errors import UsageError
from shardwise.world.world import World

LAYOUTS = [("data=2", 2), ("tensor=2", 2), ("data=2 tensor=2", 4)]


def data() -> list[tuple[Tensor, Tensor]]:
    """Batches of which the last divides unevenly."""
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(n, 6, generator=generator), torch.randint(4, (n,), generator=generator)) for n in (8, 8, 5)]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))


def rows_seen_by_a_library(count: int) -> int:
    """As torchmetrics synchronises a sum: by torch.distributed, if it is initialized."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return count
    total = torch.tensor(count)
    parts = [torch.zeros_like(total) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.barrier()
    torch.distributed.all_gather(parts, total)
    return int(sum(parts))


def unchanged(value: Any, op: str = "") -> Any:
    """In place of `reduce` and `gather` in one process."""
    return value


def evaluated(net: nn.Module, batches: Any, reduce: Any = shardwise.reduce, gather: Any = shardwise.gather) -> dict[str, Any]:
    metric = None
    try:
        import torchmetrics  # here: an extra of Lightning

        metric = torchmetrics.SumMetric()
    except ImportError:
        pass
    counts = {"right": 0, "rows": 0}
    largest, outputs = -1e9, []
    with torch.no_grad():
        for x, y in batches:
            out = net(x)
            counts = {"right": counts["right"] + int((out.argmax(1) == y).sum()), "rows": counts["rows"] + len(y)}
            largest = max(largest, float(out.max()))
            outputs.append(gather({"out": out, "y": y}))
            if metric is not None:
                metric.update(len(y))
    found = {**reduce(counts), "largest": reduce(largest, "max"), "outputs": outputs}
    found["library"] = rows_seen_by_a_library(counts["rows"])
    found["torchmetrics"] = int(metric.compute()) if metric is not None else found["library"]
    return found


def compared(world: World, layout: str) -> list[str]:
    serial = evaluated(network(), data(), unchanged, unchanged)
    net = shardwise.auto_parallelize(network(), data()[0], plan=layout, world=world)
    wrong = []
    # Whole batches first: then torch.distributed is not initialized; after shards shardwise.reduce still tells whole batches from rows.
    for name, batches in [("whole", data()), ("shards", shardwise.shard(data())), ("whole again", data())]:
        found = evaluated(net, batches)
        keys = found.keys() - ({"library", "torchmetrics"} if name == "whole again" else set())
        for key in sorted(keys - {"outputs"}):
            if found[key] != pytest.approx(serial[key]):
                wrong.append(f"{name}: {key} is {found[key]}, not {serial[key]}")
        for ours, theirs in zip(found["outputs"], serial["outputs"], strict=True):
            if not all(torch.allclose(ours[key], theirs[key], atol=1e-6) for key in theirs):
                wrong.append(f"{name}: other outputs")
    if shardwise.rank() != world.rank or shardwise.num_ranks() != world.num_ranks:
        wrong.append("rank")
    return wrong


@pytest.mark.parametrize(("layout", "num_ranks"), LAYOUTS)
def test_counts_are_those_of_one_process(ranks: Callable[..., list[Any]], layout: str, num_ranks: int) -> None:
    assert ranks(compared, num_ranks, layout) == [[]] * num_ranks


def reduced_alone(world: World) -> dict[str, Any]:
    """A twin that must differ: the rows of one replica, reduced over all ranks of data=2 tensor=2, count twice."""
    net = shardwise.auto_parallelize(network(), data()[0], plan="data=2 tensor=2", world=world)
    (x, y), *_ = shardwise.shard(data())
    net(x)
    mistaken = torch.tensor([float(len(y))])
    world.world_group.all_reduce(mistaken)
    try:
        shardwise.reduce("text")
    except UsageError as error:
        refused = str(error)
    return {"mistaken": float(mistaken), "rows": shardwise.reduce(len(y)), "mean": shardwise.reduce(float(len(y)), "mean"), "text": refused}


def test_ranks_that_share_rows_count_once(ranks: Callable[..., list[Any]]) -> None:
    for found in ranks(reduced_alone, 4):
        assert (found["mistaken"], found["rows"], found["mean"]) == (16.0, 8, 4.0)
        assert "is given a str" in found["text"]
