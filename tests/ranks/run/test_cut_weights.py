"""Weights that are cut between ranks in a user's own loop: what clips, sums, averages, saves and loads them, against one process."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardwise
from shardwise.errors import UsageError
from shardwise.plan.ir.placement import Shard
from shardwise.run.loop.sharded_tensor import GlobalTensorSpec, ShardedParameter, ShardedTensor
from shardwise.world import private
from shardwise.world.world import World
from tests.support.plain_models import BATCH, Mixed, batches, loss_of, matches, plan_of, said

LAYOUTS = [("data=2", 2), ("tensor=2", 2), ("data=2 tensor=2", 4)]
CLIP = 0.05  # below the norm of every step's gradients


def torch_clips(net: nn.Module) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP)


def torch_clips_many_at_once(net: nn.Module) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP, norm_type=3.0, foreach=True)


def torch_clips_by_the_largest(net: nn.Module) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP, norm_type=float("inf"))


def clips_by_hand(net: nn.Module) -> Tensor:
    """As in many a repository."""
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    total = sum(g.detach().data.norm(2).item() ** 2 for g in grads) ** 0.5
    for g in grads:
        g.mul_(min(1.0, CLIP / (total + 1e-6)))
    return torch.tensor(total, dtype=torch.float64)


def trusts(net: nn.Module) -> Tensor:
    """Layer-wise rates (You et al. 2017): norms of weights over norms of gradients."""
    total = torch.zeros((), dtype=torch.float64)
    for p in net.parameters():
        if p.grad is not None and p.grad.any():
            ratio = p.detach().norm() / torch.linalg.vector_norm(p.grad)
            p.grad.mul_(ratio)
            total += ratio + p.grad.abs().max() + p.grad.mean()
    return total


def penalty(net: nn.Module) -> Tensor:
    """Differentiable: of squares, of norms, of the largest magnitude."""
    parameters = [p for name, p in net.named_parameters() if "never" not in name]
    squares = sum((p.pow(2).sum() for p in parameters), torch.zeros((), dtype=torch.float64))
    return 1e-2 * squares + 1e-2 * torch.stack([p.norm(3) for p in parameters]).sum() + 1e-2 * net.up.weight.abs().max()  # type: ignore[union-attr,operator]


CLIPS = [torch_clips, torch_clips_many_at_once, torch_clips_by_the_largest, clips_by_hand, trusts]


def loop(net: nn.Module, data: Any, clip: Callable[[nn.Module], Tensor], penalized: bool) -> list[float]:
    opt = torch.optim.AdamW(net.parameters(), lr=0.05)
    norms = []
    for x, y in data:
        opt.zero_grad()
        (loss_of(net, x, y) + (penalty(net) if penalized else 0.0)).backward()  # type: ignore[no-untyped-call]
        norms.append(float(clip(net)))
        opt.step()
    return norms


def clipped(world: World, layout: str) -> list[tuple[str, list[str], bool]]:
    """For every way to clip: what differs from the loop on one process."""
    found = []
    for penalized in (False, True):
        for clip in CLIPS:
            torch.manual_seed(7)
            with shardwise.auto_parallelize(batch=batches()[0], plan=plan_of(layout), world=world):
                net = Mixed()
            norms = loop(net, shardwise.shard(batches()), clip, penalized)
            torch.manual_seed(7)
            serial = Mixed().double()
            want_norms = loop(serial, batches(), clip, penalized)
            want = dict(serial.named_parameters())
            wrong = [name for name, p in net.named_parameters() if not matches(p.detach(), want[name].detach())]
            same = torch.allclose(torch.tensor(norms), torch.tensor(want_norms), rtol=1e-9)
            found.append((clip.__name__, wrong, same))
    return found


@pytest.mark.parametrize(("layout", "num_ranks"), LAYOUTS)
def test_what_a_loop_does_with_norms_is_as_on_one_process(ranks: Callable[..., list[Any]], layout: str, num_ranks: int) -> None:
    for rank in ranks(clipped, num_ranks, layout):
        assert rank == [(clip.__name__, [], True) for clip in CLIPS] * 2


def parts_alone(world: World) -> list[float]:
    """The broken twin: the norm of what this rank holds, beside the whole's."""
    torch.manual_seed(7)
    with shardwise.auto_parallelize(batch=batches()[0], plan=plan_of("tensor=2"), world=world):
        net = Mixed()
    whole = float(net.up.weight.norm())
    with private.as_base_tensor():
        return [float(net.up.weight.norm()), whole]


def test_the_norm_of_a_part_is_another_one(ranks: Callable[..., list[Any]]) -> None:
    (first, whole), (second, same) = ranks(parts_alone, 2)
    assert whole == same
    assert first != second
    assert max(first, second) < whole
    assert (first**2 + second**2) ** 0.5 == pytest.approx(whole, rel=1e-12)


