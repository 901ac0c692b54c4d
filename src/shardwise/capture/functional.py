"""Functionalization of in-place operators, on the operator list; only buffers and parameters are still written in place.

`storages` tells which values share memory, as recorded while the model was traced. A write is propagated through the chain of views to the
tensor that owns the memory (into a slice: `slice_scatter`), then every other view of that memory is regenerated. Unsupported aliasing is
left to torch's own functionalization: None is returned.

Torch's own (`run_decompositions`) was tried in its place, with torch 2.13: it treats writes under `no_grad`, through `.data` and `detach`
as differentiable, returns the final values of buffers where a graph writes them, and takes as long as the trace.

A write in a block without gradients, or through `.data` or `detach()`, changes the value and not the gradient: the result has the written
value, and its gradient flows to the original. Limit: a value that is infinite before such a write gets no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardwise.model.graph import Arg, Operator, Ref, Tensor, Word, rename_inputs
from shardwise.model.strides.strides import without_gaps
from shardwise.ops import record_of, writes_in_place
from shardwise.ops.vocabulary import ViewKind

_RETURN_INPUT = {"contiguous", "to", "type_as", "alias", "clone", "dropout"}  # may return their input
_METADATA_WRITES = ("set", "resize", "requires_grad")  # writes of metadata, not of values
# In-place random operators whose functional twins have other names; the other arguments are equal.
_FUNCTIONAL_TWINS = {"aten.normal_.default": "aten.normal_functional.default", "aten.bernoulli_.float": "aten.bernoulli.p"}
_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor", "logical_not"}


@dataclass(frozen=True, slots=True)
class _AliasedView:
    """Output number `output` of `op` is a view of `base`."""

    op: Operator
    base: str
    output: int


@dataclass(frozen=True, slots=True)
class StorageAliasing:
    """Aliasing and gradient information of values.

    Args:
        storages: the id of the storage of every value; values without an entry share none.
        in_place: buffers and parameters, which are still written in place.
        requires_grad: variables that require a gradient.
        no_grad_operators: names of the operators in blocks without gradients (`no_grad`).
    """

    storages: Mapping[str, int]
    in_place: frozenset[str]
    requires_grad: frozenset[str]
    no_grad_operators: frozenset[str]


def functionalize_operators(
    operators: list[Operator], tensors: dict[str, Tensor], aliasing: StorageAliasing, exists: Callable[[str], bool]
) -> tuple[list[Operator], dict[str, str]] | None:
    """Return `operators` without in-place writes, and the last name of every written value; None for a write with unsupported aliasing.

    `exists(target)`: whether torch has an operator of this name.
    """
    return _Functionalizer(tensors, aliasing, exists).run(operators)


class _UntrackedWrite(Exception):
    """A write with unsupported aliasing."""


class _Functionalizer:
    def __init__(self, tensors: dict[str, Tensor], memory: StorageAliasing, exists: Callable[[str], bool]) -> None:
        self.tensors, self.aliasing, self.exists = tensors, memory, exists
        self.storages, self.in_place = memory.storages, memory.in_place
        self.requires_grad = set(memory.requires_grad)  # and values that depend on them
        self.views: dict[str, _AliasedView] = {}  # in the order of creation
        self.aliases: dict[str, str] = {}  # result of a write -> the written value
        self.latest_names: dict[str, str] = {}  # name of a value in the model -> its latest functional name
        self.functional: list[Operator] = []

    def run(self, operators: list[Operator]) -> tuple[list[Operator], dict[str, str]] | None:
        try:
            for op in operators:
                if op.target == "aten.detach_.default":
                    self._rewrite_detach(op)
                elif writes_in_place(op):
                    self._rewrite_write(op)
                elif "out" in dict(op.kwargs):
                    self._rewrite_out_argument(op)
                elif op.target == "aten.copy.default":
                    self._rewrite_copy(op, op.outputs[0])
                else:
                    self._emit(op)
                    self._record_views(op)
        except _UntrackedWrite:
            return None
        return self.functional, {v: self._latest_name(v) for v in (*self.latest_names, *self.aliases)}

    def _resolve_alias(self, value: str) -> str:
        return self.aliases.get(value, value)

    def _latest_name(self, value: str) -> str:
        value = self._resolve_alias(value)
        return self.latest_names.get(value, value)

    def _memory_owner(self, value: str) -> str:
        while value in self.views:
            value = self.views[value].base
        return value

    def _emit(self, op: Operator) -> None:
        rewritten = rename_inputs(op, self._latest_name)
        self.functional.append(rewritten)
        if (
            op.name not in self.aliasing.no_grad_operators
            and not op.target.startswith("aten.detach")
            and self.requires_grad.intersection(rewritten.inputs)
        ):
            self.requires_grad.update(v for v in op.outputs if self.tensors[v].is_differentiable)

    def _new_value(self, value: str, suffix: str, like: str) -> str:
        name = f"{value}_{suffix}"
        while name in self.tensors:
            name += "_"
        self.tensors[name] = without_gaps(self.tensors[like])
        return name

    def _record_views(self, op: Operator) -> None:
        """Record the outputs that share memory with an input."""
        if op.target.startswith("aten.lift_fresh_copy"):
            return  # a copy, which shares its source's storage in a trace
        for i, output in enumerate(op.outputs):
            storage = self.storages.get(output)
            if storage is None:
                continue
            base = next((v for v in op.inputs if self.storages.get(v) == storage), None)
            if base is not None:
                self.views[output] = _AliasedView(op, self._resolve_alias(base), i)

    def _rewrite_detach(self, op: Operator) -> None:
        """Rewrite `x.detach_()`: later uses of x pass no gradient, earlier ones still do."""
        assert isinstance(op.args[0], Ref)
        target = self._resolve_alias(op.args[0].value)
        self.aliases[op.outputs[0]] = target
        if self._latest_name(target) not in self.requires_grad:
            return
        if target in self.in_place or any(view.base == target for view in self.views.values()):
            raise _UntrackedWrite
        new = self._new_value(op.outputs[0], "new", target)
        self._emit(replace(op, target="aten.detach.default", name=new, outputs=(new,)))
        self.latest_names[target] = new

    def _rewrite_write(self, op: Operator) -> None:
        assert isinstance(op.args[0], Ref)
        target = self._resolve_alias(op.args[0].value)
        root = self._memory_owner(target)
        self.aliases[op.outputs[0]] = target
        if root in self.in_place and root == target:
            self._emit(replace(op, args=(Ref(target), *op.args[1:])))  # readers of the write's result read the buffer
            return
        new = self._new_value(op.outputs[0], "new", target)
        packet, overload = op.target.split(".")[1][:-1], op.target.split(".")[2]
        twin = _FUNCTIONAL_TWINS.get(op.target, f"aten.{packet}.{overload}")
        if packet.startswith(_METADATA_WRITES) or not self._keeps_dtype(op, packet, target):
            raise _UntrackedWrite
        if packet not in ("copy", "zero", "fill_diagonal") and not self.exists(twin):
            raise _UntrackedWrite
        original = self._latest_name(root)
        if packet == "copy":
            self._rewrite_copy(op, new)
        elif packet == "fill_diagonal":
            self._rewrite_fill_diagonal(op, target, new)
        elif packet == "zero":
            self._emit(replace(op, target="aten.zeros_like.default", name=new, outputs=(new,), returns_sequence=False))
        else:
            self._emit(replace(op, target=twin, name=new, outputs=(new,), returns_sequence=False))
        self.latest_names[target] = new
        chain = self._propagate_to_bases(op, target)
        if root in self.in_place:
            written = self._new_value(root, "written", root)
            self._emit_call(op, "copy_.default", written, Ref(root), Ref(self.latest_names.pop(root)), site=f"{op.site}/copy_")
            chain = {root}
        elif original in self.requires_grad and (op.name in self.aliasing.no_grad_operators or self._is_detached(target)):
            self._keep_gradient(op, root, original)
            chain = {root}
        self._regenerate_views(root, chain)

    def _rewrite_out_argument(self, op: Operator) -> None:
        """Rewrite `torch.div(a, b, out=buffer)` as the value, and a copy of it into the buffer."""
        into = dict(op.kwargs)["out"]
        packet = op.target.split(".")[1]
        twin = next((t for t in (f"aten.{packet}.Tensor", f"aten.{packet}.default") if self.exists(t)), None)
        if not isinstance(into, Ref) or self._resolve_alias(into.value) not in self.in_place or twin is None or op.returns_sequence:
            raise _UntrackedWrite
        buffer = self._resolve_alias(into.value)
        new = self._new_value(op.outputs[0], "new", buffer)
        kwargs = tuple((k, a) for k, a in op.kwargs if k != "out")
        self._emit(replace(op, target=twin, name=new, kwargs=kwargs, outputs=(new,)))
        written = self._new_value(buffer, "written", buffer)
        self._emit_call(op, "copy_.default", written, Ref(buffer), Ref(new), site=f"{op.site}/copy_")
        self.aliases[op.outputs[0]] = buffer
        self._regenerate_views(buffer, {buffer})

    def _is_detached(self, value: str) -> bool:
        while value in self.views:
            if self.views[value].op.target.startswith("aten.detach"):
                return True
            value = self.views[value].base
        return False

    def _emit_call(self, op: Operator, target: str, output: str, *args: Arg, **changes: Any) -> None:
        """Emit a call of `aten.target` in place of `op`, with one output; `changes`: other fields."""
        call = replace(op, target=f"aten.{target}", name=output, args=args, kwargs=(), outputs=(output,), returns_sequence=False)
        self._emit(replace(call, **changes))

    def _keep_gradient(self, op: Operator, root: str, original: str) -> None:
        """Give `root` the written value and the gradient of `original`: the value detached, plus zeros that carry the gradient."""
        written = self.latest_names.pop(root)
        names = [self._new_value(root, suffix, root) for suffix in ("still", "zero", "zeros", "value", "kept")]
        still, zero, zeros, value, result = names
        self._emit_call(op, "detach.default", still, Ref(original))
        self._emit_call(op, "sub.Tensor", zero, Ref(original), Ref(still))
        self._emit_call(op, "nan_to_num.default", zeros, Ref(zero))
        self._emit_call(op, "detach.default", value, Ref(written))
        self._emit_call(op, "add.Tensor", result, Ref(zeros), Ref(value))
        # These carry the gradient, also in a block without gradients.
        self.requires_grad.update((zero, zeros, result))
        self.latest_names[root] = result

    def _keeps_dtype(self, op: Operator, packet: str, target: str) -> bool:
        """Return whether the functional twin's result has the dtype of the written tensor without a cast."""
        written = self.tensors[target]
        if packet == "copy":
            return True
        if packet in _COMPARISONS:
            return written.dtype == "bool"
        dtypes = {self.tensors[v].dtype for v in op.inputs[1:]} - {written.dtype, "bool"}
        return not dtypes or (written.is_float and not any("float" in d or "complex" in d for d in dtypes))

    def _rewrite_fill_diagonal(self, op: Operator, target: str, new: str) -> None:
        shape = self.tensors[target].shape
        if len(shape) != 2 or (len(op.args) > 2 and op.args[2]):
            raise _UntrackedWrite
        mask = self._new_value(new, "diagonal", target)
        self.tensors[mask] = replace(self.tensors[mask], dtype="bool")
        kwargs = (("dtype", Word("dtype", "bool")), ("device", Word("device", "run")))
        self._emit_call(op, "eye.m", mask, *shape, kwargs=kwargs)
        self._emit_call(op, "masked_fill.Scalar", new, op.args[0], Ref(mask), op.args[1])

    def _rewrite_copy(self, op: Operator, new: str) -> None:
        """Rewrite `copy`, which has no derivative in torch, as zeros plus the source (in their dtype)."""
        into, source = op.args[0], op.args[1]
        if not isinstance(into, Ref) or not isinstance(source, Ref):
            raise _UntrackedWrite
        dtype = self.tensors[into.value].dtype
        if self.tensors[source.value].dtype != dtype:
            cast = self._new_value(new, "cast", source.value)
            self.tensors[cast] = replace(self.tensors[cast], dtype=dtype)
            self._emit_call(op, "to.dtype", cast, source, Word("dtype", dtype))
            source = Ref(cast)
        if dtype == "bool":
            raise _UntrackedWrite
        zeros = self._new_value(new, "zeros", into.value)
        self._emit_call(op, "zeros_like.default", zeros, into)
        self._emit_call(op, "add.Tensor", new, Ref(zeros), source)

    def _propagate_to_bases(self, op: Operator, target: str) -> set[str]:
        """Propagate a write to `target` through its views to the owner of the memory; return the values that are up to date then."""
        done = {target}
        while target in self.views:
            view = self.views[target]
            result = self._new_value(view.base, "new", view.base)
            name, args = self._inverse_call(view, target)
            self._emit_call(op, name, result, *args)
            target = view.base
            self.latest_names[target] = result
            done.add(target)
        return done

    def _inverse_call(self, view: _AliasedView, target: str) -> tuple[str, tuple[Arg, ...]]:
        """Return the call that writes `target` back into its base."""
        name, args, kwargs = view.op.target.split(".")[1], view.op.args, dict(view.op.kwargs)
        base, value = Ref(view.base), Ref(target)
        shape = self.tensors[view.base].shape

        def number(position: int, key: str, default: int) -> int:
            value = args[position] if len(args) > position else kwargs.get(key, default)
            if not isinstance(value, int):
                raise _UntrackedWrite
            return value

        if name in ("slice", "select") and not kwargs:
            return f"{name}_scatter.default", (base, value, *args[1:])
        if name == "narrow":
            start = number(2, "start", 0)
            return "slice_scatter.default", (base, value, number(1, "dim", 0), start, start + number(3, "length", 0))
        if name in ("split", "split_with_sizes", "chunk", "unbind", "tensor_split"):
            dim = number(1, "dim", 0) if name == "unbind" else number(2, "dim", 0)
            if name == "unbind":
                return "select_scatter.default", (base, value, dim, view.output)
            lengths = [self.tensors[v].shape[dim] for v in view.op.outputs]
            start = sum(lengths[: view.output])
            return "slice_scatter.default", (base, value, dim, start, start + lengths[view.output])
        if record_of(view.op).view.kind == ViewKind.RESHAPE:
            return "reshape.default", (value, shape)
        if name in _RETURN_INPUT and self.tensors[target] == self.tensors[view.base]:
            return "alias.default", (value,)
        if name in ("transpose", "swapaxes"):
            return "transpose.int", (value, number(1, "dim0", 0), number(2, "dim1", 1))
        if name in ("t", "numpy_T") and len(shape) <= 2:
            return "t.default", (value,)
        if name == "mT":
            return "transpose.int", (value, -1, -2)
        if name == "permute" and isinstance(args[1], tuple):
            order = [int(d) % len(shape) for d in args[1]]
            return "permute.default", (value, tuple(order.index(i) for i in range(len(order))))
        if name == "detach":
            return "alias.default", (value,)
        raise _UntrackedWrite

    def _regenerate_views(self, root: str, done: set[str]) -> None:
        """Regenerate every view of `root`'s memory in the order of creation, except those in `done`."""
        regenerated: set[str] = set()
        for value, view in list(self.views.items()):
            if self._memory_owner(value) != root or value in done or view.op.name in regenerated:
                continue
            regenerated.add(view.op.name)
            names = tuple(self._new_value(v, "again", v) for v in view.op.outputs)
            self.tensors.update(zip(names, (self.tensors[v] for v in view.op.outputs), strict=True))  # views are strided
            self._emit(replace(view.op, name=self._new_value(view.op.name, "again", value), outputs=names))
            self.latest_names.update({v: n for v, n in zip(view.op.outputs, names, strict=True) if v not in done})
