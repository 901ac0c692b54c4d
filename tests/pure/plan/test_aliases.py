"""Names of other programs in layouts: understood, and written back in a layout's own words."""

from __future__ import annotations

import pytest

from shardwise.cli.changes import parse_changes
from shardwise.errors import LayoutError
from shardwise.plan.layout import Layout


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("dp=2 tp=4 pp=2 cp=2", "data=2 tensor=4 pipeline=2 context=2"),
        ("fsdp=8", "data=8 zero=3"),
        ("dp=2 fsdp=4", "data=8 zero=3 shard=4"),
        ("hsdp=4 zero=2", "data=4 zero=2"),
        ("dp=8 fsdp=on", "data=8 zero=3"),
        ("dp=8 fsdp=off", "data=8"),
        ("dp=8 ep=4", "data=8 expert=4"),
        ("pp=2 vpp=2 gas=4", "pipeline=2 chunks=2 schedule=interleaved microbatches=4"),
        ("pp=2 vpp=2 schedule=breadth-first gas=2", "pipeline=2 chunks=2 schedule=breadth-first microbatches=2"),
        ("tp=2 sp=true dtype=bf16 ac=full zero_stage=1", "tensor=2 sequence_parallel=on precision=bfloat16 recompute=full zero=1"),
        ("tp=2x2", "tensor=2x2"),
    ],
)
def test_other_names_mean_the_same_layout(written: str, meant: str) -> None:
    assert str(Layout.parse(written)) == str(Layout.parse(meant))


@pytest.mark.parametrize("text", ["dp=2 data=2", "dp=2 fsdp=two", "tp=x", "tpp=2", "fsdp=7b"])
def test_what_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(LayoutError):
        Layout.parse(text)


def test_changes_take_the_same_names() -> None:
    assert [str(change) for change in parse_changes(["tp=2", "dtype=bf16", "gpus=8"])] == ["tensor=2", "precision=bfloat16", "gpus=8"]
