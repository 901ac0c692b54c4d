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
from collections.abc import Callable
from contextlib import chdir, redirect_stderr
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from shardwise.audit.record.page import Page
from shardwise.audit.record.placement import take_shard
from shardwise.cli import run
from shardwise.cli.output import JSON_VERSION, answer_record
from shardwise.cli.serve_run import trial_record
from shardwise.run.checkpoint import full_shard, save
from shardwise.serve.deploy.load_generator import LoadResult
from shardwise.serve.deploy.load_trial import LoadTrial, TrialRow
from shardwise.serve.deploy.server import PlanChange
from shardwise.serve.deploy.status_page import figures_of
from shardwise.serve.placement.assignment_milp import Demand
from shardwise.serve.placement.service_planner import plan_service
from shardwise.serve.placement.workflow_files import read_workflow

FOLDER = Path(__file__).parents[2] / "docs" / "json"
ROOT = Path(__file__).parents[2]
SWAP = "all_reduce\nrank 0: chunk(0)>1 chunk(0)+<1\nrank 1: chunk(0)>0 chunk(0)+<0\n"
ACCELERATE = "distributed_type: FSDP\nnum_processes: 2\nmixed_precision: 'no'\nfsdp_config: {fsdp_version: 2, fsdp_offload_params: true}\n"
PLAN = "plan gpt-tiny --cluster 1xcpu-2 --batch 8 --layout data=2"
EXPORTED = "plan gpt-tiny --cluster 1xcpu-2 --batch 8 --layout 'data=2 zero=1 recompute=selective' --to torchtitan"
# Of each schema the commands that it is inferred from, and that must keep to it; {root}: this repository, {model}: a small one.
# A plan is written before.
COMMANDS: dict[str, tuple[str, ...]] = {
    "plan": (f"{PLAN} -o plan.toml", "plan gpt-tiny --cluster 1xcpu-2 --batch 8", EXPORTED),
    "explain": ("explain plan.toml",),
    "whatif": ("whatif plan.toml zero=1 batch=16",),
    "compare": ("compare plan.toml plan.toml",),
    "scaling": ("scaling gpt-tiny --cluster 1xcpu-2 --batch 8 --devices 1,2",),
    "export": ("export plan.toml --to deepspeed", "export plan.toml --to lightning"),
    "import": ("import accelerate.yaml --model gpt-tiny --cluster 1xcpu-2 --batch 8", "import accelerate.yaml"),
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
    "serve-profile": ("serve profile signs.toml -o signs{number}.toml --batches 1 --seconds 0",),
    "serve-run": ("a load trial",),
    "serve-run-page": ("figures of a server",),
    "train": ("train tiny.toml",),
    "launch": ("launch --kubernetes -o job{number}.yaml -- train tiny.toml", "launch --skypilot -- train tiny.toml"),
    "verify": ("verify {model} --batch 2 --sequence 8 --layout data=1 --steps 1",),
    "prove": ("prove {model} --batch 2 --sequence 8 --layout data=2",),
    "probe": ("probe",),
    "doctor": ("doctor",),
    "cache": ("cache", "SHARDWISE_CACHE=kept cache"),
    "report": ("report plan.toml -o page.html",),
    "cluster-new": ("cluster new ours --device H100 --devices 4",),
    "cluster-check": ("cluster check dgx-h100",),
    "cluster-list": ("cluster show",),
    "cluster-schema": ("cluster schema",),
    "error": ("plan gpt-10n --cluster 1xcpu-2 --batch 8", "cluster check nothing.toml"),
}
OPEN = ("cluster-schema",)  # what is inside is a schema itself
NULLABLE = {"train": ("predicted_parts_s", "measured_parts_s", "memory_bytes", "predicted_memory_bytes")}  # of a run that made no step
MODEL = "gpt:vocabulary=256,hidden=32,layers=1,heads=2"
TRAIN = f"""
[model]
name = "{MODEL}"
[data]
text = "swap.txt"
sequence = 8
[train]
steps = 2
batch = 2
[run]
folder = "run"
[plan]
layout = "data=1 threads=1"
"""
WORKFLOW = """
name = "signs"
rate = 5
[source.x]
[operator.up]
inputs = ["x"]
[operator.up.variant.narrow]
model = "signs.py:narrow"
[worker.edge]
tier = 0
price_per_hour = 0.1
count = 2
"""
VARIANTS = """
import torch

def narrow():
    return torch.nn.Linear(8, 2), (torch.zeros(8, 8),)
"""


