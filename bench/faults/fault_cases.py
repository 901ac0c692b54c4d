"""The cases of `scripts/bench faults`: what happens to whom, when, and what must be said of it.

Data alone. `Fault`s follow one another in running trainings and are to cost nothing; `Ending`s are one run each, which ends by design or is
harmed between two commands, and must be resumed to the same losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EVERYONE, FORKER, PREPARED = -1, -2, -3  # in place of a rank: all of them; what forks them; what forks that
RANDOM = "at a random time"
FIRST, APART, CALM = 12, 8, 14  # steps before the first fault, between two, and before one that is told by the losses before
SAVE_EVERY, EVALUATE_EVERY = 20, 10
NOW = ("at its start", "while ranks connect")  # before there is a step
SAVES = ("as a checkpoint begins", "before a checkpoint's commit", "after a checkpoint's commit")
END = "at the end"
LEARNT = 24  # steps until the next save, at which ranks learn at the latest what became of the one before
SEEN = 150  # steps that are made meanwhile, until it is seen that a process is stopped that ranks do not wait for


@dataclass(frozen=True, slots=True)
class Fault:
    """`where`: a moment of `fault_rank.MOMENTS`, or at a random time, by another process. `says`: a pattern of what must be said, with
    RANK for the rank. `then`: a second fault (how, moment, rank) that hits while the first is recovered from. `alone`: a run of its own.
    `needs`: "copies" or "teams": only of layouts in which a replica has the same weights, or in which two ranks have the same work."""

    name: str
    how: str
    rank: int = 1
    where: str = "before its step"
    says: str = "rank RANK was killed by"
    then: tuple[str, str, int] | None = None
    every: bool = False
    lasts: int = 0
    alone: bool = False
    needs: str = ""
    kill: bool = False  # of a rank by SIGKILL: what the goal speaks of


@dataclass(frozen=True, slots=True)
class Ending:
    """`how`: of `fault_rank`, or a function of `fault_solo`. `code`: what the command must end with; `says`: all these patterns. `mend`:
    a function of `fault_solo` that follows the remedy before the same command is run again; `resumes`: whether it then can. `also`: another
    code that will do: where ranks are in different collectives one may wait, which is a hang, and be replaced."""

    name: str
    how: str
    code: int
    says: tuple[str, ...]
    rank: int = 1
    where: str = "before its step"
    every: bool = False
    step: int = 30
    mend: str = ""
    resumes: bool = True
    also: int | None = None


def _kills() -> list[Fault]:
    moments = (
        "at its start", "while ranks connect", "while data is taken", "before its step", "in forward", "in backward", "in a collective",
        "between gradients and update", "in the update", "before a snapshot's header", "after a snapshot's header", "after its step",
        "in the evaluation", *SAVES, END,
    )  # fmt: skip
    found = [
        Fault(f"kill -9 of rank {rank} {where}", "SIGKILL", rank, where, kill=True, lasts=LEARNT * (where == SAVES[2]))
        for where in moments
        for rank in (0, 1)
    ]
    found += [Fault(f"kill -9 of rank {rank} in the first step", "SIGKILL", rank, "before its first step", kill=True) for rank in (0, 1)]
    for rank in (0, 1):
        again = ("SIGKILL", "at its start", rank)
        found.append(Fault(f"kill -9 of rank {rank}, and of the new one as it starts", "SIGKILL", rank, then=again, kill=True))
        other = ("SIGKILL", "while ranks regroup", 1 - rank)
        found.append(Fault(f"kill -9 of rank {rank}, and of rank {1 - rank} as it regroups", "SIGKILL", rank, then=other, kill=True))
    return found


FAULTS: tuple[Fault, ...] = (
    *_kills(),
    *(Fault(f"kill -9 of rank {n % 2} at a random time, {n}", "SIGKILL", n % 2, RANDOM, kill=True) for n in range(6)),
    Fault("kill -9 of all ranks at once", "SIGKILL", EVERYONE, RANDOM, r"rank \d was killed by"),
    *(Fault(f"{name} of a rank", name) for name in ("SIGSEGV", "SIGABRT", "SIGBUS")),
    *(Fault(f"a rank ends with code {code}", f"exit:{code}", code % 2, says="rank RANK exited with code") for code in (0, 1, 3)),
    *(Fault(f"SIGSTOP of rank {rank}", "SIGSTOP", rank, says="rank RANK: its process is stopped") for rank in (0, 1)),
    Fault("SIGSTOP of a rank at a random time", "SIGSTOP", 0, RANDOM, "rank RANK: its process is stopped"),
    *(Fault(f"rank {rank} sleeps for ever", "sleep", rank, says="rank RANK[ :]") for rank in (0, 1)),
    Fault("rank 0 holds the interpreter", "hold", 0, says="rank RANK gave no sign"),
    Fault("rank 1 holds the interpreter", "hold", 1, says="rank RANK gave no sign"),
    Fault("the disk is full at a save", "disk:ENOSPC", 0, SAVES[1], "No space left on device.*training goes on", lasts=LEARNT),
    Fault("the disk fails at a save", "disk:EIO", 0, SAVES[1], "the disk under .* fails; use another.*training goes on", lasts=LEARNT),
    Fault("the disk is read-only at a save", "disk:EROFS", 0, SAVES[1], "Read-only file system: .*training goes on", lasts=LEARNT),
    Fault("a loss that is not a number, once", "nan", EVERYONE, says="the loss is nan; it is rerun"),
    Fault("a loss that jumps, once", "jump", EVERYONE, says="the loss went up to .*is rerun"),
    Fault("a bit of a weight is flipped on one of two replicas", "flip:weight", says="bit was flipped", alone=True, needs="copies"),
    Fault("a bit of a weight is flipped that no other rank has", "flip:weight", says="bit was flipped", alone=True, needs="no copies"),
    Fault("a bit of the optimizer's state is flipped", "flip:state", says="bit was flipped", alone=True),
    Fault("a rank is slow in each step", "slow", says="wait for rank RANK", every=True, lasts=140, alone=True, needs="teams"),
    Fault("kill -9 of the process that forks ranks", "SIGKILL", FORKER, RANDOM, "process that .*ranks"),
    Fault("SIGSTOP of the process that forks ranks", "SIGSTOP", FORKER, RANDOM, "process that .*ranks", lasts=SEEN),
    Fault("kill -9 of the prepared process", "SIGKILL", PREPARED, RANDOM, "process that .*ranks"),
    Fault("SIGSTOP of the prepared process", "SIGSTOP", PREPARED, RANDOM, "process that .*ranks", lasts=SEEN),
)

ENDINGS: tuple[Ending, ...] = (
    Ending("an exception on rank 1", "raise", 4, ("rank 1 failed: ValueError: the batch has 7 labels for 8 samples",)),
    Ending("an exception on rank 0", "raise", 4, ("rank 0 failed: ValueError: the batch has 7 labels for 8 samples",), 0),
    Ending("no memory on one rank", "memory", 4, ("rank 1 failed: MemoryError: cannot allocate 12 GiB",)),
    Ending("sys.exit in one rank", "sys.exit:0", 4, ("rank 1 failed: .*sys.exit",)),
    Ending("a rank that is killed at the same step again and again", "SIGKILL", 4,
           (r"6 losses of ranks after step \d+, and no step further", "rank 1 was killed by SIGKILL"), every=True),
    Ending("a loss that is not a number, again and again", "nan", 4, ("the loss is nan at step", "learning_rate"), EVERYONE, every=True),
    Ending("a collective of another shape on one rank", "other shape", 4, ("rank [01].* in|in .* rank [01]",), also=0),
    Ending("a collective that one rank leaves out", "leave out", 4, ("rank [01].* in|in .* rank [01]",), also=0),
    Ending("SIGTERM of the launcher", "terminate", 75, ("told to stop: saving after step",)),
    Ending("SIGHUP of the launcher", "hang_up", 75, ("told to stop: saving after step",)),
    Ending("Ctrl-C", "interrupt", 75, ("told to stop: saving after step",)),
    Ending("Ctrl-C, twice", "interrupt_twice", 130, ("interrupted",)),
    Ending("kill -9 of the launcher", "kill_launcher", -9, ()),
    Ending("SIGSTOP of the launcher for 3 s", "stop_launcher", 0, ("launcher .*is stopped",)),
    Ending("a second launcher in the same run folder", "second_launcher", 0, ("is in use by another shardwise train",)),
    Ending("the text is written over during the run", "text_over", 4, ("text .* has changed", "restore"), 0,
           mend="restore_text"),
    Ending("the text is cut off during the run", "text_cut", 4, ("text .* has changed|cut off", "restore"), 0,
           mend="restore_text"),
    Ending("the run folder is removed during the run", "remove_folder", 4, ("was removed while the run went on",), resumes=False),
    Ending("checkpoints are removed during the run", "remove_checkpoints", 0, ("removed while the run went on",)),
    Ending("the disk is full at the last save", "disk:ENOSPC:always", 4, ("No space left on device", "free space"), 0,
           "after its step", step=120),
    Ending("a third of the text is replaced between two runs", "between:text_third", 2, ("text .*(changed|is not what)", "restore"),
           mend="restore_text"),
    Ending("a bit of plan.toml is flipped between two runs", "between:flip_plan", 2, ("plan.toml is not what this run wrote", "restore"),
           mend="restore_plan"),
    Ending("a bit of corpus.json is flipped between two runs", "between:flip_corpus", 2,
           ("corpus.json is not what this run wrote", "restore"), mend="restore_corpus"),
    Ending("a bit of the newest checkpoint is flipped between two runs", "between:flip_checkpoint", 0, ("step-",)),
    Ending("the newest checkpoint is cut off between two runs", "between:cut_checkpoint", 0, ("step-",)),
    Ending("a file of the newest checkpoint is missing", "between:lose_file", 0, ("step-",)),
    Ending("a bit of the newest manifest is flipped between two runs", "between:flip_manifest", 0, ("step-",)),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Placed:
    """A fault in a run, at a step."""

    fault: Fault
    step: int


def placed(faults: Sequence[Fault]) -> tuple[list[Placed], int]:
    """The faults of one run at steps far enough from one another, and how many steps it has.

    >>> found, steps = placed([Fault("a", "SIGKILL"), Fault("b", "SIGKILL", where=SAVES[0]), Fault("c", "nan")])
    >>> [one.step for one in found], steps
    ([12, 20, 34], 42)
    """
    at, out = FIRST, []
    for fault in faults:
        if fault.where in NOW or fault.where == "before its first step":
            out.append(Placed(fault, 0))
            continue
        if fault.where == END:
            continue
        every = SAVE_EVERY if fault.where in SAVES else EVALUATE_EVERY if fault.where == "in the evaluation" else 1
        at = -(-(at + (CALM - APART if fault.how in ("nan", "jump") and out else 0)) // every) * every
        out.append(Placed(fault, at))
        at += APART + fault.lasts
    out += [Placed(fault, at) for fault in faults if fault.where == END]
    return out, at


def runs(faults: Sequence[Fault]) -> list[list[Fault]]:
    """Which faults share a run: one at the start and one at the end of each, the others evenly.

    >>> [len(one) for one in runs([Fault("a", "exit:1", where="at its start"), Fault("b", "x", where=END), *[Fault("c", "x")] * 4])]
    [6]
    """
    single = [[fault] for fault in faults if fault.alone]
    shared = [fault for fault in faults if not fault.alone]
    first = [f for f in shared if f.where in NOW or f.where == "before its first step"]
    last = [f for f in shared if f.where == END]
    rest = [f for f in shared if f not in first and f not in last]
    count = max(1, len(first), len(last)) if shared else 0
    together = [[*first[n : n + 1], *rest[n::count], *last[n : n + 1]] for n in range(count)]
    return [*together, *single]
