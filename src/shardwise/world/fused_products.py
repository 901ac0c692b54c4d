"""Agree on fused tensor collectives: product and collective in one, over symmetric memory. In: a world, groups. Out: a reason not to.

The rule: `SHARDWISE_SYMMETRIC_MEMORY=on` asks for it, every rank of every group has a GPU of its own, each group lies on one host, and a
trial of both operators on whole numbers equals plain collectives, on all ranks. All ranks take the same of both ways, since each knows what
every other one found.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from uuid import uuid4

import torch
from torch import Tensor

from shardwise.world.comm.group import Group
from shardwise.world.world import World

ASKED = "SHARDWISE_SYMMETRIC_MEMORY"  # the environment variable; `on` asks for them
Probe = Callable[[World, Sequence[Group]], str]


def explain_no_symmetric_memory(world: World, groups: Sequence[Group]) -> str:
    """Return why this rank's groups cannot use symmetric memory ("" if they can)."""
    if os.environ.get(ASKED) != "on":
        return f"{ASKED}=on does not ask for them; no GPU has run them yet"
    if world.device.type != "cuda":
        return f"its device is {world.device.type}, not a GPU"
    if any(group.size > 1 and group.transport_name != "nccl" for group in groups):
        return "ranks share a GPU, or torch has no NCCL"
    if any(len(group.ranks_by_host) > 1 for group in groups):
        return "a group of tensor ranks lies on several hosts"
    return ""


def agree_on_fused_products(world: World, groups: Sequence[Group], probe: Probe = explain_no_symmetric_memory) -> str:
    """Return why products of `groups` run beside plain collectives, the same text on all ranks; "": fused, by `Group.fused_name`.

    Every rank of the world calls this, with its connected groups, equally many everywhere.
    """
    reason = _first_reason(world, probe(world, groups))
    if reason:
        return reason
    name = world.broadcast_text(lambda: uuid4().hex)  # no run before this one in the same process had it
    names = [f"shardwise-{name}-{number}-{'-'.join(map(str, group.ranks))}" for number, group in enumerate(groups)]
    registrations: list[object] = []
    reason = _first_reason(world, _try_groups(world, groups, names, registrations))
    if not reason:
        for group, each, registration in zip(groups, names, registrations, strict=True):
            group.use_fused_products(each, registration)
    return reason


def _first_reason(world: World, reason: str) -> str:
    """Return the reason of the first rank that has one, on every rank."""
    reasons = world.all_gather_text(reason)
    return next((f"rank {rank}: {text}" for rank, text in enumerate(reasons) if text), "")


def _try_groups(world: World, groups: Sequence[Group], names: Sequence[str], registrations: list[object]) -> str:
    """Register these groups under these names; return what is wrong with their fused products ("" if nothing)."""
    from shardwise.world import symmetric_memory  # of torch's private names, only where they are used

    try:
        for group, name in zip(groups, names, strict=True):
            store = world.open_substore(name)
            registrations.append(symmetric_memory.register_group(store, group.index, group.size, name, world.device))
            if not _trial_is_exact(group, name, world.device):
                return "a trial of torch's fused products gave other numbers than plain collectives"
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        return f"a trial of torch's fused products failed: {str(error).splitlines()[0]}"
    return ""


def _trial_is_exact(group: Group, name: str, device: torch.device) -> bool:
    """Return whether both operators equal plain collectives on small whole numbers, which every type of number holds exactly."""
    from shardwise.world import symmetric_memory  # as above

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float64
    rows, inputs, outputs = 16, 16, 32

    def numbers(*shape: int, seed: int) -> Tensor:
        return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)

    piece, matrix = numbers(2, rows, inputs, seed=group.index), numbers(inputs, outputs, seed=group.index + 100)
    (product,) = symmetric_memory.gather_and_multiply(piece, [matrix], 1, name)
    is_exact = torch.equal(product, group.all_gather(piece, 1) @ matrix)
    summand = numbers(2, rows * group.size, outputs, seed=group.index)
    reduced = symmetric_memory.multiply_and_scatter(summand, matrix.t(), 1, name)
    return torch.equal(reduced, group.reduce_scatter(summand @ matrix.t(), 1)) and is_exact
