"""Priced bytes of a plain loop beside counted ones: every tensor alive at the fullest moment of a step, by ZeRO stage and axis."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardwise
from shardwise.cluster.cluster import Cluster
from shardwise.plan.layout import Layout
from shardwise.run.rank_model.model_source import CachedModelSource
from shardwise.solve.search import search
from shardwise.world.world import World

LAYOUTS = ["data=2", "data=2 zero=1", "data=2 zero=2", "data=2 zero=3", "tensor=2"]
SAMPLES, STEPS = 8, 3


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of memory that operators make while it is on, and of those the most at a time; `known` memory is not counted."""

    def __init__(self, known: dict[int, int]) -> None:
        super().__init__()
        self._seen = set(known)
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            storage = x.untyped_storage() if isinstance(x, Tensor) else None
            if storage is not None and storage.data_ptr() and storage.data_ptr() not in self._seen:
                self._seen.add(storage.data_ptr())
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._forget, storage.data_ptr(), storage.nbytes())
        return result

    def _forget(self, address: int, size: int) -> None:
        self.now -= size
        self._seen.discard(address)


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))])


def tensors_alive() -> dict[int, int]:
    """Bytes of memory by address, of tensors that Python knows."""
    found: dict[int, int] = {}
    for x in gc.get_objects():
        if type(x) in (Tensor, nn.Parameter) or (isinstance(x, Tensor) and type(x).__module__.startswith("shardwise")):
            storage = x.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    found.pop(0, None)
    return found


def count_bytes(world: World, layouts: list[str]) -> list[int]:
    """The most bytes alive in forward and backward of a later step, by layout."""
    counts = []
    for text in layouts:
        gc.collect()
        before = sum(tensors_alive().values())
        net, x, y = make(), torch.randn(SAMPLES, 256), torch.randn(SAMPLES, 256)
        shardwise.auto_parallelize(net, (x,), plan=text, world=world)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        for a, b in shardwise.shard([(x, y)] * STEPS):
            optimizer.zero_grad()
            gc.collect()
            known = tensors_alive()
            with LiveBytes(known) as live:
                (net(a) - b).pow(2).mean().backward()
            optimizer.step()
        counts.append(sum(known.values()) - before + live.most)
        del net, optimizer, a, b, known, live
    return counts


def test_priced_bytes_of_a_plain_loop_are_the_counted_ones(ranks: Callable[..., Any]) -> None:
    """Without the optimizer's own buffers, which are the user's; an engine's price is the broken twin."""
    counts = ranks(count_bytes, 2, LAYOUTS)[0]
    source = CachedModelSource(make(), None)
    graph = source.capture((torch.randn(SAMPLES, 256),), None, SAMPLES, outputs=True).graph
    errors = []
    for is_plain_loop in (True, False):
        plans = [
            search(graph, Cluster.parse("1xcpu-2"), SAMPLES, "net", layout=Layout.parse(text), is_plain_loop=is_plain_loop)
            for text in LAYOUTS
        ]
        memory = [plan.prediction.memory for plan in plans if plan.prediction is not None]
        errors.append([(m.total - m.margin) / counted - 1 for m, counted in zip(memory, counts, strict=True)])
    assert errors[0] == pytest.approx([0.0] * len(LAYOUTS), abs=0.08), errors
    assert max(map(abs, errors[1])) > 0.15
