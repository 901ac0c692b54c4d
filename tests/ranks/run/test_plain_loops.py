"""Loops as people write them, on divided models against one process: two networks, two calls a step, frozen weights, loaders."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import shardwise
from shardwise.errors import ShardwiseError, UsageError
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.run.rank_agreement import digest_tensors
from shardwise.world.world import World
from tests.support.plain_models import matches, said

LAYOUTS = [("data=2", 2), ("tensor=2", 2), ("data=2 tensor=2", 4)]
BATCH = 8
CUTS = (("0.weight", 0), ("0.bias", 0), ("2.weight", 1))  # columns, then rows
Pairs = Iterable[tuple[Tensor, Tensor]]


def pair(width: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, out))


def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [tuple(torch.randn(BATCH, 6, generator=generator, dtype=torch.float64) for _ in range(2)) for _ in range(3)]  # type: ignore[misc]


def adversaries(one: nn.Module, two: nn.Module, batches: Pairs) -> None:
    """A generator and a discriminator, each with an optimizer of its own; the generator's gradients come through the other."""
    first, second = (torch.optim.AdamW(net.parameters(), lr=0.1) for net in (one, two))
    for z, x in batches:
        true, false = torch.ones(len(x), 6, dtype=x.dtype), torch.zeros(len(x), 6, dtype=x.dtype)
        second.zero_grad()
        fake = one(z)
        (binary_cross_entropy_with_logits(two(x), true) + binary_cross_entropy_with_logits(two(fake.detach()), false)).backward()
        second.step()
        first.zero_grad()
        two.requires_grad_(False)
        binary_cross_entropy_with_logits(two(one(z)), true).backward()
        two.requires_grad_(True)
        first.step()


def twins(one: nn.Module, two: nn.Module, batches: Pairs) -> None:
    """One network called twice before a backward, and once more without gradients; the other beside it."""
    opt = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1, momentum=0.9)
    for x, y in batches:
        opt.zero_grad()
        with torch.no_grad():
            target = one(x + y)
        loss = mse_loss(one(x), two(y)) + mse_loss(one(y), target)
        loss.backward(retain_graph=True)
        (0.5 * loss).backward()
        opt.step()


def frozen(one: nn.Module, two: nn.Module, batches: Pairs) -> None:
    """Frozen after it was divided, under weight decay and momentum: nothing may move what has no gradient."""
    one[0].requires_grad_(False)  # type: ignore[index]
    opt = torch.optim.AdamW([*one.parameters(), *two.parameters()], lr=0.1, weight_decay=0.5)
    for x, y in batches:
        opt.zero_grad()
        mse_loss(one(x), y).backward()  # `two` has no part in it
        opt.step()


def unfrozen(one: nn.Module, two: nn.Module, batches: Pairs) -> None:
    """As `frozen`, with gradients that are zeroed in place, and weights that train later."""
    one[0].requires_grad_(False)  # type: ignore[index]
    opt = torch.optim.AdamW([*one.parameters(), *two.parameters()], lr=0.1, weight_decay=0.5)
    for number, (x, y) in enumerate(batches):
        if number == 2:
            one[0].requires_grad_(True)  # type: ignore[index]
        opt.zero_grad(set_to_none=False)
        (mse_loss(one(x), y) + (mse_loss(two(y), x) if number == 1 else 0.0)).backward()
        opt.step()


def holders(one: nn.Module, two: nn.Module, batches: Pairs) -> None:
    """Gradients that are held over later backwards: as they are, as a view, detached; then accumulated, and zeroed in place."""
    opt = torch.optim.SGD(one.parameters(), lr=0.1)
    held: list[tuple[nn.Parameter, Tensor]] = []
    for number, (x, y) in enumerate([*batches] * 3):
        opt.zero_grad(set_to_none=number != 5)
        mse_loss(one(x), y).backward()
        if number % 4 == 3:
            mse_loss(one(y), x).backward()
        with torch.no_grad():
            for p, grad in held:
                p.add_(grad, alpha=-0.05)
        held = [(p, p.grad if number % 3 == 0 else p.grad.detach() if number % 3 == 1 else p.grad.view_as(p)) for p in one.parameters()]  # type: ignore[union-attr, misc]
        opt.step()


def hooked(one: nn.Module, two: nn.Module, batches: Pairs) -> None:
    """Hooks on some gradients, which accumulate over backwards."""
    opt = torch.optim.SGD(one.parameters(), lr=0.1)
    for number, (x, y) in enumerate([*batches] * 2):
        if number == 1:
            one[0].weight.register_hook(lambda grad: 2 * grad)  # type: ignore[index]
        if number % 3 == 0:
            opt.zero_grad()
        mse_loss(one(x), y).backward()
        opt.step()


