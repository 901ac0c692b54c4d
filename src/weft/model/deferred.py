"""Build any module without its memory, then make real only the pieces that a rank keeps.

In: the code that builds a model, inside `with Deferred()`. Out: the same modules on fake CPU tensors, and through `materialize` the initial
value of every parameter and buffer, one at a time, bit for bit what the code gives without weft after the same `torch.manual_seed`.
Code that asks for a number (`.item()`, `if mask.any()`) gets the true one. Requests for another device than the CPU are built on the CPU.
Not modelled: values read or written behind the dispatcher's back (data pointers); initial values drawn on an accelerator.
"""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from weft.errors import ModelError
from weft.model.fakes import NO_FAKE, Fake, FakeMode, fake_mode, forget
from weft.model.tape import Op, Replay, Stream, Tape, View

Take = Callable[[str, torch.Tensor], torch.Tensor | None]
_OUTSIDE = "build the model outside the block and pass it to weft.parallelize"
# Operators whose first argument is written in full and not read.
_FILLS = {"fill_", "zero_", "copy_", "normal_", "uniform_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_", "bernoulli_"}
_READS_DATA = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)


class Deferred:
    """A block in which modules are built on fake tensors.

    >>> torch.manual_seed(0)
    >>> with Deferred() as deferred:
    ...     net = nn.Linear(4, 2)
    >>> half = materialize(deferred, net, lambda name, tensor: tensor[:1])

    The state of torch's random generator after the block is that before it; `materialize` advances it.
    """

    def __init__(self) -> None:
        self.fake_mode: FakeMode = fake_mode()
        self.tape = Tape()
        self.roots: tuple[nn.Module, ...] = ()
        self._recorder = _Recorder(self)
        self._requests = _Requests(self)
        self._seen: dict[int, weakref.ref[nn.Module]] = {}
        self._hooks: list[Any] = []
        self._storages: dict[int, tuple[int, torch.UntypedStorage]] = {}
        self._lifted: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}
        self._streams: dict[int, Stream] = {}
        self._magic = tuple(random.SystemRandom().getrandbits(32) for _ in range(4))
        self._final: int | torch.Tensor = 0

    def __enter__(self) -> Deferred:
        """Start recording. A block is entered once."""
        self.stream(None)
        self._hooks = [
            register_module_parameter_registration_hook(self._see),
            register_module_buffer_registration_hook(self._see),
            register_module_module_registration_hook(self._see),
        ]
        self._requests.__enter__()
        self._recorder.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop recording, find the roots, and put the generators back to where they were before the block."""
        self._recorder.__exit__(*error)
        self._requests.__exit__(*error)
        for hook in self._hooks:
            hook.remove()
        self.tape.kept = {}
        self._lifted = {}
        self._final = self.stream(None).position()
        for stream in self._streams.values():
            stream.generator.set_state(stream.states[0])
        if error[0] is None:
            self.roots = self._find_roots()
        self._seen = {}

    def _see(self, module: nn.Module, name: str, item: object) -> None:
        for m in (module, item):
            if isinstance(m, nn.Module):
                self._seen.setdefault(id(m), weakref.ref(m))

    def _find_roots(self) -> tuple[nn.Module, ...]:
        roots = self._outermost()
        if len(roots) > 1:  # modules that were thrown away may wait for the collector
            del roots
            gc.collect()
            roots = self._outermost()
        return tuple(roots)

    def _outermost(self) -> list[nn.Module]:
        alive = [m for m in (ref() for ref in self._seen.values()) if m is not None]
        inner: set[int] = set()
        for module in alive:
            stack = list(module.children())
            while stack:
                child = stack.pop()
                if id(child) not in inner:
                    inner.add(id(child))
                    stack.extend(child.children())
        return [m for m in alive if id(m) not in inner]

    def stream(self, generator: torch.Generator | None) -> Stream:
        """The draws from a generator; None is torch's own."""
        own = torch.default_generator if generator is None else generator
        found = self._streams.get(id(own))
        if found is None:
            found = self._streams[id(own)] = Stream(own, self._magic)
        return found

    def is_fake(self, value: object) -> bool:
        """Whether this block made the tensor."""
        return isinstance(value, Fake) and value.fake_mode is self.fake_mode

    def view(self, fake: torch.Tensor) -> View:
        """Where on the tape a fake tensor is. Raises ModelError for a fake tensor that the block has not seen being made."""
        storage = fake.untyped_storage()
        found = self._storages.get(id(storage))
        if found is None:
            raise ModelError(f"a fake tensor {fake.dtype}{list(fake.shape)} was not made by a recorded operator, so it has no value; {_OUTSIDE}")
        return View(found[0], fake.dtype, tuple(fake.shape), fake.stride(), int(fake.storage_offset()), storage.nbytes())

    def new_storage(self, fake: torch.Tensor) -> View | None:
        """The view of a fake tensor on a storage that was not known before; None where it was."""
        storage = fake.untyped_storage()
        if id(storage) in self._storages:
            return None
        self._storages[id(storage)] = (len(self.tape.last), storage)
        self.tape.last.append(-1)
        return self.view(fake)

    def lift(self, real: torch.Tensor, fresh: bool = False) -> torch.Tensor:
        """A fake tensor with the value that a real one has now."""
        known = self._lifted.get(id(real))
        if known is not None and known[1] == real._version:
            return known[2]
        if real.layout != torch.strided or real.device.type != "cpu":
            raise ModelError(f"a {real.layout} tensor on {real.device} meets a model that is built without memory; {_OUTSIDE}")
        value = real.detach()
        if not fresh or not value.is_contiguous() or value.untyped_storage().nbytes() != value.nbytes:
            value = value.clone()
        with self.fake_mode:
            fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        view = self.new_storage(fake)
        assert view is not None
        self.tape.constant(view, value.untyped_storage())
        if not fresh:
            self._lifted[id(real)] = (real, real._version, fake)
        return fake

    def value(self, fake: torch.Tensor) -> torch.Tensor:
        """A real copy of a fake tensor as it is now, or as it was at the end of the block.

        Raises:
            ModelError: the block has not made it, or an operator cannot be replayed.
        """
        return self.tape.look([self.view(fake)])[0]


