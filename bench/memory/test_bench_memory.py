"""`scripts/bench memory`: the page of made-up rows counts right, words that name nothing are errors, and the models are all there."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from bench.memory import memory
from bench.memory.memory import CAUSES, LAYOUTS, Row, conclusion, found, line, main, markdown, measure, picked
from shardwise.cost.memory.memory import MARGIN
from shardwise.plan.layout import Layout
from shardwise.zoo.resolve import resolve

ROOT = Path(__file__).parents[2]
ROWS = (
    Row("a", "data=2", 100.0, 100.0),
    Row("a", "tensor=2", 130.0, 100.0),
    Row("b", "data=2", 94.0, 100.0),
    Row("b", "tensor=2", 75.0, 100.0),
    Row("c", "data=2", 100.4, 100.0),
    Row("c", "tensor=2", note="does not run: it said so"),
)


def test_the_page_counts_what_is_near_and_what_the_margin_does_not_hold() -> None:
    assert MARGIN == 0.06
    text = markdown({"machine": "one", "versions": {"torch": "2"}}, ROWS)
    assert "| machine | one |\n| versions | torch 2 |" in text
    assert "| model | data=2 | tensor=2 |\n|---|---:|---:|\n| a | 0 | +30 |\n| b | -6 | -25 |\n| c | 0 | (1) |\n" in text
    assert "\n1. `c` in `tensor=2` does not run: it said so\n" in text
    assert "Within 10 %: 3 of 5. Mean absolute error: 12.3 %." in text  # (0 + 30 + 6 + 25 + 0.4) / 5
    assert "Worst over: +30 % (`a` in `tensor=2`). Worst under: -25 % (`b` in `tensor=2`)." in text
    assert "margin of 6 %: 2 of 5: `b` in `data=2`, `b` in `tensor=2`." in text  # 94 and 6 % of it are 99.64
    assert text.endswith(f"{CAUSES}\n")
    assert conclusion(ROWS[-1:]) == ["Nothing was measured."]


def test_what_the_margin_holds_exactly_does_not_exceed_it() -> None:
    assert not Row("a", "data=2", 100.0, 106.0).exceeds
    assert Row("a", "data=2", 100.0, 106.1).exceeds


def test_words_name_models_or_files_and_others_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    models = {"one": ("a", "b"), "two": ("c",)}
    assert picked(models, []) == [("one", "a"), ("one", "b"), ("two", "c")]
    assert picked(models, ["two", "b"]) == [("one", "b"), ("two", "c")]
    assert main(["--models", "swim"]) == 2
    assert "no model 'swim' (did you mean swin?)" in capsys.readouterr().err
    assert main(["--layouts", "data=two"]) == 2
    assert "data=two" in capsys.readouterr().err


def test_40_models_are_there_and_eight_layouts_that_run() -> None:
    models, missing = found()
    assert [(file, len(names)) for file, names in models.items()][:3] == [("vision", 13), ("sequence", 13), ("assorted", 5)]
    if find_spec("transformers") is None:
        assert len(missing) == 1
    else:
        assert missing == []
        assert sum(map(len, models.values())) == len({name for names in models.values() for name in names}) == 40
    assert len(LAYOUTS) == 8
    for layout in LAYOUTS:
        Layout.parse(layout)


def test_without_their_package_models_are_left_out_with_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "find_spec", lambda name: None)
    models, missing = found()
    assert list(models) == ["vision", "sequence", "assorted"]
    assert missing == ["transformers is not installed: the models of bench/memory/models/hugging_face.py are left out"]


def test_a_factory_is_a_model_of_every_command() -> None:
    subject = resolve(str(ROOT / "bench" / "memory" / "models" / "vision.py:nerf"))
    assert sum(p.numel() for p in subject.make().parameters()) == 51_524
    assert {name: tuple(x.shape) for name, x in subject.example().items()} == dict.fromkeys(("origins", "directions", "colours"), (256, 3))


def test_one_run_is_predicted_and_measured_and_one_that_fails_says_why() -> None:
    row = measure("vision", "pointnet", "data=1")
    assert row.note == ""
    assert sum(size for _, size in row.predicted_parts) == pytest.approx(row.predicted_bytes)
    assert dict(row.measured_parts)["parameters"] == 4 * 86_803
    assert abs(row.error) < 0.1
    failed = measure("vision", "pointnet", "data=64")
    assert failed.note.startswith("does not run: ")
    assert str(ROOT) not in failed.note
    assert failed.note in line(failed)
