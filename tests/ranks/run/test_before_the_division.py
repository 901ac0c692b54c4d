"""What a script has made of a model before it is divided: optimizers with state, lists of parameters, hooks, averages. All as serially."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.world.world import World
from tests.support.loop_cases import CUT, LAYOUTS, Divide, data, found_in, loss_of, make, serial_of, train


def with_optimizer(kind: Any, options: dict[str, Any], divide: Divide) -> list[float]:
    """Two steps before the division, so that there is state, and a schedule; groups of their own, and a list for clipping."""
    net = make()
    parameters = list(net.parameters())
    groups: Any = [{"params": parameters[:2], "lr": 0.02}, {"params": parameters[2:]}] if kind is not torch.optim.LBFGS else parameters
    if kind is torch.optim.Muon:
        groups = [p for p in parameters if p.dim() == 2]
    opt = kind(groups, **options)
    rate = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
    losses = []

    def closure(x: Tensor, y: Tensor) -> Tensor:
        opt.zero_grad()
        loss = loss_of(net, x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 0.3)
        return loss

    for i, (x, y) in enumerate(data()):
        if i == 2:
            net = divide(net)
        losses.append(opt.step(partial(closure, x, y)).item())
        rate.step()
    return losses


def with_gradient_before(divide: Divide) -> list[float]:
    """A gradient that was accumulated before the division, and the graph of a loss that still lives."""
    net = make()
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    loss = loss_of(net, *data()[3])
    loss.backward()
    net = divide(net)
    return [loss.item(), *train(net, opt)]


def with_part(divide: Divide) -> list[float]:
    """An optimizer of a part, and another of the rest with a head beside the model."""
    net = make()
    head = nn.Linear(4, 4, dtype=torch.float64)
    opts = [torch.optim.Adam(net.up.parameters(), lr=0.02), torch.optim.AdamW([*net.down.parameters(), *head.parameters()], lr=0.02)]
    net = divide(net)
    losses = []
    for x, y in data():
        loss = nn.functional.cross_entropy(head(net(x)), y)
        loss.backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
        losses.append(loss.item())
    return losses


def with_average(divide: Divide) -> list[float]:
    """A copy of the weights that was made before: an average of them."""
    net = make()
    average = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    net = divide(net)
    losses = []
    for x, y in data():
        losses += train(net, opt)
        average.update_parameters(net)
        losses.append(loss_of(average.module.eval(), x, y).item())
    return losses


def with_flat_views(divide: Divide) -> list[float]:
    """An optimizer of a flat buffer of which the parameters are views: it would train nothing."""
    net = make()
    flat = torch.cat([p.detach().flatten() for p in net.parameters()]).requires_grad_()
    sizes = [p.numel() for p in net.parameters()]
    for p, part in zip(net.parameters(), flat.detach().split(sizes), strict=True):
        p.data = part.view_as(p)
    opt = torch.optim.SGD([flat], lr=0.1)
    net = divide(net)
    return train(net, opt)


def hooked(hook: str, is_before: bool, divide: Divide) -> list[float]:
    """Hooks on every parameter, which see the gradient of the whole batch; backward twice a step."""
    net = make()
    net = net if is_before else divide(net)
    opt: Any = torch.optim.SGD(net.parameters(), lr=0.1)
    seen: list[float] = []

    def halve(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(1 / (1 + p.grad.norm()))

    for p in net.parameters():
        own = torch.optim.AdamW([p], lr=0.05)

        def step(p: Tensor, own: Any = own) -> None:
            own.step()
            own.zero_grad()

        if hook == "gradient":
            p.register_hook(lambda grad: grad / (1 + grad.norm()))
            handle = p.register_hook(lambda grad: seen.append(float(grad.norm())))
        else:
            p.register_post_accumulate_grad_hook(step if hook == "step" else halve)
    net = divide(net) if is_before else net
    losses = []
    for i, (x, y) in enumerate(data()):
        if i == 2 and hook == "gradient":
            handle.remove()
        loss = loss_of(net, x, y)
        loss.backward(retain_graph=hook != "step")
        if hook != "step":
            loss.backward()
            opt.step()
            opt.zero_grad()
        losses.append(loss.item())
    return [*losses, *sorted(seen)]


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.05, "amsgrad": True}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.05}),
    "Muon": (torch.optim.Muon, {"lr": 0.05}),
    "LBFGS": (torch.optim.LBFGS, {"lr": 0.1, "max_iter": 2}),
}
CASES: dict[str, Callable[[Divide], list[float]]] = {
    **{name: partial(with_optimizer, *of) for name, of in OPTIMIZERS.items()},
    **{f"{hook} {is_before}": partial(hooked, hook, is_before) for hook in ("gradient", "after", "step") for is_before in (True, False)},
    "gradient before": with_gradient_before,
    "part": with_part,
    "average": with_average,
}


def every(world: World, layout: str) -> dict[str, Any]:
    found = found_in(world, CASES, CASES, layout, CUT)
    return found | found_in(world, ["flat"], {"flat": with_flat_views}, layout, CUT)


@pytest.mark.parametrize(("layout", "num_ranks"), LAYOUTS)
def test_what_was_made_before_trains_as_in_one_process(ranks: Callable[..., list[Any]], layout: str, num_ranks: int) -> None:
    wanted = serial_of(CASES)
    for found in ranks(every, num_ranks, layout):
        assert "made before the model was divided" in found.pop("flat")
        if "zero" in layout or "tensor" in layout:  # the average is of whole weights
            assert "of up.weight, of which this rank holds a part" in found["average"]
            found["average"] = wanted["average"]
        assert found == {name: pytest.approx(losses, rel=1e-9) for name, losses in wanted.items()}


class Branching(nn.Module):
    """A model that cannot be captured: what it computes depends on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.up(x))
        return self.down(y if float(x.sum()) < 1e9 else -y)


def whole(divide: Divide) -> list[float]:
    net = make(Branching)
    opt = torch.optim.AdamW(net.parameters(), lr=0.02)
    losses = train(net, opt)
    for p in net.parameters():
        p.register_hook(lambda grad: grad / (1 + grad.norm()))
    net = divide(net)
    return losses + train(net, opt)


def every_whole(world: World) -> Any:
    return found_in(world, ["whole"], {"whole": whole}, "data=2", ())["whole"]


def test_a_model_that_runs_whole_follows_them_too(ranks: Callable[..., list[Any]]) -> None:
    # Its loop calls it with the whole batch on every rank: each computes all of it, and the mean over ranks is that of the batch.
    wanted = pytest.approx(serial_of({"whole": whole})["whole"], rel=1e-9)
    assert ranks(every_whole, 2) == [wanted] * 2


def test_an_optimizer_that_takes_a_shard_in_another_way_is_refused(ranks: Callable[..., list[Any]]) -> None:
    assert all("got up.weight" in said for said in ranks(copied, 2))


def copied(world: World) -> str:
    def case(divide: Divide) -> list[float]:
        net = divide(make())
        opt = copy.copy(torch.optim.SGD(net.parameters(), lr=0.1))
        return train(net, opt)

    return str(found_in(world, ["copy"], {"copy": case}, "tensor=2", CUT)["copy"])
