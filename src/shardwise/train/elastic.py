"""Elastic training in ranks that torchrun, srun or ssh started: after the failure of a host or a rank the surviving ranks continue.

    running --peer loss--> membership vote --> a world of the next generation --> surviving state saved as a checkpoint --> running

Surviving ranks keep their processes. The state after the last step that all of them have is in their memory; if replicas or buddy
copies (`train/recovery/buddy_copies`) complete it, training resumes from it, else from the last checkpoint. Plans for fewer ranks were made
beforehand; ranks that a plan does not use wait as spares. Ranks that this program launches itself are replaced instead (`train/loop`).

In the field's terms: elastic restart.
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

from shardwise.errors import CheckpointError, RunError
from shardwise.plan.ir.metric_lines import Row
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.run import checkpoint
from shardwise.run.checkpoint.state_shard import StateShard
from shardwise.run.recovery.snapshots import common_steps
from shardwise.train import loop
from shardwise.train.loop import CHECKPOINTS, MakeEngine, Summary, TrainingJob, TrainingRun, make_engine
from shardwise.train.metrics import METRICS_FILE, last_step
from shardwise.train.recovery.buddy_copies import BuddyCopies, BuddySnapshots, CopyAssignment, assign_copies, shard_id
from shardwise.world.comm.pending import LostPeer, is_peer_loss
from shardwise.world.launch.current import set_world
from shardwise.world.launch.membership_vote import MembershipVote
from shardwise.world.peer_monitor import PeerMonitor
from shardwise.world.persistent_memory import PersistentMemory
from shardwise.world.world import RecoveryContext, World

VOTE_FOLDER, PLAN_PATTERN = ".regroup", "plan-*.toml"
RENDEZVOUS_S = 10.0
MAX_FAILURES_AT_STEP = 5  # peer losses after the same step
SPARE_POLL_S = 60.0
FINISH_TIMEOUT_S = 3.0
DONE = "done"


@dataclass(frozen=True)
class _SurvivingState:
    """State that a surviving rank contributes: snapshots of its run and buddy copies. `reason`: why the generation ended. `required`: ids
    of all shards of the state, including those of failed ranks."""

    run: TrainingRun | None
    reason: str
    copies: BuddyCopies | None = None
    required: frozenset[str] = frozenset()

    @property
    def steps(self) -> Sequence[int]:
        """Steps whose state this rank has in its own snapshots, undamaged."""
        snapshots = self.run.snapshots if self.run is not None else None
        return [step for step in snapshots.steps if step is not None and not snapshots.find_damage(step)] if snapshots is not None else []

    @property
    def copied_steps(self) -> Sequence[int]:
        """Steps whose state other ranks copied to this rank."""
        return sorted(self.copies.steps) if self.copies is not None else []

    def state_at(self, step: int) -> tuple[Row | None, list[StateShard]]:
        """Return (metrics row of step `step`, shards of the state after it), as far as this rank has them."""
        note: Row | None = None
        pieces: list[StateShard] = []
        if self.run is not None and self.run.snapshots is not None and step in self.steps:
            note = self.run.snapshots.restore(step)
            pieces = self.run.engine.state_shards()
        for copy in self.copies.copies_at(step) if self.copies is not None else ():
            if not copy.is_intact:  # its shards are missing then, and the checkpoint is gone on from
                continue
            note = note or dict(copy.note)
            pieces += copy.shards
        return note, pieces


def train(world: World, job: TrainingJob, plans: Mapping[int, Plan], make: MakeEngine = make_engine) -> Summary:
    """Train to the last step, on the ranks that survive. `plans`: by number of ranks, including the job's own.

    Raises what `loop.train` raises; RunError if no plan fits the surviving ranks, or after several peer losses without a step in between.
    """
    task = loop.prepare_job(job).task
    attempt = _Attempt(world, world.ranks_by_host(tuple(range(world.num_ranks))), job)
    lineage = world.broadcast_text(lambda: secrets.token_hex(4))
    surviving: _SurvivingState | None = None
    stuck = (-1, 0)  # a step, and the number of peer losses since
    while True:
        row: Row | None = None
        run: TrainingRun | None = None
        state, copies = CopyAssignment(), None
        worlds = [attempt.world]
        with PeerMonitor(attempt.world, attempt.ranks_by_host, job.config.run.hang_after_s, worlds) as peers:
            try:
                if surviving is not None:
                    step, row = _recover_state(attempt.world, attempt.job, surviving)
                    attempt = _select_plan(attempt, plans, step, surviving.reason)
                    stuck = (step, stuck[1] + 1 if step == stuck[0] else 1)
                    if stuck[1] > MAX_FAILURES_AT_STEP:
                        raise RunError(f"{stuck[1]} peer losses after step {step} without another step; the last: {surviving.reason}")
                    surviving = None  # and with it the previous engine
                    gc.collect()
                work = attempt.working_world
                if work is None:
                    state = assign_copies(attempt.world, attempt.ranks_by_host, ())
                    copies = _start_copies(attempt, state, worlds)
                    return _wait_as_spare(attempt, copies)
                worlds.append(work)
                set_world(work)
                engine = make(work, attempt.job, task)
                state = assign_copies(attempt.world, attempt.ranks_by_host, engine.state_shards())
                copies = _start_copies(attempt, state, worlds)
                run = TrainingRun(work, attempt.job, task, engine, row)
                if copies is not None:
                    run.make_snapshots = partial(BuddySnapshots, copies, engine.state_shards, job.config.train.steps)
                del engine
                summary = {**run.run(), **(copies.summary() if copies is not None else {})}
                _finish_together(attempt.world)
                if work.rank == 0:
                    shutil.rmtree(job.folder / VOTE_FOLDER, ignore_errors=True)
                return summary
            except Exception as error:
                failure = error
            folder = job.folder / VOTE_FOLDER / lineage
            why = _peer_loss_reason(attempt, failure, folder)
            if run is not None or copies is not None or surviving is None:
                surviving = _SurvivingState(run, why, copies, state.required)
            del run, failure, copies
            peers.leave(why)
            for closing in worlds:
                closing.close()
            num_before = attempt.world.num_ranks
            attempt = _reconvene_ranks(attempt, folder, why)
            attempt.world.previous_recorders = (*worlds[0].previous_recorders, *(closed.recorder for closed in worlds))
            surviving = replace(surviving, reason=f"{num_before - attempt.world.num_ranks} of {num_before} ranks failed ({why})")


@dataclass(frozen=True)
class _Attempt:
    """The ranks of one generation, by host in `ranks_by_host`, and their job."""

    world: World
    ranks_by_host: Sequence[Sequence[int]]
    job: TrainingJob

    def next_vote(self, folder: Path) -> MembershipVote:
        return MembershipVote(folder.with_name(f"{folder.name}-{self.world.generation + 1}"), self.world.rank, self.ranks_by_host)

    @property
    def working_world(self) -> World | None:
        """The world of the ranks that the plan uses; None on spares."""
        num_ranks = self.job.plan.layout.num_ranks
        if self.world.rank >= num_ranks:
            return None
        work = self.world.first_ranks(num_ranks)
        work.recovery = RecoveryContext(PersistentMemory(work.rank), None, None)
        work.previous_recorders = self.world.previous_recorders
        return work


def _peer_loss_reason(attempt: _Attempt, failure: Exception, folder: Path) -> str:
    """Describe the peer loss that ended an attempt. Any other failure is recorded for the next vote, and raised."""
    why = attempt.world.failure_reason or (str(failure).split(": [")[0].split("\n")[0] if is_peer_loss(failure) else "")
    if not why:
        attempt.next_vote(folder).record_failure(f"{type(failure).__name__}: {failure}")
        raise failure
    return why


def _reconvene_ranks(attempt: _Attempt, folder: Path, reason: str) -> _Attempt:
    """Form the world of the next generation from the surviving ranks; vote again if one of them fails to join."""
    world, boxes = attempt.world, attempt.ranks_by_host
    meeting, rank, generation = world.rendezvous, world.rank, world.generation
    assert meeting is not None
    while True:
        generation += 1
        call = MembershipVote(folder.with_name(f"{folder.name}-{generation}"), rank, boxes)
        listener = meeting.listen()
        address, port = listener.getsockname()[:2]
        decision, is_host = call.vote(str(address), int(port))
        if not is_host:
            listener.close()
        rank = decision.ranks.index(rank)
        surviving = [[i for i, old_rank in enumerate(decision.ranks) if old_rank in box] for box in boxes]
        boxes = sorted(ranks for ranks in surviving if ranks)
        where = (listener if is_host else None, decision.address, decision.port)
        transport = world.transport_of([len(box) for box in boxes])
        options = {"local_rank": world.local_rank, "device": world.device, "generation": generation, "transport": transport}
        try:
            return replace(
                attempt, world=meeting.reconvene((rank, len(decision.ranks)), where, RENDEZVOUS_S, **options), ranks_by_host=boxes
            )
        except LostPeer:
            continue
        except RunError as error:
            raise RunError(f"{error}; before that: {reason}") from error


def _select_plan(attempt: _Attempt, plans: Mapping[int, Plan], step: int, reason: str) -> _Attempt:
    """Select the plan with the most ranks that the world has. Raises RunError if there is none."""
    world, job = attempt.world, attempt.job
    fitting = max((n for n in plans if n <= world.num_ranks), default=0)
    if not fitting:
        numbers = ", ".join(map(str, sorted(plans)))
        shortage = f"{reason}; {world.num_ranks} survive, and there are plans for {numbers}"
        raise RunError(f"{shortage}: restart on one of these numbers to resume")
    spare = f", and {world.num_ranks - fitting} wait" if fitting < world.num_ranks else ""
    _print_on_first_rank(world, f"{reason}; {fitting} go on after step {max(0, step)} as {plans[fitting].layout}{spare}")
    peak = job.peak_flops / job.plan.layout.num_ranks * fitting
    return replace(attempt, job=replace(job, plan=plans[fitting], peak_flops=peak))


def _recover_state(world: World, job: TrainingJob, surviving: _SurvivingState) -> tuple[int, Row | None]:
    """Save the surviving state as a checkpoint, unless it is older than the last one or incomplete; every rank of `world` calls it. Return
    (step to resume after, its metrics row if that may not have been written)."""
    committed = checkpoint.committed_checkpoints(job.folder / CHECKPOINTS)
    saved = max((folder.step for folder in committed), default=-1)
    replies = [json.loads(text) for text in world.all_gather_text(json.dumps([surviving.steps, surviving.copied_steps, saved]))]
    saved = max(saved_step for _, _, saved_step in replies)
    snapshots = [steps for steps, _, _ in replies if steps]
    # If no rank that trained survives, the buddy copies are the only state.
    steps = [step for step in common_steps(snapshots or [copied for _, copied, _ in replies if copied]) if step > saved]
    first = ""
    for step in steps:
        note, pieces = surviving.state_at(step)
        why, row = _save_surviving_state(world, job, step, (note, pieces, surviving.required))
        if not why:
            return step, row
        first = first or why
    if first:
        remedy = f"resuming from the checkpoint of step {saved}" if saved >= 0 else "there is no checkpoint, so training starts anew"
        _print_on_first_rank(world, f"{first}; {remedy}")
    return saved, None


def _save_surviving_state(
    world: World, job: TrainingJob, step: int, local_state: tuple[Row | None, Sequence[StateShard], frozenset[str]]
) -> tuple[str, Row | None]:
    """Save the state after `step` steps if it is complete. Return (why it is incomplete, metrics row of the step if that may not have been
    written). `local_state`: this rank's row of that step, its shards of the state, and the ids of all shards."""
    note, pieces, needed = local_state
    facts = {"row": note, "pieces": sorted({shard_id(piece) for piece in pieces}), "all": sorted(needed)}
    replies = [json.loads(text) for text in world.all_gather_text(json.dumps(facts))]
    owners: dict[str, int] = {}
    for rank, reply in enumerate(replies):
        for name in reply["pieces"]:
            owners.setdefault(name, rank)
    if missing := {name for reply in replies for name in reply["all"]} - owners.keys():
        return f"{len(missing)} shards of the state after step {step} were only on failed ranks", None
    own: dict[str, StateShard] = {}
    for piece in pieces:
        own.setdefault(shard_id(piece), replace(piece, is_owner=owners[shard_id(piece)] == world.rank))
    token = checkpoint.broadcast_from_first(world, checkpoint.claim_folder(job.folder / CHECKPOINTS) if world.rank == 0 else 0)
    try:
        extra, keep = loop.checkpoint_metadata(job, step), job.config.train.keep
        checkpoint.save(job.folder / CHECKPOINTS, step, list(own.values()), extra, world, keep=keep, token=token)
    except CheckpointError as error:
        return f"the surviving ranks do not have all of the state after step {step} ({error})", None
    row: Row | None = next((reply["row"] for reply in replies if reply["row"] and "loss" in reply["row"]), None)
    is_written = checkpoint.broadcast_from_first(world, int(row is None or last_step(job.folder / METRICS_FILE) >= step))
    return "", None if is_written or row is None else {key: value for key, value in row.items() if key != "token"}