LOOPS = [adversaries, twins, frozen, unfrozen, holders, hooked]


def plan_of(layout: str) -> Plan:
    sizes = Layout.parse(f"{layout} precision=float64")
    return Plan(sizes, "pair", "1xcpu-2", BATCH, shards=(("tensor", CUTS),) if sizes.tensor > 1 else ())


def wrong(world: World, layout: str) -> dict[str, list[str]]:
    """By loop: the weights that are not those of one process, and gradients that are there and should not be, or the other way round."""
    found = {}
    for loop in LOOPS:
        torch.manual_seed(7)
        divided = []
        for _ in range(2):
            with shardwise.auto_parallelize(batch=(data()[0][0],), plan=plan_of(layout), world=world):
                divided.append(pair(6, 6))
        loop(*divided, shardwise.shard(data()))
        torch.manual_seed(7)
        serial = [pair(6, 6).double() for _ in range(2)]
        loop(*serial, data())
        found[loop.__name__] = [
            f"{number}.{name}"
            for number in range(2)
            for (name, p), q in zip(divided[number].named_parameters(), serial[number].parameters(), strict=True)
            if not matches(p.detach(), q.detach()) or (p.grad is None) != (q.grad is None)
        ]
    return found


def by_name(one: nn.Module, batches: Iterable[dict[str, Tensor]]) -> None:
    """Batches that are dicts, with more in them than the model takes: its own name for what it takes, or the loader's."""
    opt = torch.optim.SGD(one.parameters(), lr=0.1)
    for batch in batches:
        opt.zero_grad()
        mse_loss(one(input=batch["input"]) if "input" in batch else one(batch["pixels"]), batch["target"]).backward()
        opt.step()


def wrong_by_name(world: World, layout: str) -> list[str]:
    found = []
    for key in ("input", "pixels"):
        batches = [{key: x, "target": y} for x, y in data()]
        torch.manual_seed(7)
        with shardwise.auto_parallelize(batch=batches[0], plan=plan_of(layout), world=world):
            divided = pair(6, 6)
        by_name(divided, shardwise.shard(batches))
        torch.manual_seed(7)
        serial = pair(6, 6).double()
        by_name(serial, batches)
        found += [
            name
            for (name, p), q in zip(divided.named_parameters(), serial.parameters(), strict=True)
            if not matches(p.detach(), q.detach())
        ]
    return found


@pytest.mark.parametrize(("layout", "num_ranks"), LAYOUTS[:2])
def test_a_loader_of_dicts_may_have_targets_that_the_model_does_not_take(
    ranks: Callable[..., list[Any]], layout: str, num_ranks: int
) -> None:
    assert ranks(wrong_by_name, num_ranks, layout) == [[]] * num_ranks


@pytest.mark.parametrize(("layout", "num_ranks", "transport"), [(*one, "shared_memory") for one in LAYOUTS] + [("data=2", 2, "gloo")])
def test_loops_are_those_of_one_process(ranks: Callable[..., list[Any]], layout: str, num_ranks: int, transport: str) -> None:
    """Over gloo gradients are views of their buckets; ranks that share memory copy them."""
    for found in ranks(wrong, num_ranks, layout, env={"SHARDWISE_TRANSPORT": transport}):
        assert found == {loop.__name__: [] for loop in LOOPS}


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 6))


