"""`scripts/verify_all --prove --random N`: random graphs under random layouts, proven in this process, each graph under many layouts.

In: numbers of graphs, how many layouts of each. Out: a row for each pair, in the terminal and in `--json FILE`, from which another run goes
on; exit status 4 where a pair differs, fails, is judged otherwise by `verify`, or passes with a fault.

What is traced and run serially of a graph serves all its layouts. Every `--verify-every`th pair is also held against float64: the same
plan, its ranks threads of this process, two steps. Every `--fault-every`th pair is proven again with one collective off by 1e-15.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bench.verify.mutations.collectives import function_of, module_of
from shardwise.run.prove import rank_threads
from tests.support.random_graphs import REFUSED, RandomSubject, example, prove_example, ranks_of, verify_in_threads

EQUAL, DIFFERS, FAILED, MISSED = "equal", "differs", "failed", "missed"
SAVE_EVERY_S = 20.0
FAULT = 1 + 1e-15


@dataclass(frozen=True, slots=True)
class ProvenPair:
    """A graph under a layout. `verified`: what `verify` says, `fault`: what became of one fault; empty where neither was asked."""

    graph: int
    variant: int
    layout: str
    status: str
    note: str = ""
    cpu_s: float = 0.0
    verified: str = ""
    fault: str = ""

    @property
    def is_bad(self) -> bool:
        """Whether it is a finding: wrong, or judged in two ways, or with a fault that was not found."""
        disagrees = bool(self.verified) and (self.verified == EQUAL) != (self.status == EQUAL)
        return self.status in (DIFFERS, FAILED) or disagrees or self.fault.startswith(MISSED)

    def __str__(self) -> str:
        extra = "".join(f"  {name}: {said}" for name, said in (("verify", self.verified), ("fault", self.fault)) if said)
        return f"{self.status:8} {self.cpu_s:5.2f} s  {self.graph}/{self.variant}  {self.layout}{extra}  {self.note[:300]}"


@dataclass(frozen=True)
class Samples:
    """How many pairs are also verified, and proven with a fault: every so many; 0: none."""

    verify_every: int = 0
    fault_every: int = 0


def prove_layouts(seed: int, num_layouts: int, samples: Samples = Samples()) -> Iterator[ProvenPair]:
    """Prove so many different layouts of a number's graph; never raises for what the model or shardwise does."""
    try:
        subject = RandomSubject.build(seed)
    except Exception as error:
        # A crash is a finding, not the end of the run.
        yield ProvenPair(seed, 0, "", FAILED, f"{type(error).__name__}: {error}")
        return
    seen = set[str]()
    for variant in range(num_layouts):
        began = time.process_time()
        status, shown, note, one = FAILED, f"{ranks_of(seed, variant)} ranks", "", None
        try:
            one = example(seed, variant, subject)
            shown = str(replace(one.plan.layout, precision="float32"))
            if shown in seen:
                continue
            seen.add(shown)
            status, note = prove_example(one, subject)
        except REFUSED as error:
            status, note = "refused", str(error)
        except Exception as error:
            note = f"{type(error).__name__}: {error}"
        pair = ProvenPair(seed, variant, shown, status, " ".join(note.split()), time.process_time() - began)
        if one is not None and status in (EQUAL, DIFFERS):
            pair = replace(pair, **_sample_pair(pair, samples, subject, one))
        yield pair


def _sample_pair(pair: ProvenPair, samples: Samples, subject: RandomSubject, one: Any) -> dict[str, str]:
    """Return what `verify` says of a pair, and what becomes of a fault, where this pair is one of the samples."""
    rng, found = random.Random(f"{pair.graph}/{pair.variant}"), dict[str, str]()
    if samples.verify_every and (pair.status == DIFFERS or rng.randrange(samples.verify_every) == 0):
        found["verified"] = _ask(lambda: verify_in_threads(one) or EQUAL)
    if samples.fault_every and pair.status == EQUAL and rng.randrange(samples.fault_every) == 0:
        fault = BrokenSum(rng.randrange(8))
        with fault.installed():
            said = _ask(lambda: prove_example(one, subject)[0])
        found["fault"] = "none to break" if not fault.site else f"{MISSED} in {fault.site}" if said == EQUAL else "found"
    return found


def _ask(run: Callable[[], str]) -> str:
    try:
        return run()
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