class _Requests(TorchFunctionMode):
    """Calls that never reach the dispatcher: other devices, copies, and Python code that reads data."""

    def __init__(self, deferred: Deferred) -> None:
        super().__init__()
        self._deferred = deferred

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = _on_cpu(kwargs["device"])
        tensor = args[0] if args else None
        if not self._deferred.is_fake(tensor):
            return func(*args, **kwargs)
        if func is torch.Tensor.to:
            args = (tensor, *(_on_cpu(a) if isinstance(a, torch.device | str | int) and not isinstance(a, bool) else a for a in args[1:]))
            args = (tensor, *args[1:])
        elif func in (torch.Tensor.cuda, torch.Tensor.xpu, torch.Tensor.cpu, torch.Tensor.pin_memory):
            return tensor
        elif func is torch.Tensor.__deepcopy__:
            return self._deepcopy(tensor, args[1])
        elif func in _READS_DATA:
            with _Off(self._deferred):
                return func(self._deferred.value(tensor), *args[1:], **kwargs)
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


class _Off:
    """Takes the recorder off while a real tensor is handled inside the block."""

    def __init__(self, deferred: Deferred) -> None:
        self._recorder = deferred._recorder

    def __enter__(self) -> None:
        self._recorder.paused += 1

    def __exit__(self, *error: object) -> None:
        self._recorder.paused -= 1


def _on_cpu(device: Any) -> Any:
    """The device that stands for a requested one: the CPU, except for "meta", which has no values at all."""
    if isinstance(device, str) and device.split(":")[0] not in ("cuda", "xpu", "mps", "hpu", "npu"):
        return device
    kind = torch.device(device).type
    return device if kind in ("cpu", "meta") else torch.device("cpu")


