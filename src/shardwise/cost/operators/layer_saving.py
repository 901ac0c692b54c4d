"""What software's layers save for backward, and run again, where it is not what the graph's operators save one by one.

In: a `ShardedInventory`, a `LayerSaving`. Out: the inventory with the storages that such layers save, and which operators run again. Only
numbered blocks are layers.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import numpy as np
from numpy.typing import NDArray

from shardwise.cost.devices.devices import AS_COUNTED, LayerSaving
from shardwise.cost.memory.storages import SavedStorage
from shardwise.cost.operators.sharded_inventory import ShardedInventory

NARROW = "float8"  # name of the 8-bit copy of a product's operand


def apply_layer_saving(parts: ShardedInventory, saving: LayerSaving) -> ShardedInventory:
    """Return the inventory with what layers save."""
    if saving == AS_COUNTED:
        return parts
    cheap = _rerun_products(parts, saving.saved_products) if saving.saved_products < 1 else parts.cheap
    remade = _find_remade(parts) if saving.fuses_layers else frozenset()
    extra, working, by_torch = parts.extra_bytes.copy(), parts.working_bytes.copy(), parts.torch_bytes.copy()
    losses = [i for i, block in enumerate(parts.blocks) if not block and i in parts.extra and kind_of_operator(parts, i) == "softmax"]
    if saving.has_float32_loss:  # other gradients are of 16 bits
        working[losses], by_torch[losses] = 2 * working[losses], 2 * by_torch[losses]
    if saving.has_loss_in_place:
        extra[losses] /= 2  # logits, of 16 bits, in place of the float32 logarithms of their softmax
        working[losses] = by_torch[losses] = 0.0  # the gradient is written over them
    return replace(
        parts, cheap=cheap, saved=tuple(_saved_storages(parts, saving, i, remade) for i in range(len(parts.saved))),
        extra_bytes=extra, working_bytes=working, torch_bytes=by_torch,
    )  # fmt: skip


def without_last_products(parts: ShardedInventory, operators: NDArray[np.intp], is_rerun: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """[operator of a stage] -> whether it runs again, if a layer's recomputation ends when all is there that backward needs.

    A product's operands are saved before it runs, so that the last one of a layer does not run again.
    """
    needed, block, is_needed_later = np.zeros(len(operators), dtype=bool), "", False
    for at in range(len(operators) - 1, -1, -1):
        i = int(operators[at])
        if parts.blocks[i] != block:
            block, is_needed_later = parts.blocks[i], False
        made = {item.root for item in parts.outputs[i]}
        saves = bool(parts.saved[i]) or i in parts.extra
        saves_result = i in parts.extra or any(item.root in made for item in parts.saved[i])
        needed[at] = is_needed_later or saves_result or (saves and kind_of_operator(parts, i) != "linear")
        is_needed_later = is_needed_later or saves
    return is_rerun & needed


def kind_of_operator(parts: ShardedInventory, operator: int) -> str:
    """Return the kind of an operator's kernel."""
    kind: str = parts.compute[int(parts.index[operator])].kernel.kind
    return kind


def _rerun_products(parts: ShardedInventory, saved_products: float) -> tuple[bool, ...]:
    """[operator] -> whether `recompute=cheap` runs it again, products that it does not save included: of two the second."""
    numbers: dict[str, int] = {}
    cheap = list(parts.cheap)
    for i, block in enumerate(parts.blocks):
        if block and kind_of_operator(parts, i) == "linear":
            numbers[block] = n = numbers.get(block, 0) + 1
            cheap[i] = ceil(n * saved_products) == ceil((n - 1) * saved_products)
    return tuple(cheap)


def _find_remade(parts: ShardedInventory) -> frozenset[str]:
    """Return the storages in layers that backward's kernels make again from what the operator that makes them saves."""
    remade = set[str]()
    for i, block in enumerate(parts.blocks):
        held = {item.root for item in parts.saved[i]}
        if block and parts.cheap[i] and held and all(item.root in held for item in parts.arrivals[i]):
            remade.update(item.root for item in parts.outputs[i])
    return frozenset(remade)


def _saved_storages(parts: ShardedInventory, saving: LayerSaving, operator: int, remade: frozenset[str]) -> tuple[SavedStorage, ...]:
    """Return the storages that an operator saves."""
    items, kind = parts.saved[operator], kind_of_operator(parts, operator)
    if not parts.blocks[operator]:
        return items
    if remade:
        items = tuple(one for one in items if one.copy or one.root not in remade)
    if saving.fuses_activations and kind == "elementwise":
        makers = {storage.root: maker for maker, storage in parts.reads[operator]}
        items = tuple(one for one in items if one.copy or kind_of_operator(parts, makers.get(one.root, operator)) != "activation")
    if saving.narrows_operands and kind == "linear":
        items = tuple(one if one.is_persistent or one.copy or not one.is_float else _narrow_copy(one) for one in items)
    return items


def _narrow_copy(item: SavedStorage) -> SavedStorage:
    """Return the 8-bit copy of a 16-bit storage."""
    return item._replace(size_bytes=item.size_bytes / 2, copy=NARROW)
