"""The only adapter to torch's fake tensors (shape, dtype and device "cpu", but no memory), tracing, dispatcher and pytrees.

Private names of torch, and names that not every version has, are listed here once. `for_real()` is a block without fake tensors and
tracing, and `fake_copy` copies a module onto fake tensors. Fake tensors of other devices are not supported.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import _decomp, _subclasses, nn
from torch._decomp import decompositions
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.fx import config as fx_config
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.modules import transformer
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch, _pytree
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode
from torch.utils._python_dispatch import _disable_current_modes as for_real
from torch.utils._pytree import tree_flatten, tree_map

from shardwise.capture.closures import rebind_functions
from shardwise.capture.nesting import named_leaves
from shardwise.errors import ModelError

__all__ = [
    "DATA_DEPENDENT_ERRORS", "DETECT_CAUSAL_MASK", "DEVICE_INIT", "FAKE_TENSOR_ERRORS", "LSTM_LAYER", "MODULE_APPLY", "NAMES",
    "NO_STACK_TRACES", "TORCH_ASSERT", "VALIDATE_ARGS", "DispatchMode", "Fake", "FakeMode", "HostFakeMode", "assume_in_trace",
    "clear_fake_tensor_memo", "decompositions", "device_fake_mode", "fake_copy", "fake_mode", "for_real", "fx_config", "patched_attribute",
    "set_original", "silence_fake_tensor_log", "transformer", "tree_flatten", "tree_map", "written_arguments",
]  # fmt: skip

TORCH_ASSERT = torch._assert  # used by models to check values that a trace does not have
# (owner, attribute) of every private name used here, for the test.
NAMES: tuple[tuple[Any, str], ...] = (
    (torch, "_assert"),
    (torch, "_check"),
    (torch.ops.aten.view.default, "_schema"),
    (_decomp, "decompositions"),
    (decompositions, "one_layer_lstm"),
    (transformer, "_detect_is_causal_mask"),
    (torch.nn.Module, "_apply"),
    (torch.distributions.Distribution, "_validate_args"),
    (_subclasses, "fake_tensor"),
    (fake_tensor, "FakeTensor"),
    (fake_tensor, "FakeTensorMode"),
    (fake_tensor.FakeTensorMode, "avoid_device_init"),
    (fake_tensor, "DataDependentOutputException"),
    (fake_tensor, "DynamicOutputShapeException"),
    (fake_tensor, "UnsupportedOperatorException"),
    (symbolic_shapes, "GuardOnDataDependentSymNode"),
    (_python_dispatch, "TorchDispatchMode"),
    (_python_dispatch, "_disable_current_modes"),
    (_pytree, "tree_flatten"),
    (_pytree, "tree_map"),
)

Fake = FakeTensor
FakeMode = FakeTensorMode
# Raised by fake tensors where real values are needed: for a number, a shape, or an operator without a shape rule.
FAKE_TENSOR_ERRORS = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
# Raised in a trace where Python code reads a value of a tensor, or a shape depends on values.
DATA_DEPENDENT_ERRORS = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)


# Attributes that patches replace.
NO_STACK_TRACES = "do_not_emit_stack_traces"  # of torch.fx.config, since torch 2.12
LSTM_LAYER = "one_layer_lstm"
DEVICE_INIT = "avoid_device_init"
DETECT_CAUSAL_MASK = "_detect_is_causal_mask"
MODULE_APPLY = "_apply"  # by which `to` and `double` convert parameters
VALIDATE_ARGS = "_validate_args"  # of a distribution
_AVOID_DEVICE_INIT: Any = FakeTensorMode.avoid_device_init


class HostFakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A fake mode for host tensors that does not touch CUDA. torch's own queries the CUDA driver whenever it is entered: such a process
    cannot be forked into ranks that use a GPU. Without a GPU torch simulates one, which fails in a fork of a process that has run backward.
    Host tensors need neither, so this returns the value for a machine with a GPU.
    """

    @property
    def avoid_device_init(self) -> bool:
        return torch.version.cuda is None and bool(_AVOID_DEVICE_INIT.fget(self))