def _start_copies(attempt: _Attempt, assignment: CopyAssignment, worlds: list[World]) -> BuddyCopies | None:
    """Start buddy copies of shards between neighbouring hosts; return None if there is nothing to copy or no memory for it."""
    world, every = attempt.world, attempt.job.config.run.copy_every
    if assignment.reason:
        _print_on_first_rank(world, assignment.reason)
    if not assignment.shards_by_sender or attempt.job.plan.layout.staleness:
        return None
    worlds.append(copy_world := world.side_world("copies"))
    return BuddyCopies(
        copy_world, attempt.ranks_by_host, assignment, None if every == "auto" else every, partial(_print_on_first_rank, world)
    )


def _wait_as_spare(attempt: _Attempt, copies: BuddyCopies | None) -> Summary:
    """Wait on a spare rank for the end of the run, receiving buddy copies. Raises LostPeer when a rank fails."""
    set_world(attempt.world)
    if copies is not None:
        copies.receive()
    while not attempt.world.wait_for_flag(DONE, SPARE_POLL_S):
        pass
    if copies is not None:
        copies.close()
    _finish_together(attempt.world)
    return {"run_folder": str(attempt.job.folder), "step": attempt.job.config.train.steps, "stopped": False, "spare": True}


def _finish_together(world: World) -> None:
    """Wait until all ranks know that the run is done, since one of them hosts the key-value store."""
    with suppress(RuntimeError):
        world.set_flag(DONE)
        world.set_flag(f"part/{world.rank}")
        deadline = time.monotonic() + FINISH_TIMEOUT_S
        for rank in range(world.num_ranks):
            world.wait_for_flag(f"part/{rank}", max(0.0, deadline - time.monotonic()))


