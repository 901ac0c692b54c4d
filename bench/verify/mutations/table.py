"""Breaks one thing after another and tells what `verify` saw. In: cases. Out: a row for each mutation; a page.

A mutation that `verify` does not see is a finding, unless every rank ends in the same training state as without it: then what it changes
is no part of any result (the largest logit that is taken off before an exponential; a time that is measured), or is rounding itself (the
gradient of a mean in a variance): a state that 1e-3 moves no further than 1e-15 at the same place does. A weight that is off by
1e-6 may move every result by less than the tolerance, where it is a small part of them; then it is off by 1e-3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from bench.verify.mutations.cases import CASES, Case, Outcome, Runs
from bench.verify.mutations.target import FAR, ON_ONE_RANK, SCALED, Change, Mutation
from bench.verify.mutations.weights import static_sites
from shardwise.plan.layout import Layout

SEEN, FAR_SEEN, FAILED, SAME, MISSED = "seen", "seen off by 1e-3", "ends the run", "changes nothing", "missed"
STATE_ERROR = 1e-11  # relative, between the training states of two runs of which one is broken: rounding
ROUNDING, NOISE_FACTOR = 1e-15, 16
SAME_MOST = 4  # cases that are looked at where a mutation changes nothing


@dataclass(frozen=True)
class Row:
    """One mutation. `cases`: where it fired, of which `tried` were run; `result`: the weakest of theirs."""

    mutation: Mutation
    cases: tuple[str, ...]
    tried: int
    result: str
    note: str = ""

    def record(self) -> dict[str, object]:
        return {**asdict(self.mutation), "cases": list(self.cases), "tried": self.tried, "result": self.result, "note": self.note}


def judge(outcome: Outcome, mutation: Mutation) -> tuple[str, str]:
    """(result, what was said)."""
    if outcome.error:
        return FAILED, outcome.error
    if not outcome.fired.get(mutation):
        return MISSED, "it did not fire"
    if not outcome.ok:
        return SEEN, outcome.first
    return (SAME if outcome.moved <= STATE_ERROR else MISSED), f"worst error {outcome.worst:.1e}, moved {outcome.moved:.1e}"


def tried(runs: Runs, case: Case, mutations: Sequence[Mutation], steps: int = 2) -> dict[Mutation, tuple[str, str]]:
    """As `judge`, of each mutation in one case; of what is not seen at 1e-6, by more.

    Raises:
        RuntimeError: with nothing broken, afterwards, ranks are not equal to the serial run, or not where they were before.
    """
    results = {m: judge(one, m) for m, one in zip(mutations, _whole_after(runs, case, [Change(m) for m in mutations], steps), strict=True)}
    unseen = [m for m, (result, _) in results.items() if result in (SAME, MISSED) and m.how in (SCALED, ON_ONE_RANK)]
    if unseen:
        outcomes = _whole_after(runs, case, [Change(m, off) for m in unseen for off in (FAR, ROUNDING)], steps)
        for m, far, rounding in zip(unseen, outcomes[::2], outcomes[1::2], strict=True):
            result, said = judge(far, m)
            if result == MISSED and far.moved <= NOISE_FACTOR * rounding.moved:
                result = SAME
            results[m] = FAR_SEEN if result == SEEN else result, said
    return results


def _whole_after(runs: Runs, case: Case, changes: Sequence[Change], steps: int) -> list[Outcome]:
    *outcomes, whole = runs.run(case, changes, steps)
    if not whole.ok or whole.moved > STATE_ERROR:
        raise RuntimeError(f"{case} is not equal with nothing broken: {whole}")
    return outcomes


def rows(
    cases: Sequence[Case] = CASES, most: int = 2, tell: Callable[[str], object] = print, wanted: str = "", runs: Runs | None = None
) -> tuple[list[Row], list[str]]:
    """(a row for each mutation that fires anywhere, sites of collectives that none of the cases reaches).

    `most`: cases in which each is tried, those with the fewest ranks first; `SAME_MOST` where it changes nothing. `wanted`: part of a
    site's name.
    """
    runs = runs or Runs()
    where: dict[Mutation, list[Case]] = {}
    for case in cases:
        *_, whole = runs.run(case, [])
        if not whole.ok:
            raise RuntimeError(f"{case} is not equal with nothing broken: {whole.first}")
        tell(f"{case}: {len(whole.fired)} mutations fire")
        for mutation in whole.fired:
            where.setdefault(mutation, []).append(case)
    results: dict[Mutation, list[tuple[str, str]]] = {mutation: [] for mutation in sorted(where) if wanted in mutation.site}
    for case in sorted(cases, key=lambda case: Layout.parse(case.layout).num_ranks):
        due = [m for m, those in results.items() if case in where[m] and _due(those, most)]
        for mutation, result in tried(runs, case, due).items() if due else ():
            results[mutation].append(result)
            tell(f"{mutation.site} | {mutation.kind} | {mutation.how} | {case}: {', '.join(result)}")
    # What changes nothing in one case is judged by the others.
    order = (MISSED, FAILED, FAR_SEEN, SEEN, SAME)
    found = []
    for mutation, those in results.items():
        result, note = min(those, key=lambda one: order.index(one[0]))
        found.append(Row(mutation, tuple(map(str, where[mutation])), len(those), result, note))
    reached = {f"{m.site.partition(' < ')[0]}: {m.kind}" for m in where}
    return found, [site for site in static_sites() if site not in reached]


def _due(results: Sequence[tuple[str, str]], most: int) -> bool:
    return len(results) < most or (len(results) < SAME_MOST and all(result == SAME for result, _ in results))


def document(found: Sequence[Row], unreached: Sequence[str]) -> str:
    """The page."""
    count = {result: sum(row.result == result for row in found) for result in (SEEN, FAR_SEEN, FAILED, SAME, MISSED)}
    lines = [
        "# Mutations",
        "",
        "Written by `scripts/validate mutations`. Every collective and every weight of a sum in the runtime is broken once, in small",
        "models under layouts that use it, and `shardwise verify` must see it. Collectives are taken where they all go through, by who "
        "asks",
        "for them; weights are every product, quotient, mean and interpolation of floating-point numbers in `lower` and `run`; duals are",
        "those of the redistributions, each taken for the other of its shape. *Left out*: members keep what is their own. *Wrong group*:",
        "the ranks along another axis. *On one rank*: only the last member's result is off. What carries the comparison is not broken.",
        "",
        f"{len(found)} mutations fired: {count[SEEN]} were seen, {count[FAR_SEEN]} only when off by 1e-3 (a small part of every result), "
        f"{count[FAILED]} ended the run with",
        f"an error, {count[SAME]} changed nothing, {count[MISSED]} were missed. *Changes nothing*: every rank ends in the same weights, "
        "buffers and optimizer",
        "state, but for rounding. Such are memory that is measured, FLOPs that are counted, thresholds of a trial, and gradients that are",
        "zero but for rounding.",
        "",
        "| where | what | broken | fires in | result |",
        "|---|---|---|---|---|",
    ]
    for row in found:
        m = row.mutation
        site, _, expression = m.site.partition(": ")
        more = f" and {len(row.cases) - 1} more" if len(row.cases) > 1 else ""
        what = f"`{expression.replace('|', '/')}`" if expression else m.kind
        lines.append(f"| {site.replace(' < ', ', from ')} | {what} | {m.how} | {row.cases[0]}{more} | {row.result} |")
    if unreached:
        lines += ["", "Collectives that no verification reaches (plain loops, evaluation, batches whose rows ranks have apart):", ""]
        lines += [f"- {site}" for site in unreached]
    return "\n".join(lines) + "\n"
