"""`scripts/bench faults`: a hundred faults in running trainings, and how long each was felt.

In: layouts. Of each, runs with faults one after another, and runs that end or whose files come to harm; each is held against the run that
nothing touched. Out, by fault: seconds to the first word of it and to the next step, steps made again, whether the losses are the same
bit for bit, and how it came out; in the terminal, in `--json FILE` and in docs/benchmarks/faults.md. Beside it what of this torchrun with
DDP and torch.distributed.checkpoint, and torchft, do (`bench/faults/fault_peers`). Not measured: faults of the network
(`tests/ranks/train/test_elastic.py`).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from bench.common.document import command, header, lines_of, load, opening, terminal, versions
from bench.common.processes import ROOT
from bench.faults import fault_peers
from bench.faults.fault_cases import ENDINGS, FAULTS, Ending, Fault, placed, runs
from bench.faults.fault_host import Host
from bench.faults.fault_runs import BAD, Calm, Felt, calm, measure
from bench.faults.fault_solo import STEPS, alone
from shardwise.plan.layout import Layout

PAGE = ROOT / "docs" / "benchmarks" / "faults.md"
LAYOUTS = (
    "data=2", "data=2 zero=1", "data=2 zero=3", "tensor=2", "pipeline=2 microbatches=4", "pipeline=2 microbatches=4 schedule=zb-h1",
    "data=2 tensor=2",
)  # fmt: skip
GOAL_S = 0.2
WIDTH = 220  # of tables that are not for a terminal
AT_ONCE = 2  # runs that end: most of their time they start
QUICK = ("kill -9 of rank 1 before its step", "SIGSTOP of rank 0", "a loss that is not a number, once", "an exception on rank 1",
         "kill -9 of the launcher")  # fmt: skip
INTRO = """A small GPT trains on text while ranks, their launcher and their files come to harm. Most faults follow one another in
running trainings; those that end a run, or that come between two, have a run of their own, two at a time, and then the same command
is given again. `noticed`: from the fault to the first sentence that names it; `next step`: from the fault to the next step that is
told, or, where the run ended, from it to the end plus from the second command to its first step; medians over the layouts, and the
most. `made again`: the most steps of which rows were written already. `same losses`: in how many layouts the losses of all steps,
evaluations included, are, bit for bit, those of the run that nothing touched. A rank that hangs has `run.hang_after_s`, 5 s. A
checkpoint is saved every 20 steps.