def prepare_folder(folder: Path) -> None:
    """Make what the commands read: a collective, a configuration, a workflow, a checkpoint, and records of runs for an audit."""
    for name, factor in (("audit/serial", 1.0), ("audit/noise1", 1.0000001), ("audit/noise2", 0.9999999), ("same", 1.0), ("other", 2.0)):
        _record_run(folder / name, factor)
    files = {"swap.txt": SWAP, "tiny.toml": TRAIN, "signs.toml": WORKFLOW, "signs.py": VARIANTS, "accelerate.yaml": ACCELERATE}
    for name, text in files.items():
        (folder / name).write_text(text)
    save(folder / "saved", 1, [full_shard("w", "parameter", torch.ones(2))])


def _record_run(folder: Path, factor: float) -> None:
    """Write the record of two steps of one rank, whose gradients are `factor` times those of the serial run."""
    for number in range(3):
        weight, gradient = torch.tensor([1.0 - 0.1 * number, 2.0]), torch.tensor([factor, 0.5 * factor])
        page = Page({"w": take_shard(weight)}, {"w": take_shard(gradient)}, aliases={"w": ["w"]}, losses=[1.0], coarsest="float32")
        page.write(str(folder / "rank0"), number, 0, 1)


def answer_of(command: str, folder: Path, number: int = 0) -> Any:
    """The object that a command writes to the descriptor of standard output, in this process; NAME=VALUE before it sets the environment."""
    if command in SERVED:
        return {"version": JSON_VERSION, **answer_record(SERVED[command]())}
    words = shlex.split(command.format(root=ROOT, model=MODEL, number=number))
    num_variables = next(i for i, word in enumerate(words) if "=" not in word)
    variables, words = dict(word.split("=", 1) for word in words[:num_variables]), words[num_variables:]
    with tempfile.TemporaryFile() as file, chdir(folder), mock.patch.dict(os.environ, variables):
        sys.stdout.flush()
        before = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            end = words.index("--") if "--" in words else len(words)  # what stands behind is the started command's
            run([*words[:end], "--json", *words[end:]])
        finally:
            os.dup2(before, 1)
            os.close(before)
        file.seek(0)
        return json.loads(file.read())


def _served_plan() -> SimpleNamespace:
    """What a server of the example's plan tells of itself once a worker went, without the minute that Ray takes to start."""
    workflow, machines, _ = read_workflow(ROOT / "examples" / "serve" / "vqa.toml")
    assert machines is not None
    plan = plan_service(workflow, machines, Demand(40.0, 54.0))
    assert plan is not None
    stats = {"counts": {"arrived": 7}, "loads": {"a": 3}, "latency_s": {"0.5": 0.01}, "dollars": 0.25, "lost": {"a": "cpu-5"}}
    return SimpleNamespace(
        workflow=workflow, plan=plan, stats=lambda: stats, changes=[PlanChange("cpu-5 failed", plan, 0.1, 2.0)], problem=""
    )


def _trial_answer() -> dict[str, Any]:
    result = LoadResult(duration_s=2.0, num_sent=3, latency_s=[0.1, 0.2], num_refused=0, failures=["no answer"])
    trial = LoadTrial((TrialRow("requests/s", 1.5, 1.0, ""), TrialRow("p50", 0.1, 0.1, "s")), result, 1, 0.5)
    return trial_record(trial, _served_plan().changes)


SERVED: dict[str, Callable[[], dict[str, Any]]] = {
    "a load trial": _trial_answer,
    "figures of a server": lambda: figures_of(_served_plan()),  # type: ignore[arg-type]
}


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
    """Numbers may be null, which infinity becomes, and whole; lists may be empty; what was null may be anything."""
    if schema.get("type") == "null":
        return {}
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
        answer_of(COMMANDS["plan"][0], folder)
        for name, commands in COMMANDS.items():
            if name not in (names or COMMANDS):
                continue
            answers = [answer_of(command, folder, number) for number, command in enumerate(commands)]
            if failed := [answer["error"] for answer in answers if "error" in answer and name != "error"]:
                raise SystemExit(f"{name}: {failed[0]}")
            schema = relax(infer(answers))
            if name in OPEN:
                schema["properties"] = {key: {"type": value["type"]} for key, value in schema["properties"].items()}
            for key in NULLABLE.get(name, ()):
                schema["properties"][key]["type"] = ["object", "null"]
            schema["properties"]["version"] = {"const": JSON_VERSION}
            head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"shardwise {name.replace('-', ' ')} --json"}
            (FOLDER / f"{name}.json").write_text(json.dumps({**head, **schema}, indent=1) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    write_schemas(sys.argv[1:])
