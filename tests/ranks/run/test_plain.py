"""The user's own loop on a divided model (`shardwise.auto_parallelize`, `shardwise.shard`) against the same loop on one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.errors import Infeasible, ModelError
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.world.launch.current import current_data_coordinate
from shardwise.world.world import World
from tests.support.plain_models import BATCH, CUT, Mixed, batches, loss_of, matches, plan_of, said

LAYOUTS = [("data=2", 2), ("tensor=2", 2), ("data=2 tensor=2", 4)]


def loop(net: nn.Module, data: Any, accumulate: int, share: float = 1.0) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and the last gradients of a plain loop; `accumulate` backwards a step without zero_grad between them."""
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses = []
    grads: dict[str, Tensor] = {}
    for x, y in data:
        opt.zero_grad()
        for _ in range(accumulate):
            loss = loss_of(net, x, y)
            loss.backward()
        losses.append(float(loss.detach()))
        grads = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
        opt.step()
    return losses, grads


def serial(accumulate: int) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(7)
    net = Mixed().double()
    losses, grads = loop(net, batches(), accumulate)
    return losses, grads, {**dict(net.named_parameters()), **dict(net.named_buffers())}


def both(world: World, layout: str) -> list[dict[str, Any]]:
    return [divided(world, layout, accumulate) for accumulate in (1, 2)]


def divided(world: World, layout: str, accumulate: int) -> dict[str, Any]:
    torch.manual_seed(7)
    with shardwise.auto_parallelize(batch=batches()[0], plan=plan_of(layout), world=world):
        net = Mixed()
    losses, grads = loop(net, shardwise.shard(batches()), accumulate)
    want_losses, want_grads, want_state = serial(accumulate)
    mine = torch.tensor(losses, dtype=torch.float64)
    place = current_data_coordinate()
    assert place is not None
    world.world_group.all_reduce(mine)
    state = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    return {
        "losses": torch.allclose(mine / world.num_ranks, torch.tensor(want_losses, dtype=torch.float64), rtol=1e-9),
        "gradients": [name for name, want in want_grads.items() if name not in grads or not matches(grads[name], want)],
        "weights": [name for name, want in want_state.items() if not matches(state[name].detach(), want.detach())],
        "tied": net.head.weight is net.emb.weight,
        "held": sum(p.numel() for p in net.parameters()),
        "serial": sum(p.numel() for name, p in want_state.items() if isinstance(p, nn.Parameter)),
        "unused": net.never.weight.grad is None or not net.never.weight.grad.any(),
        "cut": [name for name, p in net.named_parameters() if p.shape != want_state[name].shape],
    }


@pytest.mark.parametrize(("layout", "num_ranks"), LAYOUTS)
def test_a_plain_loop_is_the_serial_loop(ranks: Callable[..., list[Any]], layout: str, num_ranks: int) -> None:
    """With one backward a step, and with two whose gradients add up."""
    for found in (one for rank in ranks(both, num_ranks, layout) for one in rank):
        assert found["losses"]
        assert not found["gradients"]
        assert not found["weights"]
        assert found["tied"]
        assert found["unused"]
        if "tensor" in layout:
            assert set(found["cut"]) == {name for name, _ in CUT}
            assert found["held"] == found["serial"] - (32 * 8 + 32 + 8 * 32 + 16 * 8) / 2, "no rank holds more than its part"
        else:
            assert found["held"] == found["serial"]


@pytest.mark.parametrize("transport", ["gloo", "boxes=1"])
def test_a_plain_loop_sums_where_ranks_share_no_memory(ranks: Callable[..., list[Any]], transport: str) -> None:
    for found in ranks(divided, 2, "data=2", 2, env={"SHARDWISE_TRANSPORT": transport}):
        assert found["losses"]
        assert not found["gradients"]
        assert not found["weights"]


class Pair(NamedTuple):
    logits: Tensor
    hidden: list[Tensor]


@dataclass(frozen=True)
class Answer:
    pair: Pair
    name: str
    extra: Tensor | None = None


class Structured(nn.Module):
    """Named tuple in a frozen dataclass, with text and None."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, scale: float = 1.0) -> Answer:
        hidden = torch.tanh(self.up(x)) * scale
        return Answer(Pair(self.down(hidden), [hidden]), "answer")


def structures(world: World) -> dict[str, Any]:
    """What the outputs of divided models look like, and the largest difference from the serial model's."""
    from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

    ids = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(1))
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
    gpt = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=8, bos_token_id=0, eos_token_id=0)
    gpt.resid_pdrop = gpt.embd_pdrop = gpt.attn_pdrop = 0.0
    bert = BertConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, num_labels=3)
    bert.hidden_dropout_prob = bert.attention_probs_dropout_prob = 0.0
    found: dict[str, Any] = {}
    rows = slice(world.rank * 2, world.rank * 2 + 2)
    makers: list[tuple[str, Callable[[], nn.Module], Any, Tensor]] = [
        ("gpt", lambda: GPT2LMHeadModel(gpt), (ids,), ids),
        ("bert", lambda: BertForSequenceClassification(bert), {"input_ids": ids}, ids),
        ("own", Structured, (x,), x),
    ]
    for name, make, batch, given in makers:
        torch.manual_seed(3)
        want = make()(given)
        torch.manual_seed(3)
        with shardwise.auto_parallelize(batch=batch, plan=Plan(Layout.parse("data=2"), name, "1xcpu-2", 4), world=world):
            net = make()
        got = net(given[rows])
        found[name] = type(got).__name__
        pair = (got.pair.logits, want.pair.logits) if name == "own" else (got.logits, want.logits)
        found[f"{name} error"] = float((pair[0] - pair[1][rows]).abs().max())
        pair[0].sum().backward()
        if name == "gpt":
            found["cache"] = said(lambda x=given[rows], net=net: len(net(x).past_key_values), ModelError)
        if name == "own":
            found["inside"] = [type(got.pair).__name__, type(got.pair.hidden).__name__, got.name, got.extra]
            found["named"] = float((net(x=given[rows]).pair.logits - pair[0]).abs().max())
            found["refused"] = wrong_calls(net, given[rows])
    return found


