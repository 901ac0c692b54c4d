"""Training in ranks that something else started (torchrun, srun, ssh), which goes on when a host or a rank is lost.

    running --lost--> roll call (who is left) --> a world of those, of the next generation --> what they hold, as a checkpoint --> running

In: a world that was joined, a job, plans for fewer ranks that were found beforehand. Out: what `loop.train` returns. Those who are left
keep their processes. The state after the last step that all of them have is in their memory; where replicas, or copies of what one host
alone had (`train/copies`), make it all of the state, that is gone on from, else the last checkpoint. Ranks that a plan has no use for wait
as spares.
"""

from __future__ import annotations

import gc
import json
import secrets
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from weft.errors import CheckpointError, RunError
from weft.plan.layout import Layout
from weft.plan.plan import Plan
from weft.run.state import checkpoint
from weft.run.state.checkpoint.piece import Piece
from weft.run.state.snapshots import all_common
from weft.train import loop
from weft.train.copies import Copied, Copies, State, mark, state_of
from weft.train.loop import CHECKPOINTS, Job, MakeEngine, Run, Summary, make_engine
from weft.train.metrics import FILE, Row, last_step
from weft.world.current import set_world
from weft.world.kept import Kept
from weft.world.peers import Peers
from weft.world.pending import LostPeer, is_lost
from weft.world.roll_call import RollCall
from weft.world.world import Survivor, World

FOLDER, PLANS = ".regroup", "plan-*.toml"
MEET_S = 10.0
MOST = 5  # losses after one step
SPARE_S = 60.0
PART_S = 3.0
DONE = "done"


@dataclass(frozen=True)
class _Left:
    """What a rank brings to those that are left: what it has run, whose snapshots it has, what it has copies of, and `why` that is over.
    `needed`: marks of all pieces that make up the state, of those that are lost, too."""

    run: Run | None
    why: str
    copies: Copies | None = None
    needed: frozenset[str] = frozenset()

    @property
    def steps(self) -> Sequence[int]:
        """After which this rank has its own state."""
        snapshots = self.run.snapshots if self.run is not None else None
        return [step for step in snapshots.steps if step is not None] if snapshots is not None else []

    @property
    def copied(self) -> Sequence[int]:
        """After which it has what others copied."""
        return sorted(self.copies.steps) if self.copies is not None else []

    def at(self, step: int) -> tuple[Row | None, list[Piece]]:
        """(what the last of so many steps told, the state after them), as far as they are here."""
        note: Row | None = None
        pieces: list[Piece] = []
        if self.run is not None and self.run.snapshots is not None and step in self.steps:
            note = self.run.snapshots.restore(step)
            pieces = self.run.engine.pieces()
        for one in self.copies.of(step) if self.copies is not None else ():
            note = note or dict(one.note)
            pieces += one.pieces
        return note, pieces


def train(world: World, job: Job, plans: Mapping[int, Plan], make: MakeEngine = make_engine) -> Summary:
    """Train to the last step, on those ranks that are left. `plans`: by number of ranks, the job's own among them.

    Raises what `loop.train` raises; RunError where there is no plan for those that are left, or no step was made between many losses.
    """
    subject = loop.prepared(job).subject
    attempt = _Attempt(world, world.boxes(tuple(range(world.num_ranks))), job)
    lineage = world.told(lambda: secrets.token_hex(4))
    left: _Left | None = None
    stuck = (-1, 0)  # a step, and losses since
    while True:
        row: Row | None = None
        run: Run | None = None
        state, copies = State(), None
        worlds = [attempt.world]
        with Peers(attempt.world, attempt.boxes, job.config.run.hang_after_s, worlds) as peers:
            try:
                if left is not None:
                    step, row = _given(attempt.world, attempt.job, left)
                    attempt = _planned(attempt, plans, step, left.why)
                    stuck = (step, stuck[1] + 1 if step == stuck[0] else 1)
                    if stuck[1] > MOST:
                        raise RunError(f"{stuck[1]} losses of ranks after step {step}, and no step further; the last: {left.why}")
                    left = None  # and with it the engine before
                    gc.collect()
                work = attempt.work
                if work is None:
                    state = state_of(attempt.world, attempt.boxes, ())
                    copies = _copies(attempt, state, worlds)
                    return _spare(attempt, copies)
                worlds.append(work)
                set_world(work)
                engine = make(work, attempt.job, subject)
                state = state_of(attempt.world, attempt.boxes, engine.pieces())
                copies = _copies(attempt, state, worlds)
                run = Run(work, attempt.job, subject, engine, row)
                if copies is not None:
                    run.keep = partial(Copied, copies, engine.pieces, job.config.train.steps)
                del engine
                summary = {**run.run(), **(copies.told() if copies is not None else {})}
                _part(attempt.world)
                if work.rank == 0:
                    shutil.rmtree(job.folder / FOLDER, ignore_errors=True)
                return summary
            except Exception as error:
                lost = error
            why = attempt.world.lost_why or (str(lost).split(": [")[0].split("\n")[0] if is_lost(lost) else "")
            folder = job.folder / FOLDER / lineage
            if not why:
                attempt.call(folder).fail(f"{type(lost).__name__}: {lost}")
                raise lost
            left = _Left(run, why, copies, state.needed) if run is not None or copies is not None or left is None else left
            del run, lost, copies
            peers.leave(why)
            for one in worlds:
                one.close()
            num_before = attempt.world.num_ranks
            attempt = _met(attempt, folder, why)
            attempt.world.before = (*worlds[0].before, *(one.recorder for one in worlds))
            left = replace(left, why=f"{num_before - attempt.world.num_ranks} of {num_before} ranks are lost ({why})")


