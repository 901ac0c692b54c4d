"""Gathers of a ZeRO-3 stage layer by layer: proven by the checker, bounded in memory, and as fast as the closed form of two lanes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.errors import ProgramError
from shardwise.plan.ir.action import Action
from shardwise.plan.ir.check import check
from shardwise.plan.ir.program import Compute, ComputeOp, Manage, ManageOp, Program
from shardwise.schedules.lower import gather_layers
from shardwise.simulate.clock import simulate


def most_whole(program: Program) -> int:
    """Return the largest number of layers that are whole at the same time."""
    whole, most = set[int](), 0
    for action in program.actions[0]:
        if isinstance(action, Manage):
            (whole.add if action.op is ManageOp.UNSHARD else whole.discard)(action.stage)
        most = max(most, len(whole))
    assert not whole
    return most


@pytest.mark.parametrize("num_layers", [1, 2, 5])
@pytest.mark.parametrize("ahead", [0, 1])
def test_is_proven_and_bounded(num_layers: int, ahead: int) -> None:
    program = gather_layers(num_layers, ahead)
    check(program)
    assert most_whole(program) == min(num_layers, 1 + ahead)
    gathers = [a.stage for a in program.actions[0] if isinstance(a, Manage) and a.op is ManageOp.UNSHARD]
    assert gathers == [*range(num_layers), *reversed(range(num_layers))]  # each once a direction, in the order of use


@pytest.mark.parametrize(("compute_s", "gather_s"), [(2.0, 1.0), (1.0, 3.0)])
def test_gathers_ahead_hide_behind_compute(compute_s: float, gather_s: float) -> None:
    """Of n layers a direction shows one gather and n - 1 times what a gather lasts longer than the layer before."""
    n = 6
    times = [
        simulate(gather_layers(n, ahead), lambda a: compute_s if a.stage < n else 0.0, lambda *_: 0.0, manage_s=lambda a: gather_s).total_s
        for ahead in (0, 1)
    ]
    shown = gather_s + (n - 1) * max(0.0, gather_s - compute_s)
    assert times == [pytest.approx(2 * n * (compute_s + gather_s)), pytest.approx(2 * (n * compute_s + shown))]


def gathered_layer(program: Program, instead: int, of: int) -> tuple[Action, ...]:
    """Return the row with the first gather of layer `of` replaced by one of another layer."""
    row = list(program.actions[0])
    row[row.index(Manage(ManageOp.UNSHARD, of))] = Manage(ManageOp.UNSHARD, instead)
    return tuple(row)


def gathered_late(program: Program, layer: int) -> tuple[Action, ...]:
    """Return the row with a layer's gather after its forward."""
    row = list(program.actions[0])
    row.remove(Manage(ManageOp.UNSHARD, layer))
    row.insert(row.index(Compute(ComputeOp.F, layer, 0)) + 1, Manage(ManageOp.UNSHARD, layer))
    return tuple(row)


def test_gathers_of_another_layer_or_too_late_are_refused() -> None:
    program = gather_layers(4)
    for row, named in (
        (gathered_layer(program, 3, 2), r"3UNSHARD makes w\(3\)"),
        (gathered_late(program, 2), r"2F0 reads w\(2\), which is not held"),
    ):
        with pytest.raises(ProgramError, match=named):
            check(replace(program, actions=(row,)))