class _Recorder(TorchDispatchMode):
    """Writes operators on fake tensors onto the tape."""

    def __init__(self, deferred: Deferred) -> None:
        super().__init__()
        self._deferred = deferred
        self.paused = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        deferred = self._deferred
        if self.paused:
            return func(*args, **kwargs)
        if func is torch.ops.aten.lift_fresh.default and not isinstance(args[0], Fake):
            return deferred.lift(args[0], fresh=True)
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        tensors = [a for a in tree_flatten((args, kwargs))[0] if isinstance(a, torch.Tensor)]
        real = [t for t in tensors if not isinstance(t, Fake)]
        writes = _written(func, args, kwargs)
        if real:
            if any(not isinstance(t, Fake) for t in writes):
                return self._write_real(func, args, kwargs, is_random)
            if len(real) == len(tensors) and not is_random:
                return func(*args, **kwargs)
            args, kwargs = tree_map(lambda a: deferred.lift(a) if isinstance(a, torch.Tensor) and not isinstance(a, Fake) else a, (args, kwargs))
        if func.overloadpacket is torch.ops.aten.set_:  # moves a tensor to another storage; writes none
            with deferred.fake_mode:
                return func(*args, **kwargs)
        generator = kwargs.get("generator") or next((a for a in args if isinstance(a, torch.Generator)), None)
        before = {id(t): deferred.view(t) for t in tree_flatten((args, kwargs))[0] if isinstance(t, Fake)}
        try:
            with deferred.fake_mode:
                out = func(*args, **kwargs)
        except NO_FAKE:
            return self._now(func, args, kwargs, writes, is_random)
        forget(deferred.fake_mode)
        self._record(func, args, kwargs, out, before, writes, deferred.stream(generator) if is_random else None)
        return out

    def _record(
        self, func: Any, args: Any, kwargs: Any, out: Any, before: dict[int, View], writes: list[torch.Tensor], stream: Stream | None
    ) -> None:
        deferred = self._deferred
        tape = deferred.tape
        makes = []
        for position, item in enumerate(tree_flatten(out)[0]):
            if isinstance(item, Fake):
                view = deferred.new_storage(item)
                if view is not None:
                    makes.append((position, view))
        if not makes and not writes and stream is None:
            return
        written = {id(t): before[id(t)] for t in writes}
        read = [view for key, view in before.items() if key not in written]
        overwrites: tuple[View, ...] = ()
        if func.overloadpacket.__name__ in _FILLS and len(written) == 1:
            (view,) = written.values()
            if view.covers and all(r.storage != view.storage for r in read):
                overwrites = (view,)
        changed = dict.fromkeys(v.storage for v in written.values() if v not in overwrites)
        reads = dict.fromkeys(v.storage for v in read if v.storage not in changed)
        args, kwargs = tree_map(lambda a: before[id(a)] if isinstance(a, torch.Tensor) else a, (args, kwargs))
        op = Op(
            func,
            args,
            kwargs,
            tuple(tape.now(s) for s in reads),
            tuple(tape.now(s) for s in changed),
            overwrites,
            tuple(makes),
            torch.get_default_dtype(),
        )
        if stream is not None:
            stream.record(op)
        tape.add(op)

    def _values(self, tree: Any) -> Any:
        fakes = {id(t): t for t in tree_flatten(tree)[0] if isinstance(t, Fake)}
        real = dict(zip(fakes, self._deferred.tape.look(self._deferred.view(t) for t in fakes.values()), strict=True))
        return tree_map(lambda a: real[id(a)] if isinstance(a, Fake) else a, tree)

    def _now(self, func: Any, args: Any, kwargs: Any, writes: list[torch.Tensor], is_random: bool) -> Any:
        """Run an operator whose result decides what the program does next, or whose shapes depend on data."""
        if writes or is_random:
            raise ModelError(f"{func} in the model's constructor has no shape rule, so it cannot be deferred; {_OUTSIDE}")
        args, kwargs = self._values((args, kwargs))
        try:
            out = func(*args, **kwargs)
        except RuntimeError as error:
            raise ModelError(f"{func} in the model's constructor failed on real values: {error}; {_OUTSIDE}") from error
        return tree_map(lambda a: self._deferred.lift(a, fresh=True) if isinstance(a, torch.Tensor) else a, out)

    def _write_real(self, func: Any, args: Any, kwargs: Any, is_random: bool) -> Any:
        """An operator that writes a tensor that was made outside the block runs at once."""
        if is_random:
            raise ModelError(f"{func} draws into a tensor that was made outside the block; make it inside, or {_OUTSIDE}")
        args, kwargs = self._values((args, kwargs))
        return func(*args, **kwargs)


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an operator's schema says it writes."""
    found: list[torch.Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found.extend(t for t in tree_flatten(value)[0] if isinstance(t, torch.Tensor))
    return found


def _named(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _piece(take: Take, name: str, full: torch.Tensor, dtype: torch.dtype | None, owned: bool) -> torch.Tensor | None:
    """What `take` keeps of a tensor, in memory of its own unless it is all of a tensor that nothing else holds."""
    full = full.detach()
    if dtype is not None and full.is_floating_point() and full.dtype != dtype:
        full, owned = full.to(dtype), True
    piece = take(name, full)
    if piece is None:
        return None
    piece = piece.detach()
    storage = piece.untyped_storage()
    if storage is full.untyped_storage() and (not owned or storage.nbytes() != piece.nbytes):
        return piece.clone(memory_format=torch.contiguous_format)
    return piece


def materialize(deferred: Deferred, module: nn.Module, take: Take, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """The pieces of a deferred module's parameters and buffers that `take(name, full_tensor)` returns, by name; None keeps nothing.

    `take` is called once for each, under its first name where it is tied, with the initial value on the CPU, in an order that depends on
    the program alone; at most a few full tensors are alive at a time. `dtype` converts floating-point tensors first. torch's random
    generator moves on to where plain construction leaves it, unless it has been used or seeded since the block.

    Raises:
        ModelError: a tensor that has no value (meta device), or an operator that cannot be replayed.
    """
    named = dict(_named(module))
    tape = deferred.tape
    last_draw = tape.last_draws()
    kept: dict[str, torch.Tensor | None] = {}
    units: dict[int, list[tuple[str, View]]] = {}
    for name, tensor in named.items():
        if not isinstance(tensor, Fake):
            kept[name] = _piece(take, name, tensor, dtype, owned=False)
        elif not deferred.is_fake(tensor) or tensor.device.type == "meta":
            why = "is on the meta device" if tensor.device.type == "meta" else "was made by another block"
            raise ModelError(f"{name} {why}, so it has no initial value here; {_OUTSIDE}")
        else:
            view = deferred.view(tensor)
            units.setdefault(view.storage, []).append((name, view))
    order = sorted(units, key=lambda s: (last_draw[tape.last[s]], tape.last[s]))
    replay = Replay(tape, [tape.now(s) for s in order])
    for s in order:
        version = tape.now(s)
        storage = replay.value(version)
        owned = len(units[s]) == 1 and version not in replay.held
        for name, view in units[s]:
            kept[name] = _piece(take, name, view.on(storage), dtype, owned)
        del storage
    _advance(deferred)
    return {name: piece for name in named if (piece := kept[name]) is not None}


def _advance(deferred: Deferred) -> None:
    for stream in deferred._streams.values():
        if torch.equal(stream.generator.get_state(), stream.states[0]):
            final = deferred._final if stream is deferred.stream(None) else len(stream.ops)
            stream.generator.set_state(deferred.tape.state(stream, final))


def materialize_real(module: nn.Module, take: Take, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """`materialize` for a module that has real tensors: the pieces that `take` keeps, by first name. The module is not changed."""
    kept = {name: _piece(take, name, tensor, dtype, owned=False) for name, tensor in _named(module)}
    return {name: piece for name, piece in kept.items() if piece is not None}
