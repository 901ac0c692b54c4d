"""Nested batches and outputs: their leaves by path, the same nesting with other leaves, and what stays fixed from batch to batch.

In: tuples, lists, dicts, and what libraries make of them (named tuples, dataclasses, Hugging Face's ModelOutput and BatchEncoding). Out:
leaves by path (`0`, `1.mask`, `input_ids`), and objects of the same classes. Whatever else there is, is a leaf.

Not modelled: keys that differ but read alike, as the number 1 and the text "1" in one dict.
"""

from __future__ import annotations

import copy
import dataclasses
import zlib
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
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


def with_samples(batch: Any, samples: int) -> Any:
    """A batch whose tensors know of how many samples they are rows, so that ranks need not tell each other."""
    for x in tensors_of(batch).values():
        x.weft_samples = samples  # type: ignore[attr-defined]
    return batch


def count_samples(batch: Any) -> int:
    """Of how many samples a batch has rows, where its tensors know; 0 where one does not.

    >>> x = torch.ones(2)
    >>> count_samples((x,)), count_samples((with_samples(x, 5),)), count_samples((x[:1],))
    (0, 5, 0)
    """
    return min((getattr(x, "weft_samples", 0) for x in tensors_of(batch).values()), default=0)


_LITERALS = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device)


def is_value(leaf: Any) -> bool:
    """Whether a leaf that is no tensor is a value, which two batches may have alike, and not an object that may change."""
    return leaf is None or isinstance(leaf, _LITERALS)


@dataclass(frozen=True)
class BatchForm:
    """What a capture takes for granted of a batch: which tensors there are, of which shape but for samples, and everything else's value.

    `tensors`: by path, whether it has samples in dimension 0, its other sizes, its kind (any floating point is one). `fixed`: what is no
    tensor, but for None, which is as good as left out.

    >>> one, other = ((torch.zeros(4, 3), None), (torch.zeros(2, 3),))
    >>> BatchForm.of(one).key == BatchForm.of(other).key, BatchForm.of((torch.zeros(4, 5),)).key == BatchForm.of(other).key
    (True, False)
    """

    tensors: Mapping[str, tuple[bool, tuple[int, ...], str]]
    fixed: Mapping[str, Any]

    @classmethod
    def of(cls, batch: Any) -> Self:
        """The form of a batch."""
        samples, tensors, fixed = batch_size_of(batch), {}, {}
        for path, leaf in leaves(batch):
            if isinstance(leaf, torch.Tensor):
                batched = leaf.dim() > 0 and leaf.shape[0] == samples
                kind = "float" if leaf.is_floating_point() else str(leaf.dtype)
                tensors[path] = batched, tuple(leaf.shape[batched:]), kind
            elif leaf is not None:
                fixed[path] = leaf
        return cls(tensors, fixed)

    @cached_property
    def key(self) -> Hashable:
        """Equal for batches that are captured alike, as far as what they hold are tensors and values."""
        values = ((path, type(leaf), leaf) for path, leaf in self.fixed.items() if is_value(leaf))
        return frozenset(self.tensors.items()), frozenset(values)

    @cached_property
    def number(self) -> int:
        """Of the key, the same in every process."""
        values = {path: (type(leaf).__name__, repr(leaf)) for path, leaf in self.fixed.items() if is_value(leaf)}
        return zlib.crc32(repr((sorted(self.tensors.items()), sorted(values.items()))).encode())

    def other_objects(self, form: BatchForm) -> dict[str, Any]:
        """Objects that another form holds and this one does not, by path: what they hold could change from batch to batch."""
        return {path: leaf for path, leaf in form.fixed.items() if not is_value(leaf) and not _equal(leaf, self.fixed.get(path))}

    def check_objects(self, form: BatchForm) -> None:
        """Raise Infeasible where another form holds objects that this one does not."""
        for path, leaf in self.other_objects(form).items():
            was = f"was captured with {path}={self.fixed[path]!r}" if path in self.fixed else f"was captured without {path}"
            raise Infeasible(
                f"the batch has {path}={leaf!r}, and the model {was}; a captured model takes tensors and plain values, so leave it "
                "out of the batch"
            )

    def check_tensors(self, form: BatchForm) -> None:
        """Raise Infeasible where another form has other tensors or values, whatever their shapes."""
        missing, more = sorted(self.tensors.keys() - form.tensors.keys()), sorted(form.tensors.keys() - self.tensors.keys())
        other = [p for p in {**self.fixed, **form.fixed} if not _equal(self.fixed.get(p), form.fixed.get(p))]
        if missing or more or other:
            what = f"lacks {', '.join(missing)}" if missing else f"has {', '.join([*more, *other])}"
            raise Infeasible(
                f"the batch {what}, and the model, which could not be captured, was divided with another one; give the same tensors and "
                "values in every batch"
            )


def tensors_of(batch: Any) -> dict[str, torch.Tensor]:
    """The tensors of a batch by path."""
    return {path: leaf for path, leaf in leaves(batch) if isinstance(leaf, torch.Tensor)}


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    try:
        return type(a) is type(b) and bool(a == b)
    except (TypeError, ValueError, RuntimeError):
        return False
