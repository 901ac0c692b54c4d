"""A tape of operators on storages, and its replay on real CPU tensors, one requested tensor at a time.

Operators are recorded in program order, each with the storages that it reads, changes, overwrites and makes. Replay computes the real value
of any storage after any operator, bitwise equal to the program's, with no more memory than that value needs. Views are free: a tensor
argument is (storage, dtype, sizes, strides, offset).

[Note: versions] A value is (storage, index of the operator that wrote it last). An operator consumes versions and makes versions, so the
tape is a graph without mutation. Operators that no requested version depends on are never run, and a version is changed in place by its
last consumer. An operator that overwrites a whole storage does not consume its old version: initial values overwritten later are dead code.

[Note: random streams] Random operators draw from a generator in tape order. The generator's state before each is cached once computed,
so a tensor can be drawn separately, in any order and repeatedly. To compute the state before a draw, earlier ones run on scratch memory.

Not supported: writes that bypass the dispatcher (through numpy or a data pointer).
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
        """Return the real tensor of this view on a real storage."""
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.stride)

    @property
    def covers(self) -> bool:
        """Return whether the view covers the storage, each byte once."""
        dense = 1
        for stride, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size != 1:
                if stride != dense:
                    return False
                dense *= size
        return self.offset == 0 and dense * self.dtype.itemsize == self.size_bytes


@dataclass(slots=True)
class Op:
    """One recorded call.

    It consumes the versions of `reads` and `modifies` (storages written in part) and writes `overwrites` in full; `creates`: (position in
    the flat output, view) of every new storage. `draw_index` is its index among the draws of `stream`.
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
    """The draws from one generator. State number k is the state after k draws; number 0 is the initial state.

    `positions_before[n]` is the position before draw n: a state number, or a state that the program set itself. During recording
    the generator contains tokens in place of states, see `install_token`.
    """

    generator: torch.Generator
    magic: tuple[int, ...]
    states: dict[int, torch.Tensor] = field(default_factory=dict)
    before: list[int | torch.Tensor] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    final: int | torch.Tensor = 0  # the position at the end of the program
    shape: torch.Tensor = field(init=False)  # the template of tokens

    def __post_init__(self) -> None:
        if self.generator.device.type != "cpu":
            raise ModelError(f"a generator on {self.generator.device} cannot be replayed on the CPU; build the model outside the block "
                             "and pass it to weft.parallelize")  # fmt: skip
        self.shape = self.states[0] = self.generator.get_state()
        self.hold(0)

    # A token is a valid state that means "state number k": it survives torch.get_rng_state, set_rng_state and fork_rng, so a program that
    # saves and restores the generator is recorded without computing its states. It has the seed, so torch.initial_seed is right.
    # Layout of a CPU state: seed, two counters (24 bytes), then 624 words of 32 bits, each in 8 bytes.

    def hold(self, number: int) -> None:
        """Set the generator to the token of a state."""
        token = self.shape.clone()
        token.view(torch.int64)[3 : 5 + len(self.magic)] = torch.tensor([*self.magic, number & 0xFFFFFFFF, number >> 32])
        self.generator.set_state(token)

    def position(self) -> int | torch.Tensor:
        """Return the generator's position: a state number, or a state that the program has set."""
        state = self.generator.get_state()
        *magic, low, high = state.view(torch.int64)[3 : 5 + len(self.magic)].tolist()
        if tuple(magic) == self.magic:
            return int(low) | int(high) << 32
        self.shape = state
        return state

    def record(self, op: Op) -> None:
        """Record `op` as the next draw."""
        op.stream, op.draw = self, len(self.ops)
        self.before.append(self.position())
        self.ops.append(op)
        self.hold(len(self.ops))


