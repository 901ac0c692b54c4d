"""Models that cannot be captured in a plain loop: every rank holds all of them, and the loop is that of one process, in float64.

Three launches of ranks: what trains, what is refused, and such a model in an engine.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import shardwise
from shardwise.errors import Infeasible, ModelError, ShardwiseError, UsageError
from shardwise.world.world import World
from tests.support import whole_models as models
from tests.support.plain_models import said

Given = tuple[Tensor, Tensor]


def of_logits(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(net(x).flatten(0, 1), y.flatten())


def of_its_own(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """No mean of what ranks would make of their own losses."""
    found: Tensor = net(x, y)["loss"].square()
    return found


def of_both(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    found = net(ids=x, y=y)
    return of_logits(lambda _: found["scores"]["logits"], x, y) * found["loss"] + net.emb.weight.square().sum()  # type: ignore[arg-type, operator, union-attr]


LOOPS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor]]] = {
    "logits": (models.Experts, of_logits),
    "its own loss": (models.Scored, of_its_own),
    "both": (models.Scored, of_both),
    "checkpoints": (models.Reentrant, of_logits),
}


def loop(net: nn.Module, data: Iterable[Given], loss_of: Callable[..., Tensor]) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, norms and the last gradients. Gradients add up over two backwards, are clipped, and weights without one must not decay."""
    opt = torch.optim.AdamW(net.parameters(), lr=0.05, weight_decay=0.3)
    losses, norms = [], []
    grads: dict[str, Tensor] = {}
    for x, y in data:
        opt.zero_grad()
        for _ in range(2):
            loss = loss_of(net, x, y)
            loss.backward()
        losses.append(float(loss.detach()))
        norms.append(float(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)))
        grads = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
        opt.step()
    return losses, norms, grads


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-9, atol=1e-12)


def trained(world: World, name: str) -> dict[str, Any]:
    make, loss_of = LOOPS[name]
    data = models.tokens()
    data.append((data[0][0][:5], data[0][1][:5]))  # a last batch that does not divide
    batch: Any = data[0] if issubclass(make, models.Reentrant) or make is models.Experts else dict(zip(("ids", "y"), data[0], strict=True))  # type: ignore[arg-type]
    torch.manual_seed(7)
    with shardwise.auto_parallelize(batch=batch, plan="data=2 precision=float64", world=world):
        net = make()
    initial = {name: x.clone() for name, x in net.state_dict().items()}
    torch.manual_seed(7)
    serial = make()
    equal = all(torch.equal(initial[name], x.double()) for name, x in serial.state_dict().items())
    serial = serial.double()
    losses, norms, grads = loop(net, shardwise.shard(data), loss_of)
    wanted_losses, wanted_norms, wanted = loop(serial, data, loss_of)
    mean = torch.tensor(losses, dtype=torch.float64) / world.num_ranks
    if name != "its own loss":  # it is a mean over this rank's samples
        mean[-1] *= (3, 2)[world.rank] / 2.5
    world.world_group.all_reduce(mean)
    whole = shardwise.full_state_dict(net)
    return {
        "initial weights": equal,
        "losses": same(mean, torch.tensor(wanted_losses, dtype=torch.float64)),
        "norms": same(torch.tensor(norms), torch.tensor(wanted_norms)),
        "gradients": grads.keys() == wanted.keys() and all(same(grads[name], want) for name, want in wanted.items()),
        "weights": all(same(p, q) for p, q in zip(net.parameters(), serial.parameters(), strict=True)),
        "tied": net.head.weight is net.emb.weight,
        "state": (whole is None) == (world.rank > 0) and all(same(whole[k], x) for k, x in serial.state_dict().items() if whole),
        "last expert here": bool((next(iter(shardwise.shard(data)))[0] < 2).any()) == (world.rank == 0),
    }


