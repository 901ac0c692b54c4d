"""Every optimizer of torch, and some that nobody knows, with a schedule, on weights that lie in pieces: it trains as on one process."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import shardwise
from shardwise.errors import ShardwiseError
from shardwise.world.world import World
from tests.support.plain_models import Mixed, batches, loss_of, matches, plan_of


class _Plain(Optimizer):
    """An optimizer of nobody's, so that nothing can know it by name."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @abstractmethod
    def of(self, p: torch.Tensor, every: list[torch.Tensor]) -> torch.Tensor:
        """How far a parameter moves, of all that have a gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        moves = [self.of(p, held) for p in held]
        for p, move in zip(held, moves, strict=True):
            p.sub_(move, alpha=self.param_groups[0]["lr"])
        return loss


class ByMatrix(_Plain):
    """By products of its own gradient, as far from a step of elements as Muon's are."""

    def of(self, p: torch.Tensor, every: list[torch.Tensor]) -> torch.Tensor:
        assert p.grad is not None
        rows = p.grad.reshape(p.shape[0], -1)
        return (rows @ rows.T @ rows / (rows.norm() ** 2 + 1e-8)).reshape(p.shape)


class ByGroup(ByMatrix):
    """By products where a group says so, in a word that the constructor does not know."""

    def of(self, p: torch.Tensor, every: list[torch.Tensor]) -> torch.Tensor:
        assert p.grad is not None
        products = any(group.get("products") for group in self.param_groups if any(q is p for q in group["params"]))
        return super().of(p, every) if products else p.grad


class ByAll(_Plain):
    """Of length one in all."""

    def of(self, p: torch.Tensor, every: list[torch.Tensor]) -> torch.Tensor:
        assert p.grad is not None
        return p.grad / torch.stack([q.grad.norm() for q in every if q.grad is not None]).norm()


OURS = {"ByMatrix": ByMatrix, "ByGroup": ByGroup, "ByAll": ByAll}
KINDS = {name: kind for name, kind in vars(torch.optim).items() if isinstance(kind, type) and issubclass(kind, Optimizer)}
ALL = [*sorted(name for name, kind in KINDS.items() if kind is not Optimizer), *OURS]
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "LBFGS": {"lr": 0.1, "max_iter": 2},
    "Adam": {"amsgrad": True},
    "RMSprop": {"centered": True, "momentum": 0.5},
}


def run(net: nn.Module, name: str, loader: Any) -> None:
    parameters: list[Any] = [p for p in net.parameters() if name != "Muon" or p.dim() == 2]
    if name == "ByGroup":
        parameters = [{"params": parameters[1:]}, {"params": parameters[:1], "products": True}]
    opt = (KINDS | OURS)[name](parameters, **OPTIONS.get(name, {}))
    rate = torch.optim.lr_scheduler.OneCycleLR(opt, 0.1, total_steps=4, cycle_momentum=False)
    for x, y in loader:

        def closure() -> torch.Tensor:
            opt.zero_grad()
            loss = loss_of(net, x, y)  # noqa: B023
            loss.backward()
            return loss

        opt.step(closure)
        rate.step()


def outcomes(world: World, layout: str) -> dict[str, str]:
    found = {}
    for name in ALL:
        torch.manual_seed(7)
        with shardwise.auto_parallelize(batch=batches()[0], plan=plan_of(layout), world=world):
            net = Mixed()
        torch.manual_seed(7)
        serial = Mixed().double()
        try:
            run(serial, name, batches())
        except RuntimeError as error:  # of sparse gradients alone
            found[name] = f"serial: {error}"
            continue
        try:
            run(net, name, shardwise.shard(batches()))
        except ShardwiseError as error:
            found[name] = f"refused: {error}"
            continue
        pairs = zip(net.named_parameters(), serial.parameters(), strict=True)
        wrong = [path for (path, p), q in pairs if not matches(p.detach(), q.detach())]
        found[name] = f"differs in {', '.join(wrong)}" if wrong else "equal"
    return found


@pytest.mark.parametrize("layout", ["data=2 zero=2", pytest.param("tensor=2", marks=pytest.mark.long)])
def test_every_optimizer_of_torch_trains_alike(ranks: Callable[..., list[Any]], layout: str) -> None:
    for found in ranks(outcomes, 2, layout):
        told = {name: what.split(" ")[0].strip(":") if what.startswith("serial") else what for name, what in found.items()}
        assert told == {name: "serial" if name == "SparseAdam" else "equal" for name in ALL}
