"""Linear layers that keep this rank's piece of what is gathered for them, and communicate beside products, as they do on GPUs.

Held against the same step without: bit for bit, since the same products and sums are taken in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import shardwise
from shardwise.run.step import executors
from shardwise.world.world import World
from shardwise.zoo.resolve import resolve

LLAMA = "llama:vocabulary=60,sequence=256,hidden=64,layers=2,heads=4,kv_heads=2,inner=96"
GPT = "gpt:layers=2,hidden=64,heads=4,sequence=256,vocabulary=64"
UNEVEN = "llama:vocabulary=60,sequence=255,hidden=64,layers=1,heads=4,kv_heads=2,inner=96"
PIECE = 4 * 256 * 64 * 4 // 2  # bytes of 4 samples, 256 positions, 64 numbers of 4 bytes, cut in two
CASES = [  # and how many gathered tensors are saved as pieces: two a layer
    (LLAMA, "tensor=2 sequence_parallel=on", 4),
    (GPT, "tensor=2 sequence_parallel=on", 4),
    (GPT, "tensor=2", 0),  # nothing is gathered
    (LLAMA, "tensor=2 sequence_parallel=on recompute=full", None),
    (LLAMA, "tensor=2 sequence_parallel=on recompute=selective microbatches=2", 4),
    (LLAMA, "tensor=2 sequence_parallel=on precision=bfloat16", None),
    (GPT, "tensor=2 sequence_parallel=on zero=3", 4),
    (UNEVEN, "tensor=2 sequence_parallel=on", None),
]


def _step(world: World, model: str, layout: str, on: bool) -> dict[str, Any]:
    executors.keeps_pieces = lambda device: on  # type: ignore[attr-defined,assignment]
    spec = resolve(model)
    batch = spec.batch(4)
    engine = shardwise.parallelize(spec.make, batch, loss=spec.loss, plan=layout, seed=0, world=world, optimizer="sgd")
    with _counted_storages() as saved:
        engine.step(batch)
    loss = engine.step(batch).loss
    return {"loss": float(loss), "state": engine.full_state_dict(), "bytes": sum(saved.values())}


@contextmanager
def _counted_storages() -> Iterator[dict[int, int]]:
    """Bytes of the storages that autograd saves within, by storage: memory of weights that are gathered and freed comes again."""
    kept: list[Tensor] = []
    found: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept.append(x)  # so that no storage comes twice
        found[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield found


def _both(world: World, cases: list[tuple[str, str, int | None]]) -> list[dict[str, Any]]:
    found = []
    for model, layout, _ in cases:
        plain, kept = (_step(world, model, layout, on) for on in (False, True))
        alike = plain["state"] is None or all(torch.equal(plain["state"][k], x) for k, x in kept["state"].items())
        found.append({"alike": alike, "losses": (plain["loss"], kept["loss"]), "bytes": (plain["bytes"], kept["bytes"])})
    return found


def test_steps_with_pieces_are_those_without_bit_for_bit(ranks: Callable[..., list[Any]]) -> None:
    for of_rank in ranks(_both, 2, CASES):
        for case, found in zip(CASES, of_rank, strict=True):
            whole, kept = found["bytes"]
            assert found["alike"], case
            assert found["losses"][0] == found["losses"][1], case
            assert kept <= whole
            assert case[2] is None or whole - kept == case[2] * PIECE, case
