"""What a trace does not see, watched while it runs: Python code in backward, state that a module keeps in Python, random numbers of Python.

In: a module that is called under tracing. Out: the call's result; `ModelError` by name for what a graph of operators cannot hold. `.data`
is told to the trace as what it is (a detached view), buffers and parameters that are replaced are written, reentrant checkpoints run
plainly.

Not modelled: what happens inside of objects that a module holds, apart from lists, dicts, sets and deques of plain values.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from weft.capture.fakes import told
from weft.capture.functions import BASE, Record, plainly, recorded, recording
from weft.capture.patches.casts import without_casts
from weft.capture.patches.checks import passing
from weft.capture.patches.ctc import Picked
from weft.capture.patches.instead import INSTEAD, exactly, one_by_one
from weft.capture.patches.known import Known
from weft.capture.randomness import python_randomness
from weft.errors import ModelError

State = Mapping[tuple[str, str], Any]  # (path of a module, attribute) -> value
_GET_DATA, _SET_DATA = Tensor.data.__get__, Tensor.data.__set__  # type: ignore[attr-defined]
_GET_GRAD_FN = Tensor.grad_fn.__get__  # type: ignore[union-attr]  # what a module asks of a parameter that it is given
_IN_BACKWARD: dict[Any, str] = {
    Tensor.register_hook: "registers a hook on a tensor",
    Tensor.register_post_accumulate_grad_hook: "registers a hook on a tensor",
    Tensor.backward: "calls backward",
    torch.autograd.grad: "calls torch.autograd.grad",
    torch.autograd.backward: "calls torch.autograd.backward",
}
_ASKS_TRUE = (Tensor.__bool__, Tensor.allclose, torch.allclose, Tensor.equal, torch.equal)
_MAKES = (
    "the model makes {} while it runs, which an optimizer that was made before does not know; let it make and choose its parts when it is "
    "constructed"
)
_OWN = set(vars(nn.Module()))
_TABLES = ("_parameters", "_buffers", "_modules")
_HOOKS = {key for key in _OWN if "forward" in key and "hooks" in key}  # a model may hang some on its parts when it is first called


class _Told(TorchFunctionMode):
    """Refuses what acts in backward alone or on parameters of others, and says `.data` in words that a trace keeps."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model, self._own = model, {id(p) for p in model.parameters()}
        self._known, self._picked = Known(), Picked()
        self._made: list[Tensor] = []  # parameters that the model makes while it runs

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _GET_DATA:
            return args[0].detach() if args[0].requires_grad else args[0]
        if func == _SET_DATA:
            return self._assign(*args)
        if func == _GET_GRAD_FN:
            return func(*args)
        kwargs = _without_default(kwargs or {})
        generator = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Generator)), None)
        if generator is not None and generator.device.type != "meta":
            raise ModelError(
                f"the model draws from {_held_as(self._model, generator)} in forward, whose state moves on with every call; "
                "a captured graph draws what belongs to the seed and the step: leave generator= out, or draw beside the model"
            )
        if func in _IN_BACKWARD:
            raise ModelError(f"the model {_IN_BACKWARD[func]} while it runs, which a captured graph does not hold")
        for x in (*args, *(kwargs or {}).values()):
            if isinstance(x, nn.Parameter) and x.requires_grad and id(x) not in self._own and not _holds(self._model, x):
                if any(x is made for made in self._made):
                    raise ModelError(_MAKES.format(f"a parameter of shape {list(x.shape)}"))
                raise ModelError(
                    f"a parameter of shape {list(x.shape)} is read that is none of the model's, so that it would not be trained; make it "
                    "(and the loss, where that reads it) a part of the model"
                )
        if func is Tensor.requires_grad_:
            self._made.append(args[0])  # what becomes a parameter of a traced tensor does so here
        answer = self._known.asked(func, args)
        if answer is not None:
            return answer[0]
        if func is Tensor.__bool__ and _asked_by(inspect.currentframe()) == nn.Transformer.__module__:
            return False  # whether a mask is causal, which only chooses the faster of two ways to the same result
        if func in _ASKS_TRUE and (func is not Tensor.__bool__ or args[0].numel() == 1):
            passes = passing(_caller(inspect.currentframe()))
            if passes is not None:
                return passes
        if func is F.ctc_loss:
            args, kwargs = (), self._picked.apart(args, kwargs or {})
        if func in (F.cross_entropy, F.nll_loss):
            _as_many(*args[:2], **{key: x for key, x in (kwargs or {}).items() if key in ("input", "target")})
        if func in INSTEAD:
            return INSTEAD[func](*args, **(kwargs or {}))
        each = one_by_one(func, args, kwargs or {})
        if each is not None:
            return each()
        if func is Tensor.__setitem__ and isinstance(args[2], float) and args[0].is_floating_point():
            number = exactly(torch.tensor, args[2:], {})  # which torch would make a tensor of float32 of
            args = args if number is None else (*args[:2], number.to(torch.float32))
        exact = exactly(func, args, kwargs or {})
        result = func(*args, **(kwargs or {})) if exact is None else exact.to(torch.float32)
        self._known.note(func, args, kwargs or {}, result)
        self._picked.note(func, args, result)
        return result

    def _assign(self, into: Tensor, value: Tensor) -> None:
        """`into.data = value`, as a write of the same values."""
        held = {x.untyped_storage()._cdata for x in (*self._model.parameters(), *self._model.buffers()) if x is not into}
        if value.shape != into.shape or value.dtype != into.dtype or value.untyped_storage()._cdata in held:
            raise ModelError(
                "the model assigns to the .data of a tensor while it runs what has another shape or dtype, or is the memory of another "
                "parameter or buffer; write with .data.copy_ instead"
            )
        with torch.no_grad():
            into.detach().copy_(value)


