"""ZeRO inside groups of replicas (`shard=N`): equal to the serial model, what each rank keeps and sends, and checkpoints of any layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise
from shardwise.run.verify.verify import verify_on_rank
from shardwise.world.comm.group import Group
from shardwise.world.world import World
from tests.support.equal_layers import DEPTH, LAYER, WIDTH, Deep, deep_batch, deep_loss

SIZE = 8 * DEPTH * LAYER


def _counted(world: World, layout: str) -> dict[str, Any]:
    """Bytes of gradients and optimizer state of a rank, and what a step hands to collectives of groups of two, by name and stride."""
    plan = f"{layout} precision=float64"
    engine = shardwise.parallelize(Deep, deep_batch(), loss=deep_loss, plan=plan, seed=0, world=world, optimizer={"clip": 0.1})
    engine.step(deep_batch())
    sent: Counter[str] = Counter()
    for name, counted in (("all_reduce", 0), ("reduce_scatter_into", 1), ("all_gather_into", 0)):
        real = getattr(Group, name)

        def wrapped(self: Group, *args: Any, real: Any = real, name: str = name, counted: int = counted, **kwargs: Any) -> Any:
            if self.size == 2 and args[counted].numel() > 1:
                sent[f"{name} {self.ranks[1] - self.ranks[0]}"] += args[counted].nbytes
            return real(self, *args, **kwargs)

        setattr(Group, name, wrapped)
    engine.step(deep_batch())
    state = sum(x.nbytes for x in engine._optimizer.state_tensors() if x.numel() > 1)
    gradients = sum(group.grad.untyped_storage().nbytes() for group in engine.rank_model.groups)
    return {"sent": dict(sent), "state": state, "gradients": gradients}


def _spoiled(self: Any) -> None:
    self._wait_until(0)


def _verified(world: World, layouts: tuple[str, ...], breaks: bool = False) -> list[bool]:
    if breaks:  # shards are not summed over the groups
        shardwise.run.gradients.gradient_reducer.GradientScatterer.wait = _spoiled  # type: ignore[method-assign]
    found = []
    for layout in layouts:
        plan = shardwise.plan(Deep, deep_batch(), loss=deep_loss, cluster="1xcpu-8", layout=f"{layout} precision=float64")
        one = verify_on_rank(world, plan, Deep, deep_batch(), deep_loss)
        found.append(one is None or one.ok)
    return found


def _trained(world: World, layout: str, folder: str, steps: int, saves: bool) -> Any:
    plan = f"{layout} precision=float64"
    engine = shardwise.parallelize(Deep, deep_batch(), loss=deep_loss, plan=plan, seed=0, world=world, optimizer={"clip": 0.1})
    if not saves:
        engine.load(folder)
    for _ in range(steps):
        engine.step(deep_batch())
    if saves:
        engine.save(folder)
    return engine.full_state_dict()


def _everything(world: World, folder: str) -> dict[str, Any]:
    layouts = tuple(f"data=4 zero={zero} shard=2 microbatches={m}" for zero, m in ((1, 1), (2, 2), (3, 2)))
    _trained(world, "data=4 zero=3 shard=2", folder, 2, True)
    return {
        "verified": _verified(world, layouts),
        "loaded": _trained(world, "data=4 zero=1 shard=2", folder, 2, False),
        "whole": _trained(world, "data=4 zero=1", folder, 2, False),
        "counted": [_counted(world, layout) for layout in layouts],
        "broken": _verified(world, layouts[1:2], breaks=True),
    }


@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
def test_shards_inside_groups_equal_the_serial_model(ranks: Callable[..., list[Any]], tmp_path: Path, transport: str) -> None:
    found = ranks(_everything, 4, str(tmp_path), env={"SHARDWISE_TRANSPORT": transport})[0]
    assert found["verified"] == [True] * 3
    assert found["broken"] == [False]
    for name, x in found["whole"].items():
        assert float((found["loaded"][name] - x).abs().max()) < 1e-12
    one, two, three = found["counted"]
    assert {each["state"] for each in found["counted"]} == {SIZE}  # two moments, of half of the weights
    assert [each["gradients"] for each in (two, three)] == [SIZE // 2] * 2
    # Whole buckets inside the group, halves of them beyond it: zero=1 once a step, later ones every microbatch inside and once beyond.
    assert one["sent"] == {"reduce_scatter_into 1": SIZE, "all_reduce 2": SIZE // 2, "all_gather_into 1": SIZE}
    assert two["sent"] == {"reduce_scatter_into 1": 2 * SIZE, "all_reduce 2": SIZE // 2, "all_gather_into 1": SIZE}
    assert three["sent"] == {"reduce_scatter_into 1": 2 * SIZE, "all_reduce 2": SIZE // 2, "all_gather_into 1": 4 * SIZE}


LAYOUTS = (
    "data=4 tensor=2 zero=2 shard=2",
    "data=4 pipeline=2 microbatches=2 zero=1 shard=2",
    "data=4 tensor=2 zero=3 shard=2 recompute=full",
)


def test_layouts_with_other_axes_equal_the_serial_model(ranks: Callable[..., list[Any]]) -> None:
    assert ranks(_verified, 8, LAYOUTS)[0] == [True] * len(LAYOUTS)


class Attends(torch.nn.Module):
    """Along a sequence: what each position reads of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.mixes = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 3 * WIDTH) for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for mix in self.mixes:
            q, k, v = mix(x).chunk(3, -1)
            x = x + torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return x.square().mean()


class Convolves(torch.nn.Module):
    """Along an image: what each row reads of its neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Conv2d(3, 3, 3, padding=1) for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def _verified_along(world: World) -> list[bool]:
    numbers = torch.Generator().manual_seed(0)
    sequence, image = (torch.randn(*shape, generator=numbers) for shape in ((8, 8, WIDTH), (8, 3, 8, 8)))
    found = []
    for model, batch, axes in ((Attends, (sequence,), "context=2 zero=3"), (Convolves, (image,), "spatial=2 zero=2")):
        plan = shardwise.plan(model, batch, loss=deep_loss, cluster="1xcpu-8", layout=f"data=4 {axes} shard=2 precision=float64")
        one = verify_on_rank(world, plan, model, batch, deep_loss)
        found.append(one is None or one.ok)
    return found


def test_layouts_along_a_sequence_and_an_image_equal_the_serial_model(ranks: Callable[..., list[Any]]) -> None:
    assert ranks(_verified_along, 8)[0] == [True] * 2
