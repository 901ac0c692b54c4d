"""Record the tensor operators of a program that builds a model on fake tensors, onto a `Tape`.

Recorded are operators from torch's dispatcher, and the few calls that never reach it. When the program reads a number, or a shape depends
on data, the tape is replayed far enough for it. Not supported: data pointers; tensors that are not strided.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shardwise.capture.fakes import (
    FAKE_TENSOR_ERRORS,
    DispatchMode,
    Fake,
    clear_fake_tensor_memo,
    fake_mode,
    tree_flatten,
    tree_map,
    written_arguments,
)
from shardwise.capture.initialization.tape import RandomStream, RecordedOp, StorageView, Tape, Version
from shardwise.capture.nesting import tensors_in
from shardwise.errors import ModelError, UsageError

BUILD_OUTSIDE = "build the model outside the block and pass it to shardwise.parallelize"
# Operators that write their first argument in full without reading it.
_FULL_OVERWRITES = {"fill_", "zero_", "copy_"}
_FULL_OVERWRITES |= {"normal_", "uniform_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_", "bernoulli_"}
# Operators that read the shape of their tensor arguments only.
_SHAPE_ONLY = {f"{new}_like" for new in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")}
_SHAPE_ONLY |= {f"new_{new}" for new in ("empty", "empty_strided", "zeros", "ones", "full")}
_READS_DATA = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)
_DEVICE_MOVES = (torch.Tensor.cuda, torch.Tensor.cpu, torch.Tensor.pin_memory)


class Recording:
    """The tape of one block, and the tape's storages of its fake tensors."""

    def __init__(self) -> None:
        self.fake_mode = fake_mode()
        self.tape = Tape()
        self.streams: dict[int, RandomStream] = {}
        self.bounds_by_version: dict[Version, Bounds] = {}
        self._storages: dict[int, tuple[int, torch.UntypedStorage]] = {}  # by id; kept alive so that no id is reused
        self._lifted: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}
        self._magic = tuple(random.SystemRandom().getrandbits(32) for _ in range(4))
        self.operators = OperatorRecorder(self)
        self._requests = FunctionInterceptor(self)

    def start(self) -> None:
        """Start recording. Raises UsageError the second time."""
        if self.streams:
            raise UsageError("a Deferred block is entered once; make a new Deferred() for another model")
        self.stream_of(None)
        self._requests.__enter__()  # type: ignore[no-untyped-call]
        self.operators.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Stop recording, and restore each generator to its state before its first use."""
        self.operators.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._requests.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self.tape.cached_values = {}
        self._lifted = {}
        for stream in self.streams.values():
            stream.final = stream.position()
            stream.generator.set_state(stream.states[0])

    def stream_of(self, generator: torch.Generator | None) -> RandomStream:
        """Return the stream of draws of a generator; None is torch's default one."""
        source = torch.default_generator if generator is None else generator
        stream = self.streams.get(id(source))
        if stream is None:
            stream = self.streams[id(source)] = RandomStream(source, self._magic)
        return stream

    def is_fake(self, value: object) -> bool:
        """Return whether this block made the tensor."""
        return isinstance(value, Fake) and value.fake_mode is self.fake_mode

    def view_of(self, fake: torch.Tensor) -> StorageView:
        """Return the view of a fake tensor on the tape's storages. Raises ModelError for one that the block did not make."""
        storage = fake.untyped_storage()
        storage_view = self._storages.get(id(storage))
        if storage_view is None:
            kind = f"{fake.dtype}{list(fake.shape)}"
            raise ModelError(f"a fake tensor {kind} was not made by an operator in this block, so it has no value; {BUILD_OUTSIDE}")
        return StorageView(storage_view[0], fake.dtype, tuple(fake.shape), fake.stride(), int(fake.storage_offset()), storage.nbytes())

    def new_storage(self, fake: torch.Tensor) -> StorageView | None:
        """Register the storage of a fake tensor and return its view; None if it was registered before."""
        storage = fake.untyped_storage()
        if id(storage) in self._storages:
            return None
        self._storages[id(storage)] = (len(self.tape.last_writers), storage)
        self.tape.last_writers.append(-1)
        return self.view_of(fake)

    def lift(self, real: torch.Tensor, fresh: bool = False) -> torch.Tensor:
        """Return a fake tensor with the current value of a real one. A `fresh` one is referenced nowhere else."""
        lifted = self._lifted.get(id(real))
        if lifted is not None and lifted[1] == real._version:
            return lifted[2]
        if real.layout != torch.strided or real.device.type != "cpu":
            raise ModelError(f"a {real.layout} tensor on {real.device} meets a model that is built without memory; {BUILD_OUTSIDE}")
        value = real.detach()
        if not fresh or not value.is_contiguous() or value.untyped_storage().nbytes() != value.nbytes:
            value = value.clone()
        with self.fake_mode:
            fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        view = self.new_storage(fake)
        if view is not None:
            self.tape.add_constant(view, value.untyped_storage())
        if not fresh:
            self._lifted[id(real)] = (real, real._version, fake)
        return fake

    def real_copies(self, tree: Any) -> Any:
        """Return the same nesting with real copies of its fake tensors at their current values."""
        fakes = {id(t): t for t in tree_flatten(tree)[0] if isinstance(t, Fake)}
        with self.operators.pause():
            real = dict(zip(fakes, self.tape.copy_current_values(self.view_of(t) for t in fakes.values()), strict=True))
        return tree_map(lambda a: real[id(a)] if isinstance(a, Fake) else a, tree)

    def value_bounds(self, fake: Any) -> Bounds | None:
        """Return bounds of the values of a fake tensor that covers its storage; None without bounds."""
        view = self.view_of(fake)
        return self.bounds_by_version.get(self.tape.latest_version(view.storage)) if view.covers_storage else None


