"""The benchmark of splits: every kind has a layout that runs and a formula; formulas by hand; what is counted is what is sent."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

from bench.common.case import Case  # noqa: E402
from bench.training.split import KINDS, Bytes, wrong  # noqa: E402
from bench.training.split_bytes import counted  # noqa: E402
from bench.training.split_formulas import FORMULAS  # noqa: E402
from shardwise.plan.layout import Layout  # noqa: E402
from shardwise.zoo.resolve import resolve  # noqa: E402

TINY = Case("gpt:layers=2,hidden=32,heads=2,sequence=16,vocabulary=64", batch=4, sequence=16)


def test_every_kind_runs_and_has_a_formula() -> None:
    for kind in KINDS:
        layout = Layout.parse(kind.layout)
        assert layout.num_ranks == kind.ranks
        assert FORMULAS[kind.name](kind.case, kind.ranks) > 0
        assert kind.peer is not None or kind.why


def test_formulas_by_hand() -> None:
    size = 4.0 * sum(p.numel() for p in resolve(TINY.model).make().parameters())
    between = 4 * 16 * 32 * 4.0
    assert FORMULAS["data"](TINY, 2) == size
    assert FORMULAS["data"](TINY, 4) == 1.5 * size
    assert FORMULAS["tensor"](TINY, 2) == (4 * 2 + 2) * between
    for word, part in (("ring", 4.5), ("gather", 3.0), ("ulysses", 1.5)):
        assert FORMULAS[word](TINY, 4) == 1.5 * size + 2 * part * between
    assert FORMULAS["pipeline"](TINY, 2) == between + 64 * 32 * 4
    images = Case("resnet-tiny:image=32", batch=1, sequence=3 * 32 * 32, microbatches=1)
    # Rows of C x W words. Of stride 2 (the pool and three convolutions) a row goes one way, its gradient back; of stride 1 both ways.
    strided, plain = 16 * 16 + 16 * 8 + 32 * 4 + 64 * 2, 2 * 16 * 8 + 32 * 4 + 64 * 2
    assert FORMULAS["spatial"](images, 2) == 4.0 * (strided + 2 * plain)


@pytest.mark.long
def test_bytes_that_are_counted_are_the_formulas() -> None:
    sent = counted(TINY.model, TINY.batch, "data=2 zero=1 threads=1")
    assert sum(sent.values()) == pytest.approx(FORMULAS["zero=1"](TINY, 2), rel=0.01)


def test_other_bytes_than_the_formulas_are_an_error() -> None:
    assert not wrong([], [Bytes("data", "", "data=2", 1005.0, 1000.0)], {})
    assert "data: 1,020 bytes sent, +2.0%" in wrong([], [Bytes("data", "", "data=2", 1020.0, 1000.0)], {})[0]
