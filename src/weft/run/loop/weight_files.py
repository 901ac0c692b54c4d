"""The weights of a divided model as safetensors files with an index, of which no rank holds more than one tensor at a time.

In: a divided model, a folder. Out: `model-00001-of-00003.safetensors` and so on with `model.safetensors.index.json`, or one
`model.safetensors` where that is enough; and such files read back, of which each rank keeps its parts. Files are written by all ranks in
turn. Of tied tensors the first name is written.

Not modelled: tensors of complex numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from weft.errors import CheckpointError, UsageError
from weft.run.loop.module import sharded_modules_of, state_pieces
from weft.run.sharded_state import full_tensor
from weft.run.state.checkpoint import Piece
from weft.run.state.checkpoint.disk import write_file
from weft.run.state.checkpoint.tensorfile import bytes_of, header_of
from weft.world import private
from weft.world.world import World

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
OLD = f"model-{'[0-9]' * 5}-of-{'[0-9]' * 5}.safetensors"


def write_weights(model: nn.Module, folder: Path, most_bytes: float) -> list[str]:
    """Write the model's parameters and buffers in files of at most so many bytes, if no tensor is larger. Every rank calls it. Returns
    the names of the tensors."""
    inside = sharded_modules_of(model)
    if not inside:
        raise UsageError(f"{type(model).__name__} is not divided: its own save_pretrained writes it")
    world = inside[0][1].world
    pieces: dict[str, list[Piece]] = {}
    with private.as_base_tensor():
        for piece in state_pieces(model):
            pieces.setdefault(piece.name, []).append(piece)
    files = _split({name: _bytes(some[0]) for name, some in pieces.items()}, most_bytes)
    names = [FILE] if len(files) == 1 else [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    if world.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        for old in (*folder.glob(OLD), folder / FILE, folder / INDEX):
            old.unlink(missing_ok=True)
    world.maximum([0])
    for number, (name, held) in enumerate(zip(names, files, strict=True)):
        _write_file(folder / name, {key: pieces[key] for key in held}, world, number % world.num_ranks)
    if world.rank == 0 and len(files) > 1:
        total = sum(_bytes(some[0]) for some in pieces.values())
        table = {key: name for name, held in zip(names, files, strict=True) for key in held}
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": table}, indent=2, sort_keys=True) + "\n")
    world.maximum([0])
    return list(pieces)


def read_weights(model: nn.Module, folder: Path) -> None:
    """Load what `write_weights`, or `save_pretrained`, wrote; each rank reads one tensor at a time and keeps its part.

    Raises:
        CheckpointError: no such files, or tensors that the model has and they have not.
    """
    index = folder / INDEX
    names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else [FILE]
    tied: dict[int, set[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        tied.setdefault(id(p), set()).add(name)
    missing = {min(some) for some in tied.values()}
    for name in names:
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name} is not there: give the folder that save_pretrained wrote")
        with safe_open(folder / name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - it is no mapping
                model.load_state_dict({key: file.get_tensor(key)}, strict=False)
                missing -= {min(some) for some in tied.values() if key in some}
    if missing:
        raise CheckpointError(f"{folder} has no {', '.join(sorted(missing)[:3])}, which {type(model).__name__} has: is it another model's?")


def _bytes(piece: Piece) -> int:
    return torch.Size(piece.global_shape).numel() * piece.tensor.element_size()


def _split(sizes: Mapping[str, int], most_bytes: float) -> list[list[str]]:
    """Names in their order, in groups of so many bytes.

    >>> _split({"a": 4, "b": 4, "c": 9, "d": 1}, 8)
    [['a', 'b'], ['c'], ['d']]
    """
    groups: list[list[str]] = [[]]
    room = most_bytes
    for name, size in sizes.items():
        if groups[-1] and size > room:
            groups.append([])
            room = most_bytes
        groups[-1].append(name)
        room -= size
    return groups


def _write_file(path: Path, pieces: Mapping[str, Sequence[Piece]], world: World, writer: int) -> None:
    """A file of these tensors, written by one rank; all gather."""
    # Wide ones first, so that every tensor is aligned.
    order = sorted(pieces, key=lambda name: -pieces[name][0].tensor.element_size())
    forms = [torch.empty(pieces[name][0].global_shape, dtype=pieces[name][0].tensor.dtype, device="meta") for name in order]

    def parts() -> Iterator[Any]:
        yield header_of(list(zip(order, forms, strict=True)), {"format": "pt"})[0]
        for name in order:
            x: Tensor | None = full_tensor(pieces[name], world.everyone, writer)
            if x is not None:
                yield bytes_of(x)

    if world.rank == writer:
        write_file(path, parts())
    else:
        for _ in parts():
            pass
