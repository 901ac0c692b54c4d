"""Sharded tensors of a plain loop: the local shard of a parameter, with the groups that hold the other shards (cf. PyTorch's DTensor).

Functions of such tensors act as the factor rules of their operators allow (`run/loop/shard_semantics`): elementwise on each shard, so that
optimizers work, or with partial sums all-reduced; norms and extremes are those of the full tensor (`run/loop/global_reductions`), so that
clipping uses the global norm. Everything else is refused by name. Gradients and optimizer state of such tensors are sharded tensors too.

Every rank calls what reduces over shards. Properties (`global_shape`, `numel()`, `tolist()`) are those of the local shard.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

from torch import Tensor, nn

from shardwise.capture.nesting import map_tensors, tensors_in
from shardwise.errors import UsageError
from shardwise.lower.redistribute import redistribute
from shardwise.plan.ir.placement import D, R, Shard
from shardwise.run.loop import global_reductions, shard_semantics
from shardwise.run.loop.shard_semantics import ArgumentSpec, DimShards, ResultSpec, ShardRanks, ShardSemantics
from shardwise.run.state.block_ranges import BlockRanges, block_of, full_ranges, shard_block
from shardwise.world import private
from shardwise.world.world import Group

_MAX_CACHED = 4096  # calls whose semantics are cached


@dataclass(frozen=True, eq=False)
class GlobalTensorSpec:
    """Spec of a sharded tensor. `placements`: its sharded dimensions, each with the group that holds the shards."""

    name: str
    global_shape: tuple[int, ...]
    placements: tuple[tuple[Shard, Group], ...]

    @cached_property
    def shards(self) -> DimShards:
        """The sharded dimensions with their ranks, in a hashable form without process groups."""
        return tuple((form.dim, ShardRanks.from_placement(form, group)) for form, group in self.placements)

    @cached_property
    def cache_key(self) -> Hashable:
        """A key that is equal for shards on which functions act alike."""
        return (self.global_shape, self.shards)

    @cached_property
    def block_ranges(self) -> BlockRanges:
        """The index ranges of this rank's shard."""
        spans = full_ranges(self.global_shape)
        for form, group in self.placements:
            spans = shard_block(spans, form, group.size, group.index)
        return spans

    def as_shard(self, x: Tensor) -> ShardedTensor:
        """Return `x` (a gradient) as this rank's shard of such a tensor."""
        return ShardedTensor.from_local(x, self)

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's shard."""
        return shard_semantics.local_shape_of(self.global_shape, self.shards)

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups over which shards are reduced, in order."""
        return tuple(group for _, group in self.placements)


class ShardedTensor(global_reductions.ShardedTensorBase):
    """This rank's shard of a tensor."""

    spec: GlobalTensorSpec

    @classmethod
    def from_local(cls, local: Tensor, spec: GlobalTensorSpec) -> Self:
        """Return `local` as a shard that shares its memory and its autograd graph."""
        cut = local.as_subclass(cls)
        cut.spec = spec
        return cut

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _local_properties:
            with private.as_base_tensor():
                return func(*args)
        name = _operation_name(func)
        combine = global_reductions.FUNCTIONS.get(name)
        if combine is not None:
            result = combine(func, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return _call_on_shards(name, func, tuple(args), kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        if id(self) not in memo:
            with private.as_base_tensor():
                memo[id(self)] = type(self).from_local(self.detach().clone().requires_grad_(self.requires_grad), self.spec)
        copied: ShardedTensor = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise unsupported_error(
            "saving", self, "shardwise.save(folder, net, optimizer) saves the whole, and shardwise.load takes it back in any layout"
        )


class ShardedParameter(ShardedTensor, nn.Parameter):
    """This rank's shard of a parameter."""

    @classmethod
    def from_local(cls, local: Tensor, spec: GlobalTensorSpec) -> Self:
        """Return a leaf parameter that shares the memory and `requires_grad` of `local`."""
        parameter = cls(local.detach(), local.requires_grad)
        parameter.spec = spec
        return parameter


def unsupported_error(name: str, shard: ShardedTensor, why: str = "") -> UsageError:
    """Return the error of an operation that would treat the shard as the full tensor."""
    full = shard.spec
    return UsageError(
        f"{name} of {full.name}, of which this rank holds a part, {list(shard.shape)} of {list(full.global_shape)}, would take that part "
        f"for the "
        'whole; use shardwise.full_state_dict(net), or a layout that cuts no weights: auto_parallelize(..., plan="data=N")'
        f"{f' ({why})' if why else ''}"
    )


def _operation_name(func: Any) -> str:
    """Return an operation's name: `sum` for torch.sum and Tensor.sum, the property's name for a property."""
    name = str(getattr(func, "__name__", func))
    return str(getattr(func.__self__, "__name__", name)) if name in ("__get__", "__set__", "__delete__") else name


def _check_assignment(name: str, shard: ShardedTensor, x: Tensor, value: Any) -> None:
    """Raise UsageError if a shard is assigned a full tensor as gradient or data, or the other way round."""
    if isinstance(value, Tensor) and not (isinstance(x, ShardedTensor) and tuple(value.shape) == tuple(x.shape)):
        raise unsupported_error(f"setting {name}", shard, "copy_() takes this rank's part of a whole tensor")


def _call_on_shards(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function on shards: redistribute its inputs and wrap its results as its shard semantics say."""
    with private.as_base_tensor():
        tensors: list[Tensor] = []
        key = (func, _argument_key(args, tensors), _argument_key(kwargs, tensors) if kwargs else None)
        semantics = _cached_semantics(key, args, kwargs, tensors)
        if semantics.unsupported_reason:
            raise unsupported_error(name, _first_sharded(tensors), semantics.unsupported_reason)
        if not semantics.runs_operators:
            return _call_property(name, func, args, kwargs, _first_sharded(tensors))
        groups: dict[ShardRanks, Group] = {
            ranks: group
            for x in tensors
            if isinstance(x, ShardedTensor)
            for (_, ranks), group in zip(x.spec.shards, x.spec.groups, strict=True)
        }
        if semantics.redistributes_inputs:
            tensors = [
                _redistribute_input(x, cuts, sums, groups)
                for x, cuts, sums in zip(tensors, semantics.input_shards, semantics.input_reductions, strict=True)
            ]
            fed = iter(tensors)
            args, kwargs = map_tensors((args, kwargs), lambda _: next(fed))
        result = func(*args, **kwargs)
        outputs = [result] if isinstance(result, Tensor) else list(tensors_in(result))
        if len(outputs) != len(semantics.results):
            raise AssertionError(f"{name} gives {len(outputs)} tensors, and was to give {len(semantics.results)}")
        inputs = {id(x) for x in tensors}  # an input changed in place is returned itself
        full = _first_sharded(tensors).spec
        results = [
            x if id(x) in inputs else _wrap_result(x, spec, full.name, groups) for x, spec in zip(outputs, semantics.results, strict=True)
        ]
        left = iter(results)
        return map_tensors(result, lambda _: next(left))


def _first_sharded(tensors: Iterable[Tensor]) -> ShardedTensor:
    return next(x for x in tensors if isinstance(x, ShardedTensor))


def _redistribute_input(x: Tensor, shards: DimShards, reduced_over: tuple[ShardRanks, ...], groups: dict[ShardRanks, Group]) -> Tensor:
    """Return a full input sharded, or with its gradient reduced, as the other inputs' shards need it."""
    for dim, ranks in shards:
        group, placement = groups[ranks], ranks.placement(dim)
        if x.requires_grad:
            x = redistribute(x, R, placement, group)
        else:
            x = block_of(x, shard_block(full_ranges(x.shape), placement, group.size, group.index))
    for ranks in reduced_over:
        x = redistribute(x, R, D, groups[ranks])
    return x


def _wrap_result(x: Tensor, result_spec: ResultSpec, name: str, groups: dict[ShardRanks, Group]) -> Tensor:
    for ranks, share in result_spec.partial_sums:
        x = global_reductions.all_reduce_share(x, share, groups[ranks])
    cuts = tuple((ranks.placement(dim), groups[ranks]) for dim, ranks in result_spec.shards)
    return ShardedTensor.from_local(x, GlobalTensorSpec(name, result_spec.global_shape, cuts)) if cuts else x


def _call_property(name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shard: ShardedTensor) -> Any:
    """Call a function that runs no operator, such as a property; a resulting tensor (gradient, data) is a shard as well."""
    kind = getattr(func, "__name__", "")
    if kind == "__set__":
        x, value = args
        _check_assignment(name, shard, x, value)
    result = func(*args, **kwargs)
    if isinstance(result, Tensor) and not isinstance(result, ShardedTensor):
        if tuple(result.shape) != tuple(shard.shape):
            raise unsupported_error(name, shard)
        return ShardedTensor.from_local(result, shard.spec)
    if kind == "__get__" and not isinstance(result, Tensor) and name not in global_reductions.FUNCTIONS:
        _local_properties.add(func)
    return result


def _cached_semantics(key: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> ShardSemantics:
    func: Any = key[0]  # type: ignore[index]
    try:
        cached = _semantics_cache.get(key)
    except TypeError:  # an argument is not hashable
        return _infer_semantics(func, args, kwargs, tensors)
    if cached is None:
        cached = _infer_semantics(func, args, kwargs, tensors)
        while len(_semantics_cache) >= _MAX_CACHED:
            del _semantics_cache[next(iter(_semantics_cache))]
        _semantics_cache[key] = cached
    return cached


def _infer_semantics(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> ShardSemantics:
    inputs = [_argument_spec(x) for x in tensors]
    semantics = shard_semantics.infer_shard_semantics(func, args, kwargs, inputs)
    if not semantics.is_valid_on_full:
        # A plain tensor of a shard's local shape was made from what the user saw of the shard: treat it as a shard.
        shards = {spec.local_shape: spec for spec in inputs if spec.is_sharded}
        sharded = [
            replace(shards[spec.local_shape], is_sharded=False) if not spec.is_sharded and spec.local_shape in shards else spec
            for spec in inputs
        ]
        semantics = shard_semantics.infer_shard_semantics(func, args, kwargs, sharded) if sharded != inputs else semantics
    return semantics


def _argument_spec(x: Tensor) -> ArgumentSpec:
    shape = tuple(x.shape)
    if isinstance(x, ShardedTensor):
        return ArgumentSpec(x.spec.global_shape, shape, x.spec.shards, x.dtype, True, False)
    return ArgumentSpec(shape, shape, (), x.dtype, False, x.requires_grad)


_semantics_cache: dict[Hashable, ShardSemantics] = {}  # results that depend on the key only
_local_properties: set[Any] = set()  # property getters that return no tensor: they describe the local shard


def _argument_key(value: Any, tensors: list[Tensor]) -> Hashable:
    """Return a hashable key of arguments that decide which operators run, and append their tensors to `tensors`.

    Non-integer floats are not part of the key: a learning rate may change at every step.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return (value.shape, value.dtype, value.spec.cache_key if isinstance(value, ShardedTensor) else value.requires_grad)
    if isinstance(value, float):
        return value if value.is_integer() else float
    if isinstance(value, list | tuple):
        return (type(value), *[_argument_key(item, tensors) for item in value])
    if isinstance(value, dict):
        return (dict, *[(name, _argument_key(item, tensors)) for name, item in value.items()])
    if isinstance(value, slice):
        return (slice, value.start, value.stop, value.step)
    return (type(value), value)