class FunctionInterceptor(TorchFunctionMode):
    """Handles calls that never reach the dispatcher: other devices, deep copies, and Python code that reads data."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Handle one call of torch's Python interface."""
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = _cpu_stand_in(kwargs["device"])
        tensor: Any = args[0] if args else None
        if not self._recording.is_fake(tensor):
            return func(*args, **kwargs)
        if func in _DEVICE_MOVES:
            return tensor
        if func is torch.Tensor.to:
            args = (tensor, *map(_cpu_stand_in, args[1:]))
        elif func is torch.Tensor.__deepcopy__:
            return self._deepcopy(tensor, args[1])
        elif func in _READS_DATA:
            value = self._recording.real_copies(tensor.detach())
            with self._recording.operators.pause():
                return func(value, *args[1:], **kwargs)
        return func(*args, **kwargs)

    def _deepcopy(self, tensor: Any, memo: dict[int, Any]) -> Any:
        if id(tensor) in memo:
            return memo[id(tensor)]
        new = tensor.detach().clone()
        if isinstance(tensor, nn.Parameter):
            new = nn.Parameter(new, tensor.requires_grad)
        else:
            new.requires_grad_(tensor.requires_grad)
        memo[id(tensor)] = new
        for key, item in vars(tensor).items():
            if key not in vars(new):
                setattr(new, key, copy.deepcopy(item, memo))
        return new


def _cpu_stand_in(device: Any) -> Any:
    """Return the CPU for a requested device, except "meta"; values that are no device are returned unchanged."""
    if isinstance(device, bool) or not isinstance(device, torch.device | str | int):
        return device
    kind = device.type if isinstance(device, torch.device) else device.split(":")[0] if isinstance(device, str) else "cuda"
    return device if kind in ("cpu", "meta") else torch.device("cpu")


class _RecordingPause:
    def __init__(self, operators: OperatorRecorder) -> None:
        self._operators = operators
        self._before = False

    def __enter__(self) -> None:
        self._before, self._operators.is_paused = self._operators.is_paused, True

    def __exit__(self, *error: object) -> None:
        self._operators.is_paused = self._before


