"""Parameters of a module under any wrapper, with this process's shards of weights and gradients.

Here and only here are the private names of FullyShardedDataParallel (flat parameters) and DeepSpeed (partitioned ones). Names are the
serial model's: the prefixes that wrappers add are removed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .placement import LocalShard, take_shard

_WRAPPERS = re.compile(
    r"(?:(?<=^)|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_forward_module|_fpw_module)(?:\.|$)"
)


def clean_name(name: str) -> str:
    """Remove what wrappers add to a parameter's name.

    >>> clean_name("module._orig_mod.layers.0.weight"), clean_name("my_module.weight")
    ('layers.0.weight', 'my_module.weight')
    """
    return _WRAPPERS.sub("", name).rstrip(".")


@dataclass
class HeldParameter:
    """A parameter that this process holds, or a shard of it; `key` is equal for tied parameters."""

    name: str
    parameter: Tensor
    key: object
    weight: LocalShard | None
    gradient: LocalShard | None


def held_parameters(root: nn.Module, stepping: Iterable[Tensor], rank: int) -> Iterator[HeldParameter]:
    """Yield all parameters of a module. `stepping`: those that an optimizer is about to update; empty outside of a step."""
    flat = dict(_flat_parameters(root))
    for name, (handle, position) in flat.items():
        held = _hold_flat(name, handle, position)
        if held is not None:
            yield held
    for raw, p in root.named_parameters(remove_duplicate=False):
        name = clean_name(raw)
        if name in flat or hasattr(p, "_fqns"):
            continue
        if is_uninitialized(p):
            yield HeldParameter(name, p, id(p), None, None)
        elif hasattr(p, "ds_tensor"):
            yield _hold_zero3(name, p, bool(stepping), rank)
        else:
            gradient = p.grad if p.grad is not None else getattr(p, "main_grad", None)
            taken = take_shard(gradient) if gradient is not None else _zero12_gradient(p, stepping)
            yield HeldParameter(name, p, id(p), take_shard(p), taken)


def is_uninitialized(p: Tensor) -> bool:
    """Return whether a parameter of a lazy module has no values yet."""
    return isinstance(p, nn.parameter.UninitializedParameter)


def _flat_parameters(root: nn.Module) -> Iterator[tuple[str, tuple[Any, int]]]:
    """Yield each parameter of FullyShardedDataParallel with its flat parameter and position in it."""
    for prefix, module in root.named_modules():
        handle = getattr(module, "_handle", None)
        if handle is not None and hasattr(handle, "flat_param"):
            for i, name in enumerate(handle.flat_param._fqns):
                yield clean_name(f"{prefix}.{name}".strip(".")), (handle.flat_param, i)


def _hold_flat(name: str, flat: Any, i: int) -> HeldParameter | None:
    infos, shape = getattr(flat, "_shard_param_infos", None), tuple(flat._shapes[i])
    if infos is None:  # not sharded: a range of the flat parameter, behind those before it
        start, numel = sum(n.numel() for n in flat._shapes[:i]), flat._shapes[i].numel()
        cut = slice(start, start + numel)
        if flat._params is not None:  # with use_orig_params
            p = flat._params[i]
            return HeldParameter(name, p, name, take_shard(p), take_shard(p.grad))
        gradient = None if flat.grad is None else flat.grad.flatten()[cut].reshape(shape)
        return HeldParameter(name, flat, name, take_shard(flat.flatten()[cut].reshape(shape)), take_shard(gradient))
    info = infos[i]
    if flat._params is not None:  # with use_orig_params
        p = flat._params[i]
        weight, gradient = p, p.grad
    else:
        cut = slice(info.offset_in_shard or 0, (info.offset_in_shard or 0) + (info.numel_in_shard or 0))
        p, weight, gradient = flat, flat[cut], None if flat.grad is None else flat.grad[cut]
    if not info.in_shard:
        return HeldParameter(name, p, name, None, None)
    start = info.intra_param_start_idx
    place = {"shape": shape, "flat": (start, start + weight.numel())}
    held = take_shard(None if gradient is None else gradient.flatten(), **place)
    return HeldParameter(name, p, name, take_shard(weight.flatten(), **place), held)


def _hold_zero3(name: str, p: Any, is_stepping: bool, rank: int) -> HeldParameter:
    """Return the shard of a parameter that DeepSpeed partitions with ZeRO-3."""
    size = p.ds_tensor.numel()
    start = size * p.ds_tensor.__dict__.get("_rank", rank)
    length = max(0, min(size, p.ds_numel - start))
    place = {"shape": tuple(p.ds_shape), "flat": (start, start + length)}
    gradient = None
    if is_stepping:
        try:
            gradient = p._z3_optimizer.get_local_fp32_grad_for_param(p)
        except Exception:  # DeepSpeed's own of many kinds: there is none before the first backward
            gradient = None
    held = take_shard(None if gradient is None else gradient.flatten()[:length], **place)
    return HeldParameter(name, p, id(p), take_shard(p.ds_tensor.flatten()[:length], **place), held)


def _zero12_gradient(p: Any, stepping: Iterable[Tensor]) -> LocalShard | None:
    """Return the gradient that DeepSpeed's ZeRO-1 or 2 keeps in a flat part, found by the memory that the weight's fragment shares."""
    link = getattr(p, "_hp_mapping", None)
    for flat in stepping if link is not None else ():
        part = link.hp_fragment  # type: ignore[union-attr]
        if flat.grad is not None and flat.untyped_storage().data_ptr() == part.untyped_storage().data_ptr():
            at = int(part.storage_offset() - flat.storage_offset())
            start = link.lp_fragment_address.start  # type: ignore[union-attr]
            return take_shard(flat.grad.flatten()[at : at + part.numel()], shape=tuple(p.shape), flat=(start, start + part.numel()))
    return None


def perturb_weights(root: nn.Module, seed: int, unit_of: str) -> None:
    """Move every weight up or down by one unit of rounding of dtype `unit_of` (or of its own, if that is coarser)."""
    draw = torch.Generator().manual_seed(seed)
    coarse = torch.finfo(getattr(torch, unit_of)).eps
    with torch.no_grad():
        for parameter in root.parameters():
            if parameter.is_floating_point() and not is_uninitialized(parameter):
                p = parameter.to_local() if hasattr(parameter, "to_local") else parameter.data  # a serial run may be FSDP2 of one rank
                unit = max(coarse, torch.finfo(p.dtype).eps)
                sign = torch.randint(0, 2, p.shape, generator=draw).to(p.device, torch.float64) * 2 - 1
                p.copy_((p.double() * (1 + unit * sign)).to(p.dtype))
