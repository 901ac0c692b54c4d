"""A fine-tuning script as its author wrote it, on 1, 2 and 4 ranks: every loss, gradient norm, token, logged activation and weight is the
serial script's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import shardwise
from shardwise.lower.float64_mode import compute_in_float64
from shardwise.world.world import World

transformers = pytest.importorskip("transformers")
Batch = dict[str, torch.Tensor]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))


def images() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of 8, 8, 5 and 1."""
    g = torch.Generator().manual_seed(0)
    shapes = ((n, 2, 6, 6) for n in (8, 8, 5, 1))
    return [(torch.randn(shape, generator=g, dtype=torch.float64), torch.randint(0, 3, shape[:1], generator=g)) for shape in shapes]


def classified(net: nn.Module) -> list[float]:
    """A loss between samples, which no mean over parts of them is, and what is right of all."""
    opt, found = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), []
    for x, y in images():
        scores = net(x)
        loss = F.cross_entropy(scores, y) + 0.1 * (scores @ scores.T).logsumexp(1).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        found.append(loss.item())
        net.eval()
        with torch.no_grad():
            found.append(float((net(x).argmax(1) == y).double().mean()))
        net.train()
    return found


def texts(count: int, seed: int) -> list[Batch]:
    """Samples with a mask and labels that partly do not count."""
    g = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        ids = torch.randint(3, 64, (10,), generator=g)
        mask = (torch.arange(10) < int(torch.randint(4, 11, (), generator=g))).long()
        found.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    return found


def loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Batches of 4, 4 and 3; of 4 and 1."""
    shuffled = torch.Generator().manual_seed(1)
    return DataLoader(texts(11, 2), 4, shuffle=True, generator=shuffled), DataLoader(texts(5, 3), 4)  # type: ignore[arg-type]


def script(model: Any, training: Iterable[Batch], validation: Iterable[Batch]) -> dict[str, list[Any]]:
    """The author's own."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, 1, 4)
    found: dict[str, list[Any]] = {"losses": [], "norms": [], "validation": [], "predicted": [], "tokens": [], "seen": []}
    layer = model.transformer.h[0].mlp.c_fc
    for epoch in range(2):
        model.train()
        handle = layer.register_forward_hook(lambda module, args, output: found["seen"].append(float(output.abs().max())))
        for batch in training:
            batch = {name: x.to(model.device) for name, x in batch.items()}
            loss = model(**batch).loss
            loss.backward()
            found["norms"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            found["losses"].append(loss.item())
        handle.remove()
        model.eval()
        for batch in validation:
            with torch.no_grad():
                found["validation"].append(model(**batch).loss.item())
            with torch.inference_mode():  # without labels
                output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
            found["predicted"] += output.logits.sum((1, 2)).tolist()
        prompt = torch.tensor([[0, 6, 7], [8, 9, 10]])  # one is padded, which the library sees if forward can be told
        found["tokens"].append(model.generate(prompt, max_new_tokens=3 + epoch, do_sample=False, pad_token_id=0).tolist())
    assert len(training) == 3  # type: ignore[arg-type]
    assert model.config.n_layer == 1
    assert "attention_mask" in inspect.signature(model.forward).parameters  # as libraries ask
    return found


def whole_batches(world: World, layouts: list[str]) -> list[Any]:
    """A loop without `shardwise.shard`: every rank calls the model with the whole batch, and computes the loss from all of its output."""
    found = []
    for layout in layouts:
        torch.manual_seed(7)
        net = shardwise.auto_parallelize(Normed().double(), images()[0], plan=f"{layout} precision=float64", world=world)
        found.append((classified(net), shardwise.full_state_dict(net)))
        if layout == "data=2" and shardwise.is_main:  # nothing travels: one rank may look at some samples by itself
            net.eval()
            with torch.no_grad():
                net(images()[0][0][:3])
    return found


def divided(world: World, folder: str, layouts: list[str]) -> list[tuple[dict[str, list[Any]], Any]]:
    """The same script, with one changed line."""
    found = []
    for layout in layouts:
        training, validation = loaders()
        model = transformers.GPT2LMHeadModel.from_pretrained(folder).double()
        batch = next(iter(DataLoader(texts(4, 0), 4)))  # type: ignore[arg-type, var-annotated]
        model = shardwise.auto_parallelize(model, batch, plan=f"{layout} precision=float64", world=world)
        told = script(model, shardwise.shard(training), shardwise.shard(validation))
        found.append((told, shardwise.full_state_dict(model)))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=1, n_embd=16, n_head=2, n_positions=16, vocab_size=64, bos_token_id=1, eos_token_id=1, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0,
    )  # fmt: skip
    transformers.GPT2LMHeadModel(config).save_pretrained(made)
    return str(made)


@pytest.fixture(scope="module")
def serial(folder: str) -> tuple[dict[str, list[Any]], dict[str, torch.Tensor]]:
    model = transformers.GPT2LMHeadModel.from_pretrained(folder).double()
    with compute_in_float64(True):  # the library computes losses in float32
        return script(model, *loaders()), model.state_dict()


def check(found: list[Any], serial: Any, layout: str) -> None:
    (told, weights), (wanted, state) = found[0], serial
    for key in ("losses", "norms", "validation"):
        assert told[key] == pytest.approx(wanted[key], rel=1e-9), (layout, key)
    for name, x in state.items():
        assert float((weights[name] - x).abs().max()) <= 1e-9 * float(x.abs().max()), (layout, name)
    assert all(one["tokens"] == wanted["tokens"] for one, _ in found), layout
    assert [max(seen) for seen in zip(*(one["seen"] for one, _ in found), strict=True)] == pytest.approx(wanted["seen"], rel=1e-9)
    rows = [y for one, _ in found for y in one["predicted"]]  # every sample is on one rank, or on several
    assert {round(y, 9) for y in rows} == {round(y, 9) for y in wanted["predicted"]}, layout


LAYOUTS = {1: ["data=1"], 2: ["tensor=2", "data=2 zero=3"], 4: ["data=2 tensor=2 zero=1", "data=4"]}


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(4, marks=pytest.mark.long)])
def test_a_script_is_the_serial_script(ranks: Callable[..., list[Any]], folder: str, serial: Any, num_ranks: int) -> None:
    results = ranks(divided, num_ranks, folder, LAYOUTS[num_ranks])
    for layout, found in zip(LAYOUTS[num_ranks], zip(*results, strict=True), strict=True):
        check(list(found), serial, layout)


def test_a_loop_may_keep_its_whole_batches(ranks: Callable[..., list[Any]]) -> None:
    torch.manual_seed(7)
    net = Normed().double()
    wanted = classified(net)
    results = ranks(whole_batches, 2, ["data=2", "data=2 zero=2", "tensor=2"])
    for told in zip(*results, strict=True):
        assert all(losses == pytest.approx(wanted, rel=1e-9) for losses, _ in told)
        for name, x in net.state_dict().items():
            assert float((told[0][1][name] - x).abs().max()) <= 1e-9 * float(x.abs().max()), name