def others(world: World) -> dict[str, Any]:
    """Copies, state in attributes, random numbers, and what a model that is whole may still do after it was divided."""
    x, found = torch.randn(8, 4, generator=torch.Generator().manual_seed(world.rank)), {}
    whole = torch.randn(8, 4, generator=torch.Generator().manual_seed(2))
    with shardwise.auto_parallelize(batch=(whole,), world=world):
        net = models.Logging()
    twin = copy.deepcopy(net)
    with torch.no_grad():
        net.layer.weight.mul_(2.0)
        found["copy"] = torch.equal(twin(x), nn.functional.linear(x, net.layer.weight / 2, net.layer.bias))
    found["copy trains"] = said(lambda: twin(x), UsageError)
    twin.load_state_dict(net.state_dict())
    found["loaded"] = torch.equal(twin.layer.weight, net.layer.weight)
    found["logged"] = len(net.seen)
    seen: list[Any] = []
    net.layer.register_forward_hook(lambda *_: seen.append(1))
    net(x)
    found["hook on a part"] = len(seen)

    with shardwise.auto_parallelize(batch=(whole,), world=world):
        noisy = models.Noisy()
    torch.manual_seed(3)
    out = noisy(torch.ones(64, 4))
    zeros = (out == 0).double()
    everywhere = zeros.clone()
    world.world_group.all_reduce(everywhere)
    found["masks differ"] = not torch.equal(everywhere, zeros * 2)
    found["dropped"] = 0.3 < float(zeros.mean()) < 0.7
    torch.manual_seed(3)
    found["loop's own numbers"] = torch.equal(torch.randn(3), _drawn_after(3, lambda: noisy(x)))
    noisy.eval()
    found["evaluated"] = torch.equal(noisy(x), noisy.layer(x))

    whole[0] = 100.0
    torch.manual_seed(7)
    with shardwise.auto_parallelize(batch=(whole,), plan="data=2 precision=float64", world=world):
        net = models.Sometimes()
    torch.manual_seed(7)
    serial = models.Sometimes().double()
    for one, batches in ((net, shardwise.shard([whole.double()])), (serial, [whole.double()])):
        opt = torch.optim.AdamW(one.parameters(), lr=0.1, weight_decay=0.5)
        for given in batches:
            one(given).square().mean().backward()
            opt.step()
    found["used on one rank"] = all(same(p, q) for p, q in zip(net.parameters(), serial.parameters(), strict=True))
    return found


def _drawn_after(seed: int, call: Callable[[], Any]) -> Tensor:
    torch.manual_seed(seed)
    call()
    return torch.randn(3)


def all_of_it(world: World) -> dict[str, Any]:
    return {name: trained(world, name) for name in LOOPS} | {"others": others(world)}


def test_a_model_that_cannot_be_captured_trains_in_a_plain_loop(ranks: Callable[..., list[Any]]) -> None:
    for found in ranks(all_of_it, 2):
        rest = found.pop("others")
        for name, one in found.items():
            assert all(one.values()), f"{name}: {[key for key, value in one.items() if not value]}"
        assert rest.pop("copy trains").startswith("a copy of a divided model has weights of its own")
        assert (rest.pop("logged"), rest.pop("hook on a part")) == (0, 1)
        assert all(rest.values()), rest


def refusals(world: World) -> dict[str, str]:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    made: list[Any] = []

    def build(make: Callable[[], nn.Module], plan: str = "data=2") -> None:
        with shardwise.auto_parallelize(batch=(x,), plan=plan, world=world):
            made.append(make())

    found = {
        kind.__name__: said(lambda kind=kind: build(kind), ShardwiseError)
        for kind in (
            models.Normed, models.Remembering, models.Contrasting, models.Summed, models.Selecting, models.Clipping, models.Borrowing,
        )
    }  # fmt: skip
    for plan in ("tensor=2", "pipeline=2", "data=2 zero=1", "data=2 recompute=full", "data=1"):
        found[plan] = said(lambda plan=plan: build(models.Branching, plan), ShardwiseError)

    def hooked() -> nn.Module:
        net = models.Branching()
        net.layer.weight.register_hook(lambda grad: grad.clamp(-1, 1))  # type: ignore[no-untyped-call]
        return net

    found["hooked"] = said(lambda: build(hooked), ModelError)
    build(models.Branching)
    net = made[-1]
    rows = x[:4]
    found["by weights"] = said(lambda: torch.autograd.grad(mse_loss(net(rows), rows), list(net.parameters())), UsageError)
    found["twice"] = said(lambda: mse_loss(net(rows), rows).backward(create_graph=True), UsageError)
    found["saved"] = said(lambda: net.__reduce_ex__(2), UsageError)
    net.layer.weight.grad = None
    found["unequal rows"] = said(lambda: mse_loss(net(x[: 3 + world.rank]), x[: 3 + world.rank]).backward(), Infeasible)
    net.more = lambda x, h: (h, x)
    found["other tensors"] = said(lambda: net(rows), ModelError)
    net.layer = nn.Linear(4, 4)
    found["replaced"] = said(lambda: net(rows), UsageError)
    return found


