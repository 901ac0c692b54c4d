"""A tape of operators on storages, and its replay on real CPU tensors, one wanted tensor at a time.

In: operators in the order in which a program called them, each with the storages that it reads, changes, overwrites and makes.
Out: the real value of any storage after any operator, bit for bit what the program would have had, with no more memory than that value
needs. Views cost nothing: a tensor argument is (storage, dtype, sizes, strides, offset).

[Note: versions] A value is (storage, index of the operator that wrote it last). An operator consumes versions and makes versions, so the
tape is a graph without mutation. What nothing wanted depends on is never run, and a version whose last consumer changes it is changed in
place. An operator that overwrites a whole storage does not consume what was there: initial values that are overwritten later die.

[Note: random streams] Random operators draw from a generator in tape order. The generator's state before each is remembered once known, so
a tensor can be drawn on its own, in any order and again. To learn the state before operator n, those before it run on scratch memory.

Not modelled: storages written behind the dispatcher's back (through numpy or a data pointer).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from weft.capture.fakes import tree_flatten, tree_map
from weft.errors import ModelError

Version = tuple[int, int]  # storage, operator that wrote it last


@dataclass(frozen=True, slots=True)
class View:
    """A tensor as a window on a storage. Sizes, strides and offset are in elements, `size_bytes` is the storage's."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    size_bytes: int

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The real tensor that this is on a real storage."""
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.stride)

    @property
    def covers(self) -> bool:
        """Whether it is the whole storage, each byte once."""
        dense = 1
        for stride, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size != 1:
                if stride != dense:
                    return False
                dense *= size
        return self.offset == 0 and dense * self.dtype.itemsize == self.size_bytes


@dataclass(slots=True)
class Op:
    """One call.

    It consumes the versions of `reads` and `changes` (storages written in part), writes `overwrites` in full, and its output has `makes`:
    (position in the flat output, view) of every new storage. `draw` is its number among the draws of `stream`.
    """

    func: Callable[..., Any]
    args: Any
    kwargs: Any
    reads: tuple[Version, ...] = ()
    changes: tuple[Version, ...] = ()
    overwrites: tuple[View, ...] = ()
    makes: tuple[tuple[int, View], ...] = ()
    default_dtype: torch.dtype = torch.float32
    stream: Stream | None = None
    draw: int = -1

    @property
    def consumes(self) -> tuple[Version, ...]:
        return self.reads + self.changes

    @property
    def writes(self) -> Iterator[int]:
        yield from (s for s, _ in self.changes)
        yield from (v.storage for v in self.overwrites)
        yield from (v.storage for _, v in self.makes)


@dataclass(eq=False)
class Stream:
    """The draws from one generator. State number k is the state after k draws; number 0 is that at the start.

    `before[n]` is what draw n starts from: a number of a state, or a state that the program set itself. While the program is recorded
    the generator holds tokens in place of states, see `token`.
    """

    generator: torch.Generator
    magic: tuple[int, ...]
    states: dict[int, torch.Tensor] = field(default_factory=dict)
    before: list[int | torch.Tensor] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    final: int | torch.Tensor = 0  # where the program leaves the generator
    shape: torch.Tensor = field(init=False)  # the state that tokens are made from

    def __post_init__(self) -> None:
        if self.generator.device.type != "cpu":
            raise ModelError(f"a generator on {self.generator.device} cannot be replayed on the CPU; build the model outside the block "
                             "and pass it to weft.parallelize")  # fmt: skip
        self.shape = self.states[0] = self.generator.get_state()
        self.hold(0)

    # A token is a valid state that means "state number k": it survives torch.get_rng_state, set_rng_state and fork_rng, so a program that
    # saves and restores the generator is followed without its states being known. It keeps the seed, so torch.initial_seed is right.
    # Layout of a CPU state: seed, two counters (24 bytes), then 624 words of 32 bits, each in 8 bytes.

    def hold(self, number: int) -> None:
        """Put the token of a state into the generator."""
        token = self.shape.clone()
        token.view(torch.int64)[3 : 5 + len(self.magic)] = torch.tensor([*self.magic, number & 0xFFFFFFFF, number >> 32])
        self.generator.set_state(token)

    def position(self) -> int | torch.Tensor:
        """What the generator holds: the number of a state, or a state that the program has set."""
        state = self.generator.get_state()
        *magic, low, high = state.view(torch.int64)[3 : 5 + len(self.magic)].tolist()
        if tuple(magic) == self.magic:
            return int(low) | int(high) << 32
        self.shape = state
        return state

    def record(self, op: Op) -> None:
        """`op` draws next."""
        op.stream, op.draw = self, len(self.ops)
        self.before.append(self.position())
        self.ops.append(op)
        self.hold(len(self.ops))


class Tape:
    """Operators in program order, and the last version of each storage."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.last: list[int] = []  # per storage, the operator that wrote it last
        self.values: dict[Version, torch.UntypedStorage] = {}  # values from the latest look into the tape while it is recorded
        self.consts: dict[int, torch.UntypedStorage] = {}  # per operator without a function: the value itself

    def add(self, op: Op) -> None:
        """Append an operator; its writes are the last versions from now on."""
        for storage in op.writes:
            self.last[storage] = len(self.ops)
        self.ops.append(op)

    def now(self, storage: int) -> Version:
        """The last version of a storage."""
        return storage, self.last[storage]

    def constant(self, view: View, value: torch.UntypedStorage) -> None:
        """A storage with a known value."""
        self.consts[len(self.ops)] = value
        self.add(Op(torch.empty, (), {}, makes=((0, view),)))

    def look(self, views: Iterable[View]) -> list[torch.Tensor]:
        """Real copies of tensors as they are now, while the tape is still recorded."""
        wanted = list(views)
        replay = Replay(self, [self.now(v.storage) for v in wanted], keep=True)
        values = [v.on(replay.value(self.now(v.storage))).clone() for v in wanted]
        self.values = replay.current
        return values

    def state(self, stream: Stream, position: int | torch.Tensor) -> torch.Tensor:
        """A generator's state at a position; runs the draws before it on scratch where they are not known yet."""
        todo: list[int] = []
        while not isinstance(position, torch.Tensor):
            if position in stream.states:
                position = stream.states[position]
            else:
                todo.append(position - 1)
                position = stream.before[position - 1]
        state = position
        for draw in reversed(todo):
            op = stream.ops[draw]
            if op.reads:  # how much it draws may depend on what it reads
                Replay(self, (), also=(op,)).run(op)
            else:
                self.call(op, {})
            state = stream.states[draw + 1]
        return state

    def call(self, op: Op, storages: dict[int, torch.UntypedStorage]) -> list[Any]:
        """Run one operator on real storages, as the program ran it; scratch memory stands for what is missing. Returns the flat output."""

        def real(arg: Any) -> Any:
            if not isinstance(arg, View):
                return arg
            storage = storages.get(arg.storage)
            return torch.empty_strided(arg.shape, arg.stride, dtype=arg.dtype) if storage is None else arg.on(storage)

        args, kwargs = tree_map(real, op.args), tree_map(real, op.kwargs)
        default_dtype = torch.get_default_dtype()
        stream = op.stream
        if stream is not None:
            before = self.state(stream, stream.before[op.draw])
            outside = stream.generator.get_state()
            stream.generator.set_state(before)
        torch.set_default_dtype(op.default_dtype)
        try:
            with torch.no_grad():
                out = op.func(*args, **kwargs)
            if stream is not None:
                stream.states[op.draw + 1] = stream.generator.get_state()
        except RuntimeError as error:
            raise ModelError(f"{op.func} cannot be replayed while weft builds the model's weights: {error}; build the model outside the "
                             "block and pass it to weft.parallelize") from error  # fmt: skip
        finally:
            torch.set_default_dtype(default_dtype)
            if stream is not None:
                stream.generator.set_state(outside)
        return tree_flatten(out)[0]

    def last_draws(self) -> list[int]:
        """Per operator, the index of the last random operator that its results depend on; -1 for none."""
        draws: list[int] = []
        for i, op in enumerate(self.ops):
            draws.append(i if op.stream is not None else max((draws[v] for _, v in op.consumes), default=-1))
        return draws


