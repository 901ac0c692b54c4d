"""`shardwise checkpoint`: inspect a checkpoint, or verify its files' sizes and checksums; of a folder of checkpoints the newest."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli import options
from shardwise.cli.output import CommandOutput, open_output
from shardwise.errors import CheckpointError, UsageError, did_you_mean
from shardwise.report.tables import TextTable
from shardwise.units import format_bytes, format_count

if TYPE_CHECKING:
    from shardwise.run.checkpoint.manifest import Manifest

app = typer.Typer(help="Inspect, verify and convert checkpoints.", no_args_is_help=True, rich_markup_mode=None)
Where = Annotated[
    Path, typer.Argument(metavar="PATH", help="A checkpoint, a folder of them (the newest counts), or a run folder.", show_default=False)
]
FORMATS = ("shardwise", "safetensors", "dcp", "huggingface")
_SOURCE = "A checkpoint or run folder, a folder or file of safetensors, a torch.distributed.checkpoint, or a Hugging Face folder."
_CONFIG = "Of --to huggingface: the folder that has the model's config.json and tokenizer."
FOLDER = "checkpoints"
MAX_ROWS = 40


@app.command("inspect")
def inspect_checkpoint(path: Where, as_json: options.Json = False) -> None:
    """Say what a checkpoint holds, from its manifest alone.

    \b
    Example:
      shardwise checkpoint inspect runs/gpt_text
    """
    with open_output(as_json) as out:
        require_folder(path)
        from shardwise.run.checkpoint.folder import read_manifest  # here: the command starts fast

        folder = newest_checkpoint(path)
        _show_checkpoint(folder, read_manifest(folder), out, is_complete=None)


@app.command("verify")
def verify(path: Where, as_json: options.Json = False) -> None:
    """Check every file of a checkpoint against its size and SHA-256; exit 4 where one is damaged, missing or too many.

    \b
    Example:
      shardwise checkpoint verify runs/gpt_text
    """
    with open_output(as_json) as out:
        require_folder(path)
        from shardwise.run.checkpoint import verify as check  # here: the command starts fast

        folder = newest_checkpoint(path)
        with out.working(f"reading {folder}"):
            manifest = check(folder)
        _show_checkpoint(folder, manifest, out, is_complete=True)


@app.command("convert")
def convert_checkpoint(
    path: Annotated[Path, typer.Argument(metavar="SOURCE", help=_SOURCE, show_default=False)],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="A folder that is not there yet.", show_default=False)],
    wanted: Annotated[str, typer.Option("--to", metavar="FORMAT", help="shardwise, safetensors, dcp or huggingface.", show_default=False)],
    max_size: Annotated[str, typer.Option("--max-shard-size", metavar="SIZE", help="Largest file of safetensors.")] = "5GB",
    config: Annotated[Path | None, typer.Option("--config", metavar="FOLDER", help=_CONFIG, show_default=False)] = None,
    as_json: options.Json = False,
) -> None:
    """Convert a checkpoint to and from other formats.

    Weights are converted everywhere, optimizer state between shardwise and dcp (torch.distributed.checkpoint). Reading dcp unpickles its
    metadata: convert files that you trust.

    \b
    Example:
      shardwise checkpoint convert runs/gpt_text weights --to safetensors
      shardwise checkpoint convert runs/bert folder --to huggingface --config bert-base
      shardwise checkpoint convert folder checkpoints --to shardwise
    """
    with open_output(as_json) as out:
        if wanted not in FORMATS:
            raise UsageError(f"--to {wanted} is no format of checkpoints{did_you_mean(wanted, FORMATS)}; use {', '.join(FORMATS)}")
        if not path.exists():
            raise UsageError(f"{path} is not there; name a checkpoint, a run folder, or a folder of weights")
        from shardwise.run.checkpoint.conversion import convert_checkpoint, format_of  # here: the command starts fast
        from shardwise.units import parse_bytes

        try:
            found = format_of(path)
        except UsageError:
            path, found = newest_checkpoint(path) if path.is_dir() else path, "shardwise"
        with out.working(f"converting {path}"):
            keys = convert_checkpoint(path, target, wanted, parse_bytes(max_size), config)
        kinds = Counter(kind for kind, _, _ in keys)
        words = ", ".join(f"{count} of kind {kind}" for kind, count in kinds.items())
        out.text(f"{path} ({found}) to {target} ({wanted}): {words}")
        out.answer({"source": str(path), "target": str(target), "from": found, "to": wanted, "tensors": dict(kinds)})


def require_folder(path: Path) -> None:
    """Raise `UsageError` where no folder is."""
    if not path.is_dir():
        raise UsageError(f"{path} is not a folder; name a checkpoint, or the run folder that `shardwise train` printed")


def newest_checkpoint(path: Path) -> Path:
    """Return the checkpoint at `path`: itself, or the newest in it or in its `checkpoints`.

    Raises:
        UsageError: no such folder; CheckpointError: no checkpoint in it.
    """
    require_folder(path)
    from shardwise.run.checkpoint.folder import committed_checkpoints  # here: the command starts fast
    from shardwise.run.checkpoint.manifest import MANIFEST

    if (path / MANIFEST).exists():
        return path
    for folder in (path, path / FOLDER):
        if saved := committed_checkpoints(folder):
            return folder / saved[-1].name
    raise CheckpointError(f"{path} holds no checkpoint; a run writes one every so many steps and at its end")


def _show_checkpoint(path: Path, manifest: Manifest, out: CommandOutput, is_complete: bool | None) -> None:
    from shardwise.run.checkpoint import inspect_checkpoint as summarize  # here: the command starts fast

    tensors = manifest.tensors
    parameters = [t for t in tensors if t.kind == "parameter"]
    size_bytes = sum(file.size_bytes for file in manifest.files)
    count = sum(t.size_bytes // t.item_bytes for t in parameters)
    facts = [
        ("checkpoint", str(path)),
        ("step", str(manifest.step)),
        ("parameters", f"{len(parameters)} tensors, {format_count(count)} numbers"),
        ("size", f"{format_bytes(size_bytes)} in {len(manifest.files)} files, written by {manifest.num_ranks} ranks"),
    ]
    if is_complete is not None:
        facts.append(("whole", "yes: every file has its size and SHA-256"))
    out.table(TextTable("Checkpoint", ("", ""), tuple(facts)))
    rows = tuple((t.kind, t.slot, t.name, f"{t.dtype}{t.shape}", format_bytes(t.size_bytes)) for t in tensors[:MAX_ROWS])
    hidden = len(tensors) - len(rows)
    out.table(TextTable("Tensors", ("kind", "slot", "name", "shape", "size"), rows, right=(4,), note=f"{hidden} more" if hidden else ""))
    out.answer({"path": str(path), "whole": is_complete, **summarize(path)})
