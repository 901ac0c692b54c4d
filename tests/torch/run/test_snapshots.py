"""State that outlives a rank, against the state itself; the vote, against all orders in which ranks write."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardwise.errors import RunError
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.run.engine import Engine
from shardwise.run.rank_model.model_source import CachedModelSource
from shardwise.run.recovery import snapshots
from shardwise.run.recovery.fingerprints import fingerprint_of, wrap_to_int64
from shardwise.run.recovery.gradient_snapshots import GradientSnapshots, encode_mark
from shardwise.run.recovery.snapshots import RankState, Snapshots, agree_on_intact_step, agree_on_step, newest_common_step, required_bytes
from shardwise.world import persistent_memory, recorder
from shardwise.world.persistent_memory import PersistentMemory, create_memory_files
from shardwise.world.recorder import CollectiveRecorder
from shardwise.world.world import RecoveryContext, World


def world_of(record: Path, memory: PersistentMemory) -> World:
    world = World(recorder=CollectiveRecorder(record, memory.rank))
    world.rank = memory.rank
    world.recovery = RecoveryContext(memory, None, lambda generation: world)
    return world


def tensors() -> list[torch.Tensor]:
    numbers = torch.zeros((), dtype=torch.int64), torch.zeros(7, dtype=torch.bfloat16)
    return [torch.zeros(5, 3), *numbers, torch.zeros(0), torch.zeros(2, 2).t()]


def test_who_replaces_a_rank_has_its_state_bit_for_bit(tmp_path: Path) -> None:
    recorder.create_record_file(tmp_path / "record", 1)
    held, state, fixed = create_memory_files(1), tensors(), [torch.randn(3)]
    snapshots = Snapshots(world_of(tmp_path / "record", PersistentMemory(0, held)), RankState(state, fixed))
    was = []
    for step in range(1, 4):
        for x in state:
            x.copy_(torch.randn(x.shape) * 100)
        was.append([x.clone() for x in state])
        snapshots.take(step, {"loss": 0.1 + step})
    new, new_fixed = tensors(), [torch.zeros(3)]
    world = world_of(tmp_path / "record", PersistentMemory(0, held))
    other = Snapshots(world, RankState(new, new_fixed))
    assert agree_on_step(world) == 3
    for step in (3, 2):
        assert other.restore(step) == {"loss": 0.1 + step}
        assert all(map(torch.equal, new, was[step - 1]))
        assert torch.equal(new_fixed[0], fixed[0])


@pytest.mark.parametrize("size", [1, 100, 12_345])
def test_what_ranks_hold_alike_is_kept_once_among_them(tmp_path: Path, size: int) -> None:
    """Ranks 0, 1 and 2 hold a tensor alike, and two others with only one of them; whoever replaces one of them has all. Sides differ:
    rank 1 has made a step more, and makes it again."""
    recorder.create_record_file(tmp_path / "record", 3)
    held = create_memory_files(3)
    alike: list[dict[int, tuple[int, ...]]] = [{1: (0, 1, 2), 2: (0, 1)}, {1: (0, 1, 2), 2: (0, 1), 3: (1, 2)}, {1: (0, 1, 2), 3: (1, 2)}]

    def states() -> list[RankState]:
        return [RankState([torch.zeros(3), *(torch.zeros(size * k, dtype=torch.float64) for k in (1, 2, 3))], (), one) for one in alike]

    def snapshots(of: list[RankState]) -> list[Snapshots]:
        return [Snapshots(world_of(tmp_path / "record", PersistentMemory(rank, held)), state) for rank, state in enumerate(of)]

    def fill(of: list[RankState], step: int) -> None:
        for rank, (state, mine) in enumerate(zip(of, alike, strict=True)):
            for n, x in enumerate(state.mutable):
                x.copy_(torch.arange(x.numel()) * 10.0 + step + (0 if n in mine else 0.1 * rank))

    first = states()
    keeping = snapshots(first)
    for step in (1, 2, 3):
        fill(first, step)
        for one in keeping if step < 3 else keeping[1:2]:
            one.take(step, {})
    new, expected = states(), states()
    for again in (2, 3):
        fill(expected, again)
        going_on = snapshots(new)
        for one, state, wanted in zip(going_on, new, expected, strict=True):
            one.restore(again)
            assert all(map(torch.equal, state.mutable, wanted.mutable))
            assert one.first_difference(again) is None
        if again == 2:
            fill(new, 3)
            for one in going_on:
                one.take(3, {})
                assert set(one.steps) == {2, 3}
    first_shared = [required_bytes(state) for state in new]
    alone = [required_bytes(state._replace(replicated_on={})) for state in new]
    assert size < 1000 or all(a < 0.8 * b for a, b in zip(first_shared, alone, strict=True))


def test_who_finds_another_value_says_where_it_is(tmp_path: Path) -> None:
    recorder.create_record_file(tmp_path / "record", 2)
    held = create_memory_files(2)
    states = [RankState([torch.ones(2), torch.arange(1000.0)], (), {1: (0, 1)}) for _ in range(2)]
    keeping = [Snapshots(world_of(tmp_path / "record", PersistentMemory(rank, held)), state) for rank, state in enumerate(states)]
    for one, state in zip(keeping, states, strict=True):
        one.takes_fingerprints = True
        one.take(1, {})
        sums = {id(x): int(fingerprint_of(x)) for x in state.mutable}
        assert all(wrap_to_int64(added) == sums[tensor] for tensor, added in one.fingerprints.items())
        state.mutable[1][700] = -1.0
    assert [one.first_difference(1) for one in keeping] == [None, (1, 700)]  # whoever keeps that part


def test_memory_of_another_size_holds_nothing(tmp_path: Path) -> None:
    recorder.create_record_file(tmp_path / "record", 1)
    held = create_memory_files(1)
    Snapshots(world_of(tmp_path / "record", PersistentMemory(0, held)), RankState(tensors())).take(4, {})
    world = world_of(tmp_path / "record", PersistentMemory(0, held))
    Snapshots(world, RankState([torch.zeros(10_000)]))
    assert agree_on_step(world) is None


def test_memory_that_others_cannot_read_holds_all(tmp_path: Path) -> None:
    recorder.create_record_file(tmp_path / "record", 1)
    x = torch.arange(5000.0)
    alone = Snapshots(world_of(tmp_path / "record", PersistentMemory(0)), RankState([x], (), {0: (0, 1)}))
    alone.take(1, {})
    x.zero_()
    alone.restore(1)
    assert torch.equal(x, torch.arange(5000.0))


@pytest.mark.parametrize("library", [True, False])
@pytest.mark.parametrize("size", [0, 1, 7, 63, 64, 65, 4096, 16383, 16384, 100_003])
def test_memory_that_is_gone_through_once_is_copied_and_added_exactly(monkeypatch: pytest.MonkeyPatch, size: int, library: bool) -> None:
    if not library:
        monkeypatch.setattr(persistent_memory, "_native_library", lambda: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    room = torch.zeros(size + 9, dtype=torch.uint8)
    for start in (0, 1, 5):
        x = torch.randint(0, 256, (size,), dtype=torch.uint8)
        added = persistent_memory.copy_past_caches(room[start : start + size], x)
        assert torch.equal(room[start : start + size], x)
        assert not room[start + size :].any()
        room.zero_()
        words, rest = x[: size // 8 * 8].tolist(), x[size // 8 * 8 :].tolist()
        total = sum(int.from_bytes(bytes(words[i : i + 8]), "little") for i in range(0, len(words), 8)) + sum(rest)
        assert int(fingerprint_of(x)) % (1 << 64) == total % (1 << 64)
        assert (added is None) is not library or added is None or added % (1 << 64) == total % (1 << 64)


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
        held = held and newest_common_step(sides) == min(at) // 2
        for rank in range(ranks):
            boundary = at[rank] % 2 == 0 and not eager
            if at[rank] < len(writes) and (not boundary or min(at) // 2 == at[rank] // 2):
                todo.append(tuple(n + (r == rank) for r, n in enumerate(at)))
    assert held is not eager


def test_a_note_that_is_too_long_is_refused(tmp_path: Path) -> None:
    recorder.create_record_file(tmp_path / "record", 1)
    world = world_of(tmp_path / "record", PersistentMemory(0, create_memory_files(1)))
    snapshots = Snapshots(world, RankState([torch.ones(2)]))
    with pytest.raises(ValueError, match="1,0"):
        snapshots.take(1, {"text": "x" * 5000})
    assert agree_on_step(world) is None


class Counting(torch.nn.Module):
    """Whose buffers are of several kinds, one of them written; a parameter does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 3)
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.register_buffer("shift", torch.randn(6))
        self.still = torch.nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(self.mask, self.out(self.norm(x + self.shift)), 0) * self.still


