"""Plain PyTorch: a short script with DeviceMesh, FSDP2 or DDP, and torch.distributed.pipelining, which runs under torchrun."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources

from shardwise.frameworks.mapping import ConfigurationKeys, ExportRequest, Framework, KeyRow, Words, write_rows
from shardwise.frameworks.stage_tables import NAMED_TABLES, write_table

SCHEDULES = {
    "1f1b": "Schedule1F1B", "gpipe": "ScheduleGPipe", "interleaved": "ScheduleInterleaved1F1B", "breadth-first": "ScheduleLoopedBFS",
}  # fmt: skip
_TABLES = {name: f"{name}.csv" for name in NAMED_TABLES}
ROWS = (
    KeyRow("model", "MODEL", "", always=True),
    KeyRow("data", "DATA", 1, always=True),
    KeyRow("pipeline", "PIPELINE", 1, always=True),
    KeyRow("chunks", "CHUNKS", 1, always=True),
    KeyRow("microbatches", "MICROBATCHES", 1, always=True),
    KeyRow("micro_batch", "MICRO_BATCH", 1, always=True),
    KeyRow("zero", "ZERO", 0, always=True),
    KeyRow("shard", "SHARD", 0, always=True),
    KeyRow("schedule", "SCHEDULE", "1f1b", {**SCHEDULES, **_TABLES}, always=True),
    KeyRow("precision", "PRECISION", "float32", {name: name for name in ("float32", "bfloat16", "float64")}, always=True),
    KeyRow("recompute", "RECOMPUTE", "none", {"full": True, "none": False}, always=True),
    KeyRow("compile", "COMPILE", "off", {"on": True, "off": False}, always=True),
    KeyRow("sequence", "SEQUENCE", 0, always=True),
)


def read_pytorch(keys: ConfigurationKeys, words: Words) -> None:
    """Read the names at the head of an exported script; of any other command line, torchrun's own."""
    words["tensor"] = 1
    ranks = keys.take_number("nproc_per_node", "nproc-per-node") * keys.take_number("nnodes", default=1)
    words["devices"] = words.get("devices") or ranks
    if not keys.has("DATA"):
        words["data"] = 0
    keys.take("STAGE_STARTS", "BLOCK")


def _write(request: ExportRequest) -> Mapping[str, str]:
    values = write_rows(ROWS, request.words)
    values.setdefault("SEQUENCE", 0)
    values |= {"STAGE_STARTS": list(request.stage_starts), "BLOCK": request.block}
    head = "".join(f"{name} = {value!r}\n" for name, value in values.items())
    body = resources.files("shardwise.frameworks").joinpath("pytorch_script.txt").read_text()
    layout = request.layout
    files = {"train_pytorch.py": f'"""{layout}: torchrun --nproc-per-node {layout.num_ranks} train_pytorch.py"""\n\n{head}{body}'}
    if layout.pipeline > 1 and layout.schedule in _TABLES:
        files[_TABLES[layout.schedule]] = write_table(layout)
    return files


def _check(request: ExportRequest) -> str:
    layout = request.layout
    if layout.pipeline > 1 and layout.zero:
        return f"its stages are traced, and FSDP of these is not written: use zero=0 with pipeline={layout.pipeline}"
    if layout.pipeline > 1 and (layout.recompute != "none" or layout.compile == "on"):
        return f"recompute and compile with pipeline={layout.pipeline} are not written: use recompute=none compile=off"
    if layout.pipeline > 1 and len(request.stage_starts) not in (0, layout.num_stages - 1):
        return f"{len(request.stage_starts)} stage boundaries are known, and {layout.num_stages - 1} are needed"
    return ""


PYTORCH = Framework(
    name="pytorch", title="plain PyTorch", file_name="train_pytorch.py", signs=("DATA", "MICRO_BATCH"), rows=ROWS,
    says={
        "data": None, "pipeline": None, "microbatches": None, "chunks": None, "schedule": (*SCHEDULES, *_TABLES), "zero": (0, 2, 3),
        "shard": None,
        "precision": ("float32", "bfloat16", "float64"), "recompute": ("none", "full"), "compile": ("off", "on"),
    },
    loses={
        "zero": (2, "FSDP2 shards weights as well: gathered once, kept until backward"),
        "neighbours": ("branch", "its mesh has pipeline outermost"),
    },
    read=read_pytorch, write=_write, check=_check,
    notes=lambda request: ["AdamW with lr 1e-3 and three steps stand in the script: change them there"],
)  # fmt: skip
TORCHRUN = Framework(
    name="torchrun", title="torchrun", file_name="", signs=("nproc_per_node",), rows=(), says={}, read=read_pytorch,
)  # fmt: skip
