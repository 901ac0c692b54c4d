"""What one rank of all does: `shardwise.is_main`, `shardwise.print`."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import shardwise
from shardwise.world.world import World


def told(world: World) -> tuple[bool, bool, str]:
    paper = io.StringIO()
    shardwise.print("loss", 1.5, sep="=", end=";", file=paper)
    return bool(shardwise.is_main), shardwise.is_main(), paper.getvalue()


def test_rank_0_is_the_main_one_and_prints_alone(ranks: Callable[..., list[Any]]) -> None:
    assert ranks(told, 3) == [(True, True, "loss=1.5;"), (False, False, ""), (False, False, "")]