@dataclass(frozen=True)
class _Attempt:
    """The ranks that are there, by host in `boxes`, and what they do. `generation`: of the last roll call."""

    world: World
    boxes: Sequence[Sequence[int]]
    job: Job

    def call(self, folder: Path) -> RollCall:
        return RollCall(folder.with_name(f"{folder.name}-{self.world.generation + 1}"), self.world.rank, self.boxes)

    @property
    def work(self) -> World | None:
        """The world of the ranks that the plan is for; None on others."""
        num_ranks = self.job.plan.layout.num_ranks
        if self.world.rank >= num_ranks:
            return None
        work = self.world.first(num_ranks)
        work.survivor = Survivor(Kept(work.rank), None, None)
        work.before = self.world.before
        return work


def _met(attempt: _Attempt, folder: Path, why: str) -> _Attempt:
    """Those that are left, in a world of their own; again, where one of them has not come."""
    world, boxes = attempt.world, attempt.boxes
    meeting, rank, generation = world.joined, world.rank, world.generation
    assert meeting is not None
    while True:
        generation += 1
        call = RollCall(folder.with_name(f"{folder.name}-{generation}"), rank, boxes)
        listener = meeting.listen()
        address, port = listener.getsockname()[:2]
        decision, mine = call.answer(str(address), int(port))
        if not mine:
            listener.close()
        rank = decision.ranks.index(rank)
        parts = [[i for i, one in enumerate(decision.ranks) if one in box] for box in boxes]
        boxes = sorted(part for part in parts if part)
        where = (listener if mine else None, decision.address, decision.port)
        transport = world.transport_of([len(box) for box in boxes])
        options = {"local_rank": world.local_rank, "device": world.device, "generation": generation, "transport": transport}
        try:
            return replace(attempt, world=meeting.meet((rank, len(decision.ranks)), where, MEET_S, **options), boxes=boxes)
        except LostPeer:
            continue
        except RunError as error:
            raise RunError(f"{error}; before that: {why}") from error


def _planned(attempt: _Attempt, plans: Mapping[int, Plan], step: int, why: str) -> _Attempt:
    """With a plan for as many ranks as there are, or as are of use. Raises RunError where there is none."""
    world, job = attempt.world, attempt.job
    fitting = max((n for n in plans if n <= world.num_ranks), default=0)
    if not fitting:
        numbers = ", ".join(map(str, sorted(plans)))
        left = f"{why}; {world.num_ranks} are left, and there are plans for {numbers}"
        raise RunError(f"{left}: start it again on as many, and it goes on")
    spare = f", and {world.num_ranks - fitting} wait" if fitting < world.num_ranks else ""
    _say(world, f"{why}; {fitting} go on after step {max(0, step)} as {plans[fitting].layout}{spare}")
    peak = job.peak_flops / job.plan.layout.num_ranks * fitting
    return replace(attempt, job=replace(job, plan=plans[fitting], peak_flops=peak))


def _given(world: World, job: Job, left: _Left) -> tuple[int, Row | None]:
    """(the step that is gone on from, what it told where that may be lost): those that are left save what they hold, unless it is less than
    the last checkpoint, or not all of the state. Every rank of `world` calls it."""
    committed = checkpoint.committed(job.folder / CHECKPOINTS)
    saved = max((one.step for one in committed), default=-1)
    told = [json.loads(text) for text in world.gathered(json.dumps([left.steps, left.copied, saved]))]
    saved = max(one[2] for one in told)
    snapshots = [steps for steps, _, _ in told if steps]
    # Where nobody is left that has run, the copies are all there is.
    steps = [step for step in all_common(snapshots or [copied for _, copied, _ in told if copied]) if step > saved]
    first = ""
    for step in steps:
        note, pieces = left.at(step)
        why, row = _saved_by_those_left(world, job, step, (note, pieces, left.needed))
        if not why:
            return step, row
        first = first or why
    if first:
        of_step = f"the last checkpoint, of step {saved}, does" if saved >= 0 else "there is no checkpoint, so that it begins again"
        _say(world, f"{first}; {of_step}")
    return saved, None


