"""Nested batches and outputs (pytrees): leaves by path, replacing leaves, and the signature that batches of one capture share.

Nodes are tuples, lists, dicts and library classes of these (named tuples, dataclasses, Hugging Face's ModelOutput and BatchEncoding);
paths read `0`, `1.mask`, `input_ids`. Everything else is a leaf. Keys with the same text (1 and "1" in one dict) are not told apart.
"""

from __future__ import annotations

import copy
import dataclasses
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property
from typing import Any, Self

import torch

from shardwise.errors import Infeasible, ModelError


def named_leaves(batch: Any, path: str = "") -> list[tuple[str, Any]]:
    """Return (path, leaf) of nested tuples, lists, dicts and dataclasses, in order: `0`, `1.mask`, `input_ids`.

    >>> named_leaves({"a": (1, [2]), "b": None})
    [('a.0', 1), ('a.1.0', 2), ('b', None)]
    """
    leaves: list[tuple[str, Any]] = []
    _append_leaves(batch, path, leaves)
    return leaves


def _append_leaves(x: Any, path: str, leaves: list[tuple[str, Any]]) -> None:
    list_children = _children_of(type(x))  # type: ignore[arg-type]
    if list_children is None:
        leaves.append((path, x))
        return
    for key, value in list_children(x):
        _append_leaves(value, f"{path}.{key}" if path else key, leaves)


def replace_leaves(batch: Any, leaves_by_path: Mapping[str, Any], path: str = "") -> Any:
    """Return the same nesting, of the same classes, with the leaves of `leaves_by_path` by path.

    >>> replace_leaves({"a": (1, [2])}, {"a.0": 3, "a.1.0": 4})
    {'a': (3, [4])}
    """
    list_children = _children_of(type(batch))  # type: ignore[arg-type]
    if list_children is None:
        return leaves_by_path[path]
    items = {key: replace_leaves(value, leaves_by_path, f"{path}.{key}" if path else key) for key, value in list_children(batch)}
    if isinstance(batch, Mapping):
        named = dict(zip(batch, items.values(), strict=True))
        if type(batch) is dict:
            return named
        # Other classes are copied: their constructor arguments are unknown.
        copied = copy.copy(batch)
        for key, value in named.items():
            copied[key] = value  # type: ignore[index]
        return copied
    if isinstance(batch, tuple | list):
        values = list(items.values())
        if isinstance(batch, tuple) and hasattr(batch, "_make"):
            return batch._make(values)
        return values if type(batch) is list else type(batch)(values)
    copied = copy.copy(batch)
    for key, value in items.items():
        object.__setattr__(copied, key, value)  # frozen ones too
    return copied


@cache
def _children_of(kind: type) -> Callable[[Any], Iterable[tuple[str, Any]]] | None:
    """Return the function that lists (key, child) of nodes of a class; None for a class of leaves."""
    if issubclass(kind, Mapping):  # before dataclasses: a ModelOutput is both, and its items exclude None
        return lambda x: ((str(key), value) for key, value in x.items())
    if issubclass(kind, tuple | list):
        return lambda x: ((str(i), value) for i, value in enumerate(x))
    if dataclasses.is_dataclass(kind):
        names = [field.name for field in dataclasses.fields(kind)]
        return lambda x: ((name, getattr(x, name)) for name in names if hasattr(x, name))
    return None


class BatchLeaves:
    """The leaves of one batch, walked once: `by_path`, and `tensors` among them."""

    by_path: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    def __init__(self, batch: Any) -> None:
        if type(batch) is dict and set(map(type, batch)) == {str} and set(map(type, batch.values())) == {torch.Tensor}:
            self.by_path = self.tensors = batch  # the usual batch has no nodes
            return
        self.by_path = dict(named_leaves(batch))
        self.tensors = {path: leaf for path, leaf in self.by_path.items() if isinstance(leaf, torch.Tensor)}

    @property
    def num_rows(self) -> int:
        """The size of dimension 0 of the first tensor that is no scalar. Raises ModelError without such a tensor."""
        for x in self.tensors.values():
            if x.dim():
                return x.shape[0]
        raise ModelError("the batch has no tensor with a dimension; its tensors need the samples in dimension 0")

    @property
    def num_samples(self) -> int:
        """The number of samples that `with_sample_count` marked the batch with; 0 if one of its tensors is unmarked."""
        return min([getattr(x, "shardwise_samples", 0) for x in self.tensors.values()], default=0)

    @property
    def key(self) -> Hashable | None:
        """A hashable key of all that a step's plan depends on: paths, whole shapes, dtypes, devices, plain values; None with other objects.

        >>> x = torch.ones(2)
        >>> BatchLeaves((x, 1)).key == BatchLeaves((x + 1, 1)).key, BatchLeaves((x, 1)).key == BatchLeaves((x, True)).key
        (True, False)
        """
        tensors = tuple([(path, x.shape, x.dtype, x.device) for path, x in self.tensors.items()])
        if len(self.tensors) == len(self.by_path):
            return tensors
        others = [(path, type(leaf), leaf) for path, leaf in self.by_path.items() if path not in self.tensors]
        return (tensors, *others) if all(is_literal_value(leaf) for _, _, leaf in others) else None


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in tuples, lists and dicts, in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, tuple | list | dict):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_in(item)


