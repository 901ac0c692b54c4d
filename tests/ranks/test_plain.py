"""The user's own loop on a divided model (`weft.auto_parallelize`, `weft.shard`) against the same loop on one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import weft
from weft.errors import Infeasible
from weft.plan.layout import Layout
from weft.plan.plan import Plan
from weft.world.current import current_place
from weft.world.world import World

LAYOUTS = [("data=2", 2), ("tensor=2", 2), ("data=2 tensor=2", 4)]
# By columns and rows; the table by vocabulary, so that the logits are made in pieces and the user's loss still sees them whole.
CUT = (("up.weight", 0), ("up.bias", 0), ("down.weight", 1), ("emb.weight", 0))
BATCH, STEPS = 8, 3


class Mixed(nn.Module):
    """Tied embedding, batch norm, a layer that is never called, a column-row pair that tensor parallelism can cut."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(16, 8)
        self.norm = nn.BatchNorm1d(8)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.never = nn.Linear(4, 4)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.emb(ids)
        h = h + self.down(torch.nn.functional.gelu(self.up(self.norm(h.transpose(1, 2)).transpose(1, 2))))
        return self.head(h)


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [tuple(torch.randint(16, (BATCH, 6), generator=generator) for _ in range(2)) for _ in range(STEPS)]  # type: ignore[misc]


def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(net(x).flatten(0, 1), y.flatten())


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


def matches(local: Tensor, want: Tensor) -> bool:
    """Whether `local` is the whole, or one of its equal pieces along some dimension."""
    if local.shape == want.shape:
        return torch.allclose(local, want, rtol=1e-9, atol=1e-11)
    for dim in range(want.dim()):
        if local.shape[:dim] == want.shape[:dim] and local.shape[dim + 1 :] == want.shape[dim + 1 :]:
            count = want.shape[dim] // local.shape[dim]
            return any(torch.allclose(local, piece, rtol=1e-9, atol=1e-11) for piece in want.chunk(count, dim))
    return False


def plan_of(layout: str) -> Plan:
    sizes = Layout.parse(f"{layout} precision=float64")
    return Plan(sizes, "Mixed", "1xcpu-2", BATCH, shards=(("tensor", CUT),) if sizes.tensor > 1 else ())


def both(world: World, layout: str) -> list[dict[str, Any]]:
    return [divided(world, layout, accumulate) for accumulate in (1, 2)]


def divided(world: World, layout: str, accumulate: int) -> dict[str, Any]:
    torch.manual_seed(7)
    with weft.auto_parallelize(batch=batches()[0], plan=plan_of(layout), world=world):
        net = Mixed()
    losses, grads = loop(net, weft.shard(batches()), accumulate)
    want_losses, want_grads, want_state = serial(accumulate)
    mine = torch.tensor(losses, dtype=torch.float64)
    place = current_place()
    assert place is not None
    world.everyone.all_reduce(mine)
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


def refused(world: World) -> list[str]:
    """What is said to a batch of the wrong size, an odd batch, a pipeline and microbatches."""
    torch.manual_seed(7)
    x, y = batches()[0]
    with weft.auto_parallelize(batch=(x, y), plan=plan_of("data=2"), world=world):
        net = Mixed()

    def said(call: Callable[[], Any]) -> str:
        try:
            call()
        except Infeasible as error:
            return str(error)
        return ""

    made: list[nn.Module] = []

    def pipeline(layout: str, *stages: str) -> None:
        with weft.auto_parallelize(batch=(x, y), plan=Plan(Layout.parse(layout), "Mixed", "1xcpu-2", BATCH, stages), world=world):
            made.append(Mixed())

    return [
        said(lambda: net(x)),
        said(lambda: list(weft.shard([(x[:7], y[:7])]))),
        said(lambda: pipeline("pipeline=2", "head/linear")),
        said(lambda: pipeline("data=2 microbatches=2")),
    ]


def test_what_a_plain_loop_cannot_do_is_refused(ranks: Callable[..., list[Any]]) -> None:
    for size, odd, pipeline, microbatches in ranks(refused, 2):
        assert size.startswith("the model is divided for 8 samples, 4 on each of data=2, and was called with 8; draw batches through")
        assert odd.startswith("a batch of 7 samples does not divide into data=2")
        for text in (pipeline, microbatches):
            assert "a plain loop owns its backward and its optimizer" in text
            assert "use weft.parallelize" in text
