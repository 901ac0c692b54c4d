"""`scripts/bench out_of_core`: what can be trained under one limit of memory a rank, and how fast: pipelines, GEMS, recomputation, offload.

Out: rows and tables in the terminal, `--json FILE`, and docs/benchmarks/out_of_core.md: the largest sample and the largest batch of each
way, samples a second at given sizes beside shardwise's own choice, and the published shape of GEMS (speed-up over MP-Basic by number of
batches), simulated and measured. Every way trains the same model on two ranks whose limit is enforced. What has been measured is written
after every part, also where a later one is interrupted. Exit status 4 where shardwise's choice fails.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.common.arithmetic import Row, Series, Target, as_json, judge, row
from bench.common.document import command, header, lines_of, load, markdown, show, terminal, versions
from bench.common.measure import turn
from bench.common.processes import ROOT
from bench.memory.out_of_core_gems import BATCH, MODEL, Point, measured_shape, shape_of_gems
from bench.memory.out_of_core_tries import LATE, OWN, SWAPS, Size, Tried, Tries, Way, largest, ways
from shardwise.units import format_bytes, parse_bytes
from shardwise.world.launch.launch import ALLOCATOR

PAGE = ROOT / "docs" / "benchmarks" / "out_of_core.md"
KIND = "out of core"
SAME = " (the same plan)"

INTRO = """Two ranks, each with the limit; all ways train the same model in float32 with AdamW from the same weights. Ratios are the other
way's time over that of shardwise's choice (more than 1: shardwise's choice is faster), by round, then their median; ways take turns
within a round.
Where shardwise's choice is the plan of another way, that row is two runs of one plan: it shows how far runs lie apart, and judges nothing.
A way that exceeds the limit ends with the error that a user would see, and counts as not fitting. "swap or drop" is data parallelism for
whose every layer shardwise chooses whether its activations stay, move to the host or are made again. A size is the largest of those that
were
offered: the next one was tried and did not fit, except where "or more" says that there was none, or no time. Samples a second beside it
are of its first step. "predicted" is what the plan says that the fullest rank holds, without its margin. GEMS is beside MP-Basic with one
thread a rank; at most two of its ranks compute at a time, so that two cores suffice for four stages."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is trained within `limit`: ascending `extents` with a batch of `at.batch`, ascending `batches` at `at.extent`, and `at`
    and `tight` for samples a second: where most ways fit, and where few do."""

    limit: str
    extents: tuple[int, ...]
    batches: tuple[int, ...]
    at: Size
    tight: Size | None = None

    @property
    def title(self) -> str:
        at = self.at
        return f"{at.model} within {self.limit} a rank, {at.key}s at batch {at.batch} and batches at {at.key} {at.extent}"


RESNET, GPT = "resnet-18", "gpt-10m"
SUBJECTS = {
    "resnet": Subject("2GiB", (512, 768, 1024, 1280, 1536, 2048), (4, 8, 12, 16), Size(RESNET, 1024, 4), Size(RESNET, 1024, 8)),
    "gpt": Subject("512MiB", (256, 512, 768, 1024, 1536, 2048, 3072), (4, 8, 12, 16, 24, 32), Size(GPT, 512, 8), Size(GPT, 512, 16)),
}
TINY = "resnet-tiny"
QUICK = Subject("5MiB", (64, 128), (4, 8), Size(TINY, 64, 4))
PARTS = (*SUBJECTS, "gems")


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest extent and batch of a way, each with what it gave; `more`: whether no larger one was tried."""

    extent: Size | None
    batch: Size | None
    at_extent: Tried
    at_batch: Tried
    more_extent: bool
    more_batch: bool


@dataclass
class Found:
    """What has been measured so far."""

    rows: list[Row] = field(default_factory=list)
    series: dict[str, list[Series]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, dict[str, Largest]] = field(default_factory=dict)  # by subject's title, by way
    points: list[Point] = field(default_factory=list)
    failed: str = ""  # why shardwise's own choice does not run


def _for(size: Size, chosen: Sequence[Way]) -> list[Way]:
    """The ways that a model of this kind can be trained in."""
    return [way for way in chosen if size.key == "image" or not way.images]


def sizes_of(subject: Subject, chosen: Sequence[Way], tries: Tries, into: dict[str, Largest], keep: Callable[[], None]) -> None:
    """What each way trains at most."""
    at = subject.at
    for way in chosen:
        run, expected = partial(tries.once, way=way), partial(tries.expected, way=way)
        extent, first, more = largest([Size(at.model, n, at.batch) for n in subject.extents], run, expected)
        batch, second, still = largest([Size(at.model, at.extent, n) for n in subject.batches], run, expected)
        into[way.name] = Largest(extent, batch, first, second, not more, not still)
        keep()


def rates_of(size: Size, chosen: Sequence[Way], tries: Tries, rounds: int, found: Found, say: Callable[[str], None]) -> None:
    """Seconds a step of each way at one size, in turn; one that fails once is left out from then on."""
    label = f"{size.model}, {size}"
    seconds: dict[str, list[float]] = {}
    last: dict[str, Tried] = {}
    for number in range(rounds):
        this: dict[str, Tried] = {}
        for name in turn([way.name for way in chosen if number == 0 or way.name in seconds], number):
            tried = tries.run(size, next(way for way in chosen if way.name == name), 2)
            if tried.is_late:
                break
            if tried.why:
                found.skipped[f"{name} ({label})"] = tried.why
                seconds.pop(name, None)
            else:
                this[name] = tried
        else:  # only whole rounds count
            last |= this
            for name, tried in this.items():
                seconds.setdefault(name, []).append(tried.seconds[-1])
            continue
        say(f"  {label}: {LATE} after {number} rounds")
        break
    if not seconds:
        found.skipped.setdefault(f"all ways ({label})", LATE)
    made = {
        name: Series(name, tuple(s), losses=last[name].losses, memory_bytes=int(last[name].held_bytes), plan=last[name].layout)
        for name, s in seconds.items()
    }
    found.series[label] = list(made.values())
    if OWN in made:
        own = made[OWN]
        peers = [replace(one, name=one.name + SAME * (one.plan == own.plan)) for name, one in made.items() if name != OWN]
        found.rows += [row(label, KIND, own, one) for one in peers]
    elif why := found.skipped.get(f"{OWN} ({label})"):
        found.failed = f"{label}: {why}"


def gems_table(points: Sequence[Point]) -> Table:
    """The shape of GEMS."""
    table = Table(title="GEMS beside MP-Basic: speed-up by number of batches", title_justify="left")
    for name in ("stages", "batches", "simulated", "measured", "min..max"):
        table.add_column(name, justify="right")
    for p in points:
        shown = (f"{p.measured:.2f}", f"{p.least:.2f}..{p.most:.2f}") if p.measured else (p.why, "")
        table.add_row(str(p.stages), str(p.batches), f"{p.simulated:.2f}", *shown)
    return table


def rates_table(found: Found) -> Table:
    """Samples a second of each way, by what was trained."""
    table = Table(title="Images or sequences a second", title_justify="left")
    table.add_column("way")
    for label in found.series:
        table.add_column(label, justify="right")
    for way in dict.fromkeys(s.name for every in found.series.values() for s in every):
        by_label = {label: s for label, every in found.series.items() for s in every if s.name == way}
        table.add_row(way, *(_rates(label, by_label[label]) if label in by_label else "" for label in found.series))
    return table


def _rates(label: str, series: Series) -> str:
    """The median, and the least and the most of all rounds."""
    batch = _batch(label)
    return f"{_rate(label, series):.3g} ({batch / max(series.seconds):.3g} to {batch / min(series.seconds):.3g})"


def _rate(label: str, series: Series) -> float:
    return _batch(label) / series.median


def _batch(label: str) -> int:
    return int(label.rpartition(" ")[2])


def sizes_table(title: str, found: Mapping[str, Largest]) -> Table:
    """What each way trained at most."""
    table = Table(title=f"The largest that was trained: {title}", title_justify="left")
    for name in ("way", "size", "held", "predicted", "batch", "held", "predicted", "samples/s", "layout at the largest batch, or why not"):
        table.add_column(name, justify="left" if name == "way" or name.startswith("layout") else "right")
    for name, one in found.items():
        cells = []
        for size, tried, more, number in (
            (one.extent, one.at_extent, one.more_extent, one.extent.extent if one.extent else 0),
            (one.batch, one.at_batch, one.more_batch, one.batch.batch if one.batch else 0),
        ):
            said = f"{number}{' or more' if more else ''}" if size else "not known" if tried.is_late else "none"
            predicted = format_bytes(tried.predicted_bytes) if tried.predicted_bytes else ""
            cells += [said, format_bytes(tried.held_bytes) if tried.seconds else "", predicted]
        rate = f"{one.batch.batch / one.at_batch.seconds[-1]:.3g}" if one.batch else ""
        table.add_row(name, *cells, rate, one.at_batch.layout or one.at_batch.why)
    return table


TARGETS = (Target("shardwise's choice is the best or within 3 %", 0.97, lambda r: r.kind == KIND and not r.peer_name.endswith(SAME)),)


def options(arguments: Sequence[str]) -> argparse.Namespace:
    """The command's."""
    p = argparse.ArgumentParser(prog="scripts/bench out_of_core", description="training under a limit of memory", allow_abbrev=False)
    p.add_argument("--json", metavar="FILE", type=Path, help="write header, rows, sizes and the shape of GEMS to FILE")
    p.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to measure; the page then has these only")
    p.add_argument("--model", help="of the zoo, in place of the ResNet and the GPT, with --limit, --extents, --batches and --at")
    p.add_argument("--limit", help="of each rank; by default 2GiB for images and 512MiB for text")
    p.add_argument("--extents", type=int, nargs="+", metavar="N", help="pixels a side, or tokens, that are offered, ascending")
    p.add_argument("--batches", type=int, nargs="+", metavar="N", help="that are offered, ascending")
    p.add_argument("--at", type=int, nargs=2, metavar=("EXTENT", "BATCH"), help="what is held fixed, and trained for samples a second")
    p.add_argument("--microbatches", type=int, default=4)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--minutes", type=float, default=20.0, help="after which nothing more is tried")
    p.add_argument("--cluster", default="here")
    p.add_argument("--ways", nargs="+", choices=[w.name for w in ways(4)], default=[w.name for w in ways(4)])
    p.add_argument("--quick", action="store_true", help="a tiny model, few sizes, one round; does not write the page")
    given = p.parse_args(list(arguments))
    if not given.model and any((given.extents, given.batches, given.at)):
        p.error("--extents, --batches and --at are of a model; name one with --model")
    if given.quick:
        given.rounds, given.cluster = 1, "1xcpu-2"
    return given


def subjects(given: argparse.Namespace) -> list[Subject]:
    """What the options ask for."""
    if given.quick:
        return [QUICK]
    if not given.model:
        found = [SUBJECTS[name] for name in given.parts if name in SUBJECTS]
        return [Subject(given.limit or s.limit, s.extents, s.batches, s.at, s.tight) for s in found]
    usual = SUBJECTS["resnet" if Size(given.model, 1, 1).key == "image" else "gpt"]
    at = Size(given.model, *(given.at or (usual.at.extent, usual.at.batch)))
    extents, batches = (tuple(sorted(some or own)) for some, own in ((given.extents, usual.extents), (given.batches, usual.batches)))
    return [Subject(given.limit or usual.limit, extents, batches, at)]


def main(arguments: Sequence[str]) -> int:
    """Read the options, measure, tell."""
    given = options(arguments)
    if not given.quick and not ALLOCATOR.items() <= os.environ.items():
        # Ranks are forked from here, and the C library reads how it keeps freed memory when a process starts.
        os.execve(sys.executable, [sys.executable, "-m", "bench", "out_of_core", *arguments], {**os.environ, **ALLOCATOR})
    console = terminal()
    say = partial(console.print, highlight=False, markup=False)
    asked = subjects(given)
    about = header(
        command("out_of_core", arguments),
        versions(("torch",)),
        limit=", ".join(f"{s.at.model}: {format_bytes(parse_bytes(s.limit))} for each of two ranks, enforced" for s in asked) or "none",
        load=load(),
        measured=f"{given.rounds} rounds of 1 step after 1, in turn; medians of ratios by round. GEMS: {MODEL}, batches of {BATCH}",
    )
    found, deadline = Found(), time.monotonic() + 60 * given.minutes
    keep = partial(_keep, given, about, found)
    every = [(one, Tries(parse_bytes(one.limit), given.cluster, deadline, say)) for one in asked]
    chosen = [way for way in ways(given.microbatches) if way.name in given.ways]
    try:
        for subject, tries in every:
            for size in filter(None, (subject.at, subject.tight)):
                say(f"{size.model}, {size}: seconds a step within {subject.limit} a rank")
                rates_of(size, _for(size, chosen), tries, given.rounds, found, say)
                keep()
        if "gems" in given.parts:
            found.points = shape_of_gems((2, 4, 8), (2, 4, 8))
            if not given.quick and not given.model:
                say("GEMS beside MP-Basic")
                found.points = measured_shape(found.points, (2, 4), max(3, given.rounds), cluster=given.cluster)
                keep()
        for subject, tries in every:
            say(f"{subject.at.model}: the largest within {subject.limit} a rank")
            tried = [way for way in _for(subject.at, chosen) if way.name != SWAPS]
            sizes_of(subject, tried, tries, found.sizes.setdefault(subject.title, {}), keep)
    except KeyboardInterrupt:
        found.skipped["what comes after"] = "interrupted"
    _keep(given, about, found)
    show(console, found.rows, judge(TARGETS, found.rows, found.skipped), found.skipped)
    for table in _tables(found):
        console.print(table)
    if not given.quick:
        say(f"wrote {PAGE.relative_to(ROOT)}")
    if found.failed:
        print(f"shardwise: its own choice does not run: {found.failed}", file=sys.stderr)
    return 4 if found.failed else 0


def _tables(found: Found) -> list[Table]:
    sizes = [sizes_table(title, by_way) for title, by_way in found.sizes.items()]
    rates = [rates_table(found)] if any(found.series.values()) else []
    return [*rates, *sizes, *([gems_table(found.points)] if found.points else [])]


def _keep(given: argparse.Namespace, about: Mapping[str, Any], found: Found) -> None:
    """Write what there is."""
    verdicts = judge(TARGETS, found.rows, found.skipped)
    if given.json:
        more = {
            "largest": {title: {name: asdict(one) for name, one in by_way.items()} for title, by_way in found.sizes.items()},
            "samples_per_s": {label: {s.name: _rate(label, s) for s in every} for label, every in found.series.items()},
            "gems": [asdict(point) for point in found.points],
        }
        given.json.write_text(json.dumps(as_json(about, found.rows, verdicts, found.skipped) | more, indent=1) + "\n")
    if not given.quick:
        text = markdown(about, found.rows, verdicts, found.skipped, found.series, INTRO, "training under a limit of memory")
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text("\n".join([text, *(line for table in _tables(found) for line in lines_of(table))]))
