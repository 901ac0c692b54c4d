"""The names that users rely on: exactly these, each of them there, and none that costs torch before it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import shardwise

NAMES = {
    "Cluster", "Engine", "Layout", "Microbatches", "Plan", "Timeline", "Verification", "accumulate", "auto_parallelize", "comm_hook",
    "compare", "decoder", "errors", "estimate", "explain", "full_state_dict", "gather", "is_main", "launch", "load", "num_ranks",
    "parallelize", "plan", "print", "prove", "rank", "reduce", "report", "save", "scaling", "shard", "simulate", "verify", "whatif",
}  # fmt: skip


def test_the_public_names_are_the_interface() -> None:
    assert set(shardwise.__all__) == NAMES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_public_name_is_there_and_described(name: str) -> None:
    assert getattr(shardwise, name).__doc__


@pytest.mark.parametrize("name", ["plan", "report", "simulate"])
def test_a_part_that_is_also_a_verb_can_be_called(name: str) -> None:
    assert callable(getattr(shardwise, name))


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="paralellize"):
        _ = shardwise.paralellize  # type: ignore[attr-defined]


def test_importing_shardwise_does_not_load_torch() -> None:
    code = "import sys, shardwise; shardwise.Plan, shardwise.Layout, shardwise.errors; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
