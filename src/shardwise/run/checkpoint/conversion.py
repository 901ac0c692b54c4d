"""Convert checkpoints: shardwise's own, sharded safetensors, torch.distributed.checkpoint, a Hugging Face folder. Out: a new folder.

Weights go everywhere; optimizer state between shardwise and torch.distributed.checkpoint only. safetensors is read and written one
tensor at a time. torch.distributed.checkpoint pickles its metadata, so torch unpickles it when one is read: convert files that you trust.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from shardwise.errors import CheckpointError, UsageError
from shardwise.run.checkpoint.folder import read_manifest
from shardwise.run.checkpoint.load import read_full
from shardwise.run.checkpoint.manifest import MANIFEST
from shardwise.run.checkpoint.save import save
from shardwise.run.checkpoint.state_shard import DTYPES, full_shard
from shardwise.run.checkpoint.tensorfile import write_tensors

FORMATS = ("shardwise", "safetensors", "dcp", "huggingface")
WEIGHTS_FILE, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
DCP_METADATA = ".metadata"
MODEL, OPTIMIZER = "model.", "optimizer.state."  # names in a torch.distributed.checkpoint, as its state_dict helpers write them
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # buffers of batch norms
BESIDE_WEIGHTS = ("*.json", "*.model", "*.txt", "*.jinja")  # of a Hugging Face folder: configuration and tokenizer

Key = tuple[str, str, str]  # kind, slot, name


@dataclass(frozen=True)
class TensorSource:
    """Tensors of a checkpoint in any format: `sizes` in bytes by key, `read` returns one; `step` and `extra` of shardwise's own."""

    sizes: dict[Key, int]
    read: Callable[[Key], Tensor]
    step: int = 0
    extra: dict[str, object] = field(default_factory=dict)


def format_of(path: Path) -> str:
    """Return the format of a checkpoint at `path`.

    Raises:
        UsageError: none of those that can be read.
    """
    if (path / MANIFEST).is_file():
        return "shardwise"
    if (path / DCP_METADATA).is_file():
        return "dcp"
    if path.suffix == ".safetensors" or (path / WEIGHTS_INDEX).is_file() or (path / WEIGHTS_FILE).is_file():
        return "huggingface" if (path / "config.json").is_file() else "safetensors"
    raise UsageError(
        f"{path} is no checkpoint that can be converted: a shardwise checkpoint has {MANIFEST}, torch.distributed.checkpoint "
        f"{DCP_METADATA}, safetensors {WEIGHTS_FILE} or {WEIGHTS_INDEX}"
    )


def convert_checkpoint(source: Path, target: Path, wanted: str, max_bytes: float, config: Path | None = None) -> list[Key]:
    """Write the checkpoint `source` to the new folder `target` in the format `wanted`; returns the keys of what was written.

    `config`: the folder whose configuration and tokenizer go beside Hugging Face's weights.

    Raises:
        UsageError: an unknown format, a target that is there already. CheckpointError: damaged, or without weights.
    """
    if wanted not in FORMATS:
        raise UsageError(f"--to {wanted} is no format of checkpoints; use {', '.join(FORMATS)}")
    found = format_of(source)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} is there already; name a folder that is not, or is empty")
    if wanted == "huggingface" and config is None and found != "huggingface":
        raise UsageError("a Hugging Face folder has a configuration beside its weights; name the folder that has it, --config FOLDER")
    with ExitStack() as stack:
        tensors = _open_source(source, found, stack)
        keys = list(tensors.sizes)
        if not any(kind == "parameter" for kind, _, _ in keys):
            raise CheckpointError(f"{source} holds no weights")
        if wanted == "shardwise":
            save(target, tensors.step, [full_shard(name, kind, tensors.read((kind, slot, name)), slot) for kind, slot, name in keys],  # type: ignore[arg-type]
                 dict(tensors.extra))  # fmt: skip
        elif wanted == "dcp":
            keys = [key for key in keys if key[0] in ("parameter", "buffer", "optimizer")]
            target.mkdir(parents=True, exist_ok=True)
            save_dcp({_dcp_name(key): tensors.read(key) for key in keys}, checkpoint_id=str(target), no_dist=True)
        else:
            keys = [key for key in keys if key[0] in ("parameter", "buffer")]
            _write_safetensors(target, keys, tensors, max_bytes)
            if wanted == "huggingface":
                _copy_configuration(config or source, target)
    return keys


