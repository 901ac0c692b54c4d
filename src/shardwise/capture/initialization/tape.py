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

from shardwise.capture.fakes import tree_flatten, tree_map
from shardwise.errors import ModelError

Version = tuple[int, int]  # storage, operator that wrote it last


@dataclass(frozen=True, slots=True)
class StorageView:
    """A tensor as a window on a storage. Sizes, strides and offset are in elements, `size_bytes` is the storage's."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    size_bytes: int

    def on_storage(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the real tensor of this view on a real storage."""
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.stride)

    @property
    def covers_storage(self) -> bool:
        """Return whether the view covers the storage, each byte once."""
        dense = 1
        for stride, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size != 1:
                if stride != dense:
                    return False
                dense *= size
        return self.offset == 0 and dense * self.dtype.itemsize == self.size_bytes


@dataclass(slots=True)
class RecordedOp:
    """One recorded call.

    It consumes the versions of `reads` and `modifies` (storages written in part) and writes `overwrites` in full; `creates`: (position in
    the flat output, view) of every new storage. `draw_index` is its index among the draws of `stream`.
    """

    func: Callable[..., Any]
    args: Any
    kwargs: Any
    reads: tuple[Version, ...] = ()
    modifies: tuple[Version, ...] = ()
    overwrites: tuple[StorageView, ...] = ()
    creates: tuple[tuple[int, StorageView], ...] = ()
    default_dtype: torch.dtype = torch.float32
    stream: RandomStream | None = None
    draw_index: int = -1

    @property
    def consumes(self) -> tuple[Version, ...]:
        return self.reads + self.modifies

    @property
    def writes(self) -> Iterator[int]:
        yield from (s for s, _ in self.modifies)
        yield from (v.storage for v in self.overwrites)
        yield from (v.storage for _, v in self.creates)


@dataclass(eq=False)
class RandomStream:
    """The draws from one generator. State number k is the state after k draws; number 0 is the initial state.

    `positions_before[n]` is the position before draw n: a state number, or a state that the program set itself. During recording
    the generator contains tokens in place of states, see `install_token`.
    """

    generator: torch.Generator
    token_magic: tuple[int, ...]
    states: dict[int, torch.Tensor] = field(default_factory=dict)
    positions_before: list[int | torch.Tensor] = field(default_factory=list)
    ops: list[RecordedOp] = field(default_factory=list)
    final: int | torch.Tensor = 0  # the position at the end of the program
    token_template: torch.Tensor = field(init=False)  # the template of tokens

    def __post_init__(self) -> None:
        if self.generator.device.type != "cpu":
            raise ModelError(f"a generator on {self.generator.device} cannot be replayed on the CPU; build the model outside the block "
                             "and pass it to shardwise.parallelize")  # fmt: skip
        self.token_template = self.states[0] = self.generator.get_state()
        self.install_token(0)

    # A token is a valid state that means "state number k": it survives torch.get_rng_state, set_rng_state and fork_rng, so a program that
    # saves and restores the generator is recorded without computing its states. It has the seed, so torch.initial_seed is right.
    # Layout of a CPU state: seed, two counters (24 bytes), then 624 words of 32 bits, each in 8 bytes.

    def install_token(self, number: int) -> None:
        """Set the generator to the token of a state."""
        token = self.token_template.clone()
        token.view(torch.int64)[3 : 5 + len(self.token_magic)] = torch.tensor([*self.token_magic, number & 0xFFFFFFFF, number >> 32])
        self.generator.set_state(token)

    def position(self) -> int | torch.Tensor:
        """Return the generator's position: a state number, or a state that the program has set."""
        state = self.generator.get_state()
        *magic, low, high = state.view(torch.int64)[3 : 5 + len(self.token_magic)].tolist()
        if tuple(magic) == self.token_magic:
            return int(low) | int(high) << 32
        self.token_template = state
        return state

    def record(self, op: RecordedOp) -> None:
        """Record `op` as the next draw."""
        op.stream, op.draw_index = self, len(self.ops)
        self.positions_before.append(self.position())
        self.ops.append(op)
        self.install_token(len(self.ops))


