"""Examples in help texts name what is there, and work as they are printed, one after the other."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import typer

from shardwise.cli import app, run
from tests.support import cli_examples, doc_blocks

ROOT = Path(__file__).parents[3]
# What users have before they type an example: made by this verb's, or by what stands here.
FIRST = ["train", "plan", "simulate", "demo"]


def examples(capfd: pytest.CaptureFixture[str]) -> list[list[str]]:
    """The words of all examples, those that make what others read first."""
    found: list[list[str]] = []
    for name, command in typer.main.get_command(app).commands.items():
        inner = getattr(command, "commands", None)
        for verb in [[name, sub] for sub in inner] if inner else [[name]]:
            if not command.hidden:
                assert run([*verb, "--help"]) == 0
                found += cli_examples.find(capfd.readouterr().out)
    return sorted(found, key=lambda words: FIRST.index(words[0]) if words[0] in FIRST else len(FIRST))


def test_files_of_the_repository_that_examples_name_exist(capfd: pytest.CaptureFixture[str]) -> None:
    every = examples(capfd)
    assert len(every) > 20
    named = {word.partition(":")[0] for words in every for word in words if word.startswith(("examples/", "docs/", "scripts/"))}
    assert named
    for name in named:
        assert (ROOT / name).exists(), f"an example of a help text names {name}, which does not exist"


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_examples_of_help_texts_work(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    doc_blocks.folder_of("", tmp_path)
    (tmp_path / "config.json").rename(tmp_path / "gpt2.json")
    (tmp_path / "accelerate.yaml").write_text(
        "distributed_type: FSDP\nnum_processes: 8\nmixed_precision: bf16\nfsdp_config: {fsdp_version: 2}\n"
    )
    text = (ROOT / "docs" / "schedules.md").read_text()
    (tmp_path / "mine.txt").write_text(re.findall(r"^```text\n(.*?)^```", text, re.S | re.M)[0])
    for words in examples(capfd):
        if words[0] not in FIRST:
            _complete(tmp_path)
        status, said = doc_blocks.run_words(["shardwise", *words], tmp_path)
        assert status == 0, f"shardwise {' '.join(words)} ended with {status}\n{said}"


def _complete(folder: Path) -> None:
    """Files under the names that examples have for a second plan and an earlier run's timeline."""
    for source, name in (("plan.toml", "other.toml"), ("runs/gpt_text/timeline.json", "runs/demo/timeline.json")):
        if not (folder / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / source, folder / name)