def assume_in_trace(holds: bool | torch.SymBool) -> None:
    """Assume a relation of data-dependent sizes in a trace; raise if it does not hold."""
    torch._check(holds)  # type: ignore[no-untyped-call]


def fake_mode() -> FakeTensorMode:
    """Make a new fake mode: fake tensors of two modes cannot be mixed in one operator."""
    return HostFakeMode(allow_non_fake_inputs=True)


def device_fake_mode() -> FakeTensorMode:
    """Make a new fake mode for tensors of any device, which needs no such device: torch's own, so not for a process that is to fork."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def patched_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """A block in which an attribute is replaced (monkey patch)."""
    is_inherited = isinstance(owner, type) and name not in vars(owner)
    before = vars(owner).get(name) if isinstance(owner, type) else getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name) if is_inherited else setattr(owner, name, before)


@contextmanager
def silence_fake_tensor_log() -> Iterator[None]:
    """A block in which failing calls on fake tensors raise without an entry in torch's log."""
    log = logging.getLogger(fake_tensor.__name__)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def clear_fake_tensor_memo(mode: FakeTensorMode) -> None:
    """Drop the mode's weak references to its tensors, with which `nn.Module.to` and `.double` refuse to swap a parameter."""
    mode.fake_tensor_converter.meta_converter.tensor_memo.clear()


@cache
def written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Return positions and names of the arguments that an operator writes, by its schema."""
    arguments = func._schema.arguments if hasattr(func, "_schema") else ()
    return tuple((i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)


_ORIGINAL = "shardwise_original"


def set_original(fake: torch.Tensor, tensor: torch.Tensor) -> None:
    """Note for `fake_copy` that a fake tensor stands in a module where lists and closures have `tensor`."""
    setattr(fake, _ORIGINAL, tensor)


def fake_copy(module: nn.Module, fake_mode: FakeMode, originals: dict[int, torch.Tensor] | None = None) -> nn.Module:
    """Return a deep copy of the module on fake CPU tensors of `fake_mode`. The module is not changed and its data not copied.

    Tied tensors stay tied; tensors that share storage without being the same object are separate in the copy.
    `originals` is filled with the real tensor by `id` of each fake one, plain attributes included: a trace needs them as constants.

    Raises:
        ModelError: something else in the module cannot be copied.
    """
    twins = _FakeCopies(fake_mode, {} if originals is None else originals)
    memo: dict[int, Any] = {id(t): twins.fake_of(t) for t in (*module.parameters(), *module.buffers())}
    # Lists and closures of a divided module have the tensors for which others stand in its tables now.
    memo.update({id(x): memo[id(t)] for t in (*module.parameters(), *module.buffers()) if (x := getattr(t, _ORIGINAL, None)) is not None})
    # A generator is not copied, since its state is a real tensor; a trace refuses draws from it.
    memo.update({id(g): g for part in module.modules() for _, g in named_leaves(dict(vars(part))) if isinstance(g, torch.Generator)})
    try:
        with twins:
            copied = copy.deepcopy(module, memo)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        name = type(module).__name__
        raise ModelError(f"{name} cannot be copied for tracing: {error}; make its attributes copyable, or keep them out of it") from error
    rebind_functions(copied, memo)
    return copied


class _FakeCopies(TorchFunctionMode):
    """Makes copies of tensors that are no parameters or buffers fake, too."""

    def __init__(self, fake_mode: FakeMode, originals: dict[int, torch.Tensor]) -> None:
        super().__init__()
        self.fake_mode, self.originals = fake_mode, originals

    def fake_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a fake tensor for a real one."""
        if tensor.layout != torch.strided:
            raise ModelError(f"a {tensor.layout} tensor of shape {list(tensor.shape)} cannot be traced; make it dense")
        with self.fake_mode:
            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, tensor.requires_grad)
        fake.requires_grad_(tensor.requires_grad)
        self.originals[id(fake)] = tensor
        return fake

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Handle one call of torch's Python interface."""
        if func is torch.Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = self.fake_of(tensor)
            return memo[id(tensor)]
        if func is torch.Tensor.clone and not isinstance(args[0], Fake):  # a parameter in a list is copied by a clone of its data
            return self.fake_of(args[0])
        return func(*args, **(kwargs or {}))
