"""State that outlives a rank, against the state itself; the vote, against all orders in which ranks write."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch

from weft.run.state.snapshots import Snapshots, newest_common
from weft.world import recorder
from weft.world.kept import Held, Kept
from weft.world.recorder import Recorder
from weft.world.world import Survivor, World


def world_of(record: Path, kept: Kept) -> World:
    world = World(recorder=Recorder(record, 0))
    world.survivor = Survivor(kept, None, lambda generation: world)
    return world


def tensors() -> list[torch.Tensor]:
    numbers = torch.zeros((), dtype=torch.int64), torch.zeros(7, dtype=torch.bfloat16)
    return [torch.zeros(5, 3), *numbers, torch.zeros(0), torch.zeros(2, 2).t()]


def test_who_replaces_a_rank_has_its_state_bit_for_bit(tmp_path: Path) -> None:
    recorder.create(tmp_path / "record", 1)
    held, state, fixed = Held(), tensors(), [torch.randn(3)]
    snapshots = Snapshots(world_of(tmp_path / "record", Kept(held.ranks_end, 0)), state, fixed)
    was = []
    for step in range(1, 4):
        for x in state:
            x.copy_(torch.randn(x.shape) * 100)
        was.append([x.clone() for x in state])
        snapshots.take(step, {"loss": 0.1 + step})
    held.take()
    new, new_fixed = tensors(), [torch.zeros(3)]
    other = Snapshots(world_of(tmp_path / "record", held.of(0)), new, new_fixed)
    assert other.vote() == 3
    for step in (3, 2):
        assert other.restore(step) == {"loss": 0.1 + step}
        assert all(map(torch.equal, new, was[step - 1]))
        assert torch.equal(new_fixed[0], fixed[0])


def test_memory_of_another_size_holds_nothing(tmp_path: Path) -> None:
    recorder.create(tmp_path / "record", 1)
    held = Held()
    Snapshots(world_of(tmp_path / "record", Kept(held.ranks_end, 0)), tensors()).take(4, {})
    held.take()
    other, was = Held(), held.of(0).inherited
    assert Snapshots(world_of(tmp_path / "record", Kept(other.ranks_end, 0, was)), [torch.zeros(10_000)]).vote() is None


@pytest.mark.parametrize("eager", [False, True])
def test_the_vote_never_falls_behind_the_last_step_that_all_have_done(eager: bool) -> None:
    """A model of the protocol: ranks write in any order that the sums allow. Its broken twin begins a side before all have the other."""
    ranks, steps = 2, 3
    writes = [(step % 2, value) for step in range(1, steps + 1) for value in (None, step)]
    todo, seen, held = [(0,) * ranks], set[tuple[int, ...]](), True
    while todo:
        at = todo.pop()
        if at in seen:
            continue
        seen.add(at)
        sides = []
        for rank in range(ranks):
            pair: list[int | None] = [0, None]
            for side, value in writes[: at[rank]]:
                pair[side] = value
            sides.append((pair[0], pair[1]))
        held = held and newest_common(sides) == min(at) // 2
        for rank in range(ranks):
            boundary = at[rank] % 2 == 0 and not eager
            if at[rank] < len(writes) and (not boundary or min(at) // 2 == at[rank] // 2):
                todo.append(tuple(n + (r == rank) for r, n in enumerate(at)))
    assert held is not eager


def test_a_note_that_is_too_long_is_refused(tmp_path: Path) -> None:
    ours, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    recorder.create(tmp_path / "record", 1)
    snapshots = Snapshots(world_of(tmp_path / "record", Kept(ours, 0)), [torch.ones(2)])
    with pytest.raises(ValueError, match="1,0"):
        snapshots.take(1, {"text": "x" * 5000})
    assert snapshots.vote() is None
