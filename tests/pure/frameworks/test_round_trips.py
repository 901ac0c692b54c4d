"""A layout written as a framework's configuration and read again is the layout: 200 random ones for each framework."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import LayoutError, ShardwiseError
from shardwise.frameworks import EXPORTED, ExportedConfiguration, ExportRequest, export_layout, find_framework, read_configuration
from shardwise.frameworks.stage_tables import parse_table, schedule_of_table, write_table
from shardwise.plan.layout import Layout

LAYERS, SEQUENCE, WANTED, TRIES = 32, 2048, 200, 6000
CHOICES: dict[str, tuple[Any, ...]] = {
    "data": (1, 2, 4, 8), "tensor": (1, 1, 2, 4), "pipeline": (1, 1, 2, 4), "context": (1, 1, 2), "expert": (1, 1, 2, 4),
    "microbatches": (1, 2, 4, 8), "zero": (0, 1, 2, 3), "precision": ("float32", "bfloat16", "float16", "float64", "float8", "float8-rows"),
    "recompute": ("none", "full", "selective", "full:2"), "sequence_parallel": ("off", "on"), "grid": ("", "2x2", "1x2x2"),
    "schedule": ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "breadth-first"), "attention": ("ring", "gather", "ulysses"),
    "offload": ("none", "optimizer"), "compile": ("off", "on"), "segment": (1, 2), "neighbours": ("branch", "pipeline"),
    "shard": (1, 2, 4),
}  # fmt: skip


def random_layout(draw: random.Random) -> Layout | None:
    keys = {key: draw.choice(values) for key, values in CHOICES.items() if draw.random() < 0.35}
    if keys.get("context", 1) > 1:
        keys.setdefault("attention", draw.choice(CHOICES["attention"]))
    if keys.get("schedule") in ("interleaved", "breadth-first"):
        keys["chunks"] = 2
    if keys.get("grid"):
        keys.pop("tensor", None)
    try:
        layout = Layout(**keys)
    except LayoutError:
        return None
    is_plain = (layout.tensor > 1 or layout.sequence_parallel == "off") and (layout.zero or not layout.shard)
    return (
        layout
        if is_plain and (layout.pipeline > 1 or layout.schedule == "1f1b") and (layout.context > 1 or not keys.get("attention"))
        else None
    )


def can_be_said_in_the_file(framework: str, exported: ExportedConfiguration) -> bool:
    """Accelerate's file has no accumulation but DeepSpeed's: it is told, and said in the script."""
    layout = exported.layout
    told = any("Accelerator(gradient_accumulation_steps" in note for note in exported.notes)
    return framework != "accelerate" or layout.microbatches == 1 or not told


@pytest.mark.parametrize("name", EXPORTED)
def test_a_layout_that_is_written_is_read_again(name: str, tmp_path: Path) -> None:
    draw, framework, seen = random.Random(20), find_framework(name), 0
    for _ in range(TRIES):
        layout = random_layout(draw)
        if layout is None:
            continue
        batch = layout.data * layout.microbatches * draw.choice((1, 2, 4))
        try:
            exported = export_layout(framework, ExportRequest(layout, batch, "llama-8b", SEQUENCE, LAYERS, "LlamaDecoderLayer"))
        except ShardwiseError:
            continue
        if exported.lost or not can_be_said_in_the_file(name, exported):
            continue
        for file, text in exported.files.items():
            (tmp_path / file).write_text(text)
        read = read_configuration(tmp_path / next(iter(exported.files)), devices=layout.num_ranks, words={"layers": LAYERS})
        assert str(read.layout) == str(layout)
        assert read.framework == name
        seen += 1
        if seen == WANTED:
            return
    assert seen >= WANTED // 2, f"only {seen} layouts of {TRIES} can be said in {name}"


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2", "zb-v", "1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 3), (4, 8)])
def test_tables_have_every_action_once_and_name_their_schedule(schedule: str, stages: int, microbatches: int) -> None:
    layout = Layout(pipeline=stages, microbatches=microbatches, schedule=schedule)
    text = write_table(layout)
    rows = parse_table(text)
    words = [word for row in rows for word in row]
    forwards = [word for word in words if "F" in word]
    assert len(rows) == stages
    assert len(set(words)) == len(words)
    assert len(forwards) == layout.num_stages * microbatches
    assert sum("W" in word or "B" in word for word in words) == len(forwards)
    assert schedule_of_table(text, stages, microbatches) == (schedule, layout.chunks)
    swapped = text.replace("0F0", "0F9").replace("0F1", "0F0").replace("0F9", "0F1")
    assert schedule_of_table(swapped, stages, microbatches) is None


@pytest.mark.parametrize(
    ("name", "layout", "said"),
    [
        ("nanotron", "data=2 zero=3", "nanotron cannot say zero=3.*use zero=0 or zero=1"),
        ("deepspeed", "pipeline=2 microbatches=2", "cannot say pipeline=2"),
        ("accelerate", "data=2 expert=2 zero=3", "cannot say expert=2"),
        ("megatron", "data=2 compress=int8", "cannot say compress=int8"),
        ("megatron", "pipeline=2 microbatches=2 schedule=zb-h1", "cannot say schedule=zb-h1.*use schedule=1f1b"),
        ("megatron", "data=2 recompute=full:h.0", "cannot say recompute=full:h.0"),
        ("torchtitan", "pipeline=2 microbatches=2 schedule=chimera", "cannot say schedule=chimera"),
        ("lightning", "tensor=2x2", "cannot say tensor=2x2|ModelParallelStrategy"),
        ("pytorch", "tensor=2", "cannot say tensor=2"),
        ("axolotl", "data=3 shares=2/1/1", "cannot say shares=2/1/1"),
    ],
)
def test_what_a_framework_cannot_say_is_refused_by_name(name: str, layout: str, said: str) -> None:
    parsed = Layout.parse(layout)
    with pytest.raises(LayoutError, match=said):
        export_layout(find_framework(name), ExportRequest(parsed, 24 * parsed.data, "llama-8b", SEQUENCE, LAYERS))


@pytest.mark.parametrize(
    ("name", "layout", "key", "instead"),
    [
        ("torchtitan", "data=4 zero=1 precision=bfloat16", "zero", 2),
        ("torchtitan", "data=4 zero=3 recompute=selective", "recompute", "full"),
        ("megatron", "data=2 compile=on", "compile", "off"),
        ("nanotron", "data=2 pipeline=2 microbatches=2 neighbours=pipeline", "neighbours", "branch"),
        ("pytorch", "data=2 zero=1", "zero", 2),
        ("transformers", "data=2 zero=2 recompute=full segment=2", "segment", 1),
    ],
)
def test_what_a_framework_does_otherwise_is_told(name: str, layout: str, key: str, instead: object) -> None:
    exported = export_layout(find_framework(name), ExportRequest(Layout.parse(layout), 16, "llama-8b", SEQUENCE, LAYERS))
    assert [(lost.key, lost.instead) for lost in exported.lost] == [(key, instead)]
    assert getattr(exported.layout, key) == instead


@pytest.mark.parametrize("name", EXPORTED)
def test_weights_of_16_bits_are_what_a_framework_calls_bfloat16(name: str) -> None:
    words = ("bfloat16-mixed", "bfloat16")
    mixed, narrow = (export_layout(find_framework(name), ExportRequest(Layout(data=8, precision=word), 8)) for word in words)
    assert mixed.files == narrow.files
    assert mixed.lost == narrow.lost
    assert mixed.layout.precision == ("bfloat16-mixed" if narrow.layout.precision == "bfloat16" else narrow.layout.precision)


def test_unequal_microbatches_are_refused() -> None:
    with pytest.raises(LayoutError, match="unequal microbatches"):
        export_layout(find_framework("megatron"), ExportRequest(Layout.parse("data=2 microbatches=2"), 6))


def test_uneven_stages_go_to_megatrons_own_layout() -> None:
    layout = Layout.parse("pipeline=3 microbatches=3")
    exported = export_layout(find_framework("megatron"), ExportRequest(layout, 3, layers=9, stage_layers=(2, 3, 4)))
    assert "--pipeline-model-parallel-layout 'Et*2|t*3|t*4L'" in exported.files["megatron.args"]
