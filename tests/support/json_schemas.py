"""JSON schemas of what verbs answer with `--json`, inferred from answers: docs/json has one a verb.

Write them anew, after a change that is meant: `python -m tests.support.json_schemas`.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import sys
import tempfile
from contextlib import chdir, redirect_stderr
from pathlib import Path
from typing import Any

import torch

from shardwise.audit.record.page import Page
from shardwise.audit.record.placement import take_shard
from shardwise.cli import run
from shardwise.run.checkpoint import full_shard, save

FOLDER = Path(__file__).parents[2] / "docs" / "json"
ROOT = Path(__file__).parents[2]
SWAP = "all_reduce\nrank 0: chunk(0)>1 chunk(0)+<1\nrank 1: chunk(0)>0 chunk(0)+<0\n"
PLAN = "plan gpt-tiny --cluster 1xcpu-2 --batch 8 --layout data=2"
# Of each schema the commands that it is inferred from, and that must keep to it; {root}: this repository. A plan is written before.
COMMANDS: dict[str, tuple[str, ...]] = {
    "plan": (f"{PLAN} -o plan.toml", "plan gpt-tiny --cluster 1xcpu-2 --batch 8"),
    "explain": ("explain plan.toml",),
    "whatif": ("whatif plan.toml zero=1 batch=16",),
    "compare": ("compare plan.toml plan.toml",),
    "scaling": ("scaling gpt-tiny --cluster 1xcpu-2 --batch 8 --devices 1,2",),
    "estimate": ("estimate gpt-tiny --cluster 1xcpu-2 --batch 8 --tokens 1M",),
    "simulate": ("simulate plan.toml",),
    "schedule": ("schedule 1f1b --stages 2 --microbatches 4", "schedule zb-v --stages 2 --microbatches 4 --times f=1,b=1,w=1"),
    "schedules": ("schedules --stages 4 --microbatches 8",),
    "check": ("check swap.txt",),
    "collectives-compare": ("collectives compare --ranks 4 --bytes 1MiB", "collectives compare --ranks 8 --cluster dgx-h100"),
    "collectives-draw": ("collectives draw ring --ranks 4", "collectives draw swap.txt"),
    "cluster-show": ("cluster show dgx-h100",),
    "checkpoint-inspect": ("checkpoint inspect saved",),
    "checkpoint-verify": ("checkpoint verify saved",),
    "checkpoint-convert": ("checkpoint convert saved converted{number} --to safetensors",),
    "audit": tuple(
        f"audit --serial true --folder audit --parallel \"sh -c 'cp -r {run}/. $SHARDWISE_AUDIT_FOLDER'\"" for run in ("same", "other")
    ),
    "serve-plan": ("serve plan {root}/examples/serve/vqa.toml --accuracy 56 --brief",),
    "error": ("plan gpt-10n --cluster 1xcpu-2 --batch 8", "plan gpt-tiny --cluster 1xcpu-2 --batch 8 --layout data=3"),
}


def prepare_folder(folder: Path) -> None:
    """Make what the commands read: a collective, a checkpoint, and records of runs for an audit."""
    for name, factor in (("audit/serial", 1.0), ("audit/noise1", 1.0000001), ("audit/noise2", 0.9999999), ("same", 1.0), ("other", 2.0)):
        _record_run(folder / name, factor)
    (folder / "swap.txt").write_text(SWAP)
    save(folder / "saved", 1, [full_shard("w", "parameter", torch.ones(2))])


def _record_run(folder: Path, factor: float) -> None:
    """Write the record of two steps of one rank, whose gradients are `factor` times those of the serial run."""
    for number in range(3):
        weight, gradient = torch.tensor([1.0 - 0.1 * number, 2.0]), torch.tensor([factor, 0.5 * factor])
        page = Page({"w": take_shard(weight)}, {"w": take_shard(gradient)}, aliases={"w": ["w"]}, losses=[1.0], coarsest="float32")
        page.write(str(folder / "rank0"), number, 0, 1)


def answer_of(command: str, folder: Path, number: int = 0) -> Any:
    """The object that a command writes to the descriptor of standard output, in this process."""
    words = shlex.split(command.format(root=ROOT, number=number))
    with tempfile.TemporaryFile() as file, chdir(folder):
        sys.stdout.flush()
        before = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            run([*words, "--json"])
        finally:
            os.dup2(before, 1)
            os.close(before)
        file.seek(0)
        return json.loads(file.read())


def infer(values: list[Any]) -> dict[str, Any]:
    """The schema of all these values: keys that each has are required, others may come."""
    types = sorted({_type_of(value) for value in values})
    if "number" in types and "integer" in types:
        types.remove("integer")
    schema: dict[str, Any] = {"type": types[0] if len(types) == 1 else types}
    tables = [value for value in values if isinstance(value, dict)]
    if tables:
        shared = [key for key in tables[0] if all(key in table for table in tables)]
        if _is_mapping(tables):
            schema["additionalProperties"] = infer([value for table in tables for value in table.values()] or [0.0])
        else:
            every = list(dict.fromkeys(key for table in tables for key in table))
            schema["properties"] = {key: infer([table[key] for table in tables if key in table]) for key in every}
            schema["required"] = shared
    items = [item for value in values if isinstance(value, list) for item in value]
    if items:
        schema["items"] = infer(items)
    return schema


def _is_mapping(tables: list[dict[str, Any]]) -> bool:
    """Whether keys are names that the user's model or layout has: all values are numbers."""
    return all(isinstance(value, int | float) and not isinstance(value, bool) for table in tables for value in table.values())


def _type_of(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object", type(None): "null"}
    return kinds[type(value)]


def relax(schema: dict[str, Any]) -> dict[str, Any]:
    """Numbers may be null, which infinity becomes, and whole; lists may be empty."""
    if schema.get("type") in ("integer", "number"):
        return {**schema, "type": ["number", "null"]}
    relaxed = dict(schema)
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            relaxed[key] = relax(schema[key])
    if "properties" in schema:
        relaxed["properties"] = {key: relax(value) for key, value in schema["properties"].items()}
    return relaxed


def write_schemas(names: list[str]) -> None:
    """Infer these schemas, by default all, and write them to docs/json."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as text, redirect_stderr(io.StringIO()):
        folder = Path(text)
        prepare_folder(folder)
        for name, commands in COMMANDS.items():
            if name not in (names or COMMANDS):
                continue
            schema = relax(infer([answer_of(command, folder, number) for number, command in enumerate(commands)]))
            schema["properties"]["version"] = {"const": 1}
            head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"shardwise {name.replace('-', ' ')} --json"}
            (FOLDER / f"{name}.json").write_text(json.dumps({**head, **schema}, indent=1) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    write_schemas(sys.argv[1:])
