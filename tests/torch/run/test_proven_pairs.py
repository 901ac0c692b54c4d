"""The run over pairs of graph and layout: what it samples, what counts as a finding, and how it goes on from a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from bench.verify import proven_pairs
from bench.verify.proven_pairs import BrokenSum, ProvenPair, Samples, load_pairs, main, prove_layouts, summarise
from shardwise.run.prove import rank_threads
from tests.support.random_graphs import RandomSubject, example, prove_example, verify_in_threads

GRAPH, VARIANT = 70003, 7  # small; of a layout with data=4


def test_every_layout_of_a_graph_is_proven_once_and_sampled() -> None:
    pairs = list(prove_layouts(GRAPH, 4, Samples(verify_every=1, fault_every=1)))
    equal = [pair for pair in pairs if pair.status == "equal"]
    assert len({pair.layout for pair in equal}) == len(equal) >= 2
    assert all(pair.verified == "equal" for pair in equal)
    assert {pair.fault for pair in equal} <= {"found", "none to break"}
    assert not any(pair.is_bad for pair in pairs)


def test_what_verify_and_proof_say_differs_where_only_one_sees_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = RandomSubject.build(GRAPH)
    one = example(GRAPH, VARIANT, subject)
    add_up = rank_threads.add_up

    def break_sums(factor: float) -> None:
        def add_up_wrongly(parts: Sequence[Tensor]) -> Tensor:
            return add_up(parts) * factor if parts[0].is_floating_point() else add_up(parts)

        monkeypatch.setattr(rank_threads, "add_up", add_up_wrongly)

    break_sums(1 + 1e-6)
    assert verify_in_threads(one)
    break_sums(1 + 1e-15)
    assert not verify_in_threads(one)
    assert prove_example(one, subject)[0] == "differs"


def test_findings_are_told_apart() -> None:
    equal = ProvenPair(1, 0, "data=2", "equal")
    findings = [
        ProvenPair(1, 0, "data=2", "differs"),
        ProvenPair(1, 0, "data=2", "failed"),
        ProvenPair(1, 0, "data=2", "equal", verified="gradients differ"),
        ProvenPair(1, 0, "data=2", "differs", verified="equal"),
        ProvenPair(1, 0, "data=2", "equal", fault="missed in run/engine"),
    ]
    assert all(pair.is_bad for pair in findings)
    assert not equal.is_bad
    assert "2 pairs of 1 graphs: 1 equal, 1 differs" in summarise([equal, findings[3]])
    assert "verify agrees on 0 of 1" in summarise([equal, findings[3]])


def test_a_broken_sum_breaks_one_result() -> None:
    fault, ones = BrokenSum(1), torch.ones(3, dtype=torch.float64)
    with fault.installed():
        assert torch.equal(rank_threads.add_up([ones, ones]), 2 * ones)
        assert torch.equal(rank_threads.add_up([0 * ones, 0 * ones]), 0 * ones)  # which no factor changes
        assert not torch.equal(rank_threads.join_flat([ones]), ones)
        assert torch.equal(rank_threads.add_up([ones, ones]), 2 * ones)
    assert fault.site == "a proof"


def test_a_run_goes_on_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[int] = []

    def prove_nothing(seed: int, num_layouts: int, samples: Samples) -> list[ProvenPair]:
        asked.append(seed)
        return [ProvenPair(seed, 0, "data=2", "differs" if seed == 3 else "equal")]

    monkeypatch.setattr(proven_pairs, "prove_layouts", prove_nothing)
    monkeypatch.setattr(proven_pairs, "gc", SimpleNamespace(collect=lambda: None, freeze=lambda: None))  # which would outlast this test
    file = str(tmp_path / "pairs.json")
    assert main(["--random", "2", "--seed", "1", "--json", file]) == 0
    assert main(["--random", "3", "--seed", "1", "--json", file]) == 4
    assert asked == [1, 2, 3]
    assert [pair.graph for pair in load_pairs(Path(file))] == [1, 2, 3]
    assert "3 pairs of 3 graphs: 2 equal, 1 differs" in capsys.readouterr().out


@pytest.mark.parametrize(("graph", "variant"), [(80096, 20), (80098, 32)])
def test_experts_that_are_sent_tokens_are_not_cut_again_by_expert(graph: int, variant: int) -> None:
    """expert=2 beside tensor ranks that may cut samples: the rows of one expert, cut over both by expert, were summed twice."""
    subject = RandomSubject.build(graph)
    one = example(graph, variant, subject)
    assert one.plan.layout.expert == 2
    assert one.plan.layout.sample_parallel == "on"
    assert prove_example(one, subject) == ("equal", "")
    assert not verify_in_threads(one)
