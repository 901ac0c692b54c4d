"""Read a torch.fx graph of `torch.export` or `make_fx` as a list of operators, with the sub-graphs of gradient and autocast blocks inlined.

The `FxGraphReader` has the operators, the tensors between them, and which of these share storage. Not supported: higher-order operators
(loops, branches), and operators that depend on memory layout.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.capture.fakes import written_arguments
from shardwise.errors import ModelError
from shardwise.model.graph import FUNCTION, Arg, Function, Operator, Ref, Tensor, Word
from shardwise.model.strides.strided_views import as_strided_steps
from shardwise.ops import record_of, writes_in_place
from shardwise.ops.vocabulary import CostKind

if TYPE_CHECKING:
    from shardwise.capture.autograd_functions.trace import JointGraph

FunctionLookup = Callable[[int, tuple[Tensor, ...]], "tuple[Function, JointGraph]"]

_FORMATS = (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
_LAYOUT_WORDS: dict[Any, Word] = {torch.strided: Word("layout", "strided"), **{f: Word("format", str(f).split(".")[1]) for f in _FORMATS}}
_Overload = type(torch.ops.aten.add.Tensor)  # the class has no public name


class UnsupportedAliasing(Exception):
    """An in-place write with unsupported aliasing, or a function transform (vmap); the caller tries torch's decomposition."""


def operator_exists(target: str) -> bool:
    namespace, packet, overload = target.split(".")
    return hasattr(getattr(getattr(torch.ops, namespace), packet, None), overload)


def spec_of(value: Any) -> Tensor:
    if isinstance(value, torch.Tensor):
        strides = () if value.layout != torch.strided or value.is_contiguous() else tuple(int(n) for n in value.stride())
        return Tensor(tuple(int(n) for n in value.shape), str(value.dtype).removeprefix("torch."), strides)
    return Tensor((), {bool: "bool", int: "int64", float: "float64"}.get(type(value), "int64"))


def _check_writes(op: Operator, target: Any) -> None:
    """Raise ModelError for an operator that writes an argument in an unsupported way: the write would be lost."""
    written = [name for _, name in written_arguments(target)]
    allowed = writes_in_place(op) or "out" in dict(op.kwargs) or record_of(op).kind == CostKind.BATCH_NORM
    if written and not allowed:
        raise ModelError(
            f"{op.site} writes its argument {written[0]} in place ({op.target}), which cannot be followed; write with the tensor's own "
            "methods (copy_, mul_, add_), one tensor at a time"
        )


