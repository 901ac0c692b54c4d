"""Trivial mistakes are told before torch is loaded: here torch cannot be, and each is told nevertheless, with exit code 2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from shardwise.zoo.listing import zoo_names
from shardwise.zoo.names import FAMILIES, published_sizes

MISTAKES = {
    "plan gpt-10m --cluster 1xcpu-2 --batch 8 --layout dta=2": "did you mean data?",
    "plan gpt-10m --cluster 8xp3.16xlarg --batch 8": "did you mean p3.16xlarge?",
    "plan gpt-10m --batch 8 --objective tme": "did you mean time?",
    "plan gpt-10m --batch 8 --constrain tensr<=2": "did you mean tensor?",
    "plan gpt-10n --batch 8": "did you mean gpt-10m",
    "plan nofile.py:make --batch 8": "there is no file nofile.py",
    "plan hf:none.json --batch 8": "there is no file none.json",
    "plan gpt-10m --batch 8 --device-memory 2XiB": "unknown unit 'XiB'",
    "verify gpt-tiny --layout dta=2": "did you mean data?",
    "verify gpt-tiny --layout data=2 --dtype float99": "float99 is unknown",
    "verify gpt-tiny --layout data=2 --device tpu": "use cpu, cuda, auto",
    "verify gpt-tiny --layout data=2 --ranks 3": "leave --ranks out",
    "verify gpt-tine": "did you mean gpt-tiny",
    "verify none.toml": "cannot read the plan none.toml",
    "train none.toml": "none.toml cannot be read",
    "explain none.toml": "cannot read the plan none.toml",
    "simulate none.toml": "cannot read the plan none.toml",
    "simulate gpt-10n --batch 8": "did you mean gpt-10m",
    "estimate gpt-10n --cluster 1xcpu-2": "did you mean gpt-10m",
    "scaling gpt-10n --cluster 1xcpu-2": "did you mean gpt-10m",
    "checkpoint inspect none": "none is not a folder",
    "checkpoint convert none x --to safetensor": "did you mean safetensors?",
    "check none.txt": "cannot read none.txt",
    "collectives draw rng": "did you mean ring?",
    "schedule 1f1c --stages 2 --microbatches 2": "did you mean 1f1b?",
}
PROGRAM = """
import sys
sys.modules["torch"] = None  # importing it is an error from now on
from shardwise.cli import run
for line in sys.stdin.read().splitlines():
    print(f"\\n=== {run(line.split(' '))}", file=sys.stderr, flush=True)
"""


def said(lines: list[str], folder: Path) -> list[tuple[str, int]]:
    """Of each command: what it prints on standard error, and its exit code."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], input="\n".join(lines), text=True, capture_output=True, cwd=folder, check=True)
    found, text = [], ""
    for line in done.stderr.splitlines():
        if line.startswith("=== "):
            found.append((text, int(line.removeprefix("=== "))))
            text = ""
        else:
            text += line + "\n"
    return found


def test_each_is_told_without_torch(tmp_path: Path) -> None:
    found = said(list(MISTAKES), tmp_path)
    assert len(found) == len(MISTAKES)
    for (line, words), (text, code) in zip(MISTAKES.items(), found, strict=True):
        assert words in text, (line, text)
        assert code == 2, (line, text)


def test_what_needs_torch_would_fail_here(tmp_path: Path) -> None:
    ((text, code),) = said(["plan gpt-tiny --cluster 1xcpu-2 --batch 8 --layout data=2"], tmp_path)
    assert code == 4
    assert "torch" in text


def test_the_names_read_from_the_source_are_the_zoos() -> None:
    assert set(zoo_names()) == {*published_sizes(), *FAMILIES}