class Replay:
    """Real values of wanted versions, each given out once; holds a value only while something wanted still consumes it."""

    def __init__(self, tape: Tape, wanted: Iterable[Version], also: Iterable[Op] = (), keep: bool = False) -> None:
        self.tape = tape
        self.keep = keep
        self.held: dict[Version, torch.UntypedStorage] = dict(tape.values)
        self.current: dict[Version, torch.UntypedStorage] = {}
        self.uses: Counter[Version] = Counter()
        self.uses.update(wanted)
        for op in also:
            self.uses.update(op.consumes)
        todo = [version[1] for version in self.uses if version not in self.held]
        seen: set[int] = set()
        while todo:
            i = todo.pop()
            if i in seen:
                continue
            seen.add(i)
            for version in self.tape.ops[i].consumes:
                self.uses[version] += 1
                if version not in self.held:
                    todo.append(version[1])

    def value(self, version: Version) -> torch.UntypedStorage:
        """The storage of a wanted version; the replay holds it no longer unless something else consumes it."""
        self._ready([version])
        return self._consume(version)

    def _ready(self, versions: Iterable[Version]) -> None:
        """Run what the versions depend on, in tape order."""
        todo: set[int] = set()
        stack = [v for s, v in versions if (s, v) not in self.held]
        while stack:
            i = stack.pop()
            if i not in todo:
                todo.add(i)
                stack.extend(v for s, v in self.tape.ops[i].consumes if (s, v) not in self.held)
        order = list(todo)
        heapq.heapify(order)
        while order:
            i = heapq.heappop(order)
            self.run(self.tape.ops[i], i)

    def _consume(self, version: Version) -> torch.UntypedStorage:
        storage = self.held[version]
        self.uses[version] -= 1
        if not self.uses[version]:
            del self.held[version]
            if self.keep and self.tape.last[version[0]] == version[1]:
                self.current[version] = storage
        return storage

    def run(self, op: Op, index: int = -1) -> None:
        """Run one operator; `index` is its place on the tape, without it the results are dropped."""
        if index < 0:
            self._ready(op.consumes)
        if index in self.tape.consts:
            self._hold({op.makes[0][1].storage: _copy(self.tape.consts[index])}, index)
            return
        storages: dict[int, torch.UntypedStorage] = {}
        for version in op.reads:
            storages[version[0]] = self._consume(version)
        for version in op.changes:
            storage = self._consume(version)
            others = version in self.held or version in self.tape.values or version in self.current
            storages[version[0]] = _copy(storage) if others else storage
        for view in op.overwrites:
            storages[view.storage] = _allocate(view.size_bytes)
        out = self.tape.call(op, storages)
        written = {s: storages[s] for s, _ in op.changes} | {v.storage: storages[v.storage] for v in op.overwrites}
        inputs = {id(storage) for storage in storages.values()}
        for position, view in op.makes:
            written[view.storage] = _storage(out[position], view, inputs, op)
        if index >= 0:
            self._hold(written, index)

    def _hold(self, written: dict[int, torch.UntypedStorage], index: int) -> None:
        for s, storage in written.items():
            if self.uses[(s, index)]:
                self.held[(s, index)] = storage


