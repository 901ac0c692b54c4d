"""Updates that come late, against a loop of plain torch; how far ranks get ahead of one another; checkpoints; memory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardwise
from shardwise.plan.layout import Layout
from shardwise.run.gradients.stale_updates import StaleUpdates
from shardwise.run.state.optimizer import Optimizer
from shardwise.run.verify.verify import Options, verify_on_rank
from shardwise.world.world import World

STEPS = 8
BOUNDS = (0, 1, 3)
SAMPLES = 12
CASES = [(staleness, name) for staleness in (0, 1, 2, 3) for name in ("sgd", "adamw")]
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"name": "sgd", "lr": 0.05, "momentum": 0.9, "clip": 0.4},
    "adamw": {"name": "adamw", "lr": 0.01, "weight_decay": 0.1},
}


def _make() -> torch.nn.Module:
    """One bucket of more than 64 KiB in float64, which is summed where it lies, or two."""
    layers = [torch.nn.Linear(33, 111), torch.nn.Tanh(), torch.nn.Linear(111, 111), torch.nn.Tanh(), torch.nn.Linear(111, 3)]
    return torch.nn.Sequential(*layers)


class Branching(torch.nn.Module):
    """No graph: it is trained whole."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _make()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x.to(self.inner[0].weight.dtype))
        return y if y.sum() > 0 else y * 1.0


def _loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return (output - 1).square().mean()


def _batch(step: int) -> tuple[torch.Tensor]:
    return (torch.randn(SAMPLES, 33, generator=torch.Generator().manual_seed(step), dtype=torch.float64),)


def _rate(step: int) -> float:
    return 0.01 * (step + 1)


def _late(name: str, staleness: int, drains: int = -1) -> tuple[list[float], list[torch.Tensor]]:
    """Losses and last weights of a loop in one process; after step `drains`, and at the end, all updates are applied that wait."""
    torch.manual_seed(0)
    model = _make().double()
    given = dict(OPTIMIZERS[name])
    clip = given.pop("clip", 0.0)
    optimizer = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[given.pop("name")](model.parameters(), **given)
    waiting: deque[tuple[float, list[torch.Tensor]]] = deque()

    def apply(down_to: int) -> None:
        while len(waiting) > down_to:
            rate, gradients = waiting.popleft()
            norm = torch.cat([g.flatten() for g in gradients]).norm()
            scale = clip / (norm + 1e-6) if clip and norm > clip else 1.0
            for p, g in zip(model.parameters(), gradients, strict=True):
                p.grad = g * scale
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()

    losses = []
    for step in range(STEPS):
        loss = _loss(model(*_batch(step)), None)
        waiting.append((_rate(step), list(torch.autograd.grad(loss, list(model.parameters())))))
        losses.append(loss.item())
        apply(0 if step == drains else staleness)
    apply(0)
    return losses, [p.detach() for p in model.parameters()]


def _engine(world: World, layout: str, name: str = "adamw", make: Callable[[], torch.nn.Module] = _make) -> Any:
    given = dict(OPTIMIZERS[name])
    return shardwise.parallelize(make, _batch(0), loss=_loss, plan=f"{layout} precision=float64", seed=0, world=world, optimizer=given)


def _trained(world: World, layout: str, name: str, early: bool = False, branching: bool = False) -> Any:
    """Losses and last weights; `early`: of a twin that applies updates a step too soon."""
    if early:
        real = StaleUpdates.push

        def push(self: StaleUpdates, lr: float | None) -> float | None:
            self._staleness -= 1
            try:
                return real(self, lr)
            finally:
                self._staleness += 1

        StaleUpdates.push = push  # type: ignore[method-assign]
    engine = _engine(world, layout, name, Branching if branching else _make)
    losses = [engine.step(_batch(step), lr=_rate(step)).loss for step in range(STEPS)]
    state = engine.full_state_dict()
    return losses, None if state is None else list(state.values())


def _off(found: list[Any], want: tuple[list[float], list[torch.Tensor]]) -> float:
    """The largest relative difference of losses on any rank, and of weights."""
    worst = max(abs(a / b - 1) for losses, _ in found for a, b in zip(losses, want[0], strict=True))
    return max([worst, *(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found[0][1], want[1], strict=True))])


def _each(world: World, layout: str) -> list[Any]:
    return [_trained(world, f"{layout} staleness={staleness}", name) for staleness, name in CASES]