class Tape:
    """Operators in program order, and the last version of each storage."""

    def __init__(self) -> None:
        self.ops: list[RecordedOp] = []
        self.last_writers: list[int] = []  # per storage, the operator that wrote it last
        self.cached_values: dict[Version, torch.UntypedStorage] = {}  # values of the latest evaluation during recording
        self.constants: dict[int, torch.UntypedStorage] = {}  # values of the operators that stand for constants

    def add(self, op: RecordedOp) -> None:
        """Append an operator; its writes become the last versions."""
        for storage in op.writes:
            self.last_writers[storage] = len(self.ops)
        self.ops.append(op)

    def latest_version(self, storage: int) -> Version:
        """Return the last version of a storage."""
        return storage, self.last_writers[storage]

    def add_constant(self, view: StorageView, value: torch.UntypedStorage) -> None:
        """Record a new storage with its value."""
        self.constants[len(self.ops)] = value
        self.add(RecordedOp(torch.empty, (), {}, creates=((0, view),)))

    def copy_current_values(self, views: Iterable[StorageView]) -> list[torch.Tensor]:
        """Return real copies of tensors at their current values, while the tape is still recorded."""
        requested = list(views)
        replay = Replay(self, [self.latest_version(v.storage) for v in requested], keeps_latest=True)
        values = [v.on_storage(replay.take_value(self.latest_version(v.storage))).clone() for v in requested]
        self.cached_values = replay.latest_values
        return values

    def generator_state(self, stream: RandomStream, position: int | torch.Tensor) -> torch.Tensor:
        """Return a generator's state at a position; draws before it that have not run are run on scratch memory."""
        pending: list[int] = []
        while not isinstance(position, torch.Tensor):
            if position in stream.states:
                position = stream.states[position]
            else:
                pending.append(position - 1)
                position = stream.positions_before[position - 1]
        state = position
        for draw in reversed(pending):
            op = stream.ops[draw]
            if op.reads:  # the number of draws may depend on its inputs
                Replay(self, (), extra_ops=(op,)).run(op)
            else:
                self.run_on_storages(op, {})
            state = stream.states[draw + 1]
        return state

    def run_on_storages(self, op: RecordedOp, storages: dict[int, torch.UntypedStorage]) -> list[Any]:
        """Run one operator on real storages, scratch memory for missing ones. Returns the flat output."""

        def real(arg: Any) -> Any:
            if not isinstance(arg, StorageView):
                return arg
            storage = storages.get(arg.storage)
            return torch.empty_strided(arg.shape, arg.stride, dtype=arg.dtype) if storage is None else arg.on_storage(storage)

        args, kwargs = tree_map(real, op.args), tree_map(real, op.kwargs)
        default_dtype = torch.get_default_dtype()
        stream = op.stream
        if stream is not None:
            before = self.generator_state(stream, stream.positions_before[op.draw_index])
            outer_state = stream.generator.get_state()
            stream.generator.set_state(before)
        torch.set_default_dtype(op.default_dtype)
        try:
            with torch.no_grad():
                out = op.func(*args, **kwargs)
            if stream is not None:
                stream.states[op.draw_index + 1] = stream.generator.get_state()
        except RuntimeError as error:
            raise ModelError(f"{op.func} cannot be replayed while shardwise builds the model's weights: {error}; build the model outside the "  # noqa: E501
                             "block and pass it to shardwise.parallelize") from error  # fmt: skip
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

    def __init__(self, tape: Tape, wanted: Iterable[Version], extra_ops: Iterable[RecordedOp] = (), keeps_latest: bool = False) -> None:
        self.tape = tape
        self.keeps_latest = keeps_latest
        self.available: dict[Version, torch.UntypedStorage] = dict(tape.cached_values)
        self.latest_values: dict[Version, torch.UntypedStorage] = {}
        self.remaining_uses: Counter[Version] = Counter()
        self.remaining_uses.update(wanted)
        for op in extra_ops:
            self.remaining_uses.update(op.consumes)
        pending = [version[1] for version in self.remaining_uses if version not in self.available]
        visited: set[int] = set()
        while pending:
            i = pending.pop()
            if i in visited:
                continue
            visited.add(i)
            for version in self.tape.ops[i].consumes:
                self.remaining_uses[version] += 1
                if version not in self.available:
                    pending.append(version[1])

    def take_value(self, version: Version) -> torch.UntypedStorage:
        """Return the storage of a requested version; the replay frees it unless another operator consumes it."""
        self._run_dependencies([version])
        return self._consume(version)

    def _run_dependencies(self, versions: Iterable[Version]) -> None:
        """Run the operators that the versions depend on, in tape order."""
        pending: set[int] = set()
        stack = [v for s, v in versions if (s, v) not in self.available]
        while stack:
            i = stack.pop()
            if i not in pending:
                pending.add(i)
                stack.extend(v for s, v in self.tape.ops[i].consumes if (s, v) not in self.available)
        order = list(pending)
        heapq.heapify(order)
        while order:
            i = heapq.heappop(order)
            self.run(self.tape.ops[i], i)

    def _consume(self, version: Version) -> torch.UntypedStorage:
        storage = self.available[version]
        self.remaining_uses[version] -= 1
        if not self.remaining_uses[version]:
            del self.available[version]
            if self.keeps_latest and self.tape.last_writers[version[0]] == version[1]:
                self.latest_values[version] = storage
        return storage

    def run(self, op: RecordedOp, index: int = -1) -> None:
        """Run one operator; `index` is its position on the tape, without it the results are dropped."""
        if index < 0:
            self._run_dependencies(op.consumes)
        if index in self.tape.constants:
            self._store_results({op.creates[0][1].storage: _copy_storage(self.tape.constants[index])}, index)
            return
        storages: dict[int, torch.UntypedStorage] = {}
        for version in op.reads:
            storages[version[0]] = self._consume(version)
        for version in op.modifies:
            storage = self._consume(version)
            is_shared = version in self.available or version in self.tape.cached_values or version in self.latest_values
            storages[version[0]] = _copy_storage(storage) if is_shared else storage
        for view in op.overwrites:
            storages[view.storage] = _allocate_storage(view.size_bytes)
        out = self.tape.run_on_storages(op, storages)
        written = {s: storages[s] for s, _ in op.modifies} | {v.storage: storages[v.storage] for v in op.overwrites}
        inputs = {id(storage) for storage in storages.values()}
        for position, view in op.creates:
            written[view.storage] = _output_storage(out[position], view, inputs, op)
        if index >= 0:
            self._store_results(written, index)

    def _store_results(self, written: dict[int, torch.UntypedStorage], index: int) -> None:
        for s, storage in written.items():
            if self.remaining_uses[(s, index)]:
                self.available[(s, index)] = storage


