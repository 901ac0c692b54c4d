"""Whether `verify` sees what is broken: a sample of `scripts/validate mutations`, and the harness held against what it must find."""

from __future__ import annotations

import ast
import functools
from collections import Counter
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

from bench.verify.mutations import table  # noqa: E402
from bench.verify.mutations.cases import ODD, Case, Outcome, Runs, apart  # noqa: E402
from bench.verify.mutations.target import OFF, SCALED, Active, Change, Mutation  # noqa: E402
from bench.verify.mutations.weights import HOOK, _weigh, _Wrap, static_sites  # noqa: E402


@pytest.mark.long
@pytest.mark.parametrize(("case", "every"), [(Case(f"{ODD}:norms", "data=2"), 3), (Case(f"{ODD}:two_inputs", "data=2 tensor=2"), 1)])
def test_a_sample_of_mutations_is_seen(case: Case, every: int) -> None:
    """Of some sites one way to break each, in turn; `scripts/validate mutations` has all of them."""
    runs = Runs()
    *_, whole = runs.run(case, [], steps=1)
    assert whole.ok, whole
    sites: dict[tuple[str, str], list[Mutation]] = {}
    for mutation in sorted(whole.fired):
        if not mutation.site.startswith("run/engine.Engine.__init__"):  # counts FLOPs
            sites.setdefault((mutation.site, mutation.kind), []).append(mutation)
    sample = [those[number % len(those)] for number, those in enumerate(list(sites.values())[::every])]
    results = table.tried(runs, case, sample, steps=1)
    assert not [one for one in results.items() if one[1][0] == table.MISSED]
    assert len({mutation.how for mutation, (result, _) in results.items() if result == table.SEEN}) >= 2


def test_what_verify_does_not_see_is_told_as_missed() -> None:
    """A broken twin of verify, which finds everything equal."""
    mutation = Mutation("run/some.f: x * y", "weight", SCALED)
    fired = {mutation: 2}
    assert table.judge(Outcome(True, fired=fired, moved=1e-7), mutation)[0] == table.MISSED
    assert table.judge(Outcome(True, fired=fired), mutation)[0] == table.SAME
    assert table.judge(Outcome(True), mutation)[0] == table.MISSED  # it did not fire
    assert table.judge(Outcome(False, first="loss", fired=fired, moved=1e-7), mutation)[0] == table.SEEN
    assert table.judge(Outcome(False, "RankError: rank 1 failed"), mutation)[0] == table.FAILED
    state = {"weight": torch.ones(2, dtype=torch.float64)}
    assert apart(state, {"weight": torch.tensor([1.0, 1.0 + 1e-7], dtype=torch.float64)}) == pytest.approx(1e-7, rel=0.01)
    assert apart(state, {}) == apart(state, {"weight": state["weight"] * float("nan")}) == float("inf")


def test_weights_are_found_and_broken_in_their_code() -> None:
    source = """
def loss(x, parts, scale):
    share = 1 / parts
    rows = parts * 2
    x.mul_(scale)
    total = x * share
    total /= 4.0
    return total.mean(), rows
"""
    wrap = _Wrap("run/some")
    code = compile(ast.fix_missing_locations(wrap.visit(ast.parse(source))), "some", "exec")
    assert [site.partition(": ")[2] for site in wrap.sites] == [
        "1 / parts", "parts * 2", "x.mul_(scale)", "x * share", "total /= 4.0", "total.mean()",
    ]  # fmt: skip
    for site in wrap.sites:
        mutation = Mutation(site, "weight", SCALED)
        active = Active(Change(mutation))
        names = {HOOK: functools.partial(_weigh, active)}
        exec(code, names)
        loss, rows = names["loss"](torch.ones(3, dtype=torch.float64), 2, 3.0)  # type: ignore[operator]
        assert rows == 4  # whole numbers are left alone
        off = float(loss) / 0.375 - 1
        broken = 0.0 if site.endswith("parts * 2") else -OFF if "/=" in site else OFF
        assert off == pytest.approx(broken, rel=1e-5)
        assert active.fired == (Counter() if site.endswith("parts * 2") else {mutation: 1})


def test_sites_are_found_by_themselves() -> None:
    sites = static_sites()
    assert "lower/redistribute._redistribute_in_rank_order: reduce_scatter" in sites
    assert "run/gradients/gradient_reducer.GradientReducer._reduce_bucket: all_reduce" in sites
    assert "run/step/transfers.Transfers.sender: isend" in sites
    carriers = ("run/verify/verify", "run/verify/shard_differences")  # of the comparison
    assert not [site for site in sites if site.startswith(carriers)]
    assert len(sites) > 25


def test_duals_have_another_of_their_shape() -> None:
    from bench.verify.mutations.collectives import OTHER_DUAL

    assert all(OTHER_DUAL[OTHER_DUAL[name]] == name for name in OTHER_DUAL)