class Tape:
    """Operators in program order, and the last version of each storage."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.last: list[int] = []  # per storage, the operator that wrote it last
        self.values: dict[Version, torch.UntypedStorage] = {}  # values of the latest evaluation during recording
        self.consts: dict[int, torch.UntypedStorage] = {}  # values of the operators that stand for constants

    def add(self, op: Op) -> None:
        """Append an operator; its writes become the last versions."""
        for storage in op.writes:
            self.last[storage] = len(self.ops)
        self.ops.append(op)

    def now(self, storage: int) -> Version:
        """Return the last version of a storage."""
        return storage, self.last[storage]

    def constant(self, view: View, value: torch.UntypedStorage) -> None:
        """Record a new storage with its value."""
        self.consts[len(self.ops)] = value
        self.add(Op(torch.empty, (), {}, makes=((0, view),)))

    def look(self, views: Iterable[View]) -> list[torch.Tensor]:
        """Return real copies of tensors at their current values, while the tape is still recorded."""
        requested = list(views)
        replay = Replay(self, [self.now(v.storage) for v in requested], keep=True)
        values = [v.on(replay.value(self.now(v.storage))).clone() for v in requested]
        self.values = replay.current
        return values

    def state(self, stream: Stream, position: int | torch.Tensor) -> torch.Tensor:
        """Return a generator's state at a position; draws before it that have not run are run on scratch memory."""
        pending: list[int] = []
        while not isinstance(position, torch.Tensor):
            if position in stream.states:
                position = stream.states[position]
            else:
                pending.append(position - 1)
                position = stream.before[position - 1]
        state = position
        for draw in reversed(pending):
            op = stream.ops[draw]
            if op.reads:  # the number of draws may depend on its inputs
                Replay(self, (), also=(op,)).run(op)
            else:
                self.call(op, {})
            state = stream.states[draw + 1]
        return state

    def call(self, op: Op, storages: dict[int, torch.UntypedStorage]) -> list[Any]:
        """Run one operator on real storages, scratch memory for missing ones. Returns the flat output."""

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
            outer_state = stream.generator.get_state()
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
                stream.generator.set_state(outer_state)
        return tree_flatten(out)[0]

    def last_draws(self) -> list[int]:
        """Return for each operator the index of the last random operator that its results depend on; -1 for none."""
        draws: list[int] = []
        for i, op in enumerate(self.ops):
            draws.append(i if op.stream is not None else max((draws[v] for _, v in op.consumes), default=-1))
        return draws


class Replay:
    """Replays requested versions, each returned once; a value is freed after the last consumer that a request depends on."""

    def __init__(self, tape: Tape, wanted: Iterable[Version], also: Iterable[Op] = (), keep: bool = False) -> None:
        self.tape = tape
        self.keep = keep
        self.held: dict[Version, torch.UntypedStorage] = dict(tape.values)
        self.current: dict[Version, torch.UntypedStorage] = {}
        self.uses: Counter[Version] = Counter()
        self.uses.update(wanted)
        for op in also:
            self.uses.update(op.consumes)
        pending = [version[1] for version in self.uses if version not in self.held]
        visited: set[int] = set()
        while pending:
            i = pending.pop()
            if i in visited:
                continue
            visited.add(i)
            for version in self.tape.ops[i].consumes:
                self.uses[version] += 1
                if version not in self.held:
                    pending.append(version[1])

    def value(self, version: Version) -> torch.UntypedStorage:
        """Return the storage of a requested version; the replay frees it unless another operator consumes it."""
        self._ready([version])
        return self._consume(version)

    def _ready(self, versions: Iterable[Version]) -> None:
        """Run the operators that the versions depend on, in tape order."""
        pending: set[int] = set()
        stack = [v for s, v in versions if (s, v) not in self.held]
        while stack:
            i = stack.pop()
            if i not in pending:
                pending.add(i)
                stack.extend(v for s, v in self.tape.ops[i].consumes if (s, v) not in self.held)
        order = list(pending)
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
        """Run one operator; `index` is its position on the tape, without it the results are dropped."""
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
            is_shared = version in self.held or version in self.tape.values or version in self.current
            storages[version[0]] = _copy(storage) if is_shared else storage
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
    all_bytes = View(0, torch.uint8, (storage.nbytes(),), (1,), 0, storage.nbytes())
    storage_copy = _allocate(storage.nbytes())
    all_bytes.on(storage_copy).copy_(all_bytes.on(storage))
    return storage_copy


def _storage(tensor: torch.Tensor, view: View, inputs: set[int], op: Op) -> torch.UntypedStorage:
    """Return the storage of an operator's output in the recorded layout."""
    if tensor.device.type != "cpu":
        raise ModelError(f"{op.func} in the model's constructor makes a tensor on {tensor.device}, which has no values; make it on the CPU")
    if tuple(tensor.shape) != view.shape or tensor.dtype != view.dtype:
        raise ModelError(f"{op.func} gives {tensor.dtype}{list(tensor.shape)} where {view.dtype}{list(view.shape)} was recorded; build the "
                         "model outside the block and pass it to weft.parallelize")  # fmt: skip
    storage = tensor.untyped_storage()
    has_layout = tensor.stride() == view.stride and tensor.storage_offset() == view.offset and storage.nbytes() == view.size_bytes
    if has_layout and id(storage) not in inputs:
        return storage
    storage_copy = _allocate(view.size_bytes)
    view.on(storage_copy).copy_(tensor)
    return storage_copy