How it came out: *went on* or, by design, *ended* with its own exit code and a sentence that names cause and remedy, and gone on with
to the same losses; else it is one of the bad ones. *silent*: other losses, and nobody was told. *orphans*: a process lives 1 s after
its launcher's end. *hang*: 60 s without a step or an end. *unclear*: another exit code or sentence than the case names. *lost*: told,
but the losses are not those of the calm run in the end. Commands are forked from a process that has torch in memory; ranks are harmed
by their own code at the call that the moment is named after, or by a signal from outside."""


def applies(fault: Fault, layout: Layout) -> bool:
    """Whether a fault can be of a layout."""
    copies = layout.data > 1 and layout.zero < 3
    return {"": True, "copies": copies, "no copies": not copies, "teams": layout.pipeline == 1}[fault.needs]


def of_layout(host: Host, layout: str, words: Sequence[str], parent: Path, console: Console, ends: bool = True) -> list[Felt]:
    """All cases of a layout whose names have one of `words`, `ends`: those that end a run, too; what comes out badly is told at once."""
    known = Layout.parse(layout)
    quiet: dict[int, Calm] = {}

    def calm_of(steps: int) -> Calm:
        if steps not in quiet:
            plan = next((one.plan for one in quiet.values()), None)
            quiet[steps] = calm(host, layout, steps, parent / f"calm-{steps}", plan)
        return quiet[steps]

    def wanted(case: Fault | Ending) -> bool:
        return any(word in case.name for word in words)

    found = list[Felt]()
    groups = [placed(group) for group in runs([f for f in FAULTS if wanted(f) and applies(f, known)])]
    longest = max((steps for cases, steps in groups if not cases[0].fault.alone), default=0)
    for number, (cases, steps) in enumerate(groups):
        steps = steps if cases[0].fault.alone else longest  # so that runs share the calm one
        mine = measure(host, layout, known.num_ranks, cases, steps, parent / f"run-{number}", calm_of(steps))
        _progress(console, mine)
        found += mine
    endings = list(filter(wanted, ENDINGS)) if ends else []
    undisturbed = calm_of(STEPS) if endings else None

    def ended(number: int) -> Felt:
        assert undisturbed is not None
        one = alone(host, layout, known.num_ranks, endings[number], parent / f"alone-{number}", undisturbed)
        _progress(console, [one])
        return one

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return found + list(pool.map(ended, range(len(endings))))


def _seconds(values: Sequence[float]) -> list[str]:
    known = [v for v in values if not math.isnan(v)]
    return [f"{median(known):.3f}", f"{max(known):.3f}"] if known else ["", ""]


def _table(title: str, names: Sequence[str], left: Sequence[int] = (0,)) -> Table:
    table = Table(title=title, title_justify="left")
    for number, name in enumerate(names):
        table.add_column(name, justify="left" if number in left else "right")
    return table


def table(found: Sequence[Felt]) -> Table:
    """A row a case."""
    names = ("fault", "noticed, s", "most", "next step, s", "most", "made again", "same losses", "came out")
    out = _table("Faults", names, (0, 7))
    for name in dict.fromkeys(one.name for one in found):
        mine = [one for one in found if one.name == name]
        cells = [*_seconds([one.noticed_s for one in mine]), *_seconds([one.next_step_s for one in mine])]
        came = Counter(one.outcome for one in mine)
        ways = ", ".join(way if len(came) == 1 else f"{way} {count}" for way, count in came.most_common())
        bad = "; ".join(one.layout for one in mine if one.outcome in BAD)
        again = str(max(one.lost for one in mine))
        out.add_row(
            name, *cells, again, f"{sum(one.same for one in mine)} of {len(mine)}", f"{ways} ({bad})" if bad and len(came) > 1 else ways
        )
    return out


def by_layout(found: Sequence[Felt]) -> Table:
    """What a killed rank costs, a row a layout."""
    names = ("layout", "kills", "noticed, s", "most", "next step, s", "most", f"under {GOAL_S:g} s", "made again", "slowest")
    out = _table("Killed ranks, by layout", names, (0, 8))
    for layout in dict.fromkeys(one.layout for one in found):
        kills = [one for one in found if one.layout == layout and one.kill]
        if not kills:
            continue
        known = [one for one in kills if not math.isnan(one.next_step_s)]
        slowest = max(known, key=lambda one: one.next_step_s, default=None)
        cells = [*_seconds([one.noticed_s for one in kills]), *_seconds([one.next_step_s for one in kills])]
        under = f"{sum(one.next_step_s < GOAL_S for one in known)} of {len(known)}"
        out.add_row(layout, str(len(kills)), *cells, under, str(max(one.lost for one in kills)), slowest.name if slowest else "")
    return out


def summary(found: Sequence[Felt]) -> Table:
    """How many cases came out badly, and which."""
    out = _table("Summary", ("of", "cases", "which"), (0, 2))
    out.add_row("all", str(len(found)), f"{len({one.name for one in found})} in {len({one.layout for one in found})} layouts")
    for kind in BAD:
        mine = [one for one in found if one.outcome == kind]
        which = [
            f"{name} ({', '.join(one.layout for one in mine if one.name == name)})" for name in dict.fromkeys(one.name for one in mine)
        ]
        out.add_row(kind, str(len(mine)), "; ".join(which))
    return out


def _progress(console: Console, found: Sequence[Felt]) -> None:
    for one in found:
        if one.outcome in BAD:
            console.print(f"  {one.outcome}: {one.name} ({one.layout}): {one.said}", markup=False)


def main(arguments: Sequence[str]) -> int:
    """Read the options, measure, tell."""
    p = argparse.ArgumentParser(prog="scripts/bench faults", description="faults in running trainings", allow_abbrev=False)
    p.add_argument("--json", metavar="FILE", type=Path, help="write header and every fault to FILE")
    p.add_argument("--layouts", nargs="+", default=list(LAYOUTS))
    p.add_argument("--ending", nargs="+", metavar="LAYOUT", help="layouts in which the cases that end a run are made; default: all")
    p.add_argument("--only", nargs="+", default=[""], metavar="WORDS", help="the cases that have these words in their names; no page")
    p.add_argument("--no-peers", action="store_true", help="shardwise alone; no page")
    p.add_argument("--quick", action="store_true", help="a few cases in one layout; no page")
    given = p.parse_args(list(arguments))
    about = header(command("faults", arguments), versions(("torch", "torchft")), load=load(), measured="each case once a layout")
    console, found = terminal() if sys.stdout.isatty() else Console(width=WIDTH), list[Felt]()
    with Host() as host:
        for layout in given.layouts[:1] if given.quick else given.layouts:
            ends = given.ending is None or layout in given.ending
            with tempfile.TemporaryDirectory() as folder:
                try:
                    mine = of_layout(host, layout, QUICK if given.quick else given.only, Path(folder), console, ends)
                except RuntimeError as error:  # even in peace it does not train; the other layouts are measured all the same
                    mine = [Felt("none", layout, math.nan, math.nan, 0, False, "lost", said=str(error))]
                    _progress(console, mine)
            console.print(f"{layout}: {len(mine)} cases")
            found += mine
    beside, whys = ([], {}) if given.quick or given.no_peers else fault_peers.measure(console)
    made = [summary(found), by_layout(found), table(found), *fault_peers.tables(beside, whys)]
    for one in made:
        console.print(one)
    none = {"peer": None, "peer_name": "", "ratio": None, "unit": "s"}
    rows = [{"case": f"{one.name}, {one.layout}", "shardwise": one.next_step_s, **none} for one in found]
    if given.json:
        peers = [asdict(one) for one in beside]
        text = json.dumps({"about": about, "rows": rows, "found": [asdict(one) for one in found], "peers": peers}, indent=1)
        given.json.write_text(text.replace("NaN", "null") + "\n")
    if not given.quick and not given.no_peers and given.only == [""]:
        PAGE.write_text(
            "\n".join([*opening("faults", about, f"{INTRO}\n\n{fault_peers.SETTINGS}"), *(line for one in made for line in lines_of(one))])
        )
        console.print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0
