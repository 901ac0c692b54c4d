"""Serialise values that are sent between processes. In: None, bool, numbers, strings, bytes, tensors, and lists, tuples and dicts of them.
Out: one safetensors file whose metadata holds the structure as JSON, and back. No pickle: loading runs no code.

Tensors arrive on the host, contiguous, without gradient. Not modelled: two tensors that share memory arrive as two.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from shardwise.errors import UsageError

_KEY = "shardwise"


def dump(value: Any, what: str = "value") -> bytes:
    """Return `value` as bytes. Raises UsageError, naming the part (`what[0].key`) that cannot be sent.

    >>> load(dump({"loss": (1.5, None), 3: [True]}))
    {'loss': (1.5, None), 3: [True]}
    """
    tensors: dict[str, Tensor] = {}
    shape = _encode_value(value, what, tensors)
    return save_tensors(tensors, metadata={_KEY: json.dumps(shape)})


def load(data: bytes) -> Any:
    """Return the value that `dump` wrote. Raises ValueError for other bytes."""
    head = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    tensors = load_tensors(data)
    return _decode_value(json.loads(head["__metadata__"][_KEY]), tensors)


def _encode_value(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    def save(tensor: Tensor) -> str:
        name = str(len(tensors))
        tensors[name] = tensor
        return name

    match value:
        case None | bool() | int() | float() | str():
            return value
        case Tensor() if value.dtype is torch.complex128:  # which safetensors does not have
            return ["complex", save(torch.view_as_real(value.detach().to("cpu").resolve_conj()).contiguous())]
        case Tensor() if value.layout is torch.strided and not value.is_meta and not value.is_quantized:
            return ["tensor", save(value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format))]
        case bytes():
            return ["bytes", save(torch.frombuffer(bytearray(value), dtype=torch.uint8) if value else torch.empty(0, dtype=torch.uint8))]
        case list():
            return ["list", *(_encode_value(item, f"{where}[{i}]", tensors) for i, item in enumerate(value))]
        case tuple():
            return ["tuple", *(_encode_value(item, f"{where}[{i}]", tensors) for i, item in enumerate(value))]
        case dict():
            return [
                "dict",
                *([_encode_value(k, f"a key of {where}", tensors), _encode_value(v, f"{where}[{k!r}]", tensors)] for k, v in value.items()),
            ]
    kind = f"{value.layout} on {value.device} of {value.dtype}" if isinstance(value, Tensor) else type(value).__qualname__
    raise UsageError(
        f"{where} is a {kind}, which cannot be sent between processes; "
        "send None, bools, numbers, strings, bytes, dense tensors, or lists, tuples and dicts of them"
    )


def _decode_value(shape: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(shape, list):
        return shape
    kind, *rest = shape
    makers: dict[str, Callable[[], Any]] = {
        "tensor": lambda: tensors[rest[0]],
        "complex": lambda: torch.view_as_complex(tensors[rest[0]]),
        "bytes": lambda: bytes(tensors[rest[0]].tolist()),
        "list": lambda: [_decode_value(item, tensors) for item in rest],
        "tuple": lambda: tuple(_decode_value(item, tensors) for item in rest),
        "dict": lambda: {_decode_value(k, tensors): _decode_value(v, tensors) for k, v in rest},
    }
    return makers[kind]()
