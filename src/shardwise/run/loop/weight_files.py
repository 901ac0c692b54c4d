"""Weights of a sharded model as safetensors files in the format of `save_pretrained`, with one full tensor in memory at a time.

Writes `model-00001-of-00003.safetensors` and so on with `model.safetensors.index.json`, or a single `model.safetensors`; ranks take turns
in writing files. Reading keeps each rank's shards. Of tied tensors the first name is written. Not modelled: complex tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from shardwise.errors import CheckpointError, UsageError, format_error
from shardwise.plan.ir.toml_text import parse_json
from shardwise.run.checkpoint import StateShard
from shardwise.run.checkpoint.disk import write_file
from shardwise.run.checkpoint.tensorfile import bytes_of, encode_header
from shardwise.run.loop.module import sharded_modules_of, state_shards
from shardwise.run.sharded_state import full_tensor
from shardwise.world import private
from shardwise.world.world import World

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
STALE_FILES = f"model-{'[0-9]' * 5}-of-{'[0-9]' * 5}.safetensors"


def write_weights(model: nn.Module, folder: Path, max_bytes: float) -> list[str]:
    """Write the model's parameters and buffers in files of at most `max_bytes`, unless one tensor is larger. Every rank calls it.

    Returns the names of the tensors."""
    sharded_modules = sharded_modules_of(model)
    if not sharded_modules:
        raise UsageError(f"{type(model).__name__} is not divided: its own save_pretrained writes it")
    world = sharded_modules[0][1].world
    pieces: dict[str, list[StateShard]] = {}
    with private.as_base_tensor():
        for piece in state_shards(model):
            pieces.setdefault(piece.name, []).append(piece)
    files = _split_by_size({name: _num_bytes(some[0]) for name, some in pieces.items()}, max_bytes)
    names = [FILE] if len(files) == 1 else [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    if world.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        for old in (*folder.glob(STALE_FILES), folder / FILE, folder / INDEX):
            old.unlink(missing_ok=True)
    world.all_reduce_max([0])
    for number, (name, keys) in enumerate(zip(names, files, strict=True)):
        _write_file(folder / name, {key: pieces[key] for key in keys}, world, number % world.num_ranks)
    if world.rank == 0 and len(files) > 1:
        total = sum(_num_bytes(some[0]) for some in pieces.values())
        table = {key: name for name, keys in zip(names, files, strict=True) for key in keys}
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": table}, indent=2, sort_keys=True) + "\n")
    world.all_reduce_max([0])
    return list(pieces)


def read_weights(model: nn.Module, folder: Path) -> None:
    """Load files of `write_weights` or `save_pretrained`; each rank reads one tensor at a time and keeps its shard.

    Raises:
        CheckpointError: a file is missing, or lacks tensors of the model.
    """
    index = folder / INDEX
    try:
        names = sorted(set(parse_json(index.read_bytes())["weight_map"].values())) if index.is_file() else [FILE]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is damaged: {format_error(error)}; write the weights again") from error
    tied: dict[int, set[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        tied.setdefault(id(p), set()).add(name)
    missing = {min(some) for some in tied.values()}
    for name in names:
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name} is not there: give the folder that save_pretrained wrote")
        with safe_open(folder / name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - it is not a mapping
                model.load_state_dict({key: file.get_tensor(key)}, strict=False)
                missing -= {min(some) for some in tied.values() if key in some}
    if missing:
        raise CheckpointError(f"{folder} has no {', '.join(sorted(missing)[:3])}, which {type(model).__name__} has: is it another model's?")


def _num_bytes(shard: StateShard) -> int:
    return torch.Size(shard.global_shape).numel() * shard.tensor.element_size()


def _split_by_size(sizes: Mapping[str, int], max_bytes: float) -> list[list[str]]:
    """Split names, in order, into groups of at most `max_bytes`.

    >>> _split_by_size({"a": 4, "b": 4, "c": 9, "d": 1}, 8)
    [['a', 'b'], ['c'], ['d']]
    """
    groups: list[list[str]] = [[]]
    remaining_bytes = max_bytes
    for name, size in sizes.items():
        if groups[-1] and size > remaining_bytes:
            groups.append([])
            remaining_bytes = max_bytes
        groups[-1].append(name)
        remaining_bytes -= size
    return groups


def _write_file(path: Path, shards: Mapping[str, Sequence[StateShard]], world: World, writer: int) -> None:
    """Write one file of these tensors on rank `writer`; all ranks gather."""
    # Wide dtypes first, so that every tensor is aligned.
    order = sorted(shards, key=lambda name: -shards[name][0].tensor.element_size())
    specs = [torch.empty(shards[name][0].global_shape, dtype=shards[name][0].tensor.dtype, device="meta") for name in order]

    def chunks() -> Iterator[Any]:
        yield encode_header(list(zip(order, specs, strict=True)), {"format": "pt"})[0]
        for name in order:
            x: Tensor | None = full_tensor(shards[name], world.world_group, writer)
            if x is not None:
                yield bytes_of(x)

    if world.rank == writer:
        write_file(path, chunks())
    else:
        for _ in chunks():
            pass
