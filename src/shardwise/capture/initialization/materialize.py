"""Materialize a deferred module's initial values, one full tensor at a time, and store only the shards of a rank.

`take` returns the shard of a full tensor, or None; it may move the shard to another device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from shardwise.capture.fakes import Fake
from shardwise.capture.initialization.deferred import DeferredInit
from shardwise.capture.initialization.operator_log import BUILD_OUTSIDE
from shardwise.capture.initialization.tape import Replay, StorageView
from shardwise.errors import ModelError

TakeShard = Callable[[str, torch.Tensor], torch.Tensor | None]


def materialize_shards(
    deferred: DeferredInit, module: nn.Module, take: TakeShard, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """Return the shards of a deferred module's parameters and buffers, by name: the results of `take(name, full)` that are not None.

    `take` is called once for each tensor, under its first name where it is tied, with its initial value on the CPU, in an order that
    depends on the user's program alone; only a few full tensors are alive at a time. Its result is cloned if it is a view of `full`.
    `dtype` converts floating-point tensors first. The module is not changed. torch's random generator is advanced as by plain
    construction, unless it has been used or seeded since the block.

    Raises:
        ModelError: a tensor that has no value (meta device, another block), or an operator that cannot be replayed.
    """
    recording, tape = deferred.recording, deferred.recording.tape
    named = dict(_named_tensors(module))
    shards: dict[str, torch.Tensor | None] = {}
    units: dict[int, list[tuple[str, StorageView]]] = {}
    for name, tensor in named.items():
        if not isinstance(tensor, Fake):
            shards[name] = _take_shard(take, name, tensor, dtype)
        elif not deferred.is_fake(tensor) or tensor.device.type == "meta":
            why = "was made by another block" if tensor.device.type != "meta" else "is on the meta device"
            raise ModelError(f"{name} {why}, so it has no initial value here; {BUILD_OUTSIDE}")
        else:
            view = recording.view_of(tensor)
            units.setdefault(view.storage, []).append((name, view))
    last_draw = tape.last_draws()
    order = sorted(units, key=lambda s: (last_draw[tape.last_writers[s]], tape.last_writers[s]))
    replay = Replay(tape, map(tape.latest_version, order))
    for s in order:
        storage = replay.take_value(tape.latest_version(s))
        is_copy = len(units[s]) == 1 and tape.latest_version(s) not in replay.available
        for name, view in units[s]:
            shards[name] = _take_shard(take, name, view.on_storage(storage), dtype, is_copy)
        del storage
    for stream in recording.streams.values():
        if torch.equal(stream.generator.get_state(), stream.states[0]):
            stream.generator.set_state(tape.generator_state(stream, stream.final))
    return {name: shard for name in named if (shard := shards[name]) is not None}


def take_real_shards(module: nn.Module, take: TakeShard, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Return the shards of a module with real tensors, by first name, as `materialize_shards` does. The module is not changed."""
    shards = {name: _take_shard(take, name, tensor, dtype) for name, tensor in _named_tensors(module)}
    return {name: shard for name, shard in shards.items() if shard is not None}


def materialize_module(deferred: DeferredInit, module: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """Materialize all of a deferred module in place, with the values of plain construction: for a rank with a full replica.

    Tensors that are plain attributes, alone or in lists, tuples and dicts, become real too. Returns the module.
    """
    values = materialize_shards(deferred, module, lambda name, full: full, dtype)
    real: dict[int, Any] = {}
    for name, fake in _named_tensors(module):
        value = values[name]
        if isinstance(fake, nn.Parameter):
            real[id(fake)] = _with_attributes(nn.Parameter(value, fake.requires_grad), fake)
        else:
            real[id(fake)] = value.requires_grad_(fake.requires_grad)

    def swap(item: Any) -> Any:
        if deferred.is_fake(item):
            if id(item) not in real:
                value = deferred.real_value(item)
                real[id(item)] = nn.Parameter(value, item.requires_grad) if isinstance(item, nn.Parameter) else value
            return real[id(item)]
        if type(item) in (list, tuple):
            return type(item)(map(swap, item))
        if type(item) is dict:
            return {key: swap(value) for key, value in item.items()}
        return item

    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for key, tensor in table.items():
                if tensor is not None:
                    table[key] = real.get(id(tensor), tensor)
        for key, item in list(vars(part).items()):
            if isinstance(item, Fake) or (type(item) in (list, tuple, dict) and not key.startswith("_")):
                vars(part)[key] = swap(item)
    return module


def _with_attributes(new: nn.Parameter, old: nn.Parameter) -> nn.Parameter:
    """Copy the user's Python attributes of the old parameter to the new one, and return it."""
    attributes = vars(nn.Parameter(torch.empty(0)))
    for key, item in vars(old).items():
        if key not in attributes and key not in _FAKE_ATTRIBUTES:
            setattr(new, key, item)
    return new


_FAKE_ATTRIBUTES = {"fake_device", "fake_mode", "constant", "real_tensor", "_is_param", "_debug_trace"}


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _take_shard(take: TakeShard, name: str, full: torch.Tensor, dtype: torch.dtype | None, is_copy: bool = False) -> torch.Tensor | None:
    """Return the shard that `take` selects, in its own memory. `is_copy`: nothing else references `full`, so it needs no copy."""
    full = full.detach()
    if dtype is not None and full.is_floating_point() and full.dtype != dtype:
        full, is_copy = full.to(dtype), True
    shard = take(name, full)
    if shard is None:
        return None
    shard = shard.detach()
    storage = shard.untyped_storage()
    if storage is full.untyped_storage() and (not is_copy or storage.nbytes() != shard.nbytes):
        return shard.clone()
    return shard