@pytest.mark.parametrize("layout", ["data=2", "data=3 all_reduce=parameter_server", "data=2 all_reduce=ring", "data=3 all_reduce=native"])
def test_it_is_the_loop_whose_updates_come_late(ranks: Callable[..., list[Any]], layout: str) -> None:
    """Momentum, clipping, rates and AdamW's count of steps go with the step whose gradients they are."""
    found = ranks(_each, Layout.parse(layout).num_ranks, layout)
    for (staleness, name), each in zip(CASES, zip(*found, strict=True), strict=True):
        assert _off(list(each), _late(name, staleness)) < 1e-9, (staleness, name)


def _besides(world: World, words: list[str]) -> list[Any]:
    return [_trained(world, f"data=2 staleness=2 {more}", "sgd") for more in words]


def test_it_goes_with_what_a_layout_may_have_besides(ranks: Callable[..., list[Any]]) -> None:
    words = ["microbatches=2", "microbatches=3 recompute=full", "offload=activations"]
    for more, each in zip(words, zip(*ranks(_besides, 2, words), strict=True), strict=True):
        assert _off(list(each), _late("sgd", 2)) < 1e-9, more


@pytest.mark.parametrize(
    ("transport", "layout"), [("gloo", "data=2"), ("shared_memory", "data=2"), ("boxes=2", "data=4 all_reduce=hierarchical")]
)
def test_every_transport_does(ranks: Callable[..., list[Any]], transport: str, layout: str) -> None:
    found = ranks(_trained, Layout.parse(layout).num_ranks, f"{layout} staleness=2", "sgd", env={"SHARDWISE_TRANSPORT": transport})
    assert _off(found, _late("sgd", 2)) < 1e-9


def test_a_model_without_a_graph_is_trained_so_too(ranks: Callable[..., list[Any]]) -> None:
    assert _off(ranks(_trained, 2, "data=2 staleness=2", "adamw", False, True), _late("adamw", 2)) < 1e-9


@pytest.mark.parametrize("staleness", [1, 3])
def test_a_twin_that_is_early_is_found(ranks: Callable[..., list[Any]], staleness: int) -> None:
    assert _off(ranks(_trained, 2, f"data=2 staleness={staleness}", "sgd", True), _late("sgd", staleness)) > 1e-4


def _verified(world: World, layout: str, spoil: str) -> Any:
    if spoil == "early":
        StaleUpdates.start = _drained_first(StaleUpdates.start)  # type: ignore[method-assign]
    elif spoil == "rate":
        real = Optimizer.step
        Optimizer.step = lambda self, lr=None: real(self, 2e-3)  # type: ignore[method-assign]
    plan = shardwise.plan(_make(), _batch(0), loss=_loss, layout=f"{layout} precision=float64")
    sabotage = {"0.weight": 1.001} if spoil == "gradient" else None
    options = Options(optimizer={"name": "adamw", "clip": 0.1}, sabotage=sabotage)
    found = verify_on_rank(world, plan, _make, _batch(0), _loss, options=options)
    return None if found is None else (found.ok, str(found))


def _drained_first(real: Callable[[StaleUpdates], None]) -> Callable[[StaleUpdates], None]:
    def start(self: StaleUpdates) -> None:
        self.drain()
        real(self)

    return start


@pytest.mark.parametrize("layout", ["data=2 staleness=1", "data=3 microbatches=2 staleness=3 all_reduce=parameter_server"])
def test_verification_delays_the_serial_model_alike(ranks: Callable[..., list[Any]], layout: str) -> None:
    ok, said = ranks(_verified, Layout.parse(layout).num_ranks, layout, "")[0]
    assert ok, said


@pytest.mark.parametrize(("spoil", "names"), [("early", ""), ("rate", "weights"), ("gradient", "gradients of 0.weight")])
def test_verification_finds_what_is_wrong(ranks: Callable[..., list[Any]], spoil: str, names: str) -> None:
    ok, said = ranks(_verified, 2, "data=2 staleness=2", spoil)[0]
    assert not ok
    assert names in said