def test_what_would_train_something_else_is_refused_by_name(ranks: Callable[..., list[Any]]) -> None:
    for found in ranks(refusals, 2):
        assert "norm takes statistics over the whole batch, which data=2 would divide" in found["Normed"]
        assert "it reads in the next call what it keeps in its attribute seen" in found["Remembering"]
        assert "its output over 8 samples is neither made of those of data=2 parts of them" in found["Contrasting"]
        assert "its output over 8 samples is neither made of those of data=2 parts of them" in found["Summed"]
        assert "rows for equal parts of the samples" in found["Selecting"]
        assert "is not in proportion to that of its outputs (a hook or a function that cuts off gradients" in found["Clipping"]
        assert found["Borrowing"].startswith("a parameter of shape [4] is read that is none of the model's")
        assert "could not be captured (torch.export cannot follow the model: data-dependent at whole_models.py" in found["tensor=2"]
        assert "only data and zero apply; use pipeline=1" in found["pipeline=2"]
        assert "could not be captured, so a plain loop keeps all of it on every rank; leave zero out" in found["data=2 zero=1"]
        assert "use recompute=none" in found["data=2 recompute=full"]
        assert "needs 1 ranks, 2 were started" in found["data=1"]
        assert found["hooked"] == ""  # it sees the gradient of the whole batch: test_before_the_division
        assert found["by weights"].startswith("torch.autograd.grad by layer.")
        assert "is this rank's alone" in found["twice"]
        assert "shardwise.full_state_dict(net)" in found["saved"]
        assert "rows on this rank and 7 on all 2, so the mean over ranks of a mean over rows is not that of all" in found["unequal rows"]
        assert found["other tensors"].startswith("the model returned the tensors")
        assert found["replaced"].startswith("layer.weight was put into the model after it was divided")


def test_one_process_keeps_the_model_and_is_told_why(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(8, 4)
    torch.manual_seed(7)
    with shardwise.auto_parallelize(batch=(x,)):
        net = models.Normed()
    torch.manual_seed(7)
    serial = models.Normed()
    net(x).square().mean().backward()
    serial(x).square().mean().backward()
    assert all(torch.equal(p, q) and torch.equal(p.grad, q.grad) for p, q in zip(net.parameters(), serial.parameters(), strict=True))
    assert capsys.readouterr().err.startswith(
        "shardwise: Normed could not be captured (torch.export cannot follow the model: data-dependent at whole_models.py"
    )


def engines(world: World, folder: str) -> dict[str, bool]:
    """Losses of a model that drops out: after a checkpoint as without one, with other numbers on every rank, and none of the loop's."""
    x = torch.ones(8, 4)
    made = [shardwise.parallelize(models.Noisy, (x,), loss=squares, plan="data=2", seed=3, world=world) for _ in range(2)]
    losses = [made[0].step((x,)).loss]
    made[0].save(folder)
    losses += [made[0].step((x,)).loss for _ in range(2)]
    made[1].load(folder)
    torch.manual_seed(world.rank)
    before = torch.random.get_rng_state()
    again = [made[1].step((x,)).loss for _ in range(2)]
    alone = made[1].rank_model.single_stage.module(x[:4])[0].detach().double()
    total = alone.clone()
    world.world_group.all_reduce(total)
    return {
        "resumed": again == losses[1:],
        "apart": not torch.equal(total, alone * 2),
        "loop's own numbers": torch.equal(torch.random.get_rng_state(), before),
    }


def squares(output: Tensor, batch: Any) -> Tensor:
    return output.square().mean()


def test_an_engine_of_a_model_that_draws_resumes_exactly(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    for found in ranks(engines, 2, str(tmp_path)):
        assert all(found.values()), found
