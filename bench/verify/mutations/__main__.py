"""`scripts/validate mutations`: breaks every collective, weight and slice once, which `verify` must see; with `--prove`, `prove`.

Writes docs/benchmarks/mutations.md, or mutations-proofs.md; exit status 4 where something is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.verify.mutations.cases import CASES, Case
from bench.verify.mutations.proofs import document_proofs, proof_rows
from bench.verify.mutations.table import MISSED, document, rows

ROOT = Path(__file__).resolve().parents[3]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/validate mutations", description=__doc__)
    parser.add_argument("sites", nargs="?", default="", help="part of the sites' names; nothing is written to docs then")
    parser.add_argument("--most", type=int, default=1, metavar="N", help="cases in which each mutation is tried")
    parser.add_argument("--case", action="append", type=int, metavar="K", help="only these cases, by number; nothing is written then")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, as JSON")
    parser.add_argument("--prove", action="store_true", help="what prove finds, in this process")
    asked = parser.parse_args(arguments)
    began = time.perf_counter()
    cases = [CASES[k] for k in asked.case] if asked.case else CASES
    if asked.prove:
        return _prove(asked, cases)
    found, unreached = rows(cases, asked.most, lambda line: print(line, file=sys.stderr, flush=True), asked.sites)
    missed = [row for row in found if row.result == MISSED]
    for row in missed:
        print(f"missed: {row.mutation.site}, {row.mutation.kind}, {row.mutation.how}, in {row.cases[0]}: {row.note}")
    print(f"{len(found)} mutations, {len(missed)} missed, {time.perf_counter() - began:.0f} s")
    if asked.json:
        asked.json.write_text(json.dumps([row.record() for row in found], indent=1) + "\n")
    if not asked.sites and not asked.case:
        (ROOT / "docs" / "benchmarks" / "mutations.md").write_text(document(found, unreached), encoding="utf-8")
    return 4 if missed else 0


def _prove(asked: argparse.Namespace, cases: Sequence[Case]) -> int:
    began = time.perf_counter()
    found, refused = proof_rows(cases, asked.sites, lambda line: print(line, file=sys.stderr, flush=True))
    missed = [row for row in found if row.result == MISSED]
    for row in missed:
        print(f"missed: {row.mutation.site}, {row.mutation.kind}, {row.broken}, in {row.cases[0]}: {row.note}")
    for line in refused:
        print(f"not provable: {line}")
    print(f"{len(found)} mutations, {len(missed)} missed, {time.perf_counter() - began:.0f} s")
    if not asked.sites and not asked.case:
        (ROOT / "docs" / "benchmarks" / "mutations-proofs.md").write_text(document_proofs(found, refused), encoding="utf-8")
    return 4 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
