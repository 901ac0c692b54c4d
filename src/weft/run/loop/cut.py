"""What a plain loop sees of a parameter that is cut between ranks: a tensor that knows that it is a part.

In: this rank's part, and the ranks that hold the others. Out: a tensor of which a function gives what the factor rules of its operators say
(`run/loop/followed`): parts where it works on each part by itself, so that optimizers work on it, and whole sums where parts have
summands; norms and extremes are the whole tensor's too (`run/loop/combined`), so that clipping clips by the global norm. Everything else
is refused by name. Gradients and what optimizers make of such tensors are of the same kind.

Every rank calls what combines parts. What tells how a tensor lies here (`shape`, `numel()`, `tolist()`) is the part's.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

from torch import Tensor, nn

from weft.errors import UsageError
from weft.lower.redistribute import redistribute
from weft.plan.placement import D, R, Shard
from weft.run.loop import combined, followed
from weft.run.loop.followed import Cuts, Given, Made, Ranks, Verdict
from weft.run.state.spans import Spans, block_of, cut_again, full_spans
from weft.world import private
from weft.world.world import Group

_MOST_VERDICTS = 4096  # calls whose verdicts are kept


@dataclass(frozen=True, eq=False)
class FullTensor:
    """What a part is of. `cuts`: the dimensions that are cut, and who holds the parts along each; `shape`: of the whole tensor."""

    name: str
    shape: tuple[int, ...]
    cuts: tuple[tuple[Shard, Group], ...]

    @cached_property
    def places(self) -> Cuts:
        """The same in terms that every rank has."""
        return tuple((form.dim, Ranks.of(form, group)) for form, group in self.cuts)

    @cached_property
    def key(self) -> Hashable:
        """Equal for parts of which functions give the same."""
        return (self.shape, self.places)

    @cached_property
    def spans(self) -> Spans:
        """Where this rank's part lies."""
        spans = full_spans(self.shape)
        for form, group in self.cuts:
            spans = cut_again(spans, form, group.size, group.index)
        return spans

    def of(self, x: Tensor) -> Cut:
        """`x` as this rank's part of it: a gradient."""
        return Cut.of(x, self)

    @cached_property
    def part(self) -> tuple[int, ...]:
        """The shape of this rank's part."""
        return followed.part_of(self.shape, self.places)

    @property
    def groups(self) -> tuple[Group, ...]:
        """Those between which parts are combined, one after the other."""
        return tuple(group for _, group in self.cuts)


