"""PyTorch's own samples of operators, and its own word on whether a cut of one is right: the one file that uses these private names.

`torch.distributed.tensor._ops.strategy_validation` runs an operator on the pieces that placements describe, in one process, puts the
outputs together as their placements say, and compares them with the operator on whole tensors. `OpInfo` has samples of the arguments of
some 700 operators. Both need the package `expecttest`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.testing._internal.common_methods_invocations as samples
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._ops import strategy_validation as validation
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree

# Names that a newer torch may move: an owner, and what is asked of it.
NAMES = (
    (samples, "op_db"),
    (samples, "S"),
    (validation, "LocalTensorMode"),
    (validation, "validate_aten_combination"),
    (pytree, "tree_flatten"),
    (pytree, "tree_unflatten"),
)
SIZES = {"XS": 2, "S": 6, "M": 12, "L": 24}  # of the samples' dimensions, which divide by two and by three then
RANKS = 2
SKIPPED = frozenset({"_segment_reduce"})  # reads beyond its samples where their sizes are others than torch's own

Call = tuple[str, tuple[Any, ...], dict[str, Any]]


@contextmanager
def _sizes() -> Iterator[None]:
    before = {name: getattr(samples, name) for name in SIZES}
    try:
        for name, size in SIZES.items():
            setattr(samples, name, size)
        yield
    finally:
        for name, size in before.items():
            setattr(samples, name, size)


def operators() -> list[Any]:
    """Every operator of which torch has samples: one `OpInfo` each, with `name` and `variant_test_name`."""
    return [info for info in samples.op_db if info.name not in SKIPPED]


def calls(info: Any, most: int) -> Iterator[Call]:
    """The operators that up to `most` samples of `info` run, as a capture would see them: (overload, arguments, keyword arguments)."""
    dtype = next((d for d in (torch.float64, torch.int64, torch.bool) if d in info.supported_dtypes("cpu")), None)
    if dtype is None:
        return
    torch.manual_seed(0)
    try:
        with _sizes():
            made = list(info.sample_inputs("cpu", dtype))
    except (RuntimeError, IndexError):  # some have numbers of their own that hang on torch's sizes
        made = list(info.sample_inputs("cpu", dtype))
    step = max(1, len(made) / most)
    for sample in [made[int(i * step)] for i in range(min(most, len(made)))]:
        leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        if any(leaves[i].is_sparse or leaves[i].layout is not torch.strided for i in places):
            continue

        def run(*tensors: Tensor, leaves: list[Any] = leaves, spec: Any = spec, places: list[int] = places) -> Any:
            filled = list(leaves)
            for i, tensor in zip(places, tensors, strict=True):
                filled[i] = tensor
            first, args, kwargs = pytree.tree_unflatten(filled, spec)
            return info.op(first, *args, **kwargs)

        tensors = [leaves[i].detach().clone() for i in places]
        try:
            graph = make_fx(run, pre_dispatch=True)(*tensors)
        except Exception:  # a sample that torch itself cannot trace is none of ours
            continue
        yield from _run(graph, tensors)


def _run(graph: torch.fx.GraphModule, tensors: Sequence[Tensor]) -> list[Call]:
    """Each operator of a traced sample with the values that it is called with."""
    found: list[Call] = []

    class Recording(torch.fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if isinstance(target, torch._ops.OpOverload):
                found.append((str(target), args, dict(kwargs)))
            return super().call_function(target, args, kwargs)

    try:
        Recording(graph).run(*tensors)
    except Exception:
        return []
    return found


def written(call: Call) -> str:
    """What tells one call from another: the operator, its shapes and its other arguments."""

    def arg(x: Any) -> str:
        if isinstance(x, Tensor):
            return f"{x.dtype}{tuple(x.shape)}"
        return f"[{', '.join(map(arg, x))}]" if isinstance(x, list | tuple) else repr(x)

    return f"{call[0]}({', '.join(map(arg, call[1]))}; {', '.join(f'{name}={arg(x)}' for name, x in call[2].items())})"


def placement(word: str) -> Replicate | Shard | Partial:
    """R whole, P summands, S2 pieces of dimension 2."""
    return Replicate() if word == "R" else Partial("sum") if word == "P" else Shard(int(word[1:]))


def outputs_of(call: Call) -> list[Tensor]:
    """What the operator makes of whole tensors."""
    target, args, kwargs = call
    out = overload(target)(*args, **kwargs)
    return [out] if isinstance(out, Tensor) else [x for x in out if isinstance(x, Tensor)]


def tensors_of(call: Call) -> list[Tensor]:
    """Every tensor that an operator is called with, in order."""
    return [x for a in (*call[1], *call[2].values()) for x in (a if isinstance(a, list | tuple) else [a]) if isinstance(x, Tensor)]


def with_tensors(call: Call, by_id: Mapping[int, Tensor]) -> Call:
    """The call with other tensors in the places of those of these ids."""

    def arg(x: Any) -> Any:
        return by_id.get(id(x), x) if isinstance(x, Tensor) else type(x)(arg(i) for i in x) if isinstance(x, list | tuple) else x

    target, args, kwargs = call
    return target, tuple(arg(a) for a in args), {name: arg(a) for name, a in kwargs.items()}


def writes_operand(call: Call) -> bool:
    """Whether the operator writes one of its operands, by its name."""
    name = call[0].split(".")[1]
    return name.endswith("_") and not name.endswith("__")


def overload(target: str) -> Any:
    """The operator of a name such as aten.linear.default."""
    namespace, packet, name = target.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), name)


@contextmanager
def _ranks() -> Iterator[Any]:
    """A mesh of ranks that are none: torch's "fake" backend says that it has them, and tensors of this mode hold what each of them has."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        with validation.LocalTensorMode(frozenset(range(RANKS))):
            yield init_device_mesh("cpu", (RANKS,))
    finally:
        distributed.destroy_process_group()


def wrong(call: Call, inputs: Sequence[str], outputs: Sequence[str]) -> str:
    """What torch has against this cut over two ranks: "" where it is right. Values only, no gradients."""
    target, args, kwargs = call
    whole = outputs_of(call)
    with _ranks() as mesh:
        combination = tuple(map(placement, inputs)), tuple(map(placement, outputs))
        right, reason = validation.validate_aten_combination(
            overload(target), args, kwargs, whole if len(whole) > 1 else whole[0], combination, RANKS, mesh
        )
    return "" if right else reason or "not right"


def refuted(call: Call, inputs: Sequence[str], outputs: Sequence[str]) -> str:
    """What torch found wrong with the values; "" also where it could not try, as where an argument is the whole's shape."""
    said = wrong(call, inputs, outputs)
    return f"torch says {said}" if "Value mismatch" in said or "local values differ" in said else ""
