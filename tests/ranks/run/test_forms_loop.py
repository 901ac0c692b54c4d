"""Batches of many forms in a plain loop, as users write it: lengths that change, last batches, other arguments, generation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwise
from shardwise.lower.float64_mode import compute_in_float64
from shardwise.world.world import World

transformers = pytest.importorskip("transformers")
Batch = dict[str, torch.Tensor]


def model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, vocab_size=40,
        max_position_embeddings=32, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).double()


def some(samples: int, length: int, seed: int) -> Batch:
    ids = torch.randint(3, 40, (samples, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def packed(samples: int, seed: int) -> Batch:
    """Two sequences of a row, with positions that begin again and a mask in blocks."""
    batch, ends = some(samples, 8, seed), torch.tensor([5] * (samples - 1) + [3])
    at = torch.arange(8)
    second = at >= ends[:, None]
    labels = batch["labels"].masked_fill(at == ends[:, None], -100)
    causal = torch.ones(8, 8, dtype=torch.bool).tril()
    mask = (second[:, :, None] == second[:, None, :]) & causal
    return {**batch, "labels": labels, "position_ids": at - second * ends[:, None], "attention_mask": mask[:, None]}


def restarted(samples: int, seed: int) -> Batch:
    """The same without a mask: the library sees by positions where sequences end."""
    return {name: x for name, x in packed(samples, seed).items() if name != "attention_mask"}


def padded(samples: int, length: int, seed: int) -> Batch:
    batch = some(samples, length, seed)
    mask = (torch.arange(length) < torch.arange(2, samples + 2)[:, None]).long()
    return {"input_ids": batch["input_ids"], "labels": batch["labels"].masked_fill(mask == 0, -100), "attention_mask": mask}


DATA = (some(4, 8, 0), some(4, 5, 1), padded(4, 6, 2), some(3, 8, 3), packed(4, 4), restarted(4, 6), some(1, 8, 5))


def tuned(net: Any, data: Iterable[Batch]) -> list[float]:
    """Losses of the model's own, of logits in the loop's code, and of evaluation."""
    opt, losses = torch.optim.SGD(net.parameters(), lr=0.5), []
    for batch in data:
        net.train()
        loss = net(**batch).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
        net.eval()
        with torch.no_grad():
            losses += [float(loss.detach()), float(net(**batch).loss)]
    return losses


def divided(world: World, layout: str) -> tuple[list[float], Any, list[list[int]], list[float]]:
    net = shardwise.auto_parallelize(model(), DATA[0], plan=f"{layout} precision=float64", world=world)
    losses = tuned(net, shardwise.shard(DATA))
    with torch.no_grad():
        tokens = net.generate(DATA[0]["input_ids"], max_new_tokens=4, do_sample=False, attention_mask=torch.ones(4, 8, dtype=torch.long))
    logits = net(input_ids=next(iter(shardwise.shard([DATA[1]])))["input_ids"]).logits.detach().sum(dim=(1, 2)).tolist()
    return losses, shardwise.full_state_dict(net), tokens.tolist(), logits


@pytest.fixture(scope="module")
def serial() -> Any:
    net = model()
    with compute_in_float64(True):  # the library computes parts of it in float32
        losses = tuned(net, DATA)
    with torch.no_grad():
        tokens = net.generate(DATA[0]["input_ids"], max_new_tokens=4, do_sample=False, attention_mask=torch.ones(4, 8, dtype=torch.long))
    with torch.no_grad(), compute_in_float64(True):
        logits = net(input_ids=DATA[1]["input_ids"]).logits.sum(dim=(1, 2)).tolist()
    return losses, net.state_dict(), tokens.tolist(), logits


@pytest.mark.parametrize("layout", ["data=2", pytest.param("tensor=2", marks=pytest.mark.long)])
def test_a_script_with_batches_of_many_forms(ranks: Callable[..., list[Any]], serial: Any, layout: str) -> None:
    found = ranks(divided, 2, layout)
    losses, weights, tokens, logits = serial
    assert found[0][0] == pytest.approx(losses, rel=1e-9)
    for name, x in weights.items():
        assert float((found[0][1][name] - x).abs().max()) < 1e-9 * float(x.abs().max()), name
    assert [one[2] for one in found] == [tokens] * 2
    mine = found[0][3] + (found[1][3] if layout == "data=2" else [])
    assert mine == pytest.approx(logits, rel=1e-9, abs=1e-9)


class Images(nn.Module):
    """Of several sizes, normalised over the batch; the loss is the loop's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


def images() -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    shapes = ((6, 2, 6, 6), (6, 2, 8, 4), (5, 2, 6, 6), (4, 2, 5, 5), (3, 2, 6, 6))
    return [(torch.randn(shape, generator=g, dtype=torch.float64), torch.randint(0, 3, shape[:1], generator=g)) for shape in shapes]


def seen(net: nn.Module, data: Iterable[Any]) -> None:
    opt = torch.optim.SGD(net.parameters(), lr=0.3)
    for x, y in data:
        F.cross_entropy(net(x), y).backward()
        opt.step()
        opt.zero_grad()


def looked(world: World) -> dict[str, torch.Tensor] | None:
    torch.manual_seed(0)
    net = shardwise.auto_parallelize(Images().double(), images()[0], plan="data=2 precision=float64", world=world)
    seen(net, shardwise.shard(images()))
    return shardwise.full_state_dict(net)


def test_images_of_several_sizes_and_short_batches(ranks: Callable[..., list[Any]]) -> None:
    torch.manual_seed(0)
    net = Images().double()
    seen(net, images())
    found = ranks(looked, 2)[0]
    for name, x in net.state_dict().items():
        assert float((found[name] - x).abs().max()) <= 1e-9 * float(x.abs().max()), name