class Cut(combined.Part):
    """This rank's part of a tensor."""

    full: FullTensor

    @classmethod
    def of(cls, part: Tensor, full: FullTensor) -> Self:
        """`part`, sharing its memory and its place in autograd's graph."""
        cut = part.as_subclass(cls)
        cut.full = full
        return cut

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _properties:
            with private.as_base_tensor():
                return func(*args)
        name = _name(func)
        combine = combined.FUNCTIONS.get(name)
        if combine is not None:
            result = combine(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return _called(name, func, tuple(args), kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Cut:
        if id(self) not in memo:
            with private.as_base_tensor():
                memo[id(self)] = type(self).of(self.detach().clone().requires_grad_(self.requires_grad), self.full)
        copied: Cut = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise refusal("saving", self, "weft.save(folder, net, optimizer) saves the whole, and weft.load takes it back in any layout")


class CutParameter(Cut, nn.Parameter):
    """This rank's part of a parameter."""

    @classmethod
    def of(cls, part: Tensor, full: FullTensor) -> Self:
        """A parameter of its own that shares the memory of `part`, which gives the gradient's need."""
        parameter = cls(part.detach(), part.requires_grad)
        parameter.full = full
        return parameter


def refusal(name: str, part: Cut, why: str = "") -> UsageError:
    """What is said to an operation that would take the part for the whole."""
    full = part.full
    return UsageError(
        f"{name} of {full.name}, of which this rank holds a part, {list(part.shape)} of {list(full.shape)}, would take that part for the "
        'whole; use weft.full_state_dict(net), or a layout that cuts no weights: auto_parallelize(..., plan="data=N")'
        f"{f' ({why})' if why else ''}"
    )


def _name(func: Any) -> str:
    """An operation's name: `sum` for torch.sum and Tensor.sum, of a property its own."""
    name = str(getattr(func, "__name__", func))
    return str(getattr(func.__self__, "__name__", name)) if name in ("__get__", "__set__", "__delete__") else name


def _check_set(name: str, part: Cut, x: Tensor, value: Any) -> None:
    """Raise where a part becomes a whole's gradient or data, or the other way round."""
    if isinstance(value, Tensor) and not (isinstance(x, Cut) and tuple(value.shape) == tuple(x.shape)):
        raise refusal(f"setting {name}", part, "copy_() takes this rank's part of a whole tensor")


def _called(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the function gives, as its verdict says."""
    with private.as_base_tensor():
        tensors: list[Tensor] = []
        key = (func, _key(args, tensors), _key(kwargs, tensors) if kwargs else None)
        told = _verdict(key, args, kwargs, tensors)
        if told.why:
            raise refusal(name, _first(tensors), told.why)
        if not told.computes:
            return _of_itself(name, func, args, kwargs, _first(tensors))
        groups: dict[Ranks, Group] = {
            ranks: group for x in tensors if isinstance(x, Cut) for (_, ranks), group in zip(x.full.places, x.full.groups, strict=True)
        }
        if told.prepares:
            tensors = [_prepared(x, cuts, sums, groups) for x, cuts, sums in zip(tensors, told.cuts, told.sums, strict=True)]
            fed = iter(tensors)
            args, kwargs = followed.replaced(args, fed), followed.replaced(kwargs, fed)
        result = func(*args, **kwargs)
        outputs = [result] if isinstance(result, Tensor) else list(followed.tensors_in(result))
        if len(outputs) != len(told.results):
            raise AssertionError(f"{name} gives {len(outputs)} tensors, and was to give {len(told.results)}")
        inputs = {id(x) for x in tensors}  # what was changed in place comes back
        full = _first(tensors).full
        results = [x if id(x) in inputs else _made(x, one, full.name, groups) for x, one in zip(outputs, told.results, strict=True)]
        return results[0] if isinstance(result, Tensor) else followed.replaced(result, iter(results))


def _first(tensors: Iterable[Tensor]) -> Cut:
    return next(x for x in tensors if isinstance(x, Cut))


def _prepared(x: Tensor, cuts: Cuts, sums: tuple[Ranks, ...], groups: dict[Ranks, Group]) -> Tensor:
    """A whole tensor as parts need it."""
    for dim, ranks in cuts:
        group, form = groups[ranks], ranks.form(dim)
        if x.requires_grad:
            x = redistribute(x, R, form, group)
        else:
            x = block_of(x, cut_again(full_spans(x.shape), form, group.size, group.index))
    for ranks in sums:
        x = redistribute(x, R, D, groups[ranks])
    return x


def _made(x: Tensor, one: Made, name: str, groups: dict[Ranks, Group]) -> Tensor:
    for ranks, share in one.sums:
        x = combined.summed(x, share, groups[ranks])
    cuts = tuple((ranks.form(dim), groups[ranks]) for dim, ranks in one.cuts)
    return Cut.of(x, FullTensor(name, one.shape, cuts)) if cuts else x


def _of_itself(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], part: Cut) -> Any:
    """What a tensor tells of itself without computing: its gradient and its data are parts as well."""
    kind = getattr(func, "__name__", "")
    if kind == "__set__":
        _check_set(name, part, *args)
    result = func(*args, **kwargs)
    if isinstance(result, Tensor) and not isinstance(result, Cut):
        if tuple(result.shape) != tuple(part.shape):
            raise refusal(name, part)
        return Cut.of(result, part.full)
    if kind == "__get__" and not isinstance(result, Tensor) and name not in combined.FUNCTIONS:
        _properties.add(func)
    return result


def _verdict(key: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> Verdict:
    func: Any = key[0]  # type: ignore[index]
    try:
        cached = _verdicts.get(key)
    except TypeError:  # something that cannot be compared is among the arguments
        return _asked(func, args, kwargs, tensors)
    if cached is None:
        cached = _asked(func, args, kwargs, tensors)
        while len(_verdicts) >= _MOST_VERDICTS:
            del _verdicts[next(iter(_verdicts))]
        _verdicts[key] = cached
    return cached


def _asked(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> Verdict:
    inputs = [_given(x) for x in tensors]
    told = followed.verdict(func, args, kwargs, inputs)
    if not told.can_be:
        # Beside a whole it would not fit: somebody made it as large as the part that he saw.
        parts = {one.part: one for one in inputs if one.knows}
        as_parts = [replace(parts[one.part], knows=False) if not one.knows and one.part in parts else one for one in inputs]
        told = followed.verdict(func, args, kwargs, as_parts) if as_parts != inputs else told
    return told


def _given(x: Tensor) -> Given:
    shape = tuple(x.shape)
    if isinstance(x, Cut):
        return Given(x.full.shape, shape, x.full.places, x.dtype, True, False)
    return Given(shape, shape, (), x.dtype, False, x.requires_grad)


_verdicts: dict[Hashable, Verdict] = {}  # of what depends on nothing but the key
_properties: set[Any] = set()  # that are no tensors: they tell how the part lies


def _key(value: Any, tensors: list[Tensor]) -> Hashable:
    """Arguments as far as they decide which operators run, and their tensors, put into `tensors`.

    Fractions do not: a learning rate may be another one at every step.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return (value.shape, value.dtype, value.full.key if isinstance(value, Cut) else value.requires_grad)
    if isinstance(value, float):
        return value if value.is_integer() else float
    if isinstance(value, list | tuple):
        return (type(value), *[_key(item, tensors) for item in value])
    if isinstance(value, dict):
        return (dict, *[(name, _key(item, tensors)) for name, item in value.items()])
    if isinstance(value, slice):
        return (slice, value.start, value.stop, value.step)
    return (type(value), value)