def _open_source(path: Path, found: str, stack: ExitStack) -> TensorSource:
    if found == "shardwise":
        manifest = read_manifest(path)
        by_label = dict(read_full(path, tuple({t.kind for t in manifest.tensors})))
        labels = {t.key: full_shard(t.name, t.kind, torch.empty(0, dtype=DTYPES[t.dtype]), t.slot).label for t in manifest.tensors}
        return TensorSource(
            {t.key: t.size_bytes for t in manifest.tensors}, lambda key: by_label[labels[key]], manifest.step, manifest.extra
        )
    if found == "dcp":
        return _open_dcp(path)
    return _open_safetensors(path, stack)


def _open_dcp(path: Path) -> TensorSource:
    """Read all tensors of a torch.distributed.checkpoint; values that are no tensors are left out."""
    described = FileSystemReader(str(path)).read_metadata().state_dict_metadata
    state: dict[str, Tensor] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in described.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load_dcp(state, checkpoint_id=str(path), no_dist=True)
    prefix = MODEL if any(name.startswith(MODEL) for name in state) else ""
    tensors: dict[Key, Tensor] = {}
    for name, tensor in state.items():
        if name.startswith(OPTIMIZER):
            weight, _, slot = name.removeprefix(OPTIMIZER).rpartition(".")
            tensors["optimizer", slot, weight] = tensor
        elif name.startswith(prefix):
            weight = name.removeprefix(prefix)
            tensors[_kind_of(weight, tensor.dtype), "", weight] = tensor
    return TensorSource({key: tensor.nbytes for key, tensor in tensors.items()}, tensors.__getitem__)


def _open_safetensors(path: Path, stack: ExitStack) -> TensorSource:
    files = [path]
    if path.is_dir():
        index = path / WEIGHTS_INDEX
        names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else [WEIGHTS_FILE]
        files = [path / Path(name).name for name in names]
    where, sizes = {}, {}
    for file in files:
        try:
            opened = stack.enter_context(safe_open(file, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
        for name in opened.keys():  # noqa: SIM118 - it is not a mapping
            part = opened.get_slice(name)
            dtype = DTYPES.get(part.get_dtype())
            if dtype is None:
                raise CheckpointError(f"{file}: {name} has dtype {part.get_dtype()}; known: {', '.join(DTYPES)}")
            key = (_kind_of(name, dtype), "", name)
            where[key] = opened
            sizes[key] = torch.Size(part.get_shape()).numel() * dtype.itemsize
    return TensorSource(sizes, lambda key: where[key].get_tensor(key[2]))


def _kind_of(name: str, dtype: torch.dtype) -> str:
    """Return whether a tensor that has only a name is a parameter: running statistics and whole numbers are buffers."""
    return "buffer" if name.rpartition(".")[2] in STATISTICS or not (dtype.is_floating_point or dtype.is_complex) else "parameter"


def _dcp_name(key: Key) -> str:
    kind, slot, name = key
    return f"{OPTIMIZER}{name}.{slot}" if kind == "optimizer" else f"{MODEL}{name}"


def _write_safetensors(target: Path, keys: Sequence[Key], tensors: TensorSource, max_bytes: float) -> None:
    """Write files of at most `max_bytes`, unless one tensor is larger, with an index where there are several."""
    files = list(_split_keys(keys, tensors.sizes, max_bytes))
    names = [WEIGHTS_FILE] if len(files) == 1 else [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    target.mkdir(parents=True, exist_ok=True)
    for name, some in zip(names, files, strict=True):
        widest_first = sorted(((key[2], tensors.read(key)) for key in some), key=lambda entry: -entry[1].element_size())
        write_tensors(target / name, widest_first, {"format": "pt"})
    if len(files) > 1:
        table = {key[2]: name for name, some in zip(names, files, strict=True) for key in some}
        total = sum(tensors.sizes[key] for key in keys)
        (target / WEIGHTS_INDEX).write_text(
            json.dumps({"metadata": {"total_size": total}, "weight_map": table}, indent=2, sort_keys=True) + "\n"
        )


def _split_keys(keys: Sequence[Key], sizes: dict[Key, int], max_bytes: float) -> Iterator[list[Key]]:
    some: list[Key] = []
    for key in keys:
        if some and sum(sizes[k] for k in some) + sizes[key] > max_bytes:
            yield some
            some = []
        some.append(key)
    yield some


def _copy_configuration(source: Path, target: Path) -> None:
    files = [file for pattern in BESIDE_WEIGHTS for file in source.glob(pattern) if file.name != WEIGHTS_INDEX]
    if not any(file.name == "config.json" for file in files):
        raise UsageError(f"{source} has no config.json; name the Hugging Face folder of this model, --config FOLDER")
    for file in files:
        shutil.copy(file, target / file.name)
