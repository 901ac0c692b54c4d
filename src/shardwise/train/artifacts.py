"""Artifacts of a finished run: exported weights, a timeline of the last step, a sample of generated text.

Rank 0 writes; the others take part in gathering. Not modelled: sampling from a model that does not fit on one rank.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwise.errors import ShardwiseError
from shardwise.plan.ir.timeline import Span, Timeline
from shardwise.run.checkpoint import write_tensors
from shardwise.run.engine import Engine
from shardwise.run.state.precision import autocast_dtype_of
from shardwise.train.data.reading.tokenizers import tokenizer_of
from shardwise.train.training_task import TrainingTask
from shardwise.world.world import World
from shardwise.zoo.gpt import generate

if TYPE_CHECKING:
    from shardwise.train.loop import TrainingJob

MODEL, TIMELINE, SAMPLE = "model.safetensors", "timeline.json", "sample.txt"
MAX_SAMPLED_PARAMETERS = 2_000_000_000  # parameters
TEMPERATURE = 0.8
SAMPLE_LIMIT_S = 20.0


def write_artifacts(engine: Engine, job: TrainingJob, subject: TrainingTask, world: World, say: Callable[[str], None]) -> None:
    """Write all artifacts; a failure is only logged, since the last checkpoint is complete."""
    state = engine.full_state_dict()
    spans = gather_spans(engine.timeline, job.folder, world)
    if world.rank == 0:
        assert state is not None
        jobs: list[Callable[[], object]] = [lambda: export_weights(state, job.folder / MODEL)]
        if spans is not None:
            trace = spans.to_perfetto()
            jobs.append(lambda: _replace_text_file(job.folder / TIMELINE, trace))
        if job.corpus is not None and job.corpus.is_text and job.config.run.sample and engine.num_parameters <= MAX_SAMPLED_PARAMETERS:
            jobs.append(lambda: write_sample(state, job, subject, world))
        for do in jobs:
            try:
                do()
            except (OSError, ShardwiseError) as error:
                say(f"not written: {error}")
    world.all_reduce_max([0])


def is_export_complete(folder: Path, world: World) -> bool:
    """Return whether the exported weights exist; the same on every rank."""
    return bool(world.all_reduce_max([int(world.rank == 0 and (folder / MODEL).exists())])[0])


def export_weights(state: Mapping[str, Tensor], path: Path) -> None:
    """Write weights and buffers under the model's own names, atomically."""
    entries = sorted(state.items(), key=lambda item: -item[1].element_size())
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    try:
        write_tensors(temporary, entries, {"format": "pt"})
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def gather_spans(timeline: Timeline | None, folder: Path, world: World) -> Timeline | None:
    """Gather the timeline of the last step of all ranks on rank 0, through hidden files in the run folder; None on other ranks."""
    own_file = folder / f".timeline-{world.rank}.json"
    if timeline is not None:
        own_file.write_text(timeline.to_json(), encoding="utf-8")
    world.all_reduce_max([0])
    if world.rank:
        return None
    spans: list[Span] = []
    for rank in range(world.num_ranks):
        path = folder / f".timeline-{rank}.json"
        if path.exists():
            spans += [span._replace(rank=rank) for span in Timeline.from_json(path.read_text(encoding="utf-8")).spans]
            path.unlink()
    return Timeline(timeline.name if timeline else "", world.num_ranks, tuple(spans)) if spans else None


def write_sample(state: Mapping[str, Tensor], job: TrainingJob, subject: TrainingTask, world: World) -> None:
    """Generate text after the prompt for at most SAMPLE_LIMIT_S into `write_sample.txt`; do nothing if the model is no language model."""
    model = subject.make().to(world.device)
    model.load_state_dict(dict(state), strict=False)
    model.eval()
    run, section = job.config.run, job.config.data
    tokenizer = tokenizer_of(section.tokenizer, job.config.model.name)
    prompt = torch.tensor([tokenizer.encode([run.prompt])[0] or list(tokenizer.end or (0,))], device=world.device)
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads * world.num_ranks))  # the other ranks wait
    try:
        products = autocast_dtype_of(job.plan.layout.precision)
        with torch.no_grad(), torch.autocast(world.device.type, products, enabled=products is not None):
            if not _is_language_model(logits_of(model, prompt), prompt):
                return
            generator = torch.Generator(world.device).manual_seed(job.config.train.seed)
            ids, deadline = prompt, time.monotonic() + SAMPLE_LIMIT_S
            for _ in range(run.sample):
                step = partial(logits_of, model)
                ids = generate(step, ids, 1, sequence=section.sequence, temperature=TEMPERATURE, generator=generator)
                if time.monotonic() > deadline:  # a large model, or a busy machine
                    break
    finally:
        torch.set_num_threads(threads)
    _replace_text_file(job.folder / SAMPLE, tokenizer.decode(ids[0].tolist()))


def logits_of(model: torch.nn.Module, ids: Tensor) -> Any:
    """Return the model's logits BSV for token ids BS, which may be a field of its output."""
    out = model(ids)
    return getattr(out, "logits", out)


def _is_language_model(logits: Any, prompt: Tensor) -> bool:
    return isinstance(logits, Tensor) and logits.dim() == 3 and logits.shape[:2] == prompt.shape


def _replace_text_file(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