class OperatorRecorder(DispatchMode):  # type: ignore[no-untyped-call]
    """Records operators onto the tape and returns fake tensors."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording
        self.is_paused = False

    def pause(self) -> _RecordingPause:
        """Return a block in which operators run without being recorded."""
        return _RecordingPause(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record one operator."""
        kwargs = dict(kwargs or {})
        recording = self._recording
        if self.is_paused:
            return func(*args, **kwargs)
        if kwargs.get("device") is not None:
            kwargs["device"] = _cpu_stand_in(kwargs["device"])
        if func is torch.ops.aten.lift_fresh.default and not isinstance(args[0], Fake):
            return recording.lift(args[0], fresh=True)
        if func.overloadpacket is torch.ops.aten.set_:
            return self._set_storage(func, args, kwargs)
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        tensors = list(tensors_in((args, kwargs)))
        writes = _written_tensors(func, args, kwargs)
        if any(not isinstance(t, Fake) for t in writes):
            return self._write_real(func, args, kwargs, is_random)
        if not all(isinstance(t, Fake) for t in tensors):
            if not is_random and not any(isinstance(t, Fake) for t in tensors):
                return func(*args, **kwargs)
            args, kwargs = tree_map(self._lift_if_real, (args, kwargs))
            tensors = list(tensors_in((args, kwargs)))
        before = {id(t): recording.view_of(t) for t in tensors}
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype == torch.bool:
            low, high = recording.value_bounds(args[0]) or (0, 1)
            if low == high:
                return bool(low)
        bounds = bounds_of(func, args, recording.value_bounds)
        generator = kwargs.get("generator") or next((a for a in args if isinstance(a, torch.Generator)), None)
        try:
            with recording.fake_mode:
                out = func(*args, **kwargs)
        except FAKE_TENSOR_ERRORS:
            return self._run_now(func, args, kwargs, bool(writes) or is_random)
        clear_fake_tensor_memo(recording.fake_mode)
        draws = is_random and any(t.device.type != "meta" for t in (*tensors_in(out), *writes) if isinstance(t, Fake))
        op = self._record(func, args, kwargs, out, before, writes, recording.stream_of(generator) if draws else None)
        if op is not None and bounds is not None:
            recording.bounds_by_version.update(
                {(v.storage, len(recording.tape.ops) - 1): bounds for v in (*op.overwrites, *(v for _, v in op.creates))}
            )
        return out

    def _lift_if_real(self, item: Any) -> Any:
        return self._recording.lift(item) if isinstance(item, torch.Tensor) and not isinstance(item, Fake) else item

    def _record(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        out: Any,
        before: dict[int, StorageView],
        writes: list[torch.Tensor],
        stream: RandomStream | None,
    ) -> RecordedOp | None:
        """Record a call onto the tape, unless it only makes views. `before`: the views of its arguments by id."""
        tape = self._recording.tape
        flat = [out] if isinstance(out, torch.Tensor) else tree_flatten(out)[0]
        fresh = [(i, self._recording.new_storage(t)) for i, t in enumerate(flat) if isinstance(t, Fake)]
        makes = tuple((i, view) for i, view in fresh if view is not None)
        if not makes and not writes and stream is None:
            return None
        name = func.overloadpacket.__name__
        written = {id(t): before[id(t)] for t in writes}
        read = [] if name in _SHAPE_ONLY else [view for key, view in before.items() if key not in written]
        overwrites = tuple(written.values()) if name in _FULL_OVERWRITES else ()
        sources = [before[id(t)].storage for t in tensors_in((args[1:], kwargs))] if overwrites else []
        if any(not w.covers_storage or w.storage in sources for w in overwrites):  # a tensor may be copied onto itself
            overwrites = ()
        changes = dict.fromkeys(v.storage for v in written.values() if v not in overwrites)
        reads = dict.fromkeys(v.storage for v in read if v.storage not in changes)
        if before:
            args, kwargs = tree_map(lambda a: before[id(a)] if isinstance(a, torch.Tensor) else a, (args, kwargs))
        read_versions, changed_versions = tuple(map(tape.latest_version, reads)), tuple(map(tape.latest_version, changes))
        op = RecordedOp(func, args, kwargs, read_versions, changed_versions, overwrites, makes, torch.get_default_dtype())
        if stream is not None:
            stream.record(op)
        tape.add(op)
        return op

    def _set_storage(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Set a tensor to another storage, without a write. A real storage (of a file that is loaded) becomes a constant."""
        tensor, *rest = args
        if rest and isinstance(rest[0], torch.UntypedStorage) and rest[0].device.type == "cpu" and isinstance(tensor, Fake):
            real = torch.empty(0, dtype=tensor.dtype).set_(*rest, **kwargs)
            func, rest, kwargs = torch.ops.aten.set_.source_Tensor, [self._recording.lift(real, fresh=True)], {}
        with self._recording.fake_mode:
            return func(tensor, *map(self._lift_if_real, rest), **kwargs)

    def _run_now(self, func: Any, args: Any, kwargs: Any, must_record: bool) -> Any:
        """Run an operator at once: the program reads its result, its shapes depend on data, or it has no shape rule."""
        if must_record:
            raise ModelError(f"{func} in the model's constructor has no shape rule, so it cannot be deferred; {BUILD_OUTSIDE}")
        args, kwargs = self._recording.real_copies((args, kwargs))
        try:
            out = func(*args, **kwargs)
        except RuntimeError as error:
            raise ModelError(f"{func} in the model's constructor failed on real values: {error}; {BUILD_OUTSIDE}") from error
        return tree_map(lambda a: self._recording.lift(a, fresh=True) if isinstance(a, torch.Tensor) else a, out)

    def _write_real(self, func: Any, args: Any, kwargs: Any, is_random: bool) -> Any:
        """Run an operator at once that writes a tensor made outside the block."""
        if is_random:
            raise ModelError(f"{func} draws into a tensor that was made outside the block; make it inside, or {BUILD_OUTSIDE}")
        args, kwargs = self._recording.real_copies((args, kwargs))
        return func(*args, **kwargs)


def _written_tensors(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the tensors that an operator writes, by its schema."""
    return [t for i, name in written_arguments(func) for t in tensors_in(args[i] if i < len(args) else kwargs.get(name))]


Bounds = tuple[float, float]

# A normal draw is at most sqrt(-2 ln 2^-53) = 8.6 standard deviations from the mean (Box-Muller on a 53-bit uniform); the rest is rounding.
_NORMAL_REACH = 10.0


def bounds_of(func: Any, args: Any, bounds: Callable[[Any], Bounds | None]) -> Bounds | None:
    """Return the bounds (low, high) of the result of `func(*args)`, or None. `bounds` returns those of a tensor argument."""
    name = str(func).removeprefix("aten.")
    if name == "normal_.default":
        mean = args[1] if len(args) > 1 else 0.0
        std = args[2] if len(args) > 2 else 1.0
        reach = _NORMAL_REACH * std + 0.01 * abs(mean)
        return mean - reach, mean + reach
    if name in ("lt.Scalar", "gt.Scalar"):
        source = bounds(args[0])
        if source is None:
            return None
        low, high = source if name == "lt.Scalar" else (-source[1], -source[0])
        limit = args[1] if name == "lt.Scalar" else -args[1]
        return (0, 0) if low >= limit else (1, 1) if high < limit else None
    if name in ("bitwise_or.Tensor", "logical_or.default"):
        both = bounds(args[0]), bounds(args[1])
        return (0, 0) if both == ((0, 0), (0, 0)) else None
    if name == "any.default":
        return (0, 0) if bounds(args[0]) == (0, 0) else None
    return None
