"""Gradients that leave a divided module through its inputs, and parameters outside of it, against one process in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.nn import functional as F

import shardwise
from shardwise.errors import UsageError
from shardwise.world.world import World

LAYOUTS = ["data=2", "tensor=2", "data=2 zero=3"]
Divide = Callable[..., nn.Module]
Batches = Iterable[tuple[Tensor, Tensor]]


def batches(sizes: tuple[int, ...] = (8, 8, 7)) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(n, 6, generator=generator).double(), torch.randint(0, 3, (n,), generator=generator)) for n in sizes]


def mlp(width: int, out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, width), nn.Softplus(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, out)).double()


class Around(nn.Module):
    """Layers in front of, between and beside divided modules, and a parameter outside."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.between, self.beside, self.head = nn.Linear(6, 6), nn.Linear(8, 6), nn.Linear(6, 3), nn.Linear(3, 3)
        self.first, self.second, self.gain = mlp(16, 8), mlp(16, 3), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(self.second(self.between(self.first(x).tanh()))) * self.gain + self.beside(x)


def train_around(divide: Divide, data: Batches) -> list[Any]:
    net = Around().double()
    net.first, net.second = divide(net.first), divide(net.second)  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        torch.nn.utils.clip_grad_norm_([net.gain, *net.stem.parameters()], 0.5)
        optimizer.step()
    return [net.gain, net.stem.weight, net.between.bias, net.beside.weight, net.head.bias]