def refused(world: World) -> dict[str, str]:
    torch.manual_seed(7)
    with shardwise.auto_parallelize(batch=batches()[0], plan=plan_of("tensor=2"), world=world):
        net = Mixed()
    w = net.up.weight
    square = ShardedTensor.from_local(
        torch.ones(4, 8, dtype=torch.float64), GlobalTensorSpec("square", (8, 8), ((Shard(0), world.world_group),))
    )
    calls: dict[str, Callable[[], Any]] = {
        "cat": lambda: torch.cat([net.up.bias.view(-1), w.view(-1)]),
        "view": lambda: torch.nn.utils.parameters_to_vector(net.parameters()),
        "matmul": lambda: w @ w.T,
        "linear": lambda: nn.functional.linear(torch.ones(1, 8, dtype=torch.float64), net.down.weight, net.down.bias),
        "__getitem__": lambda: w[0],
        "uniform_": lambda: nn.init.xavier_uniform_(w),
        "normal_": lambda: nn.init.normal_(w),
        "norm": lambda: w.norm(dim=0),
        "rms_norm": lambda: nn.functional.rms_norm(w, list(w.spec.global_shape)),
        "softmin": lambda: nn.functional.softmin(w, dim=0),
        "linalg_inv": lambda: torch.linalg.inv(square),
        "fft_fft": lambda: torch.fft.fft(w.T),
        "logcumsumexp": lambda: w.logcumsumexp(0),
        "matrix_exp": lambda: torch.matrix_exp(square),
        "fliplr": lambda: torch.fliplr(w.T),
        "group_norm": lambda: nn.functional.group_norm(w, 2),
        "setting data": lambda: setattr(w, "data", torch.zeros(32, 8, dtype=torch.float64)),
        "add_": lambda: torch.zeros(32, 8, dtype=torch.float64).add_(w.detach()),
        "std": lambda: w.std(),
        "nonzero": lambda: w.nonzero(),
        "linalg_norm": lambda: torch.linalg.norm(w, ord=2),
        "chunk": lambda: w.chunk(2),
    }
    found = {name: said(call, UsageError) for name, call in calls.items()}
    found["state"] = said(net.state_dict, UsageError)
    return found


def test_what_would_take_a_part_for_the_whole_is_refused_by_name(ranks: Callable[..., list[Any]]) -> None:
    for found in ranks(refused, 2):
        state = found.pop("state")
        for name, said_of in found.items():
            assert said_of.startswith(f"{name} of "), name
            assert "would take that part for the whole; use shardwise.full_state_dict(net)" in said_of
        assert "group_norm of up.weight, of which this rank holds a part, [16, 8] of [32, 8]," in found["group_norm"]
        assert "linear of down.weight" in found["linear"]
        assert found["softmin"].endswith("(_softmax needs dimension 0 whole)")
        assert "state_dict() would hold only this rank's shards of sharded weights; shardwise.full_state_dict(net)" in state


def parts_and_wholes(world: World) -> dict[str, tuple[bool, ...]]:
    """What parts and wholes give together, as the same of wholes: values, and the gradients of both."""
    generator = torch.Generator().manual_seed(4)
    given = [torch.randn(32, 8, generator=generator, dtype=torch.float64), torch.rand(32, 8, generator=generator, dtype=torch.float64)]
    calls: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "a learned scale for all": lambda w, s: (w * s.mean()).pow(2).sum(),
        "for each element": lambda w, s: (w * s).exp().sum(),
        "for each column": lambda w, s: (w * s[0]).pow(2).sum(),
        "for each row": lambda w, s: (w * s[:, :1]).pow(2).sum(),
        "rows": lambda w, s: (w / w.norm(dim=1, keepdim=True)).mul(s).sum(),
        "columns": lambda w, s: (w.mean(dim=0) * s[3]).pow(2).sum(),
        "products": lambda w, s: nn.functional.linear(s[:4], w).tanh().sum(),
        "rms": lambda w, s: nn.functional.rms_norm(w, [8], s[1]).mul(s).sum(),
        "softmin": lambda w, s: nn.functional.softmin(w, dim=1).mul(s).sum(),
        "alike": lambda w, s: nn.functional.mse_loss(w, s),
        "largest": lambda w, s: w.clamp(max=0.5).max() * s.sum(),
        "largest of columns": lambda w, s: (w.clamp(max=0.5).amax(dim=0) * s[0]).sum(),
    }
    found = {}
    for name, call in calls.items():
        w, s = (x.clone().requires_grad_() for x in given)
        want = call(w, s)
        want.backward()  # type: ignore[no-untyped-call]
        part = given[0].narrow(0, 16 * world.rank, 16).clone().requires_grad_()
        cut, scale = (
            ShardedParameter.from_local(part, GlobalTensorSpec("w", (32, 8), ((Shard(0), world.world_group),))),
            given[1].clone().requires_grad_(),
        )
        got = call(cut, scale)
        got.backward()  # type: ignore[no-untyped-call]
        pairs = [(got, want), (cut.grad, w.grad.narrow(0, 16 * world.rank, 16)), (scale.grad, s.grad)]
        found[name] = tuple(torch.allclose(a, b, rtol=1e-12, atol=1e-14) for a, b in pairs)  # type: ignore[arg-type]
    return found


