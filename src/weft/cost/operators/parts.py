"""What pricing asks of a graph and a sharding again and again, gathered once. In: an inventory, a sharding. Out: `Parts`.

Operators that cost the same are one entry (layers are alike), so a layout is priced in the time of one layer. Data is divided
later: entries say whether they follow the batch and whether replicas share them. Not modelled: values shared that do not follow the batch.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from weft.cost.devices.kernels import Kernel
from weft.cost.memory.places import Stored
from weft.cost.memory.runs import NO_BYTES, Amount, Amounts
from weft.cost.operators.dispatch import ANY, Choices
from weft.cost.operators.rounds import Span
from weft.cost.pieces import pieces
from weft.model.graph import Variable
from weft.model.sharding.sharding import Sharding
from weft.model.stages.stages import Cut
from weft.plan.axis import DATA, EXPERT, axis_of

Seen = set[tuple[str, str]]  # storages that are counted already: (root, which copy of it in another dtype)


@dataclass(frozen=True, slots=True)
class Local:
    """An operator as one tensor rank has it, with the samples of all data replicas."""

    kernel: Kernel
    batched: bool
    shared: bool  # by the data replicas


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective on `size_bytes` (float32, whole along `axis`, the graph's batch). `narrow`: in 16 bits under autocast. `of`: the experts
    that its rows are of."""

    name: str
    axis: str
    size_bytes: float
    batched: bool
    shared: bool
    narrow: bool
    wide: bool = False  # float32 whatever the precision
    among: Span = None  # ranks of the axis, where not all
    of: Choices = ANY


@dataclass(frozen=True)
class Parts:
    """`compute[index[i]]` is operator i. `forward` and `backward`: (operator, entry of `collectives`)."""

    compute: tuple[Local, ...]
    index: NDArray[np.intp]
    collectives: tuple[Collective, ...]
    forward: tuple[NDArray[np.intp], NDArray[np.intp]]
    backward: tuple[NDArray[np.intp], NDArray[np.intp]]
    stored: tuple[tuple[Stored, ...], ...]
    reads: tuple[tuple[tuple[int, Stored], ...], ...]  # what each operator reads of others', with the number of the one that made it
    makes: tuple[tuple[Stored, ...], ...]
    extra_bytes: NDArray[np.float64]  # float32 tensors that are no value of the graph, kept by each operator
    working_bytes: NDArray[np.float64]  # in each operator's backward, of tensors that follow the batch if the operator does
    torch_bytes: NDArray[np.float64]  # the same where torch makes convolutions itself, as float32
    weight_bytes: NDArray[np.float64]  # the same of weights' gradients
    waiting: Amounts  # gradients that are there meanwhile: of what was made before the operator and is read behind it
    shared: NDArray[np.bool_]
    attention: NDArray[np.bool_]
    blocks: tuple[str, ...]  # the numbered block that each operator stands in, which recomputation repeats; "" for none
    attention_core: tuple[int, ...]  # the core of attention that each is of, which selective recomputation repeats; -1 for none

    @cached_property
    def batched(self) -> NDArray[np.bool_]:
        """By operator: whether its size follows the batch."""
        return np.array([local.batched for local in self.compute], dtype=bool)[self.index]

    @cached_property
    def extra(self) -> dict[int, Amount]:
        """What operators keep that is no value of the graph, of those that do."""
        amounts = {}
        for i in np.flatnonzero(self.extra_bytes).tolist():
            size = float(self.extra_bytes[i])
            amounts[i] = Amount(shared=size) if self.shared[i] else Amount(batched=size) if self.batched[i] else Amount(fixed=size)
        return amounts

    @cached_property
    def extra_half(self) -> dict[int, Amount]:
        """The same where every float tensor is 16-bit: besides losses' logarithms it is masks, a byte an element."""
        masks = {i for i in self.extra if self.compute[self.index[i]].kernel.kind == "elementwise"}
        return {i: Amount(*(0.25 * n for n in one)) if i in masks else one for i, one in self.extra.items()}

    @cached_property
    def torch_kernels(self) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_]]:
        """By operator: when torch makes a convolution itself (`TorchKernel`): its samples, whether alone, whether where it is thin."""
        owns = [local.kernel.torch_kernel for local in self.compute]
        samples, alone, thin = (np.array([getattr(one, what) for one in owns])[self.index] for what in ("samples", "alone", "thin"))
        return samples, alone, thin

    @cached_property
    def repeated(self) -> NDArray[np.bool_]:
        """By operator: whether it stands in a numbered block."""
        return np.array([bool(name) for name in self.blocks], dtype=bool)

    @cached_property
    def block_numbers(self) -> NDArray[np.intp]:
        """By operator: the number of its block."""
        numbers = {name: i for i, name in enumerate(dict.fromkeys(self.blocks))}
        return np.array([numbers[name] for name in self.blocks], dtype=np.intp)

    @cached_property
    def again(self) -> NDArray[np.bool_]:
        """By operator: whether full recomputation runs it twice: those of numbered blocks, and all where there are none."""
        return self.repeated if self.repeated.any() else np.ones(len(self.blocks), dtype=bool)


