"""Nested batches and outputs: their leaves by path, the same nesting with other leaves, and what stays fixed from batch to batch.

In: tuples, lists, dicts, and what libraries make of them (named tuples, dataclasses, Hugging Face's ModelOutput and BatchEncoding). Out:
leaves by path (`0`, `1.mask`, `input_ids`), and objects of the same classes. Whatever else there is, is a leaf.

Not modelled: keys that differ but read alike, as the number 1 and the text "1" in one dict.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch

from weft.errors import Infeasible, ModelError


def leaves(batch: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, leaf) of every leaf of nested tuples, lists, dicts and dataclasses, in order: `0`, `1.mask`, `input_ids`."""
    for key, value in _children(batch):
        yield from leaves(value, f"{path}.{key}" if path else key)
    if not _is_nested(batch):
        yield path, batch


def rebuild(batch: Any, new: Mapping[str, Any], path: str = "") -> Any:
    """The same nesting, of the same classes, with the leaves of `new` by path.

    >>> rebuild({"a": (1, [2])}, {"a.0": 3, "a.1.0": 4})
    {'a': (3, [4])}
    """
    if not _is_nested(batch):
        return new[path]
    items = {key: rebuild(value, new, f"{path}.{key}" if path else key) for key, value in _children(batch)}
    if isinstance(batch, Mapping):
        named = dict(zip(batch, items.values(), strict=True))
        if type(batch) is dict:
            return named
        # A class of its own is copied, since nobody knows what its constructor takes.
        made = copy.copy(batch)
        for key, value in named.items():
            made[key] = value  # type: ignore[index]
        return made
    if isinstance(batch, tuple | list):
        values = list(items.values())
        if isinstance(batch, tuple) and hasattr(batch, "_make"):
            return batch._make(values)
        return values if type(batch) is list else type(batch)(values)
    made = copy.copy(batch)
    for key, value in items.items():
        object.__setattr__(made, key, value)  # frozen ones too
    return made


def _is_nested(x: Any) -> bool:
    return isinstance(x, Mapping | tuple | list) or (dataclasses.is_dataclass(x) and not isinstance(x, type))


def _children(x: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(x, Mapping):  # before dataclasses: a ModelOutput is both, and its items are what it has
        for key, value in x.items():
            yield str(key), value
    elif isinstance(x, tuple | list):
        for i, value in enumerate(x):
            yield str(i), value
    elif _is_nested(x):
        for field in dataclasses.fields(x):
            if hasattr(x, field.name):
                yield field.name, getattr(x, field.name)


def batch_size_of(batch: Any) -> int:
    """Samples in dimension 0 of the first tensor that has one. Raises ModelError where there is none."""
    for _, leaf in leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            return leaf.shape[0]
    raise ModelError("the batch has no tensor with a dimension; its tensors need the samples in dimension 0")


@dataclass(frozen=True)
class BatchForm:
    """What a captured model takes for granted of a batch: which tensors there are, and the value of everything else."""

    tensors: frozenset[str]
    fixed: Mapping[str, Any]

    @classmethod
    def of(cls, batch: Any) -> Self:
        """The form of the batch that a model is captured with."""
        found = dict(leaves(batch))
        tensors = frozenset(path for path, leaf in found.items() if isinstance(leaf, torch.Tensor))
        return cls(tensors, {path: leaf for path, leaf in found.items() if path not in tensors})

    def with_tensors_of(self, batch: Any) -> Self:
        """The form of a batch with other tensors: what is no tensor stays as it was."""
        tensors = frozenset(path for path, leaf in leaves(batch) if isinstance(leaf, torch.Tensor))
        fixed = {path: leaf for path, leaf in self.fixed.items() if path not in tensors or leaf is not None}
        return self if tensors == self.tensors else type(self)(tensors, fixed)

    def tensors_of(self, batch: Any) -> dict[str, torch.Tensor]:
        """The tensors of a batch by path.

        Raises:
            Infeasible: it lacks a tensor or has another one, or what is no tensor has another value than the model was captured with.
        """
        given = dict(leaves(batch))
        tensors = {path: leaf for path, leaf in given.items() if isinstance(leaf, torch.Tensor)}
        missing = sorted(self.tensors - tensors.keys())
        if missing:
            raise Infeasible(
                f"the batch lacks {', '.join(missing)}, with which the model was captured; give the same tensors in every batch, "
                "or plan with those alone that the model is called with (batch=...)"
            )
        for path, leaf in given.items():
            if path in self.tensors or (leaf is None and path not in self.fixed):
                continue
            if path not in self.fixed or not _same(leaf, self.fixed[path]):
                was = f"was captured with {path}={self.fixed[path]!r}" if path in self.fixed else f"was captured without {path}"
                now = f"a tensor of shape {list(leaf.shape)}" if isinstance(leaf, torch.Tensor) else repr(leaf)
                raise Infeasible(
                    f"the batch has {path}={now}, and the model {was}; what is no tensor is part of the captured model, so plan "
                    "again for another, or leave it out of the batch"
                )
        for path in self.fixed.keys() - given.keys():
            if self.fixed[path] is not None:
                raise Infeasible(f"the batch lacks {path}={self.fixed[path]!r}, which the model was captured with; give it in every batch")
        return tensors


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    try:
        return type(a) is type(b) and bool(a == b)
    except (TypeError, ValueError, RuntimeError):
        return False