def _without_default(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Without torch's own generator, from which draws come that name none."""
    return {key: x for key, x in kwargs.items() if x is not torch.default_generator}


def _held_as(model: nn.Module, generator: torch.Generator) -> str:
    """What a message calls a generator."""
    for path, module in model.named_modules():
        for key, x in vars(module).items():
            if x is generator:
                return f"its torch.Generator {path}.{key}".replace(" .", " ")
    return "a torch.Generator of its own"


def _as_many(input: Tensor, target: Tensor) -> None:
    """Tell the trace what a loss asks of its rows and their classes, that they are as many: PyTorch 2.11 cannot follow it by itself where
    two like masks pick them."""
    if input.dim() == 2 and target.dim() == 1 and any(isinstance(x.shape[0], torch.SymInt) for x in (input, target)):
        told(input.shape[0] == target.shape[0])


def _is_true(number: torch.SymBool, otherwise: Callable[[torch.SymBool], bool]) -> bool:
    """Whether it is, as code asks that has compared what `.item()` gave it: what a check passes with, or else what torch says."""
    passes = passing(_caller(_caller(inspect.currentframe())))
    return otherwise(number) if passes is None else passes


def _holds(model: nn.Module, parameter: Tensor) -> bool:
    """Whether the model has this parameter now: it may have replaced one while it runs."""
    return any(p is parameter for p in model.parameters())


def _caller(frame: FrameType | None) -> FrameType | None:
    """Of the code that called the function with this frame."""
    return None if frame is None else frame.f_back


def _asked_by(frame: FrameType | None) -> str:
    """The module of that code."""
    caller = _caller(frame)
    return "" if caller is None else str(caller.f_globals.get("__name__", ""))


def refuse_hooks(model: nn.Module) -> None:
    """Raise ModelError where a parameter has a gradient hook: weft gives the module other parameters, and the hook would be lost."""
    for name, p in model.named_parameters():
        if p._backward_hooks:  # the only place where torch shows them
            raise ModelError(f"parameter {name} has a gradient hook, which weft would lose; change gradients after backward instead")


def refuse_scripts(model: nn.Module) -> None:
    """Raise ModelError where torch.jit has compiled the model or a part of it, which can be neither traced nor given other parameters."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            part = f"its part {path}" if path else "the model"
            raise ModelError(f"{part} is compiled by torch.jit, which cannot be divided; give the module as it was before torch.jit.script")


# What torch.library makes of an operator's registered backward: it belongs to the operator, which the graph holds.
_OF_AN_OPERATOR = "GeneratedBackwardFor_"
# How the checkpoint of torch 2.11 that is not reentrant holds on to its inputs; later ones need no function for that.
_OF_A_CHECKPOINT = ("torch.utils.checkpoint", "_NoopSaveInputs")


@contextmanager
def watched(model: nn.Module, record: Record) -> Iterator[None]:
    """Call `model` in this block, under tracing. Functions with a backward of their own become operators that `record` has.

    Raises:
        ModelError: what the model does is not in a graph of its operators, by name.
    """
    held = {(path, key, kind): x for path, m in model.named_modules() for kind, table in _tables(m) for key, x in table.items()}
    drawn = python_randomness()
    # Below `Function.apply`, which a module may have kept under another name (`reverse = Reverse.apply`).
    BASE.apply = classmethod(_apply)
    functions: Any = torch.autograd.function
    transformed = functions.custom_function_call
    functions.custom_function_call = _refuse_transformed
    checked = Distribution._validate_args
    # Distributions look at the values of their arguments, which only tells whether they are valid.
    Distribution.set_default_validate_args(False)
    asked: Any = torch.SymBool
    symbolic = asked.__bool__
    asked.__bool__ = lambda number: _is_true(number, symbolic)
    parts = {path: (m, dict(m._modules)) for path, m in model.named_modules()}
    made: dict[str, Tensor] = {}
    try:
        with _Told(model), recording(record), without_casts():
            yield
    finally:
        # Before anybody takes what a call has made for a part of the model that was constructed.
        for path, (module, modules_before) in parts.items():
            module._modules.clear()
            module._modules.update(modules_before)
            for kind, table in _tables(module):
                for key in [key for key in table if (path, key, kind) not in held]:
                    made[f"{path}.{key}".removeprefix(".")] = table.pop(key)
                    module._non_persistent_buffers_set.discard(key)
        asked.__bool__ = symbolic
        del BASE.apply
        functions.custom_function_call = transformed
        Distribution.set_default_validate_args(checked)
    if python_randomness() != drawn:
        raise ModelError("the model draws from Python's or numpy's random numbers, which a captured graph would fix; use torch's")
    for name, x in made.items():
        if isinstance(x, nn.Parameter):
            raise ModelError(_MAKES.format(f"its parameter {name}"))
        if x is not None:
            record.made[name] = x
    modules = {path: dict(_tables(m)) for path, m in model.named_modules()}
    for (path, key, kind), old in held.items():
        new = modules[path][kind].get(key)
        if new is not old:
            name = f"{path}.{key}".removeprefix(".")
            if old is None or new is None or new.shape != old.shape or new.dtype != old.dtype:
                raise ModelError(f"the model replaces its {kind} {name} by another kind of tensor while it runs; write into it instead")
            with torch.no_grad():
                old.copy_(new)
            modules[path][kind][key] = old
            if kind == "parameter":
                record.replaced.append(name)


def _tables(module: nn.Module) -> tuple[tuple[str, dict[str, Any]], ...]:
    return ("parameter", module._parameters), ("buffer", module._buffers)


def _apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
    if cls.__name__.startswith(_OF_AN_OPERATOR) or (cls.__module__, cls.__name__) == _OF_A_CHECKPOINT:
        return plainly(cls, *args, **kwargs)
    if cls is CheckpointFunction:
        return args[0](*args[2:])  # after it comes whether random state is kept
    if cls.__module__.partition(".")[0] == "torch":  # hooks of modules, and what sums over ranks by itself
        _refuse_transformed(cls)
    return recorded(cls, *args, **kwargs)


def _refuse_transformed(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
    raise ModelError(
        f"the model uses {cls.__name__}, whose backward is Python code that a captured graph does not hold; write it with operators and "
        "detach, for example x + (f(x) - x).detach()"
    )


@dataclass(frozen=True, slots=True)
class _Contents:
    """A container and what was in it."""

    container: Any
    items: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Table:
    """A module's own parameters, buffers or parts, by name."""

    container: dict[str, Any]
    items: tuple[tuple[str, Any], ...]


def state_of(model: nn.Module) -> State:
    """Every attribute of all modules, with the contents of containers; hooks on forward; which parameters, buffers and parts there are."""
    return {
        (path, key): _Table(value, tuple(value.items())) if key in _TABLES else _contents(value)
        for path, module in model.named_modules()
        for key, value in vars(module).items()
        if key not in _OWN or key in _HOOKS or key in _TABLES
    }


def _contents(value: Any) -> Any:
    if isinstance(value, list | set | deque):
        return _Contents(value, tuple(map(_contents, value)))
    if isinstance(value, dict):
        return _Contents(value, tuple((key, _contents(item)) for key, item in value.items()))
    return value


def changes(before: State, after: State) -> list[str]:
    """Attributes that differ, as `layers.0.count`."""
    missing = object()
    names = sorted({*before, *after})
    return [".".join(n).removeprefix(".") for n in names if not _same(before.get(n, missing), after.get(n, missing))]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, _Table) and isinstance(b, _Table):  # what is written or replaced in it is looked at elsewhere
        return [key for key, _ in a.items] == [key for key, _ in b.items]
    if isinstance(a, _Contents) and isinstance(b, _Contents):
        return a.container is b.container and _same(a.items, b.items)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    plain = isinstance(a, bool | int | float | complex | str | bytes | torch.dtype | torch.device)
    return a is b or (plain and type(a) is type(b) and a == b)


def set_state(model: nn.Module, state: State) -> None:
    """Give all modules the attributes of `state`, and take away those that it lacks."""
    for value in state.values():
        if isinstance(value, _Table):
            _restored(value)
    for path, module in model.named_modules():
        for key in [key for key in vars(module) if key not in _OWN and (path, key) not in state]:
            del vars(module)[key]
    for (path, key), value in state.items():
        vars(model.get_submodule(path))[key] = _restored(value)


def _restored(value: Any) -> Any:
    if isinstance(value, _Table):
        value.container.clear()
        value.container.update(value.items)
        return value.container
    if not isinstance(value, _Contents):
        return value
    container = value.container
    items = [(item[0], _restored(item[1])) if isinstance(container, dict) else _restored(item) for item in value.items]
    container.clear()
    (container.extend if isinstance(container, list | deque) else container.update)(items)
    return container