def map_tensors(tree: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Apply `change` to every tensor in tuples, lists and dicts, in order; everything else stays."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {key: map_tensors(value, change) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        items = [map_tensors(value, change) for value in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return tree


def batch_size_of(batch: Any) -> int:
    """Return the size of dimension 0 of the first tensor that is no scalar. Raises ModelError without such a tensor."""
    return BatchLeaves(batch).num_rows


def with_sample_count(batch: Any, num_samples: int) -> Any:
    """Mark a batch's tensors with the number of samples of the global batch, so that ranks need not communicate it."""
    for x in tensors_of(batch).values():
        x.shardwise_samples = num_samples  # type: ignore[attr-defined]
    return batch


def count_samples(batch: Any) -> int:
    """Return the number of samples that `with_sample_count` marked a batch with; 0 if one of its tensors is unmarked.

    >>> x = torch.ones(2)
    >>> count_samples((x,)), count_samples((with_sample_count(x, 5),)), count_samples((x[:1],))
    (0, 5, 0)
    """
    return BatchLeaves(batch).num_samples


_LITERALS = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device)


def is_literal_value(leaf: Any) -> bool:
    """Return whether a leaf that is no tensor is a plain value, comparable between batches, and not a mutable object."""
    return leaf is None or isinstance(leaf, _LITERALS)


@dataclass(frozen=True)
class BatchSignature:
    """The signature of a batch that a capture depends on: its tensors, their shapes except the number of samples, and all other values.

    `tensors`: by path, whether dimension 0 is samples, the other sizes, the dtype.
    `fixed`: leaves that are no tensors, except None, which equals a missing leaf.

    >>> a, b = ((torch.zeros(4, 3), None), (torch.zeros(2, 3),))
    >>> BatchSignature.of(a).key == BatchSignature.of(b).key, BatchSignature.of((torch.zeros(4, 5),)).key == BatchSignature.of(b).key
    (True, False)
    """

    tensors: Mapping[str, tuple[bool, tuple[int, ...], str]]
    fixed: Mapping[str, Any]

    @classmethod
    def of(cls, batch: Any) -> Self:
        """Return the signature of a batch."""
        return cls.of_leaves(BatchLeaves(batch))

    @classmethod
    def of_leaves(cls, leaves: BatchLeaves) -> Self:
        """Return the signature of a batch with these leaves."""
        samples, tensors, fixed = leaves.num_rows, {}, {}
        for path, leaf in leaves.by_path.items():
            if path in leaves.tensors:
                batched = leaf.dim() > 0 and leaf.shape[0] == samples
                tensors[path] = batched, tuple(leaf.shape[batched:]), str(leaf.dtype)
            elif leaf is not None:
                fixed[path] = leaf
        return cls(tensors, fixed)

    @cached_property
    def key(self) -> Hashable:
        """A hashable key, equal for batches of the same tensors and plain values; other objects are left out."""
        values = ((path, type(leaf), leaf) for path, leaf in self.fixed.items() if is_literal_value(leaf))
        return frozenset(self.tensors.items()), frozenset(values)

    @cached_property
    def checksum(self) -> int:
        """A checksum of the key, the same in every process."""
        values = {path: (type(leaf).__name__, repr(leaf)) for path, leaf in self.fixed.items() if is_literal_value(leaf)}
        return zlib.crc32(repr((sorted(self.tensors.items()), sorted(values.items()))).encode())

    def differing_objects(self, other: BatchSignature) -> dict[str, Any]:
        """Return the objects of another signature that this one lacks, by path: their contents may change from batch to batch."""
        if not other.fixed:
            return {}
        return {
            path: leaf for path, leaf in other.fixed.items() if not is_literal_value(leaf) and not _is_equal(leaf, self.fixed.get(path))
        }

    def check_objects(self, other: BatchSignature) -> None:
        """Raise Infeasible if another signature has objects that this one lacks."""
        for path, leaf in self.differing_objects(other).items():
            captured = f"was captured with {path}={self.fixed[path]!r}" if path in self.fixed else f"was captured without {path}"
            raise Infeasible(
                f"the batch has {path}={leaf!r}, and the model {captured}; a captured model takes tensors and plain values, so leave it "
                "out of the batch"
            )

    def check_tensors(self, other: BatchSignature) -> None:
        """Raise Infeasible if another signature has other tensors or values; shapes may differ."""
        missing, more = sorted(self.tensors.keys() - other.tensors.keys()), sorted(other.tensors.keys() - self.tensors.keys())
        changed = [p for p in {**self.fixed, **other.fixed} if not _is_equal(self.fixed.get(p), other.fixed.get(p))]
        if missing or more or changed:
            difference = f"lacks {', '.join(missing)}" if missing else f"has {', '.join([*more, *changed])}"
            raise Infeasible(
                f"the batch {difference}, and the model, which could not be captured, was divided with another one; give the same tensors "
                "and values in every batch"
            )


def tensors_of(batch: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a batch by path."""
    return BatchLeaves(batch).tensors


def _is_equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    try:
        return type(a) is type(b) and bool(a == b)
    except (TypeError, ValueError, RuntimeError):
        return False
