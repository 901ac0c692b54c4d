"""The block around deferred construction: its roots, its one model, its errors, and a model made real in place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwise.capture.initialization import DeferredInit, deferred_model, materialize_module
from shardwise.errors import ModelError, UsageError


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t.detach() for name, t in (*module.named_parameters(), *module.named_buffers())}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight


def test_a_block_is_entered_once() -> None:
    with DeferredInit() as deferred:
        torch.zeros(1)
    with pytest.raises(UsageError, match="once"), deferred:
        pass


def test_plain_attributes_have_values() -> None:
    torch.manual_seed(0)
    with DeferredInit() as deferred:
        scale = torch.rand(3).mul(2)[1:]
    assert torch.equal(deferred.real_value(scale), torch.rand(3).mul(2)[1:])


def test_roots_and_building() -> None:
    found: list[nn.Module] = []
    with deferred_model(lambda model, deferred: found.append(model)):
        encoder = nn.Linear(2, 2)
        nn.Sequential(nn.Linear(3, 3))  # thrown away
        net = nn.Sequential(encoder, nn.ReLU())
        nn.CrossEntropyLoss()
        loss = nn.CrossEntropyLoss()
    assert found == [net]
    assert loss.weight is None
    with (
        pytest.raises(ModelError, match=r"2 models were built in the block \(Linear, Bilinear\)"),
        deferred_model(lambda *_: found.clear()),
    ):
        pair = nn.Linear(2, 2), nn.Bilinear(2, 2, 2)
    assert len(pair) == 2
    with pytest.raises(ModelError, match="no model was built"), deferred_model(lambda *_: found.clear()):
        pass
    with pytest.raises(KeyError), deferred_model(lambda *_: found.clear()):
        raise KeyError
    assert found == [net]


def test_a_model_that_lies_where_one_thrown_away_lay_is_seen() -> None:
    kept: list[nn.Module] = []
    with DeferredInit() as deferred:
        for _ in range(100):
            thrown_away = id(nn.Sequential(nn.Linear(2, 2)))
            kept.append(nn.Sequential(nn.Linear(2, 2)))
            if id(kept[-1]) == thrown_away:
                break
    assert list(deferred.roots) == kept


def test_realize_gives_a_module_that_computes_the_same() -> None:
    def make() -> nn.Module:
        net = nn.Sequential(Tied(), nn.Linear(3, 3))
        net.scales = [torch.tensor([1.0, 2.0]), torch.rand(2)]
        net[1].weight.is_expert = True
        net[1].bias.requires_grad_(False)
        return net

    torch.manual_seed(4)
    plain = make()
    torch.manual_seed(4)
    with DeferredInit() as deferred:
        net = make()
    assert materialize_module(deferred, net) is net
    assert net[0].head.weight is net[0].embed.weight
    assert type(net[1].weight) is nn.Parameter
    assert net[1].weight.is_expert
    assert [p.requires_grad for p in net.parameters()] == [p.requires_grad for p in plain.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(net.scales, plain.scales, strict=True))
    assert all(torch.equal(t, tensors_of(plain)[name]) for name, t in tensors_of(net).items())
    x = torch.randn(2, 3)
    assert torch.equal(net[1](x), plain[1](x))


def test_generator_survives_an_error_in_the_block() -> None:
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), DeferredInit():
        nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1 // 0))
    assert torch.equal(torch.get_rng_state(), before)
    assert type(nn.Linear(2, 2).weight) is nn.Parameter