def _counted(world: World, layout: str, path: str, staleness: int) -> list[int]:
    """Rank 1 begins a step when it sees that rank 0 has begun as many more as it may. Returns how far ahead rank 0 was seen."""
    engine = _engine(world, layout)
    began = np.memmap(path, np.int64, "r+", shape=(2,))  # steps, by rank
    ahead = []
    for step in range(STEPS):
        began[world.rank] = step + 1
        if world.rank == 0:
            ahead.append(step - int(began[1]))  # which has sent its gradients of all of those but the last at least
        else:
            for _ in range(5):
                while (seen := int(began[0]) - step - 1) < min(staleness, STEPS - 1 - step):
                    time.sleep(0.001)
                ahead.append(seen)
                time.sleep(0.002)  # in which it must not go on
        engine.step(_batch(step))
    engine.drain()
    return ahead


def _bounded(world: World, how: str, folder: str) -> list[list[int]]:
    return [_counted(world, f"data=2 staleness={k} all_reduce={how}", str(Path(folder, str(k))), k) for k in BOUNDS]


@pytest.mark.parametrize("how", ["native", "parameter_server", "ring"])
def test_nobody_waits_within_the_bound_and_nobody_passes_it(ranks: Callable[..., list[Any]], tmp_path: Path, how: str) -> None:
    """A rank that waits until the other is ahead would wait for ever if that one waited for it; and it never sees it further ahead."""
    for staleness in BOUNDS:
        (tmp_path / str(staleness)).write_bytes(bytes(16))
    for staleness, first, second in zip(BOUNDS, *ranks(_bounded, 2, how, str(tmp_path)), strict=True):
        assert max(second) == staleness
        assert max(first) <= staleness


def _resumed(world: World, layout: str, folder: str) -> tuple[list[float], list[float], list[float]]:
    """Losses of a run that saves after step 3 and evaluates after step 5, from there on; and of one that goes on from what was saved."""

    def rest(engine: Any) -> list[float]:
        losses = [engine.step(_batch(step), lr=_rate(step)).loss for step in range(4, STEPS)]
        return [*losses, engine.evaluate(_batch(50))]

    engine, other = _engine(world, layout), _engine(world, layout)
    before = [engine.step(_batch(step), lr=_rate(step)).loss for step in range(4)]
    engine.save(folder)
    straight = rest(engine)
    for step in range(3):  # of another run, whose updates wait
        other.step(_batch(90 + step))
    other.load(folder)
    return before, straight, rest(other)


def test_a_run_that_saved_goes_on_as_one_that_resumes(ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    """Both from the weights of all steps made, bit for bit; and as a loop that drains there."""
    losses, _ = _late("adamw", 2, drains=3)
    for before, straight, again in ranks(_resumed, 2, "data=2 staleness=2", str(tmp_path)):
        assert straight == again
        assert [*before, *straight[:-1]] == pytest.approx(losses, rel=1e-9)
    assert losses != pytest.approx(_late("adamw", 2)[0], rel=1e-4)


def _evaluated(world: World, layout: str) -> tuple[float, float]:
    engine = _engine(world, layout)
    for step in range(STEPS):
        engine.step(_batch(step), lr=_rate(step))
    return engine.evaluate(_batch(50)), engine.evaluate(_batch(50))


def test_evaluation_sees_all_updates(ranks: Callable[..., list[Any]]) -> None:
    _, weights = _late("adamw", 3)
    model = _make().double()
    for p, w in zip(model.parameters(), weights, strict=True):
        p.data.copy_(w)
    want = _loss(model(*_batch(50)), None).item()
    for found in ranks(_evaluated, 2, "data=2 staleness=3"):
        assert found == pytest.approx((want, want), rel=1e-9)


def _held(world: World, layout: str) -> tuple[float, float]:
    """Bytes of gradients and of parameters at the peak."""
    engine = _engine(world, layout)
    for step in range(3):
        engine.step(_batch(step))
    peak = engine.peak_memory()
    assert peak is not None
    return peak.gradients, 8.0 * engine.num_parameters


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_each_step_under_way_has_gradients_of_its_own(ranks: Callable[..., list[Any]], staleness: int) -> None:
    for held, parameters in ranks(_held, 2, f"data=2 staleness={staleness}"):
        assert held == pytest.approx((staleness + 1) * parameters, rel=0.01)
    plan = shardwise.plan(_make(), _batch(0), loss=_loss, layout=f"data=2 staleness={staleness} precision=float64")
    assert plan.prediction is not None
    assert plan.prediction.memory.gradients == pytest.approx((staleness + 1) * parameters, rel=0.01)