def _allocate_storage(size_bytes: int) -> torch.UntypedStorage:
    return torch.empty(size_bytes, dtype=torch.uint8).untyped_storage()


def _copy_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    all_bytes = StorageView(0, torch.uint8, (storage.nbytes(),), (1,), 0, storage.nbytes())
    storage_copy = _allocate_storage(storage.nbytes())
    all_bytes.on_storage(storage_copy).copy_(all_bytes.on_storage(storage))
    return storage_copy


def _output_storage(tensor: torch.Tensor, view: StorageView, inputs: set[int], op: RecordedOp) -> torch.UntypedStorage:
    """Return the storage of an operator's output in the recorded layout."""
    if tensor.device.type != "cpu":
        raise ModelError(f"{op.func} in the model's constructor makes a tensor on {tensor.device}, which has no values; make it on the CPU")
    if tuple(tensor.shape) != view.shape or tensor.dtype != view.dtype:
        raise ModelError(f"{op.func} gives {tensor.dtype}{list(tensor.shape)} where {view.dtype}{list(view.shape)} was recorded; build the "
                         "model outside the block and pass it to shardwise.parallelize")  # fmt: skip
    storage = tensor.untyped_storage()
    has_layout = tensor.stride() == view.stride and tensor.storage_offset() == view.offset and storage.nbytes() == view.size_bytes
    if has_layout and id(storage) not in inputs:
        return storage
    storage_copy = _allocate_storage(view.size_bytes)
    view.on_storage(storage_copy).copy_(tensor)
    return storage_copy
