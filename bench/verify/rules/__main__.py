"""scripts/validate rules: every factor rule beside brute force, over PyTorch's samples. Writes docs/benchmarks/rules.md."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from bench.verify.rules import compare, document, truth
from bench.verify.rules.compare import Finding

ROOT = Path(__file__).resolve().parents[3]


def findings(names: Sequence[str], most: int) -> Iterator[Finding | str]:
    """One `Finding` for each different call among up to `most` samples of each operator; of all operators where no names are given.

    A name in its place says that torch ended the process: some of its kernels read where wrong pieces of indices point.
    """
    fork = multiprocessing.get_context("fork")
    pool, seen = ProcessPoolExecutor(1, fork), set[str]()
    for name in dict.fromkeys(info.name for info in truth.operators() if not names or info.name in names):
        try:
            found = pool.submit(of_operator, name, most).result()
        except BrokenProcessPool:
            pool = ProcessPoolExecutor(1, fork)
            yield name
            continue
        for call, finding in found:
            if call not in seen:
                seen.add(call)
                yield finding
    pool.shutdown()


def of_operator(name: str, most: int) -> list[tuple[str, Finding]]:
    """Findings of the samples of one operator, by call."""
    warnings.simplefilter("ignore")
    calls = {truth.written(call): call for info in truth.operators() if info.name == name for call in truth.calls(info, most)}
    found = ((written, compare.held_against_truth(call)) for written, call in calls.items())
    return [(written, finding) for written, finding in found if finding is not None]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/validate rules", description=__doc__)
    parser.add_argument("operators", nargs="*", help="names of PyTorch's samples, such as nn.functional.linear; all where none is given")
    parser.add_argument("--samples", type=int, default=12, metavar="N", help="at most so many samples an operator (12)")
    asked = parser.parse_args(arguments)
    began, found, ended = time.perf_counter(), list[Finding](), list[str]()
    for finding in findings(asked.operators, asked.samples):
        if isinstance(finding, str):
            ended.append(finding)
            print(f"torch ended the process on pieces of {finding}", flush=True)
            continue
        found.append(finding)
        for line in finding.wrong:
            print(f"wrong: {line}", flush=True)
        if len(found) % 500 == 0:
            print(f"{len(found)} calls, {time.perf_counter() - began:.0f} s", file=sys.stderr)
    print(document.summary(found))
    print(f"\n{time.perf_counter() - began:.0f} s")
    if not asked.operators:
        document.write(ROOT / "docs" / "benchmarks" / "rules.md", found, ended)
    return 1 if any(finding.wrong for finding in found) else 0


if __name__ == "__main__":
    sys.exit(main())