def block(site: str) -> str:
    """The outermost numbered block that a site stands in, of which models repeat many; "" for none.

    >>> block("layers.3.mlp.up/linear"), block("head/linear")
    ('layers.3', '')
    """
    path = site.partition("/")[0].split(".")
    return ".".join(path[: next((i + 1 for i, part in enumerate(path) if part.isdigit()), 0)])


def storages_bytes(items: Iterable[Stored], half: bool, seen: Seen, besides: Container[tuple[str, str]] = ()) -> Amount:
    """Those of these storages that are not in `seen`, to which they are added, nor `besides`. `half` as for `keeps`."""
    shared = batched = fixed = 0.0
    for item in items:
        key = (item.root, item.copy)
        if key in seen or key in besides or (item.held and not item.copy):
            continue
        seen.add(key)
        size = item.size_bytes * (0.5 if item.is_float and half else 1.0)
        if not item.batched:
            fixed += size
        elif item.shared:
            shared += size
        else:
            batched += size
    return Amount(shared, batched, fixed)


def keeps(parts: Parts, operators: Iterable[int], half: bool = False, seen: Seen | None = None) -> list[Amount]:
    """By operator: what it keeps for backward and none before it does. `seen`: storages that others count, to which these are added.

    `half`: where every float tensor is 16-bit, as on GPUs; under autocast the inventory itself says what is.
    """
    seen, amounts, extras = Seen() if seen is None else seen, [], parts.extra_half if half else parts.extra
    for i in operators:
        saved = storages_bytes(parts.stored[i], half, seen) if parts.stored[i] else NO_BYTES
        amounts.append(saved + extras[i] if i in extras else saved)
    return amounts


def kept_bytes(parts: Parts, operators: Iterable[int], half: bool = False, seen: Seen | None = None) -> Amount:
    """What these operators keep together, as `keeps`."""
    return sum(keeps(parts, operators, half, seen), NO_BYTES)


@dataclass(frozen=True, slots=True)
class Held:
    """Parameters of a stage: their number on one tensor rank, those that train, and those to sum over each set of axes.

    `expert` of the number are of experts (all of which train), which replicas of these alone sum.

    `tied` of the trainable ones another stage has too.
    """

    number: float
    trainable: float
    sums: tuple[tuple[tuple[str, ...], float], ...]
    tied: float
    expert: float = 0.0

    @property
    def unsummed(self) -> float:
        """Trainable ones whose gradients the ranks that have them do not sum, since each has the same."""
        return self.trainable - sum(n for axes, n in self.sums if any(axis_of(a).follows for a in axes))


def held_parameters(
    parameters: Mapping[str, Variable],
    sharding: Sharding | None,
    used: Sequence[str],
    readers: Mapping[str, int],
    experts: frozenset[str] = frozenset(),
) -> Held:
    """`parameters`: the graph's by value. `used`: the values that the stage reads. `readers`: how many stages read each.
    `experts`: those that are cut by experts."""
    number = trainable = tied = expert = 0.0
    sums: dict[tuple[str, ...], float] = {}
    for value in used:
        variable = parameters.get(value)
        if variable is None:
            continue
        local = variable.tensor.size / pieces(sharding, value)
        number += local
        if not variable.trainable:
            continue
        trainable += local
        if readers[value] > 1:
            tied += local
        over = () if sharding is None else tuple(sharding.gradients.get(value, ()))
        if value in experts:
            expert += local
        elif DATA in over:
            over = (*over, EXPERT)
        if over:
            sums[over] = sums.get(over, 0.0) + local
    return Held(number, trainable, tuple(sums.items()), tied, expert)


def even_sites(cuts: Sequence[Cut], num_stages: int) -> tuple[str, ...]:
    """Where stages of equally many numbered blocks begin; () for one stage, and where blocks do not divide so or hand on unequally."""
    sites: dict[str, Cut] = {}
    for one in cuts:
        if name := block(one.site):
            sites.setdefault(name, one)
    if num_stages == 1 or len(sites) % num_stages or len({one.size_bytes for one in sites.values()}) > 1:
        return ()
    starts = [one.site for one in sites.values()]
    return tuple(starts[len(starts) * i // num_stages] for i in range(1, num_stages))