class BrokenSum:
    """One sum or gather is off by 1e-15: the first that has other numbers than zero after so many like it. `site`: who asked for it."""

    def __init__(self, skipped: int) -> None:
        self._skipped, self.site = skipped, ""

    def installed(self) -> Any:
        """Return the block in which sums and gathers are broken."""
        names = ("add_up", "join_flat")
        return mock.patch.multiple(rank_threads, **{name: self._break(getattr(rank_threads, name)) for name in names})

    def _break(self, combine: Callable[[Sequence[Tensor]], Tensor]) -> Callable[[Sequence[Tensor]], Tensor]:
        def combine_wrongly(parts: Sequence[Tensor]) -> Tensor:
            whole = combine(parts)
            if self.site or not whole.is_floating_point() or not whole.numel() or not bool((whole != 0).any()):
                return whole
            self._skipped -= 1
            if self._skipped >= 0:
                return whole
            self.site = _caller_of_exchange(sys._getframe(1))
            return whole * FAULT

        return combine_wrongly


def _caller_of_exchange(frame: FrameType | None) -> str:
    """Return the nearest function outside of transports and proofs."""
    while frame is not None:
        module = module_of(frame.f_code.co_filename)
        if module and not module.startswith(("world/", "run/prove/")):
            return f"{module}.{function_of(frame.f_code.co_qualname)}"
        frame = frame.f_back
    return "a proof"


def summarise(pairs: Sequence[ProvenPair]) -> str:
    """Say how many pairs came out how, and what they cost."""
    count = Counter(pair.status for pair in pairs)
    verified = [pair for pair in pairs if pair.verified]
    agree = sum((pair.verified == EQUAL) == (pair.status == EQUAL) for pair in verified)
    faults = Counter(pair.fault.partition(" in ")[0] for pair in pairs if pair.fault)
    ran = [pair.cpu_s for pair in pairs if pair.status == EQUAL]
    return (
        f"{len(pairs)} pairs of {len({pair.graph for pair in pairs})} graphs: "
        + ", ".join(f"{n} {status}" for status, n in count.most_common())
        + f"; {sum(ran) / max(1, len(ran)):.2f} s of CPU an equal pair; verify agrees on {agree} of {len(verified)}; faults: "
        + (", ".join(f"{n} {what}" for what, n in faults.most_common()) or "none asked")
    )


def load_pairs(file: Path | None) -> list[ProvenPair]:
    """Return the pairs of an earlier run."""
    return [ProvenPair(**row) for row in json.loads(file.read_text(encoding="utf-8"))] if file is not None and file.is_file() else []


def _save_pairs(file: Path, pairs: Sequence[ProvenPair]) -> None:
    beside = file.with_suffix(".new")
    beside.write_text("[\n" + ",\n".join(json.dumps(asdict(pair)) for pair in pairs) + "\n]\n", encoding="utf-8")
    beside.replace(file)


def main(arguments: Sequence[str]) -> int:
    """Run what the arguments choose; see `--help`."""
    p = argparse.ArgumentParser(prog="scripts/verify_all --prove", description="Random graphs under random layouts, proven.")
    p.add_argument("--random", type=int, default=10, metavar="N", help="how many graphs")
    p.add_argument("--seed", type=int, default=0, metavar="N", help="the number of the first one")
    p.add_argument("--layouts", type=int, default=40, metavar="N", help="random layouts that are drawn for each graph; equal ones are one")
    p.add_argument("--until", type=float, default=float("inf"), metavar="S", help="begin no graph after so many seconds")
    p.add_argument("--verify-every", type=int, default=10, metavar="N", help="hold every Nth pair against float64; 0: none")
    p.add_argument("--fault-every", type=int, default=20, metavar="N", help="prove every Nth equal pair again with one fault; 0: none")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the pairs there; graphs that it has are not proven again")
    given = p.parse_args(list(arguments))
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "microbatches change what is trained")
    pairs, began, saved = load_pairs(given.json), time.perf_counter(), time.perf_counter()
    known = {pair.graph for pair in pairs}
    gc.collect()
    gc.freeze()  # what is imported stays, and is most of what a collection would look at
    for seed in range(given.seed, given.seed + given.random):
        if seed in known or time.perf_counter() - began > given.until:
            continue
        of_graph = []
        for pair in prove_layouts(seed, given.layouts, Samples(given.verify_every, given.fault_every)):
            of_graph.append(pair)
            print(pair, file=sys.stderr, flush=True)
        pairs += of_graph
        if given.json and time.perf_counter() - saved > SAVE_EVERY_S:
            _save_pairs(given.json, pairs)
            saved = time.perf_counter()
    if given.json:
        _save_pairs(given.json, pairs)
    print(summarise(pairs))
    return 4 if any(pair.is_bad for pair in pairs) else 0
