"""Serialise a capture as a safetensors file: its constants, with the graph as JSON in the metadata. No pickle.

Captures with user-defined autograd.Functions or fake constants are not serialised. Of an object in an output only its class name is stored.
"""

from __future__ import annotations

import json

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from shardwise.capture.capture import CapturedGraph
from shardwise.capture.fakes import Fake
from shardwise.capture.json_values import NamedObject, UnwritableValue, from_json_value, to_json_value
from shardwise.capture.nesting import is_literal_value, named_leaves, replace_leaves

_KEY = "shardwise"


def dump(captured: CapturedGraph) -> bytes | None:
    """Serialise a capture; None if it cannot be."""
    constants = {name: x.detach().contiguous() for name, x in captured.constants.items() if not isinstance(x, Fake)}
    if len(constants) < len(captured.constants) or any(x.is_meta or x.layout is not torch.strided for x in constants.values()):
        return None
    if any(x.dtype is torch.complex128 for x in constants.values()):  # unsupported by safetensors
        return None
    shared = len({x.untyped_storage().data_ptr() for x in constants.values()}) < len(constants)
    storable = {
        path: leaf if isinstance(leaf, torch.Tensor) or is_literal_value(leaf) else NamedObject(type(leaf).__name__)
        for path, leaf in named_leaves(captured.structure)
    }
    try:
        structure = to_json_value(replace_leaves(captured.structure, storable))
        text = json.dumps([to_json_value(captured.graph), structure, to_json_value(tuple(sorted(captured.attribute_reads)))])
    except UnwritableValue:
        return None
    return save_tensors({name: x.clone() if shared else x for name, x in constants.items()}, metadata={_KEY: text})


def load(data: bytes) -> CapturedGraph | None:
    """Deserialise the bytes of `dump`; None if they need classes that are not loaded."""
    try:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        graph, structure, reads = (from_json_value(part) for part in json.loads(header["__metadata__"][_KEY]))
        return CapturedGraph(graph, load_tensors(data), structure, frozenset(reads))
    except (ValueError, LookupError, TypeError, AttributeError, SafetensorError):
        return None
