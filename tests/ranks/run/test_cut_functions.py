"""Whatever function of torch's a loop tries on a cut weight: it gives what it gives of the whole, gradients too, or is refused by name.

The functions and how they are called are torch's own samples of them (OpInfo), none of them chosen here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.capture.nesting import map_tensors, tensors_in
from shardwise.errors import UsageError
from shardwise.plan.ir.placement import Shard
from shardwise.run.loop.sharded_tensor import GlobalTensorSpec, ShardedParameter, ShardedTensor
from shardwise.world.world import World

EVERY = 16  # of the functions one in so many is tried in the short suite
REFUSED = "would take that part for the whole"


def samples(number: int, every: int, count: int) -> Iterator[tuple[str, Any, Tensor, tuple[Any, ...], dict[str, Any]]]:
    """(name, function, its first tensor, its other arguments) of one function in `every`, called in `count` ways.

    Those of torch.masked compute in Python with `.shape`, which tells what this rank has.
    """
    from torch.testing._internal.common_methods_invocations import op_db

    for op in sorted(op_db, key=lambda op: (op.name, op.variant_test_name))[number::every]:
        if torch.float64 not in op.dtypes or op.name.startswith(("masked.", "jiterator")):
            continue
        torch.manual_seed(3)
        try:
            given = list(islice(op.sample_inputs("cpu", torch.float64, requires_grad=False), count))
        except Exception:  # a library that is not here
            continue
        for sample in given:
            x = sample.input
            first = next(tensors_in(x), None)
            if first is None or not first.is_floating_point() or first.layout is not torch.strided:
                continue
            for kind, call in (("", op.op), ("_", op.inplace_variant), (".", op.method_variant)):
                if call is not None:
                    yield op.name + op.variant_test_name + kind, call, x, tuple(sample.args), dict(sample.kwargs)


def whole_of(x: Tensor) -> Tensor:
    """A result, put together from all ranks' parts."""
    if not isinstance(x, ShardedTensor):
        return x.detach()
    part, whole = x.detach().as_subclass(Tensor), x.spec
    for dim, group in reversed(whole.placements):
        part = group.all_gather(part.contiguous(), dim)
    return part


def outcome(call: Any, x: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Any]]:
    """Tensors and other values of a call, what it changed among its arguments included."""
    result = call(x, *args, **kwargs)
    tensors = list(tensors_in(result))
    others = [] if tensors or result is None else [result]
    return [*tensors, *tensors_in((x, args, kwargs))], others


def learns(out: list[Tensor]) -> list[Tensor]:
    return [o for o in out if o.requires_grad and (o.is_floating_point() or o.is_complex())]


def gradient(out: list[Tensor], x: Tensor) -> Tensor | None:
    """Of a sum of all results with weights that differ by place."""
    made = learns(out)
    if not made:
        return None
    total = torch.zeros((), dtype=torch.float64)
    for o in made:
        shape = o.spec.global_shape if isinstance(o, ShardedTensor) else tuple(o.shape)
        weights = torch.linspace(0.3, 1.7, torch.Size(shape).numel(), dtype=torch.float64).view(shape)
        own = (o.abs() if o.is_complex() else o).to(torch.float64)
        total = total + (own * weights).sum()
    (found,) = torch.autograd.grad(total, [x], allow_unused=True)
    return found


def close(a: Tensor, b: Tensor, through: tuple[torch.dtype, ...] = ()) -> bool:
    """Equal to the rounding of their dtype, or of the narrowest that was computed `through`."""
    floats = [d for d in (a.dtype, *through) if d.is_floating_point or d.is_complex]
    eps = max([torch.finfo(d).eps for d in floats], default=0.0)
    return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=max(1e-9, 8 * eps), atol=max(1e-11, eps), equal_nan=True)


def tried(call: Any, name: str, x: Any, args: Any, kwargs: Any, dim: int, world: World) -> str:
    """What became of a call whose first tensor is cut: "same", "refused", "" where it is no call of the whole, or what differs."""
    first = next(tensors_in(x))
    group = world.world_group

    def run(cut: bool) -> tuple[list[Tensor], list[Any], Tensor | None]:
        fresh = iter([t.clone() for t in tensors_in((x, args, kwargs))])
        x1, args1, kwargs1 = (map_tensors(value, lambda _: next(fresh)) for value in (x, args, kwargs))
        leaf = next(tensors_in(x1)).detach()
        if cut:
            length = first.shape[dim] // group.size
            part = leaf.narrow(dim, group.index * length, length).contiguous()
            leaf = ShardedParameter.from_local(part.requires_grad_(), GlobalTensorSpec("w", tuple(first.shape), ((Shard(dim), group),)))
        else:
            leaf.requires_grad_()
        begin = leaf.clone() if name.endswith("_") else leaf
        mine = iter([begin, *list(tensors_in(x1))[1:]])
        torch.manual_seed(5)
        out, others = outcome(call, map_tensors(x1, lambda _: next(mine)), args1, kwargs1)
        found = gradient(out, leaf)
        return [whole_of(o) for o in out], others, None if found is None else whole_of(found)

    try:
        want, again = run(cut=False), run(cut=False)
    except Exception:  # no call of the whole, or none that learns
        return ""
    if not all(close(a, b) for a, b in zip(want[0], again[0], strict=True)):
        return ""  # draws, or memory that nobody has written
    try:
        got = run(cut=True)
    except UsageError as error:
        return "refused" if REFUSED in str(error) else f"error {error}"
    except Exception as error:
        return f"error {type(error).__name__} {error}"
    if len(got[0]) != len(want[0]) or not all(close(a, b) for a, b in zip(got[0], want[0], strict=True)):
        return "values"
    if repr(got[1]) != repr(want[1]):
        return f"numbers {got[1]} {want[1]}"
    mine, theirs = got[2], want[2]
    if mine is None or theirs is None:
        return "same" if mine is theirs else "gradient"
    return "same" if close(mine, theirs, tuple(o.dtype for o in want[0])) else "gradient"


def fuzz(world: World, number: int, every: int, count: int) -> dict[str, Any]:
    """Of one function in `every`: how many calls came out how, and those that are wrong."""
    counts: Counter[str] = Counter()
    wrong, right = [], set()
    for name, call, x, args, kwargs in samples(number, every, count):
        first = next(tensors_in(x))
        for dim in range(first.dim()):
            if first.shape[dim] and first.shape[dim] % world.num_ranks == 0:
                found = tried(call, name, x, args, kwargs, dim, world)
                counts[found if found in ("", "same", "refused") else "wrong"] += 1
                if found == "same":
                    right.add(name)
                elif found not in ("", "refused"):
                    wrong.append(f"{name} {[tuple(t.shape) for t in tensors_in((x, args, kwargs))]} cut {dim}: {found}"[:300])
    return {"counts": dict(counts), "wrong": wrong, "right": sorted(right)}


def check(found: dict[str, Any]) -> None:
    assert found["wrong"] == []
    assert min(found["counts"][kind] for kind in ("same", "refused")) > 40


def test_a_function_of_a_cut_weight_is_that_of_the_whole_or_refused(ranks: Callable[..., list[Any]]) -> None:
    for found in ranks(fuzz, 2, 0, EVERY, 6):
        check(found)


@pytest.mark.long
@pytest.mark.parametrize("number", range(6))
def test_every_function_of_a_cut_weight_is_that_of_the_whole_or_refused(ranks: Callable[..., list[Any]], number: int) -> None:
    for found in ranks(fuzz, 2, number, 6, 12, timeout_s=600.0):
        check(found)
