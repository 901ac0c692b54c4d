"""Configurations of all frameworks: which are known, which one a file is of, and its keys from its text or from a command line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.errors import UsageError, did_you_mean
from shardwise.frameworks.deepspeed import DEEPSPEED
from shardwise.frameworks.hugging_face import ACCELERATE, AXOLOTL, TRANSFORMERS
from shardwise.frameworks.mapping import ConfigurationKeys, Framework, ImportedConfiguration, import_layout
from shardwise.frameworks.megatron import BRIDGE, MEGATRON
from shardwise.frameworks.others import AXONN, FMS_FSDP, LIGHTNING, NANOTRON
from shardwise.frameworks.pytorch import PYTORCH, TORCHRUN
from shardwise.frameworks.recipes import read_recipe
from shardwise.frameworks.shell import parse_command_line, read_script
from shardwise.frameworks.texts import parse_mapping
from shardwise.frameworks.torchtitan import TORCHTITAN

# In the order in which a file is tried: those with keys of their own first.
FRAMEWORKS = {
    one.name: one
    for one in (
        TORCHTITAN, NANOTRON, AXONN, FMS_FSDP, PYTORCH, AXOLOTL, LIGHTNING, ACCELERATE, MEGATRON, BRIDGE, DEEPSPEED, TRANSFORMERS, TORCHRUN,
    )
}  # fmt: skip
EXPORTED = tuple(name for name, one in FRAMEWORKS.items() if one.write is not None)
ALIASES = {
    "titan": "torchtitan", "megatron-lm": "megatron", "megatron-core": "megatron", "nemo": "bridge", "megatron-bridge": "bridge",
    "hf": "transformers", "trainer": "transformers", "torch": "pytorch", "fsdp2": "pytorch", "llama-factory": "transformers",
    "gpt-neox": "deepspeed", "pytorch-lightning": "lightning",
}  # fmt: skip
_MAPPINGS = (".yaml", ".yml", ".json", ".toml")


# Keys that only one framework has, though others share the rest: name, weight, any of these keys.
_STRONG_SIGNS: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    ("megatron", 2, ("pipeline_model_parallel_size", "tensor_model_parallel_size", "use_megatron_fsdp")),
    ("deepspeed", 4, ("pipe_parallel_size",)),
    ("bridge", 8, ("train.micro_batch_size", "model.tensor_model_parallel_size", "trainer.strategy.tensor_model_parallel_size")),
    ("transformers", 9, ("per_device_train_batch_size",)),
    ("torchtitan", -99, ("parallelism.tp", "parallelism.dp")),
    ("fms-fsdp", -99, ("distributed_type", "compute_environment", "fsdp_version", "fsdp_config")),
    ("accelerate", 9, ("distributed_type", "compute_environment")),
    ("axolotl", 12, ("base_model",)),
)


def find_framework(name: str) -> Framework:
    """Return a framework by its name. Raises UsageError for an unknown one."""
    name = name.lower()
    name = ALIASES.get(name, name)
    if name not in FRAMEWORKS:
        raise UsageError(f"framework {name} is unknown{did_you_mean(name, FRAMEWORKS)}; known: {', '.join(FRAMEWORKS)}")
    return FRAMEWORKS[name]


def recognise_framework(keys: ConfigurationKeys) -> Framework:
    """Return the framework that has most of its signs among the keys. Raises UsageError where none has."""
    counts = {one.name: sum(bool(keys.find(sign)) for sign in one.signs) for one in FRAMEWORKS.values()}
    program = str(keys.values.get(".program", ""))
    for name, weight, signs in _STRONG_SIGNS:
        if keys.has(*signs) and (name != "transformers" or not counts["megatron"]):
            counts[name] += weight
    if "torchtitan" in program:
        counts["torchtitan"] += 3
    best = max(counts, key=lambda name: counts[name])
    if counts[best] <= 0 and keys.has("global_batch_size", "micro_batch_size"):
        best, counts["megatron"] = "megatron", 1  # its names, of a command with no other sign
    if counts[best] <= 0:
        shown = ", ".join(list(keys.values)[:8])
        raise UsageError(f"no framework's keys are in it ({shown}); name it with --from, one of {', '.join(FRAMEWORKS)}")
    return FRAMEWORKS[best]


def read_keys(path: Path, recipe: str = "") -> ConfigurationKeys:
    """Return a file's keys, by its ending: shell scripts, Python, TOML, JSON, YAML; a file of arguments otherwise.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    values: dict[str, Any]
    if path.suffix == ".py":
        values = read_recipe(text, path, recipe)
    elif path.suffix in _MAPPINGS:
        values = parse_mapping(text, path.name)
    elif path.suffix in (".sh", ".slurm", ".sbatch", ".bash") or text.startswith("#!"):
        values = _with_sbatch(read_script(text), text)
    else:
        values = read_script(text) if text.lstrip()[:1] not in "{[" else parse_mapping(text, "x.yaml")
    return _with_named_files(values, path.parent)


