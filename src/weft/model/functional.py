"""In-place operators made functional, on the operator list. In: operators as the model calls them. Out: operators without
writes (buffers excepted) and the final name of each value.

A write into a slice becomes `slice_scatter`; views taken earlier of what is written are taken again. What cannot be
followed (a write through a reshape that may or may not alias) is left to torch's own functionalisation: None is returned.
"""

from __future__ import annotations

from dataclasses import replace

from weft.model.graph import Arg, Operator, Ref, Tensor

_VIEWS = {
    "view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "slice", "select", "expand", "t", "flatten", "unflatten",
    "split", "split_with_sizes", "chunk", "unbind", "detach", "alias", "narrow", "diagonal", "to", "contiguous", "view_as", "expand_as",
    "movedim", "numpy_T", "mT", "unfold", "real", "imag", "type_as",
}  # fmt: skip
_SCATTER = {"slice": "aten.slice_scatter.default", "select": "aten.select_scatter.default"}


def make_functional(
    operators: list[Operator], tensors: dict[str, Tensor], buffers: set[str]
) -> tuple[list[Operator], dict[str, str]] | None:
    """`operators` without in-place writes, and the last name of every value that was written; None where aliasing is unclear."""
    made_by: dict[str, Operator] = {}
    buffered: dict[str, str] = {}  # what a write into a buffer returned -> the buffer
    now: dict[str, str] = {}  # a value as the model names it -> its latest functional name
    out: list[Operator] = []

    def current(value: str) -> str:
        return now.get(value, value)

    def roots(value: str) -> str:
        op = made_by.get(value)
        while op is not None and op.target.split(".")[1] in _VIEWS and isinstance(op.args[0], Ref):
            value = op.args[0].value
            op = made_by.get(value)
        return value

    def emit(op: Operator) -> None:
        out.append(replace(op, args=tuple(_map(a, now) for a in op.args), kwargs=tuple((k, _map(a, now)) for k, a in op.kwargs)))

    def fresh(value: str, suffix: str) -> str:
        name = f"{value}_{suffix}"
        while name in tensors:
            name += "_"
        return name

    for op in operators:
        name = op.target.split(".")[1]
        in_place = name.endswith("_") and not name.startswith("_") and not name.endswith("__")
        if not in_place or not op.args or not isinstance(op.args[0], Ref):
            emit(op)
            for value in op.outputs:
                made_by[value] = op
            continue
        target = buffered.get(op.args[0].value, op.args[0].value)
        if roots(target) in buffers:
            if roots(target) != target:
                return None
            emit(replace(op, args=(Ref(target), *op.args[1:])))
            # Whoever reads what the write returned reads the buffer.
            buffered[op.outputs[0]] = now[op.outputs[0]] = target
            continue
        functional = _functional(op)
        if functional is None:
            return None
        new = fresh(op.outputs[0], "new")
        tensors[new] = tensors[target]
        if op.target.split(".")[1] == "copy_":
            source = op.args[1]
            if not isinstance(source, Ref) or tensors[source.value].dtype != tensors[target].dtype:
                return None
            zeros = fresh(op.outputs[0], "zeros")
            tensors[zeros] = tensors[target]
            emit(replace(op, name=zeros, target="aten.zeros_like.default", args=(op.args[0],), kwargs=(), outputs=(zeros,), multiple=False))
            functional = replace(op, target="aten.add.Tensor", args=(Ref(zeros), source), kwargs=())
        emit(replace(functional, name=new, outputs=(new,), multiple=False))
        views = [v for v, maker in made_by.items() if roots(v) == roots(target) and v not in (target, roots(target))]
        written = target
        value = new
        # Carry the write up the chain of views to the tensor that owns the storage.
        while True:
            now[written] = value
            maker = made_by.get(written)
            if maker is None or maker.target.split(".")[1] not in _VIEWS or not isinstance(maker.args[0], Ref):
                break
            scatter = _SCATTER.get(maker.target.split(".")[1])
            if scatter is None:
                return None
            base = maker.args[0].value
            result = fresh(base, "new")
            tensors[result] = tensors[base]
            out.append(
                Operator(
                    result,
                    scatter,
                    (Ref(current(base)), Ref(value), *maker.args[1:]),
                    maker.kwargs,
                    (result,),
                    op.site,
                    False,
                    op.full_precision,
                )
            )
            written, value = base, result
        now[op.outputs[0]] = new
        # Whatever else looks at the same storage is looked at again, in the order it was taken.
        for view in views:
            maker = made_by[view]
            if now.get(view) == current(view) and view == target:
                continue
            if maker.multiple:
                return None
            again = fresh(view, "again")
            tensors[again] = tensors[view]
            emit(replace(maker, name=again, outputs=(again,)))
            now[view] = again
    return out, {v: current(v) for v in now}


def _map(arg: Arg, now: dict[str, str]) -> Arg:
    if isinstance(arg, Ref):
        return Ref(now.get(arg.value, arg.value))
    if isinstance(arg, tuple):
        return tuple(_map(a, now) for a in arg)
    return arg


def _functional(op: Operator) -> Operator | None:
    """The out-of-place twin: `relu_` -> `relu`; `zero_` by its meaning. (`copy` has no derivative: it is `zeros_like` and `add`.)"""
    packet, overload = op.target.split(".")[1], op.target.split(".")[2]
    plain = packet[:-1]
    if plain == "zero":
        return replace(op, target="aten.zeros_like.default")
    if plain in ("normal", "uniform", "bernoulli", "random", "exponential", "set", "resize", "requires_grad"):
        return None
    return replace(op, target=f"aten.{plain}.{overload}")
