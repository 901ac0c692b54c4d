"""Breaks collectives where they all go through, and the duals of redistributions. In: `Active`, a world, a mesh. Out: patched classes.

Left out: members keep what is their own (a gather repeats it, a message is zeros). Wrong group: the ranks along another axis of the
mesh. A wrong dual has the right shape: a slice where pieces are to be summed, zeros beside a piece where pieces are to be gathered.
Only in a process of its own: what is patched stays so.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

import shardwise
from bench.verify.mutations.target import LEFT_OUT, ON_ONE_RANK, ONE_ELEMENT, SCALED, WRONG_DUAL, WRONG_GROUP, Active, Mutation
from shardwise.lower import redistribute
from shardwise.plan.ir.mesh import Mesh
from shardwise.plan.ir.placement import even_shard_range, is_shard
from shardwise.plan.ir.transition import transition_between
from shardwise.world.comm import pending as transport
from shardwise.world.comm.group import Group
from shardwise.world.world import World

ROOT = str(Path(shardwise.__file__).parent) + "/"
OPERATIONS = (
    "all_reduce", "broadcast", "all_gather", "all_gather_into", "reduce_scatter", "reduce_scatter_into", "all_to_all", "exchange",
    "exchange_into", "isend", "irecv",
)  # fmt: skip
MESSAGES = ("isend", "irecv")
# Whose collectives carry the comparison.
INSTRUMENT = (
    "run/verify/verify", "run/verify/shard_differences", "run/verify/compressed_gradients", "run/verify/sharded_shares",
    "run/sharded_state", "run/prove/prove", "run/prove/rank_threads",
)  # fmt: skip
# The dual of the same shape that is not the right one.
PAIRS = (("", "all_reduce"), ("slice", "reduce_scatter"), ("all_gather", "pad"))
OTHER_DUAL = {a: b for pair in PAIRS for a, b in (pair, pair[::-1])}


def module_of(file: str) -> str:
    """`run/engine` of a file of shardwise; empty of any other."""
    return file.removeprefix(ROOT).removesuffix(".py") if file.startswith(ROOT) else ""


def site_of(frame: FrameType | None) -> str:
    """Who asked for a collective: the nearest function outside `world`, behind the one of its file that called it."""
    nearest, inside = None, None
    while frame is not None:
        module = module_of(frame.f_code.co_filename)
        if module and not module.startswith("world/"):
            nearest = frame
            break
        if inside is None and module.startswith("world/") and module != "world/comm/group":
            inside = frame  # a thread of the runtime's own
        frame = frame.f_back
    nearest = nearest or inside
    if nearest is None:
        return ""
    code, before = nearest.f_code, nearest.f_back
    name = function_of(code.co_qualname)
    if before is not None and before.f_code.co_filename == code.co_filename and function_of(before.f_code.co_qualname) != name:
        name = f"{name} < {function_of(before.f_code.co_qualname)}"
    return f"{module_of(code.co_filename)}.{name}"


def function_of(qualname: str) -> str:
    """`Transfers.sender` of `Transfers.sender.<locals>.<lambda>`."""
    return qualname.partition(".<locals>")[0]


def _scale(x: Tensor, factor: float) -> None:
    with torch.no_grad():
        x.detach().mul_(factor)


def _scale_one(x: Tensor, factor: float) -> None:
    """Scale the last element."""
    with torch.no_grad():
        if x.numel():
            x.detach()[tuple(n - 1 for n in x.shape)].mul_(factor)


def _scaled(x: Any, factor: float) -> Any:
    return [_scaled(one, factor) for one in x] if isinstance(x, list | tuple) else x.detach() * factor


class Broken:
    """Collectives of one process, of which the active mutation's are broken. `find_place`: the world and the mesh of the rank that
    calls, which in a proof is a thread; None where none does."""

    def __init__(self, active: Active, find_place: Callable[[], tuple[World, Mesh] | None]) -> None:
        self._active, self._find_place = active, find_place
        self._local = threading.local()

    def install(self) -> None:
        """Patch `Group` and the duals; for good."""
        for name in OPERATIONS:
            setattr(Group, name, self._wrapped(name, getattr(Group, name)))
        self._break_duals()

    def _wrapped(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(group: Group, *args: Any, **options: Any) -> Any:
            if group.size == 1 or getattr(self._local, "inside", False):
                return plain(group, *args, **options)
            self._local.inside = True
            try:
                return self._called(name, plain, group, args, options)
            finally:
                self._local.inside = False

        return call

    def _called(self, name: str, plain: Callable[..., Any], group: Group, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        site = site_of(sys._getframe(2))
        module = site.partition(".")[0]
        moved = args[0] if name not in ("all_gather_into", "reduce_scatter_into", "exchange_into") else args[1]
        floats = (moved[0] if isinstance(moved, list | tuple) else moved).dtype.is_floating_point
        if not site or module in INSTRUMENT:
            return plain(group, *args, **options)

        def hit(how: str) -> bool:
            return self._active.hit(Mutation(site, name, how))

        if name != "irecv" and floats and hit(SCALED):
            if name in ("all_reduce", "broadcast"):
                _scale(args[0], 1 + self._active.off)
                return plain(group, *args, **options)
            at = 1 if name.endswith("_into") else 0
            return plain(group, *args[:at], _scaled(args[at], 1 + self._active.off), *args[at + 1 :], **options)
        for how in (ON_ONE_RANK, ONE_ELEMENT):
            if name not in MESSAGES and floats and hit(how):
                result = plain(group, *args, **options)
                return self._off_on_last(name, group, args, result, options.get("wait", True), how == ONE_ELEMENT)
        if name != "irecv" and hit(LEFT_OUT):
            return _left_out(name, plain, group, args, options)
        other = None if name in MESSAGES else self._other(group)
        if other is not None and hit(WRONG_GROUP):
            return plain(other, *args, **options)
        return plain(group, *args, **options)

    def _off_on_last(self, name: str, group: Group, args: tuple[Any, ...], result: Any, waited: bool, is_one: bool) -> Any:
        if group.index != group.size - 1:
            return result
        scale, factor = _scale_one if is_one else _scale, 1 + self._active.off
        if name in ("all_gather", "reduce_scatter", "all_to_all", "exchange"):
            result = [x.detach().clone() for x in result] if isinstance(result, list | tuple) else result.detach().clone()
            for x in result if isinstance(result, list) else [result]:
                scale(x, factor)
            return result
        if waited:
            scale(args[0], factor)
            return result
        result.call_after(lambda: scale(args[0], factor))
        return result

    def _other(self, group: Group) -> Group | None:
        """The ranks along the first axis inside a stage that are not these."""
        place = self._find_place()
        if place is None:
            return None
        world, mesh = place
        if world.num_ranks != mesh.num_ranks or sorted(group.ranks) != list(group.ranks):
            return None
        for axis in mesh.stage_axes:
            ranks = mesh.group(world.rank, axis)
            if len(ranks) > 1 and ranks != group.ranks:
                return world.group(ranks)
        return None

    def _break_duals(self) -> None:
        """What brings a gradient back, by the two placements that it goes between."""
        backward, active = redistribute._Redistribute.backward, self._active

        def broken(ctx: Any, grad: Tensor) -> Any:
            right = backward(ctx, grad)
            source, target = ctx.duals
            other = OTHER_DUAL.get(transition_between(source, target).collective)
            mutation = Mutation(f"lower/redistribute.backward {source} to {target}", "dual", WRONG_DUAL)
            if other is None or ctx.group.size == 1 or not active.hit(mutation):
                return right
            dim = next((form.dim for form in (source, target) if is_shard(form)), 0)
            return (_dual(other, grad, right[0].shape, ctx.group, dim), *right[1:])

        redistribute._Redistribute.backward = staticmethod(broken)  # type: ignore[method-assign]


def _dual(name: str, grad: Tensor, shape: torch.Size, group: Group, dim: int) -> Tensor:
    """A gradient of `shape` by another dual than the right one."""
    if name == "all_reduce":
        out = grad.clone(memory_format=torch.contiguous_format)
        group.all_reduce(out)
        return out
    if name == "slice":
        return grad.narrow(dim, *even_shard_range(grad.shape[dim], group.size, group.index)).contiguous()
    if name == "reduce_scatter":
        return group.reduce_scatter(grad, dim)
    if name == "all_gather":
        return group.all_gather(grad.contiguous(), dim)
    if name == "pad":
        out = grad.new_zeros(shape)
        out.narrow(dim, *even_shard_range(shape[dim], group.size, group.index)).copy_(grad)
        return out
    return grad


def _left_out(name: str, plain: Callable[..., Any], group: Group, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    x = args[0]
    if name == "isend":
        return plain(group, torch.zeros_like(x), *args[1:], **options)
    if name in ("all_reduce", "broadcast"):
        return transport.DONE
    if name == "all_gather":
        dim = args[1] if len(args) > 1 else options.get("dim", 0)
        length = args[2] if len(args) > 2 else options.get("length")
        whole = torch.cat([x] * group.size, dim)
        return whole if length is None else whole.narrow(dim, 0, min(length, whole.shape[dim]))
    if name == "reduce_scatter":
        dim = args[1] if len(args) > 1 else options.get("dim", 0)
        return x.narrow(dim, *even_shard_range(x.shape[dim], group.size, group.index)).clone(memory_format=torch.contiguous_format)
    if name == "all_to_all":
        return torch.zeros_like(plain(group, *args, **options))
    if name == "exchange":
        return [x[group.index].new_zeros(tuple(shape)) for shape in args[1]]
    out, given = args[0], args[1]
    with torch.no_grad():
        if name == "all_gather_into":
            out.detach().copy_(torch.cat([given.detach()] * group.size))
        elif name == "reduce_scatter_into":
            out.detach().copy_(given.detach().view(group.size, -1)[group.index].clone())
        else:
            out.detach().copy_(given.detach())
    return transport.DONE