class FxGraphReader:
    """Converts an fx graph to operators, sub-graphs of gradient and autocast blocks included."""

    def __init__(self, functions: FunctionLookup | None = None) -> None:
        self._functions = functions  # looks up an autograd.Function call by its number and its tensors
        self.operators: list[Operator] = []
        self.tensors: dict[str, Tensor] = {}
        self.renames: dict[str, str] = {}
        self.results: list[str] = []
        self.no_grad_operators: set[str] = set()  # operators in blocks without gradients
        self._unchanged: set[str] = set()  # operators in blocks that return their tensor itself
        self._sites: dict[str, int] = {}
        self._tuples: dict[str, tuple[str, ...]] = {}
        self._storage_by_value: dict[str, torch.UntypedStorage] = {}

    def add_value(self, name: str, value: Any) -> None:
        """Add a value, with its storage."""
        self.tensors[name] = spec_of(value)
        if isinstance(value, torch.Tensor):
            self._storage_by_value[name] = value.untyped_storage()

    def storages(self) -> dict[str, int]:
        """Return the storage id of every value: equal ids share memory."""
        return {name: id(storage) for name, storage in self._storage_by_value.items()}

    def read(self, graph: Any, owner: nn.Module) -> None:
        for node in graph.nodes:
            if node.op == "call_function":
                self._read_call(node, owner, "", node.name, "")
            elif node.op == "output":
                self.results = [self.resolve_name(n.name) for n in node.args[0] if hasattr(n, "name")]

    def resolve_name(self, name: str) -> str:
        while name in self.renames:
            name = self.renames[name]
        return name

    def _read_call(self, node: Any, owner: nn.Module, prefix: str, name: str, autocast: str) -> None:
        target = node.target
        if target is operator.getitem:
            source = self._tuples[prefix + node.args[0].name]
            self.renames[prefix + node.name] = source[node.args[1]]
            return
        if not isinstance(target, _Overload):
            self._inline_block(node, owner, prefix, autocast)
            return
        value = node.meta.get("val")
        if str(target) == FUNCTION:
            self._read_function(node, prefix, autocast)
            return
        if str(target) in ("aten.as_strided.default", "aten.as_strided_scatter.default"):
            source = node.args[0].meta["val"]
            if self._read_windows(node, source, prefix):
                return
            if not source.is_contiguous() or source.storage_offset() or "scatter" in str(target):
                raise ModelError(
                    f"{self._site_of(node, str(target))} depends on how its tensor is laid out in memory; use views, unfold or indices "
                    f"instead"
                )
        multiple = isinstance(value, tuple | list)
        full = prefix + node.name
        outputs = tuple(f"{full}.{i}" for i in range(len(value))) if multiple else (full,)
        for output, item in zip(outputs, value if multiple else (value,), strict=True):
            self.add_value(output, item)
        if multiple:
            self._tuples[full] = outputs
        op = Operator(
            full,
            str(target),
            tuple(self._convert_arg(a, prefix) for a in node.args),
            tuple((k, self._convert_arg(a, prefix)) for k, a in node.kwargs.items() if k != "pin_memory"),
            outputs,
            self._site_of(node, str(target)),
            multiple,
            autocast,
        )
        _check_writes(op, target)
        self.operators.append(op)

    def _read_windows(self, node: Any, source: Any, prefix: str) -> bool:
        """Read an `as_strided` of whole dimensions, or of sliding windows, as view operators; return False for any other."""
        offset = node.args[3] if len(node.args) > 3 else None
        value = node.meta["val"]
        if "scatter" in str(node.target) or offset not in (None, source.storage_offset()) or node.kwargs:
            return False
        steps = as_strided_steps(*(tuple(zip(map(int, x.shape), map(int, x.stride()), strict=True)) for x in (source, value)))
        if steps is None:
            return False
        at, full = self._convert_arg(node.args[0], prefix), prefix + node.name
        view = source.to("meta")
        for i, (name, args) in enumerate(steps):
            packet, overload = name.split(".")
            view = getattr(getattr(torch.ops.aten, packet), overload)(view, *args)
            output = full if i == len(steps) - 1 else f"{full}.windows{i}"
            self.add_value(output, value)
            self.tensors[output] = spec_of(view)
            self.operators.append(Operator(output, f"aten.{name}", (at, *args), (), (output,), self._site_of(node, f"aten.{name}")))
            at = Ref(output)
        return True

    def _read_function(self, node: Any, prefix: str, autocast: str) -> None:
        """Read a call of an autograd.Function; inputs and outputs without a gradient are detached."""
        full, argument = prefix + node.name, self._convert_arg(node.args[0], prefix)
        assert isinstance(argument, tuple)
        assert self._functions is not None, "none is called in what this reads"
        inputs = [ref.value for ref in argument if isinstance(ref, Ref)]
        function, does = self._functions(node.args[1], tuple(self.tensors[v] for v in inputs))
        site = self._site_of(node, f"shardwise.{function.name}")

        def detached(value: str, name: str) -> str:
            self.tensors[name] = self.tensors[value]
            self._storage_by_value[name] = self._storage_by_value[value]
            self.operators.append(Operator(name, "aten.detach.default", (Ref(value),), (), (name,), f"{site}/detach"))
            return name

        read = [
            v if grad else detached(v, f"{full}.given{i}") for i, (v, grad) in enumerate(zip(inputs, function.requires_grad, strict=True))
        ]
        outputs = [f"{full}.{i}" for i in range(len(does.outputs))]
        for output, item, source in zip(outputs, node.meta["val"], does.aliased_inputs, strict=True):
            self.add_value(output, item)
            if source >= 0:
                self._storage_by_value[output] = self._storage_by_value[inputs[source]]
        refs = tuple(Ref(v) for v in read)
        self.operators.append(Operator(full, FUNCTION, (function, *refs), (), tuple(outputs), site, True, autocast))
        is_detached = [seed is None and self.tensors[v].is_float for v, seed in zip(outputs, does.seeds, strict=True)]
        self._tuples[full] = tuple(detached(v, f"{v}.kept") if no_grad else v for v, no_grad in zip(outputs, is_detached, strict=True))

    def _inline_block(self, node: Any, owner: nn.Module, prefix: str, autocast: str) -> None:
        """Inline `with torch.no_grad()` (its outputs are detached) and `with torch.autocast(...)` blocks."""
        kind = str(node.target)
        if "set_grad_enabled" in kind:
            keep_grad, body, operands = node.args[0], node.args[1], node.args[2:]
        elif "autocast" in kind:
            device, dtype, is_on = node.args[:3]
            dtype = torch.get_autocast_dtype(device) if dtype is None else dtype
            autocast = f"{device}:{str(dtype).removeprefix('torch.')}" if is_on else "off"
            keep_grad, body, operands = True, node.args[4], node.args[5:]
        else:
            if isinstance(node.target, FunctionType):
                raise UnsupportedAliasing(f"the model calls {node.target.__name__}, which shardwise cannot decompose")
            raise ModelError(f"the model calls {kind}, which shardwise cannot decompose")
        inner = getattr(owner, body.target)
        start = len(self.operators)
        within = f"{prefix}{node.name}."
        operand = iter(operands)
        for child in inner.graph.nodes:
            if child.op == "placeholder":
                self.renames[within + child.name] = self.resolve_name(prefix + next(operand).name)
            elif child.op == "call_function":
                num_before = len(self.operators)
                self._read_call(child, inner, within, child.name, autocast)
                self._note_unchanged(child, within)
                if not keep_grad:
                    self.no_grad_operators.update(op.name for op in self.operators[num_before:] if op.name not in self._unchanged)
            elif child.op == "output":
                results = child.args[0] if isinstance(child.args[0], tuple | list) else (child.args[0],)
                outputs = []
                for i, result in enumerate(results):
                    value = self.resolve_name(within + result.name)
                    if not keep_grad and self.tensors[value].is_float and self._is_made_since(value, start):
                        out = f"{within}detach{i}"
                        self.tensors[out] = self.tensors[value]
                        if value in self._storage_by_value:
                            self._storage_by_value[out] = self._storage_by_value[value]
                        self.operators.append(
                            Operator(out, "aten.detach.default", (Ref(value),), (), (out,), self._site_of(node, "aten.detach.default"))
                        )
                        value = out
                    outputs.append(value)
                self._tuples[prefix + node.name] = tuple(outputs)
                if not isinstance(child.args[0], tuple | list):
                    self.renames[prefix + node.name] = outputs[0]

    def _note_unchanged(self, node: Any, prefix: str) -> None:
        """Note a call that returns its tensor itself, as `x.to(x.dtype)`: the result has the tensor's gradient, in any block."""
        source = node.args[0] if node.args else None
        if not isinstance(node.target, _Overload) or not isinstance(source, torch.fx.Node) or writes_in_place(self.operators[-1]):
            return
        before, after = source.meta.get("val"), node.meta.get("val")
        if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor) or spec_of(before) != spec_of(after):
            return
        if any("val" not in n.meta for n in node.all_input_nodes):
            return
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        if node.target(*args, **kwargs) is before:  # each view is another tensor
            self._unchanged.add(prefix + node.name)

    def _is_made_since(self, value: str, start: int) -> bool:
        """Return whether a value is made by the operators from number `start` on; the result of a write is the written value, and that of
        a call that returns its tensor is this tensor."""
        producers = {output: op for op in self.operators[start:] for output in op.outputs}
        while op := producers.get(value):
            into = dict(op.kwargs).get("out", op.args[0] if writes_in_place(op) or op.name in self._unchanged else None)
            if not isinstance(into, Ref):
                return True
            value = self.resolve_name(into.value)
        return False

    def _convert_arg(self, arg: Any, prefix: str) -> Arg:
        if isinstance(arg, torch.fx.Node):
            return Ref(self.resolve_name(prefix + arg.name))
        if isinstance(arg, tuple | list):
            return tuple(self._convert_arg(a, prefix) for a in arg)
        if isinstance(arg, torch.dtype):
            return Word("dtype", str(arg).removeprefix("torch."))
        if isinstance(arg, torch.device):
            return Word("device", "run")
        if isinstance(arg, torch.layout | torch.memory_format):
            return _LAYOUT_WORDS[arg]
        if arg is None or isinstance(arg, bool | int | float | str | complex):
            return arg
        raise ModelError(f"the model passes {type(arg).__name__} to an operator; shardwise knows numbers, text, dtypes and tensors")

    def _site_of(self, node: Any, target: str) -> str:
        stack = node.meta.get("nn_module_stack") or {}
        path = next(reversed(stack.values()))[0] if stack else ""
        path = path.removeprefix("model").removeprefix(".")
        base = f"{path}/{target.split('.')[1]}"
        count = self._sites[base] = self._sites.get(base, -1) + 1
        return base if not count else f"{base}#{count}"