def _with_sbatch(values: dict[str, Any], text: str) -> dict[str, Any]:
    """Add the numbers of nodes and GPUs that a job file asks SLURM for, where the command has none."""
    nodes = re.search(r"^#SBATCH\s+(?:--nodes=|-N\s*)(\d+)", text, re.M)
    gpus = re.search(r"^#SBATCH\s+--(?:gpus-per-node=|gres=gpu:(?:\w+:)?|ntasks-per-node=)(\d+)", text, re.M)
    if nodes and gpus and not str(values.get("nproc_per_node", "")).isdecimal():
        values |= {"nnodes": nodes[1], "nproc_per_node": gpus[1]}
    elif nodes and not str(values.get("nnodes", "")).isdecimal():
        values["nnodes"] = nodes[1]
    for key in ("nnodes", "nproc_per_node"):
        if key in values and not str(values[key]).isdecimal():
            del values[key]
    return values


def _read_siblings(folder: Path, values: Mapping[str, Any]) -> dict[str, str]:
    """Return the tables of actions that a configuration names."""
    names = [value for value in values.values() if isinstance(value, str) and value.endswith(".csv") and len(value) < 300]
    return {name: file.read_text(encoding="utf-8", errors="replace") for name in names if (file := _find_beside(name, folder))}


def read_configuration(
    source: Path | Sequence[str], framework: str = "", recipe: str = "", devices: int = 0, words: Mapping[str, Any] | None = None
) -> ImportedConfiguration:
    """Read a configuration file, or the words of a command line, as a layout.

    Args:
        framework: its name, by default the one whose keys the file has. recipe: of a Python file with several, the function's name.
        devices: how many, where the file does not say it, or instead of what it says. words: of ours, where the file has none (layers).

    Raises:
        UsageError: it cannot be read, or is of no known framework. Infeasible, LayoutError: sizes that cannot be.
    """
    if isinstance(source, Path):
        keys = read_keys(source, recipe)
    else:
        keys = _keys_of_command(list(source))
    chosen = find_framework(framework) if framework else recognise_framework(keys)
    keys.read.add(".program")
    imported = import_layout(chosen, keys, devices, dict(words or {}))
    if chosen is FMS_FSDP and not imported.model:
        variant = str(keys.values.get("model_variant", "7b")).removeprefix("llama3_")
        imported = replace(imported, model=f"llama2-{variant}")
    return imported


def _keys_of_command(words: list[str]) -> ConfigurationKeys:
    """Return the keys of a command line; those of a configuration file that it names come first."""
    return _with_named_files(parse_command_line(words), Path())


_NAMES_A_FILE = (
    "config_file",
    "config_path",
    "config",
    "job.config_file",
    "deepspeed_config",
    "deepspeed_config_file",
    "deepspeed",
    "ds_config",
)


def _with_named_files(values: dict[str, Any], folder: Path) -> ConfigurationKeys:
    """Return the keys of a command, with those of the configuration files that it names behind its own: DeepSpeed's in a section.

    A file is looked for beside the command and above it, also where a variable before it is unknown; a note tells of one that is not found.
    """
    files: dict[str, Any] = {}
    notes: list[str] = []
    named = [(key, values[key]) for key in (*_NAMES_A_FILE, "deepspeed_config.deepspeed_config_file") if key in values]
    named += [("", word) for word in str(values.get(".program", "")).split() if Path(word).suffix in _MAPPINGS]
    for key, name in named:
        if not isinstance(name, str) or Path(name).suffix not in _MAPPINGS:
            continue
        file = _find_beside(name, folder)
        if file is None:
            notes.append(f"{name} is not beside it, so its keys are not read")
            continue
        inner = read_keys(file)
        is_section = "deepspeed" in key or key == "ds_config"
        values = {**{f"deepspeed_config.{k}" if is_section else k: v for k, v in inner.values.items()}, **values}
        files |= inner.files
        notes += inner.notes
        values.pop(key, None)
    keys = ConfigurationKeys(values, {**files, **_read_siblings(folder, values)})
    keys.notes += notes
    return keys


def _find_beside(name: str, folder: Path) -> Path | None:
    """Return the file of a name, in a folder, in those above it, or there by its last part."""
    relative = name.lstrip("/") if not Path(name).is_file() else name
    places = [folder, *folder.absolute().parents]
    found = (place / path for path in (relative, Path(name).name) for place in (places if path == relative else places[:1]))
    return next((file for file in found if file.is_file()), None)