def train_adversarially(divide: Divide, data: Batches) -> list[Any]:
    """FGSM: samples moved along the sign of their gradient; the magnitudes are compared too."""
    net = divide(mlp(16, 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seen = []
    for x, y in data:
        x = x.clone().requires_grad_()
        F.cross_entropy(net(x), y, reduction="sum").backward()
        assert x.grad is not None
        seen += [x.grad.clone()]
        optimizer.zero_grad()
        F.cross_entropy(net(x.detach() + 0.1 * x.grad.sign()), y).backward()
        optimizer.step()
    return [*seen, shown(net, data)]


def train_wgan_gp(divide: Divide, data: Batches) -> list[Any]:
    """A penalty on the norm of the critic's gradient by samples between real and generated ones, and the generator through the critic."""
    generator, critic = divide(mlp(16, 6)), divide(mlp(16, 1))
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.02) for m in (generator, critic)]
    for x, _ in data:
        fake = generator(x.flip(1)).detach()
        mixed = (0.3 * x + 0.7 * fake).requires_grad_()
        (by_sample,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        loss = critic(fake).mean() - critic(x).mean() + 10 * ((by_sample.norm(dim=1) - 1) ** 2).mean()
        optimizers[1].zero_grad()
        loss.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        (-critic(generator(x.flip(1))).mean()).backward()
        optimizers[0].step()
    return [shown(generator, data), shown(critic, data)]


def train_r1_behind_a_stem(divide: Divide, data: Batches) -> list[Any]:
    """R1 through an undivided layer: second derivatives leave and enter, and train the layer."""
    stem, critic = nn.Linear(6, 6).double(), divide(mlp(16, 1))
    optimizer = torch.optim.SGD([*stem.parameters(), *critic.parameters()], lr=0.02)
    for x, _ in data:
        x = x.clone().requires_grad_()
        out = critic(stem(x).sin())
        (by_sample,) = torch.autograd.grad(F.softplus(out).sum(), x, create_graph=True)
        optimizer.zero_grad()
        (F.softplus(-out).mean() + 5 * by_sample.square().sum(1).mean()).backward()
        optimizer.step()
    return [stem.weight, stem.bias, shown(critic, data)]


def train_prompts(divide: Divide, data: Batches) -> list[Any]:
    """A frozen divided backbone, and a trained prompt in front of it."""
    net = mlp(16, 3).requires_grad_(False)
    prompt, head = nn.Parameter(torch.zeros(6).double()), nn.Linear(3, 3).double()
    net = divide(net)  # type: ignore[assignment]
    optimizer = torch.optim.SGD([prompt, *head.parameters()], lr=0.5)
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(head(net(x + prompt)), y).backward()
        optimizer.step()
    return [prompt, head.weight]


def measure_forces(divide: Divide, data: Batches) -> list[Any]:
    """A force field: the model's gradient by positions is trained; a Jacobian by one sample's features."""
    net = divide(mlp(16, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for x, _ in data:
        x = x.clone().requires_grad_()
        energy = net(x).sum()
        forces = -torch.autograd.grad(energy, x, create_graph=True)[0]
        optimizer.zero_grad()
        (forces - x.detach().cos()).square().mean().backward()
        optimizer.step()
    return [shown(net, data)]


def train_by_imported_grad(divide: Divide, data: Batches) -> list[Any]:
    """A step by `grad`, a name that was imported before the division, by parameters of a layer in front."""
    stem, net = nn.Linear(6, 6).double(), divide(mlp(16, 3).requires_grad_(False))
    for x, y in data:
        gradients = grad(F.cross_entropy(net(stem(x)), y), list(stem.parameters()))
        with torch.no_grad():
            for p, gradient in zip(stem.parameters(), gradients, strict=True):
                p -= 0.5 * gradient
    return [stem.weight, stem.bias]


def shown(net: nn.Module, data: Batches) -> Tensor:
    """The model's outputs for fixed samples that every rank has."""
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)
    with torch.no_grad():
        return net(x)


SCRIPTS = (train_around, train_r1_behind_a_stem, train_adversarially, train_wgan_gp, train_prompts, measure_forces, train_by_imported_grad)


def run_script(script: Callable[[Divide, Batches], list[Any]], divide: Divide, data: Batches) -> list[Tensor]:
    torch.manual_seed(0)
    return [x.detach().clone() for x in script(divide, data)]


def compare_scripts(world: World, layout: str, num_scripts: int = len(SCRIPTS)) -> list[str]:
    """Return what differs from the serial run: with whole batches, and with each rank's samples."""
    differences = []
    for is_sharded in (False, True):
        for script in SCRIPTS[:num_scripts]:
            expected = run_script(script, lambda net: net, batches())

            def divide(net: nn.Module) -> nn.Module:
                example = torch.zeros(8, net[0].in_features, dtype=torch.float64)  # type: ignore[index, arg-type]
                return shardwise.auto_parallelize(net, (example,), plan=f"{layout} precision=float64", world=world)

            divide(mlp(2, 2))  # shardwise.shard needs a division
            actual = run_script(script, divide, shardwise.shard(batches()) if is_sharded else batches())
            for number, (a, b) in enumerate(zip(actual, expected, strict=True)):
                if a.shape != b.shape:  # this rank's samples of a batch
                    start = 0 if world.rank == 0 else len(b) - len(a)
                    b = b[start : start + len(a)]
                if not torch.allclose(a, b, rtol=1e-9, atol=1e-11):
                    differences.append(f"{script.__name__} sharded={is_sharded} {number}: {(a - b).abs().max():.1e} of {b.abs().max():.1e}")
    return differences


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_the_serial_run(ranks: Callable[..., list[Any]], layout: str) -> None:
    assert ranks(compare_scripts, 2, layout) == [[], []]


def test_products_of_layouts(ranks: Callable[..., list[Any]]) -> None:
    assert ranks(compare_scripts, 4, "data=2 tensor=2 zero=3", 2) == [[]] * 4


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        q = self.mix(x * scale)[:, None]
        return self.out(F.scaled_dot_product_attention(q, q.tanh(), x[:, None], is_causal=True)[:, 0])


def differentiate_tokens(divide: Callable[..., nn.Module]) -> list[Tensor]:
    torch.manual_seed(1)
    x, scale = torch.randn(4, 8, 6).double().requires_grad_(), torch.randn(6).double().requires_grad_()
    net = divide(Tokens().double(), (x.detach(), scale.detach()))
    by_x, by_scale = torch.autograd.grad(net(x, scale).square().sum(), (x, scale))
    net(x, scale).square().mean().backward()
    return [by_x, by_scale, x.grad, scale.grad, by_one_sample(net, x, scale)]  # type: ignore[list-item]


def by_one_sample(net: nn.Module, x: Tensor, scale: Tensor) -> Tensor:
    """A batch of one sample, which ranks compute alike."""
    one = x.detach()[:1].requires_grad_()
    return torch.autograd.grad(net(one, scale).square().sum(), one)[0]


def compare_tokens(world: World, layout: str) -> list[float]:
    expected = differentiate_tokens(lambda net, batch: net)
    actual = differentiate_tokens(
        lambda net, batch: shardwise.auto_parallelize(net, batch, plan=f"{layout} precision=float64", world=world)
    )
    return [float((a - b).abs().max()) for a, b in zip(actual, expected, strict=True)]


@pytest.mark.parametrize("layout", ["context=2", "data=2"])
def test_inputs_with_and_without_samples(ranks: Callable[..., list[Any]], layout: str) -> None:
    for differences in ranks(compare_tokens, 2, layout):
        assert max(differences) < 1e-10, differences


def refuse(world: World) -> list[str]:
    """Return the errors of loops that cannot be right."""
    errors = []

    def expect(action: Callable[[], Any]) -> None:
        try:
            action()
            errors.append("nothing was refused")
        except UsageError as error:
            errors.append(str(error))

    normed = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).double()
    net = shardwise.auto_parallelize(normed, (torch.zeros(8, 6).double(),), plan="data=2 precision=float64", world=world)
    x = batches()[0][0].requires_grad_()
    expect(lambda: torch.autograd.grad(net(x).sum(), x, create_graph=True))
    plain = shardwise.auto_parallelize(mlp(16, 1), (torch.zeros(8, 6).double(),), plan="data=2 precision=float64", world=world)
    own = next(iter(shardwise.shard(batches())))[0]
    scale = torch.ones(6, dtype=torch.float64, requires_grad=True)
    expect(lambda: (plain(own) * scale.sum()).sum().backward())
    other, last = nn.Linear(6, 1).double(), nn.Linear(6, 2).double()
    expect(lambda: (plain(own).sum() + other(own).sum() + (last(own).sum() if world.rank else 0.0)).backward())
    return errors


def test_refuses_by_name(ranks: Callable[..., list[Any]]) -> None:
    for second, leaf, unlike in ranks(refuse, 2):
        for words, message in (
            (("batch norm", "create_graph"), second),
            (("[6]", "nn.Parameter"), leaf),
            (("rank 0: 2 with 7 elements", "rank 1: 4 with 21 elements"), unlike),
        ):
            assert all(word in message for word in words), message


def warn_of_frozen_features(world: World) -> list[str]:
    import warnings

    net = shardwise.auto_parallelize(mlp(16, 3), (torch.zeros(8, 6).double(),), plan="data=2 precision=float64", world=world)
    head = nn.Linear(3, 3).double()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in shardwise.shard(batches()):
            with torch.no_grad():
                features = net(x)
            F.cross_entropy(head(features), y).backward()
    return [str(w.message) for w in caught]


def test_features_without_gradients_are_told(ranks: Callable[..., list[Any]]) -> None:
    for messages in ranks(warn_of_frozen_features, 2):
        assert any("not averaged over ranks" in text and "[3, 3]" in text for text in messages)