def _print_on_first_rank(world: World, text: str) -> None:
    if world.rank == 0:
        print(f"shardwise: {text}", file=sys.stderr, flush=True)


def smaller_rank_counts(num_ranks: int, hosts: int) -> Sequence[int]:
    """Numbers of ranks that plans are made for beforehand: one host less, half of the hosts, one host, one rank.

    >>> smaller_rank_counts(32, 8), smaller_rank_counts(4, 2), smaller_rank_counts(4, 1)
    ((28, 16, 4, 1), (2, 1), ())
    """
    each = num_ranks // hosts
    return tuple(dict.fromkeys((*(each * n for n in (hosts - 1, hosts // 2, 1) if 0 < n < hosts), 1))) if hosts > 1 else ()


def with_fewer_replicas(layout: Layout, num_ranks: int) -> Layout | None:
    """Return a layout given by hand with fewer replicas, so that it fits on `num_ranks`; None if one replica does not fit.

    >>> str(with_fewer_replicas(Layout.parse("data=4 tensor=2 zero=1"), 6))
    'data=3 tensor=2 pipeline=1 zero=1'
    """
    each = layout.num_ranks // layout.data
    data = num_ranks // each
    if not data or layout.shares or layout.inner or layout.servers or each * layout.data != layout.num_ranks:
        return None
    return replace(layout, data=data) if data > 1 else replace(layout, data=1, zero=0)


def plan_path(folder: Path, num_ranks: int) -> Path:
    """Path of a plan for fewer ranks in the run folder."""
    return folder / f"plan-{num_ranks}.toml"
