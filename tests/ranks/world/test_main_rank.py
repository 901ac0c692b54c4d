"""What one rank of all does: `weft.is_main`, `weft.print`."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import weft
from weft.world.world import World


def told(world: World) -> tuple[bool, bool, str]:
    paper = io.StringIO()
    weft.print("loss", 1.5, sep="=", end=";", file=paper)
    return bool(weft.is_main), weft.is_main(), paper.getvalue()


def test_rank_0_is_the_main_one_and_prints_alone(ranks: Callable[..., list[Any]]) -> None:
    assert ranks(told, 3) == [(True, True, "loss=1.5;"), (False, False, ""), (False, False, "")]