@pytest.mark.parametrize("precision", ["float32", "float64", "bfloat16"])
def test_who_takes_over_a_state_needs_no_initial_values(precision: str) -> None:
    torch.manual_seed(0)
    plan, batch = Plan(Layout.parse(f"precision={precision}"), "m", "c", 4), torch.randn(4, 6)
    source = CachedModelSource.from_model(Counting)

    def engine(source: CachedModelSource) -> Engine:
        return Engine(plan, source, batch, lambda y, _: y.square().mean(), World(), "adamw", seed=1)

    first, other = engine(source), engine(replace(source, has_values=False))
    first.step(batch)
    for x, y in zip((*first.state().mutable, *first.state().constant), (*other.state().mutable, *other.state().constant), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        y.copy_(x)
    assert first.step(batch).loss == other.step(batch).loss
    assert all(map(torch.equal, first.state().mutable, other.state().mutable))


def flip(memory: PersistentMemory, name: str, at: int) -> None:
    data = memory.memory(memory.size(name), name)
    data[at] ^= 4


def test_a_bit_that_flips_in_kept_memory_is_told_and_the_step_before_is_taken(tmp_path: Path) -> None:
    """Every byte of a half, one after another: of state, note, digests and what is constant; the other half stays as it is."""
    recorder.create_record_file(tmp_path / "record", 1)
    held, state, fixed = create_memory_files(1), [torch.randn(5), torch.randn(3)], [torch.randn(3)]
    memory = PersistentMemory(0, held)
    world = world_of(tmp_path / "record", memory)
    snapshots = Snapshots(world, RankState(state, fixed))
    for step in (1, 2):
        state[0] += 1
        snapshots.take(step, {"loss": step})
    assert agree_on_intact_step(world, snapshots) == (2, "")
    found: dict[tuple[int | None, bool], int] = {}
    for at in range(memory.size()):
        flip(memory, "state", at)
        step, words = agree_on_intact_step(world, snapshots)
        assert bool(words) == (step != 2) or step == 1
        found[step, bool(words)] = found.get((step, bool(words)), 0) + 1
        damaged = [number for number in (1, 2) if snapshots.find_damage(number)]
        for number in damaged:
            with pytest.raises(RunError, match=f"after step {number} in the memory of rank 0 has another digest"):
                snapshots.restore(number)
        flip(memory, "state", at)
    note = len('{"loss": 1}')
    assert found[1, True] == 4 * 8 + note + 8 + 8 + 4  # two tensors, the note, digests and length: each once in this half
    assert found[None, True] == 3 * 4  # what is constant is in both
    assert snapshots.restore(2) == {"loss": 2}


def test_a_bit_that_flips_in_kept_gradients_ends_the_run(tmp_path: Path) -> None:
    recorder.create_record_file(tmp_path / "record", 1)
    memory = PersistentMemory(0, create_memory_files(1))
    kept = GradientSnapshots(world_of(tmp_path / "record", memory), [12, 40])
    half = kept.begin(3)
    assert half is not None
    kept.write(half, 0, torch.ones(3))
    kept.write(half, 1, torch.ones(7))
    kept.commit(half, mark := encode_mark(3, 2, 1))
    assert [kept.read(mark, index)[1] for index in (0, 1)] == [1, 1]
    at = memory.memory(memory.size("gradients"), "gradients")[:].index(torch.ones(7).numpy().tobytes())
    flip(memory, "gradients", at + 9)
    assert kept.read(mark, 0)[1] == 1
    with pytest.raises(RunError, match="the gradients of step 4 in the memory of rank 0 have another digest"):
        kept.read(mark, 1)


def test_a_pace_costs_at_most_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of 40 ms after steps of 100 ms: 2 % of the time is one in 20 steps. Where that is an hour there is none, and none is found."""
    recorder.create_record_file(tmp_path / "record", 1)
    now = [0.0]
    monkeypatch.setattr(snapshots.time, "perf_counter", lambda: now[0])
    world, x = world_of(tmp_path / "record", PersistentMemory(0, create_memory_files(1))), torch.zeros(4)
    kept = Snapshots(world, RankState([x]), is_paced=True)
    monkeypatch.setattr(kept, "_take", lambda *_: now.__setitem__(0, now[0] + 0.04))
    taken = []
    for step in range(1, 60):
        now[0] += 0.1
        taken += [step] if kept.take(step, {}) else []
    assert taken == [1, 2, 22, 42]
    monkeypatch.setattr(kept, "_take", lambda *_: now.__setitem__(0, now[0] + 100.0))
    assert not any(kept.take(step, {}) for step in range(62, 70))
    assert kept.steps == (None, None)