def wrong_calls(net: nn.Module, x: Tensor) -> list[str]:
    assert not net(x, 0.5).pair.logits.equal(net(x).pair.logits)
    calls = (lambda: net(x, object()), lambda: net(x[:, :4]), lambda: net(x, extra=1))
    return [said(call, Infeasible, ModelError, TypeError) for call in calls]


def test_outputs_keep_their_classes(ranks: Callable[..., list[Any]]) -> None:
    for found in ranks(structures, 2):
        assert (found["gpt"], found["bert"], found["own"]) == ("CausalLMOutputWithCrossAttentions", "SequenceClassifierOutput", "Answer")
        assert all(found[f"{name} error"] < 1e-5 for name in ("gpt", "bert", "own"))
        assert "DynamicCache, which a divided model does not return" in found["cache"]
        assert found["inside"] == ["Pair", "list", "answer", None]
        assert found["named"] == 0.0
        scale, shape, unknown = found["refused"]
        assert "has 1=<object object" in scale
        assert "called with 0, cannot be divided: torch.export cannot follow" in shape
        assert "unexpected keyword argument 'extra'" in unknown


class Modes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        dropped: Tensor = self.drop(self.norm(x))
        return dropped


def modes(world: World) -> list[bool]:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
    with shardwise.auto_parallelize(batch=(x,), plan=Plan(Layout.parse("data=2"), "Modes", "1xcpu-2", 4), world=world):
        net = Modes()
    rows = slice(world.rank * 2, world.rank * 2 + 2)
    net(x[rows])
    before = {name: b.clone() for name, b in net.named_buffers()}
    net.eval()
    with torch.no_grad():
        got = net(x[rows])
    serial = Modes().eval()
    serial.load_state_dict(before, strict=False)
    kept = all(torch.equal(b, before[name]) for name, b in net.named_buffers())
    return [torch.allclose(got, serial(x)[rows]), kept, bool(before["norm.running_mean"].any())]


def test_eval_is_evaluation(ranks: Callable[..., list[Any]]) -> None:
    """After `net.eval()`: no dropout, batch norm by its running statistics, which stay."""
    assert ranks(modes, 2) == [[True] * 3] * 2


KEPT_BY_THE_LOOP = ("recompute=full", "recompute=selective", "recompute=cheap", "offload=activations", "offload=optimizer")


def refused(world: World) -> list[str]:
    """What is said to a batch of the wrong size, a pipeline, microbatches, late updates, recomputation and offload."""
    torch.manual_seed(7)
    x, y = batches()[0]
    with shardwise.auto_parallelize(batch=(x, y), plan=plan_of("data=2"), world=world):
        net = Mixed()

    made: list[nn.Module] = []

    def pipeline(layout: str, *stages: str) -> None:
        with shardwise.auto_parallelize(batch=(x, y), plan=Plan(Layout.parse(layout), "Mixed", "1xcpu-2", BATCH, stages), world=world):
            made.append(Mixed())

    return [
        said(lambda: net(x[: 4 - 2 * world.rank]), Infeasible),
        said(lambda: pipeline("pipeline=2", "head/linear"), Infeasible),
        said(lambda: pipeline("data=2 microbatches=2"), Infeasible),
        said(lambda: pipeline("data=2 staleness=1"), Infeasible),
        *(said(lambda key=key: pipeline(f"data=2 {key}"), Infeasible) for key in KEPT_BY_THE_LOOP),  # type: ignore[misc]
    ]


def test_what_a_plain_loop_cannot_do_is_refused(ranks: Callable[..., list[Any]]) -> None:
    for size, pipeline, microbatches, stale, *kept in ranks(refused, 2):
        assert size == (
            "ranks call the model with 4, 2 samples, which data=2 tensor=1 pipeline=1 precision=float64 divides otherwise; "
            "draw batches through shardwise.shard(loader), or give every rank as many"
        )
        for text in (pipeline, microbatches, stale):
            assert "a plain loop owns its backward and its optimizer" in text
            assert "use shardwise.parallelize" in text
        for key, text in zip(KEPT_BY_THE_LOOP, kept, strict=True):
            assert key in text
            assert "so recompute and offload do not apply; leave them out" in text
