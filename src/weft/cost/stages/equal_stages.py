"""Which stages of a pipeline cost the same. In: parts, parameters, stages. Out: for every stage the first that is like it.

Most stages of a deep model are runs of equal layers, and differ in names alone. Operators get a number for all that pricing asks of
them, and of what is met again (a storage that two operators keep, a weight that two read) how far back it was met: stages with the same
numbers in a row have the same sums, bit for bit. Not modelled: stages that cost the same although their operators come in another order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from weft.cost.memory.memory import Inventory
from weft.cost.memory.places import Stored
from weft.cost.operators.parts import Parts
from weft.cost.pieces import pieces
from weft.model.graph import Variable
from weft.model.sharding.sharding import Sharding
from weft.model.stages.stages import Stage

Numbers = NDArray[np.intp]


def parameter_kinds(parameters: Mapping[str, Variable], sharding: Sharding | None, experts: frozenset[str]) -> dict[str, int]:
    """A number for every parameter, the same for those that take as much and whose gradients are summed alike."""
    kinds: dict[Hashable, int] = {}
    gradients = {} if sharding is None else sharding.gradients
    return {
        value: kinds.setdefault(
            (v.tensor.size, pieces(sharding, value), v.trainable, tuple(gradients.get(value, ())), value in experts), len(kinds)
        )
        for value, v in parameters.items()
    }


def operator_kinds(inventory: Inventory, parts: Parts, weighted: NDArray[np.bool_], of_parameters: Mapping[str, int]) -> Numbers:
    """A number for every operator of the graph, the same for those of which pricing asks the same.

    How far back something was met counts operators that belong to a stage: those that follow from the batch alone keep nothing.
    """
    forward, backward = _at(*parts.forward), _at(*parts.backward)
    waiting = list(zip(parts.waiting.shared.tolist(), parts.waiting.batched.tolist(), parts.waiting.fixed.tolist(), strict=True))
    kinds: dict[Hashable, int] = {}
    met_at: dict[str, int] = {}
    read_at: dict[str, int] = {}
    made_at: list[int] = []
    free, place, numbers = inventory.graph.free, 0, []

    def met(item: Stored) -> Hashable:
        back = _back(met_at, f"{item.root} {item.copy}", place)
        return back, item.size_bytes, item.batched, item.shared, item.is_float, bool(item.copy), item.held

    for i, op in enumerate(inventory.graph.operators):
        made_at.append(place)
        entered = tuple([(place - made_at[maker], met(item)) for maker, item in parts.reads[i]])
        saved, makes = tuple([met(item) for item in parts.stored[i]]), tuple([met(item) for item in parts.makes[i]])
        read = []
        for value in op.inputs:
            if value in of_parameters:
                read.append((_back(read_at, value, place), of_parameters[value]))
        place += op.name not in free
        key = (
            parts.index[i], forward.get(i), backward.get(i), entered, saved, makes, tuple(read), parts.extra_bytes[i],
            parts.working_bytes[i], parts.torch_bytes[i], *waiting[i], parts.weight_bytes[i], parts.shared[i], parts.attention[i],
            bool(parts.blocks[i]), weighted[i], op.name in free,
        )  # fmt: skip
        numbers.append(kinds.setdefault(key, len(kinds)))
    return np.array(numbers, dtype=np.intp)


def _back(last: dict[str, int], thing: str, place: int) -> int:
    """How far back a thing was met, -1 where it never was; now it is met here."""
    distance = place - last[thing] if thing in last else -1
    last[thing] = place
    return distance


def _at(where: Numbers, what: Numbers) -> dict[int, tuple[int, ...]]:
    places: dict[int, list[int]] = {}
    for i, which in zip(where.tolist(), what.tolist(), strict=True):
        places.setdefault(i, []).append(which)
    return {i: tuple(some) for i, some in places.items()}


def firsts(
    inventory: Inventory,
    parts: Parts,
    kinds: Numbers,
    of_parameters: Mapping[str, int],
    stages: Sequence[Stage],
    numbers: Sequence[Numbers],
) -> tuple[int, ...]:
    """For every stage the first that is like it. `numbers`: of their operators; `kinds`: as `operator_kinds` gives them.

    Stages hand on and receive as much, read parameters that as many stages read, and have as many numbered blocks at the same places.
    """
    readers = Counter(value for stage in stages for value in stage.variables)
    tensors, batched = inventory.graph.tensors, inventory.batched

    def crossing(ends: Sequence[tuple[int, Sequence[str]]]) -> tuple[tuple[tuple[int, bool], ...], ...]:
        return tuple(tuple((tensors[v].size_bytes, v in batched) for v in values) for _, values in ends)

    seen: dict[Hashable, int] = {}
    first = []
    for i, (stage, mine) in enumerate(zip(stages, numbers, strict=True)):
        blocks = np.unique(parts.block_numbers[mine], return_inverse=True)[1]
        held = tuple([(of_parameters[v], readers[v] > 1) for v in stage.variables if v in of_parameters])
        key = (kinds[mine].tobytes(), blocks.tobytes(), held, crossing(stage.receives), crossing(stage.sends))
        first.append(seen.setdefault(key, i))
    return tuple(first)