def test_parts_and_wholes_give_what_wholes_give(ranks: Callable[..., list[Any]]) -> None:
    for found in ranks(parts_and_wholes, 2):
        assert [name for name, same in found.items() if same != (True, True, True)] == []


def saved(world: World, layout: str) -> dict[str, Any]:
    """A trained model gathered, another one filled from it, an average of weights."""
    torch.manual_seed(7)
    with shardwise.auto_parallelize(batch=batches()[0], plan=plan_of(layout), world=world):
        net = Mixed()
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    x, y = next(iter(shardwise.shard(batches())))
    for _ in range(3):
        opt.zero_grad()
        loss_of(net, x, y).backward()  # type: ignore[no-untyped-call]
        opt.step()
        average.update_parameters(net)
    whole = shardwise.full_state_dict(net)
    state = {name: v.tolist() for name, v in (whole or {}).items()}
    told = world.broadcast_text(lambda: repr(state))
    given = {
        name: torch.tensor(v, dtype=torch.float64 if name != "norm.num_batches_tracked" else torch.int64) for name, v in eval(told).items()
    }
    torch.manual_seed(8)
    with shardwise.auto_parallelize(batch=batches()[0], plan=plan_of(layout), world=world):
        other = Mixed()
    other.load_state_dict(given)
    averaged = copy.deepcopy(average.module)
    with torch.no_grad():
        net.eval(), other.eval(), averaged.eval()
        return {
            "state": state,
            "out": net(x).tolist(),
            "other": other(x).tolist(),
            "averaged": averaged(x).tolist(),
            "x": x.tolist(),
            "trained copy": "" if world.num_ranks == 1 else trained_copy(averaged, x),
        }


def trained_copy(net: nn.Module, x: Tensor) -> str:
    with torch.enable_grad():
        return said(lambda: net(x), UsageError)


@pytest.mark.parametrize(("layout", "num_ranks"), LAYOUTS)
def test_whole_states_and_averages_are_those_of_one_process(ranks: Callable[..., list[Any]], layout: str, num_ranks: int) -> None:
    torch.manual_seed(7)
    serial = Mixed().double()
    average = AveragedModel(serial, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    opt = torch.optim.SGD(serial.parameters(), lr=0.1, momentum=0.9)
    x, y = batches()[0]
    assert len(x) == BATCH
    for _ in range(3):
        opt.zero_grad()
        loss_of(serial, x, y).backward()  # type: ignore[no-untyped-call]
        opt.step()
        average.update_parameters(serial)
    serial.eval(), average.eval()
    found = ranks(saved, num_ranks, layout)
    want = serial.state_dict()
    assert set(found[0]["state"]) == set(want)
    assert all(torch.allclose(torch.tensor(found[0]["state"][n], dtype=v.dtype), v, rtol=1e-9, atol=1e-12) for n, v in want.items())
    for rank in found:
        with torch.no_grad():
            wants = {"out": serial(torch.tensor(rank["x"])), "averaged": average.module(torch.tensor(rank["x"]))}
        wants["other"] = wants["out"]
        for name, expected in wants.items():
            assert torch.allclose(torch.tensor(rank[name], dtype=torch.float64), expected, rtol=1e-9, atol=1e-12), name
        assert not torch.allclose(wants["out"], wants["averaged"], rtol=1e-3)
        assert "whose gradients nobody sums over ranks" in rank["trained copy"]


def compiled(world: World, layout: str) -> list[str]:
    """Parameters whose gradient differs where the user compiles the divided model."""
    torch.manual_seed(7)
    with shardwise.auto_parallelize(batch=batches()[0], plan=plan_of(layout), world=world):
        net = Mixed()
    (x, y), *_ = shardwise.shard(batches())
    loss_of(torch.compile(net), x, y).backward()  # type: ignore[no-untyped-call, arg-type]
    torch.manual_seed(7)
    serial = Mixed().double()
    loss_of(serial, *batches()[0]).backward()  # type: ignore[no-untyped-call]
    want = {name: p.grad for name, p in serial.named_parameters() if p.grad is not None}
    return [name for name, p in net.named_parameters() if name in want and (p.grad is None or not matches(p.grad, want[name]))]


def test_a_divided_model_that_is_compiled_computes_the_same(ranks: Callable[..., list[Any]]) -> None:
    assert ranks(compiled, 2, "tensor=2") == [[], []]


def test_a_divided_model_is_not_pickled() -> None:
    with shardwise.auto_parallelize(batch=(torch.ones(4, 2),), plan="data=1"):
        net = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"Linear is divided, .* save shardwise.full_state_dict\(net\)"):
        torch.save(net, io.BytesIO())
    with pytest.raises(UsageError, match="Linear is divided"):
        torch.save(copy.deepcopy(net), io.BytesIO())


def test_only_divided_models_have_a_whole_state() -> None:
    with pytest.raises(UsageError, match="Linear is not divided"):
        shardwise.full_state_dict(nn.Linear(2, 2))
