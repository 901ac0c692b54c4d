"""The verbs that lead to other frameworks and back: `plan --to`, `export` and `import`, as they are typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import run

HERE = "gpt-tiny --cluster 1xcpu-2 --batch 8"


def answer_of(words: str, capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert run([*words.split(), "--json"]) == 0
    answer: dict[str, Any] = json.loads(capfd.readouterr().out)
    return answer


def test_plan_and_export_write_the_same(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan, file = tmp_path / "plan.toml", tmp_path / "run.args"
    planned = answer_of(f"plan {HERE} --layout data=2 --to torchtitan -o {plan}", capfd)["export"]
    exported = answer_of(f"export {plan} --to torchtitan -o {file}", capfd)
    assert planned["files"][0]["text"] == exported["files"][0]["text"] == file.read_text()
    assert (planned["layout"], planned["prediction"]["step_time_s"]) == (exported["layout"], exported["prediction"]["step_time_s"])
    assert str(planned["layout"]).startswith("data=2")


def test_what_is_lost_has_its_price(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *HERE.split(), "--layout", "data=2 zero=1 recompute=selective", "--to", "torchtitan", "--json"]) == 0
    lost = {one["key"]: one for one in json.loads(capfd.readouterr().out)["export"]["lost"]}
    assert (lost["zero"]["instead"], lost["recompute"]["instead"]) == (2, "full")
    assert lost["zero"]["memory_bytes"] <= 0 <= lost["recompute"]["step_time_s"]  # weights are sharded as well; more is computed again


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (f"plan {HERE} --to torchtitam", "torchtitam is unknown (did you mean torchtitan?)"),
        (f"plan {HERE} --layout tensor=2 --to pytorch", "plain PyTorch cannot say tensor=2"),
    ],
)
def test_what_cannot_be_written_is_refused(words: str, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(words.split()) == 2
    assert said in " ".join(capfd.readouterr().err.split())


MEGATRON = "--tensor-model-parallel-size 2 --micro-batch-size 2 --global-batch-size 8 --bf16 --fp8-format hybrid --lr 1e-3"


def test_an_import_is_priced_by_part(capfd: pytest.CaptureFixture[str]) -> None:
    words = [
        "import",
        "--model",
        "gpt-tiny",
        "--cluster",
        "dgx-h100",
        "--devices",
        "8",
        "--json",
        "--",
        "pretrain_gpt.py",
        *MEGATRON.split(),
    ]
    assert run(words) == 0
    answer = json.loads(capfd.readouterr().out)
    assert answer["layout"] == "data=4 tensor=2 pipeline=1 precision=bfloat16"
    assert answer["fits"]
    assert answer["memory_bytes"]["total"] == pytest.approx(sum(size for part, size in answer["memory_bytes"].items() if part != "total"))
    assert answer["rows"][0]["step_time_s"] == answer["step_time_s"] > 0
    told = {one["key"]: one["why"] for one in answer["unpriced"]}
    assert "16 bits" in told["fp8_format"]
    assert told["lr"] == ""  # listed, and without effect


def test_what_does_not_fit_says_by_how_much_and_what_does(capfd: pytest.CaptureFixture[str]) -> None:
    command = "pretrain_gpt.py --micro-batch-size 8 --global-batch-size 64 --bf16"
    words = f"import --model gpt-1.3b --cluster dgx-a100-40 --devices 8 --search-seconds 0.1 --json -- {command}"
    assert run(words.split()) == 0
    answer = json.loads(capfd.readouterr().out)
    assert not answer["fits"]
    assert answer["shortage_bytes"] == pytest.approx(answer["memory_bytes"]["total"] - answer["memory_limit_bytes"])
    assert answer["nearest_fit"]["fits"]
    assert "0.1 s" in answer["better"]["note"]  # the search is stopped by the clock, and says so