def changed(world: World) -> dict[str, Any]:
    """What is said where the module was changed after it was divided; and what may be done."""
    (x, y), *_ = data()
    rows = slice(world.rank * BATCH // 2, (world.rank + 1) * BATCH // 2)

    def made(prepare: Callable[[Any], object]) -> Any:
        torch.manual_seed(7)
        with shardwise.auto_parallelize(batch=(x,), plan=plan_of("data=2"), world=world):
            net = Normed()
            prepare(net)
        return net

    def after(change: Callable[[Any], object]) -> str:
        net = made(lambda net: None)
        change(net)
        return said(lambda: net(x[rows]), UsageError)

    found: dict[str, Any] = {
        "replaced": after(lambda net: net.__setitem__(3, nn.Linear(16, 2))),
        "weight": after(lambda net: setattr(net[0], "weight", nn.Parameter(torch.ones(16, 6)))),
        "resized": after(lambda net: setattr(net[0].weight, "data", torch.ones(20, 6))),
        "added": after(lambda net: net.append(nn.ReLU())),
        "hooked": after(lambda net: net[1].register_forward_hook(lambda *_: torch.ones(()))),
        "backward": after(lambda net: net[1].register_full_backward_hook(lambda *_: None)),
        "nothing": after(lambda net: net.eval().train().double().requires_grad_(False)),
    }
    calls: list[int] = []
    net = made(lambda net: (net[1].eval(), net[2].eval()))
    net.register_forward_hook(lambda *_: calls.append(1))
    mse_loss(net(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
    torch.manual_seed(7)
    serial = Normed().double()
    serial[1].eval(), serial[2].eval()
    mse_loss(serial(x), y).backward()  # type: ignore[no-untyped-call]
    found["as before it was divided"] = all(matches(p.grad, q.grad) for p, q in zip(net.parameters(), serial.parameters(), strict=True))
    found["hook on the whole"] = len(calls)
    return found


def modes(net: nn.Module, batches: Pairs) -> list[Tensor]:
    """Steps of one network as its user sets it: training, in evaluation, with one layer otherwise than the others, and back."""
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    layers = list(net)  # type: ignore[arg-type]
    found = []
    for x, y in batches:
        for change in (net.train, net.eval, layers[1].train, net.train, layers[1].eval, net.eval):
            change()
            opt.zero_grad()
            loss = mse_loss(net(x), y)
            loss.backward()
            opt.step()
            with torch.no_grad():
                found.append(net(x))
    return found


OF_NORM = tuple((f"1.{name}", 0) for name in ("weight", "bias", "running_mean", "running_var"))
NORMED = (("0.weight", 0), ("0.bias", 0), *OF_NORM, ("3.weight", 1))


class Trained(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 6))


def wrong_modes(world: World, layout: str, starts: bool) -> list[str]:
    """Names of what differs from one process, of a network that is built in training or in evaluation."""
    torch.manual_seed(7)
    with shardwise.auto_parallelize(batch=data()[0], plan=replace(plan_of(layout), shards=(("tensor", NORMED),)), world=world):
        divided = Trained().train(starts)
    modes(divided, shardwise.shard(data()))
    torch.manual_seed(7)
    serial = Trained().double()
    modes(serial, data())
    held = shardwise.full_state_dict(divided)
    return [name for name, x in serial.state_dict().items() if held is not None and not matches(held[name], x)]


@pytest.mark.parametrize("starts", [True, False])
@pytest.mark.parametrize(("layout", "num_ranks"), LAYOUTS[:2])
def test_each_mode_of_a_model_is_trained_as_in_one_process(
    ranks: Callable[..., list[Any]], layout: str, num_ranks: int, starts: bool
) -> None:
    assert ranks(wrong_modes, num_ranks, layout, starts) == [[]] * num_ranks


def test_what_is_done_to_a_divided_model_is_done_or_refused(ranks: Callable[..., list[Any]]) -> None:
    for found in ranks(changed, 2):
        assert found["replaced"].startswith("3 was replaced after the model was divided: do it inside the block")
        assert found["weight"].startswith("0.weight was replaced")
        assert found["resized"].startswith("0.weight was resized after the model was divided")
        assert found["added"].startswith("4 was replaced")
        assert found["hooked"].startswith("a hook on 1 returns something, which would change what the model computes")
        assert found["backward"].startswith("a hook on the backward of 1 would never be called")
        assert found["nothing"] == ""
        assert found["as before it was divided"]
        assert found["hook on the whole"] == 1


def scaled(world: World, layout: str) -> list[tuple[float, list[bool]]]:
    """A scaled loop whose second step overflows in one rank's part: the scale after each step, and what weights are as on one process."""
    torch.manual_seed(7)
    with shardwise.auto_parallelize(batch=(data()[0][0],), plan=plan_of(layout), world=world):
        net = pair(6, 6)
    torch.manual_seed(7)
    serial = pair(6, 6).double()
    found = []
    opts = [(one, torch.optim.SGD(one.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=4.0)) for one in (net, serial)]
    for number, (x, y) in enumerate(data()):
        for one, opt, scaler in opts:
            opt.zero_grad()
            scaler.scale(mse_loss(one(x), y)).backward()
            if number == 1 and (one is serial or world.rank == 0):
                grad = one[0].weight.grad
                (grad if one is serial else grad.as_subclass(Tensor))[:1].fill_(float("inf"))
            scaler.step(opt)
            scaler.update()
        weights = [matches(p.detach(), q.detach()) for p, q in zip(net.parameters(), serial.parameters(), strict=True)]
        found.append((float(opts[0][2].get_scale()), weights))
    return found


@pytest.mark.parametrize("layout", ["tensor=2", "data=2 zero=2"])
def test_scaled_steps_are_skipped_by_all_ranks_or_none(ranks: Callable[..., list[Any]], layout: str) -> None:
    for found in ranks(scaled, 2, layout):
        assert [scale for scale, _ in found] == [4.0, 2.0, 2.0]
        assert all(all(weights) for _, weights in found)


def autocasts(world: World, layout: str) -> list[bool]:
    """Whether what a divided model gives under the user's autocast is as on one process, and something else than without."""
    x = torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(3))
    torch.manual_seed(7)
    with shardwise.auto_parallelize(batch=(x,), plan=Plan(Layout.parse(layout), "pair", "1xcpu-2", BATCH), world=world):
        net = pair(6, 6)
    torch.manual_seed(7)
    serial = pair(6, 6)
    rows = x[world.rank * BATCH // 2 : (world.rank + 1) * BATCH // 2]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under, want = net(rows), serial(rows)
    return [
        under.dtype is torch.bfloat16,
        torch.equal(under, want),
        torch.equal(net(rows), serial(rows)),
        not torch.equal(net(rows), under.float()),
    ]


@pytest.mark.parametrize("layout", ["data=2", "data=2 zero=3"])
def test_the_users_autocast_is_kept(ranks: Callable[..., list[Any]], layout: str) -> None:
    assert ranks(autocasts, 2, layout) == [[True] * 4] * 2


def loaders(world: World) -> list[str]:
    """What is said of a loader that is seeded alike, of one that shuffles by itself, and of one with a part for each rank."""
    x, y = (torch.cat(all_) for all_ in zip(*data(), strict=True))
    dataset = TensorDataset(x, y)
    with shardwise.auto_parallelize(batch=data()[0], plan=plan_of("data=2"), world=world):
        net = pair(6, 6)

    def seeded(seed: int) -> DataLoader[Any]:
        return DataLoader(dataset, BATCH, shuffle=True, generator=torch.Generator().manual_seed(seed))

    parts = DistributedSampler(dataset, num_replicas=world.num_ranks, rank=world.rank, shuffle=False)
    assert isinstance(net, nn.Module)
    given = (seeded(3), seeded(world.rank), DataLoader(dataset, BATCH // 2, sampler=parts))
    return [said(lambda loader=loader: list(shardwise.shard(loader)), UsageError) for loader in given]


def test_a_loader_that_differs_between_ranks_is_found(ranks: Callable[..., list[Any]]) -> None:
    first, second = ranks(loaders, 2)
    assert first == ["", "", ""], "rank 0 is what the others are held against"
    assert second[0] == ""
    for text in second[1:]:
        assert text.startswith("rank 1 is given another batch than rank 0")
        assert "torch.manual_seed" in text


def engine_steps(world: World, layout: str, same: bool) -> float | None:
    """A step of an engine whose ranks are given the same batch, or others. The model takes the first of two tensors, the loss both."""
    engine = shardwise.parallelize(
        lambda: pair(6, 6),
        batch=data()[0],
        loss=lambda out, batch: mse_loss(out, batch[1]),
        plan=f"{layout} precision=float64",
        seed=3,
        world=world,
    )
    return engine.step(data()[0 if same else world.rank]).loss


@pytest.mark.parametrize("layout", ["data=2", "pipeline=2 microbatches=2"])
def test_an_engine_that_is_given_other_batches_on_other_ranks_says_so(ranks: Callable[..., list[Any]], layout: str) -> None:
    torch.manual_seed(3)
    serial = pair(6, 6).double()
    x, y = data()[0]
    assert ranks(engine_steps, 2, layout, True) == [pytest.approx(float(mse_loss(serial(x), y).detach()), rel=1e-9)] * 2
    with pytest.raises(ShardwiseError, match="rank 1 is given another batch than rank 0, and one batch is divided among all ranks"):
        ranks(engine_steps, 2, layout, False)


def test_a_digest_tells_values_kinds_shapes_and_places_apart() -> None:
    x = torch.arange(6.0)
    others = [x + 1, x.view(2, 3), x.double(), x.to(torch.bfloat16), (x,), {"x": x}, (x, x[:0])]
    assert len({digest_tensors(one) for one in (x, *others)}) == 1 + len(others)
    assert digest_tensors({"x": x[::2]}) == digest_tensors({"x": torch.tensor([0.0, 2.0, 4.0])})
    assert digest_tensors((torch.zeros(0), torch.tensor(3), "text")) != digest_tensors((torch.zeros(0), torch.tensor(4), "text"))