def _saved_by_those_left(
    world: World, job: Job, step: int, here: tuple[Row | None, Sequence[Piece], frozenset[str]]
) -> tuple[str, Row | None]:
    """(why the state after `step` steps is not whole, what the last of them told where that may be lost): it is saved where it is. `here`:
    what this rank knows of that step, what it has of the state, and the marks of all of it."""
    note, pieces, needed = here
    facts = {"row": note, "pieces": sorted({mark(piece) for piece in pieces}), "all": sorted(needed)}
    told = [json.loads(text) for text in world.gathered(json.dumps(facts))]
    owners: dict[str, int] = {}
    for rank, one in enumerate(told):
        for name in one["pieces"]:
            owners.setdefault(name, rank)
    if missing := {name for one in told for name in one["all"]} - owners.keys():
        return f"{len(missing)} pieces of the state after step {step} are lost with those that held them", None
    mine: dict[str, Piece] = {}
    for piece in pieces:
        mine.setdefault(mark(piece), replace(piece, owner=owners[mark(piece)] == world.rank))
    token = checkpoint.from_first(world, checkpoint.claim(job.folder / CHECKPOINTS) if world.rank == 0 else 0)
    try:
        extra, keep = loop.extra_of(job, step), job.config.train.keep
        checkpoint.save(job.folder / CHECKPOINTS, step, list(mine.values()), extra, world, keep=keep, token=token)
    except CheckpointError as error:
        return f"those that are left do not hold all of the state after step {step} ({error})", None
    row: Row | None = next((one["row"] for one in told if one["row"] and "loss" in one["row"]), None)
    told_before = checkpoint.from_first(world, int(row is None or last_step(job.folder / FILE) >= step))
    return "", None if told_before or row is None else {key: value for key, value in row.items() if key != "token"}


def _copies(attempt: _Attempt, state: State, worlds: list[World]) -> Copies | None:
    """What copies this rank's state to other hosts, and theirs to this one; None where there is nothing to copy, or no room."""
    world, every = attempt.world, attempt.job.config.run.copy_every
    if state.why:
        _say(world, state.why)
    if not state.sends or attempt.job.plan.layout.staleness:
        return None
    worlds.append(beside := world.beside("copies"))
    return Copies(beside, attempt.boxes, state, None if every == "auto" else every, partial(_say, world))


def _spare(attempt: _Attempt, copies: Copies | None) -> Summary:
    """Wait for the end of the run, or, as a LostPeer, for a loss; keep what others copy to here."""
    set_world(attempt.world)
    if copies is not None:
        copies.receive()
    while not attempt.world.is_told(DONE, SPARE_S):
        pass
    if copies is not None:
        copies.close()
    _part(attempt.world)
    return {"run_folder": str(attempt.job.folder), "step": attempt.job.config.train.steps, "stopped": False, "spare": True}


def _part(world: World) -> None:
    """The run is done: nobody ends before the others know, since one of them has the store."""
    with suppress(RuntimeError):
        world.tell(DONE)
        world.tell(f"part/{world.rank}")
        until = time.monotonic() + PART_S
        for rank in range(world.num_ranks):
            world.is_told(f"part/{rank}", max(0.0, until - time.monotonic()))


def _say(world: World, text: str) -> None:
    if world.rank == 0:
        print(f"weft: {text}", file=sys.stderr, flush=True)


def smaller(num_ranks: int, hosts: int) -> Sequence[int]:
    """The numbers of ranks that plans are found for beforehand: of one host less, of half of them, of one, of one rank.

    >>> smaller(32, 8), smaller(4, 2), smaller(4, 1)
    ((28, 16, 4, 1), (2, 1), ())
    """
    each = num_ranks // hosts
    return tuple(dict.fromkeys((*(each * n for n in (hosts - 1, hosts // 2, 1) if 0 < n < hosts), 1))) if hosts > 1 else ()


def with_fewer_replicas(layout: Layout, num_ranks: int) -> Layout | None:
    """A layout given by hand, on fewer ranks: fewer replicas of the same; None where these are too few for that.

    >>> str(with_fewer_replicas(Layout.parse("data=4 tensor=2 zero=1"), 6))
    'data=3 tensor=2 pipeline=1 zero=1'
    """
    each = layout.num_ranks // layout.data
    data = num_ranks // each
    if not data or layout.shares or layout.inner or layout.servers or each * layout.data != layout.num_ranks:
        return None
    return replace(layout, data=data) if data > 1 else replace(layout, data=1, zero=0)


def plan_file(folder: Path, num_ranks: int) -> Path:
    """Where a plan for fewer ranks lies."""
    return folder / f"plan-{num_ranks}.toml"