def _allocate(size_bytes: int) -> torch.UntypedStorage:
    return torch.empty(size_bytes, dtype=torch.uint8).untyped_storage()


def _copy(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    everything = View(0, torch.uint8, (storage.nbytes(),), (1,), 0, storage.nbytes())
    storage_copy = _allocate(storage.nbytes())
    everything.on(storage_copy).copy_(everything.on(storage))
    return storage_copy


def _storage(tensor: torch.Tensor, view: View, inputs: set[int], op: Op) -> torch.UntypedStorage:
    """The storage of an operator's output, laid out as it was recorded."""
    if tensor.device.type != "cpu":
        raise ModelError(f"{op.func} in the model's constructor makes a tensor on {tensor.device}, which has no values; make it on the CPU")
    if tuple(tensor.shape) != view.shape or tensor.dtype != view.dtype:
        raise ModelError(f"{op.func} gives {tensor.dtype}{list(tensor.shape)} where {view.dtype}{list(view.shape)} was recorded; build the "
                         "model outside the block and pass it to weft.parallelize")  # fmt: skip
    storage = tensor.untyped_storage()
    lies_alone = tensor.stride() == view.stride and tensor.storage_offset() == view.offset and storage.nbytes() == view.size_bytes
    if lies_alone and id(storage) not in inputs:
        return storage
    storage_copy = _allocate(view.size_bytes)
    view.on(storage_copy).copy_(tensor)
    return storage_copy
