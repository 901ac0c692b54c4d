"""Reduce-scatters of ZeRO over gloo: bytes sent, counted, equal to the priced ones; room for a shard; sums equal to the serial run."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import shardwise
from shardwise.cost.network.network import FACTORS
from shardwise.run.verify.verify import verify_on_rank
from shardwise.world import private
from shardwise.world.comm import all_reduce, running
from shardwise.world.comm.group import Group
from shardwise.world.comm.process_group import ProcessGroup
from shardwise.world.world import World
from tests.support.equal_layers import Deep, deep_batch, deep_loss

WIDTH, DEPTH = 200, 3
_wide = partial(Deep, WIDTH, DEPTH, bias=False)


def _count(world: World, layout: str, ring_bytes: int) -> dict[str, float]:
    """Bytes that one rank's gradients send, and the most room that they are received in at a time, of one step."""
    all_reduce.RING_BYTES = ring_bytes
    seen: Counter[str] = Counter()
    live: dict[int, int] = {}

    def count_room(out: torch.Tensor) -> torch.Tensor:
        if out.nbytes > 1 << 13:
            live[id(out)] = out.nbytes
            weakref.finalize(out, live.pop, id(out), None)
            seen["room"] = max(seen["room"], sum(live.values()))
        return out

    take, receive = running._BufferPool.take, Group._receive_buffer
    running._BufferPool.take = lambda self, like: count_room(take(self, like))  # type: ignore[method-assign]
    Group._receive_buffer = lambda self, x, size: count_room(receive(self, x, size))  # type: ignore[method-assign]
    send, exchange = private.send, private.all_to_all

    def sending(group: Any, x: torch.Tensor, *args: Any) -> Any:
        seen["sent"] += x.nbytes
        return send(group, x, *args)

    def exchanging(group: Any, out: torch.Tensor, x: torch.Tensor, *args: Any) -> Any:
        seen["sent"] += x.nbytes * (world.num_ranks - 1) // world.num_ranks
        return exchange(group, out, x, *args)

    private.send, private.all_to_all = sending, exchanging
    engine = shardwise.parallelize(
        _wide, deep_batch(WIDTH), loss=deep_loss, plan=f"{layout} precision=float64", seed=0, world=world, optimizer="sgd"
    )
    engine.step(deep_batch(WIDTH))
    seen.clear()
    engine.step(deep_batch(WIDTH))
    private.send, private.all_to_all = send, exchange
    running._BufferPool.take, Group._receive_buffer = take, receive  # type: ignore[method-assign]
    return {**seen, "bucket": max(8 * (b.stop - b.start) for g in engine.rank_model.groups for b in g.buckets)}


def _counts(world: World, layout: str) -> list[Any]:
    counted = [_count(world, layout, 1 << 16), _count(world, layout, 1 << 62)]
    all_reduce.RING_BYTES = 1 << 16
    plan = shardwise.plan(_wide, deep_batch(WIDTH), loss=deep_loss, cluster="1xcpu-8", layout=f"{layout} precision=float64")
    found = verify_on_rank(world, plan, _wide, deep_batch(WIDTH), deep_loss)
    return [*counted, found is None or found.ok]


@pytest.mark.parametrize(("num_ranks", "zero"), [(2, 2), (4, 1)])
def test_sums_of_zero_over_gloo_need_no_room_for_all_shards(ranks: Callable[..., list[Any]], num_ranks: int, zero: int) -> None:
    total = 8 * WIDTH * WIDTH * DEPTH
    found = ranks(_counts, num_ranks, f"data={num_ranks} zero={zero}", env={"SHARDWISE_TRANSPORT": "gloo"})
    for ring, exchange, _ in found:
        for counted in (ring, exchange):
            assert counted["sent"] == pytest.approx(FACTORS["reduce_scatter"][0](num_ranks) * total)
        # A shard of the largest bucket, reused by all; an exchange needs room for all that is under way.
        assert ring["room"] <= ring["bucket"] / num_ranks
        assert exchange["room"] >= exchange["bucket"]
    assert found[0][2]


class _Recorder:
    def __init__(self) -> None:
        self.calls: list[tuple[bool, int, int]] = []

    def _reduce_scatter_base(self, out: torch.Tensor, x: torch.Tensor, options: Any) -> None:
        self.calls.append((options.reduceOp == torch.distributed.ReduceOp.SUM, out.numel(), x.numel()))


def test_nccl_scatters_equal_shards_itself_and_never_narrow_ones() -> None:
    inner = _Recorder()
    nccl, gloo = (ProcessGroup(inner, 4, 1, directed) for directed in (lambda pair: None, None))
    x = torch.zeros(8)
    nccl.reduce_scatter(x.view(4, -1)[1], x, [2] * 4, False)
    assert inner.calls == [(True, 2, 8)]
    assert nccl.scatters(torch.float32, [2, 2, 2, 2])
    assert not nccl.scatters(torch.float32, [3, 2, 2, 1])
    assert not nccl.scatters(torch.bfloat16, [2, 2, 2, 2])
    assert not gloo.scatters(torch.float32, [2, 2, 2, 2])
