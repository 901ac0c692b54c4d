"""Comparison of records that are written by hand: two ranks, one linear layer, and a fault in what one of them recorded."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.audit.compare import compare_records
from shardwise.audit.difference import KINDS, AuditResult
from shardwise.audit.pages import read_pages
from shardwise.audit.record.page import Page
from shardwise.audit.record.placement import LocalShard, runs_of, take_shard
from shardwise.audit.record.samples import describe_input, sum_of_hashes

WEIGHT = torch.tensor([[0.3, -1.2], [0.7, 0.1], [-0.4, 0.9], [1.1, 0.5]])
BIAS = torch.zeros(4)
GRADIENTS = {"up.weight": WEIGHT.flip(0) * 0.5, "up.bias": torch.tensor([0.1, -0.2, 0.3, 0.05])}
SAMPLES = torch.arange(24.0).reshape(3, 4, 2)  # of three steps, four samples each
NUM_STEPS = 2


def page_of(step: int, rows: slice = slice(None)) -> Page:
    """The page of a step of one process that holds all of the layer and reads these rows."""
    weights = {"up.weight": WEIGHT - 0.1 * step, "up.bias": BIAS - 0.1 * step}
    page = Page(aliases={name: [name] for name in weights}, coarsest="float32", losses=[2.0 - step])
    page.weights = {name: take_shard(x) for name, x in weights.items()}
    page.gradients = {name: take_shard(x.roll(step, 0)) for name, x in GRADIENTS.items()}
    page.buffers = {"up.average": take_shard(torch.tensor([0.5 * step, 1.0]))}
    page.inputs = [[row for row in [describe_input(SAMPLES[step][rows])] if row is not None]]
    page.outputs, page.kinds = {"up": [16, 1.0 + step, 2.0, False]}, {"up": "Linear"}
    page.optimizers = [{"kind": "SGD", "held": 2, "known": 2, "settings": [{"lr": 0.1, "weight_decay": 0.0}]}]
    return page


def run_of(*rows: slice) -> list[list[Page]]:
    return [[page_of(step, part) for step in range(NUM_STEPS + 1)] for part in rows]


def compare(folder: Path, ranks: list[list[Page]], gradients: dict[str, torch.Tensor] | None = None) -> AuditResult:
    """Write and compare records: serial, one perturbed by a unit of rounding, and the ranks'. `gradients`: other ones, in all of them."""
    serial = run_of(slice(None))
    for page in (page for run in (*serial, *ranks) for page in run):
        page.gradients |= {name: take_shard(value) for name, value in (gradients or {}).items()}
    perturbed = deepcopy(serial)
    for page in perturbed[0]:
        for shard in (*page.weights.values(), *page.gradients.values()):
            assert shard is not None
            shard.value = shard.value * (1 + 2**-23)
    records = {"serial": serial, "noise": perturbed, "parallel": ranks}
    for name, run in records.items():
        for rank, pages in enumerate(run):
            for number, page in enumerate(pages):
                page.write(str(folder / name / f"rank{rank}"), number, rank, len(run))
    plain, noise, parallel = (read_pages(folder / name) for name in records)
    return compare_records(plain, [noise], parallel)


def two_ranks() -> list[list[Page]]:
    return run_of(slice(0, 2), slice(2, 4))


def scale(page: Page, factor: float, *names: str) -> None:
    for name in names or page.gradients:
        shard = page.gradients[name]
        assert shard is not None
        shard.value = shard.value * factor


def replace_weights(page: Page, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for shard in page.weights.values():
        assert shard is not None
        shard.value = change(shard.value)


def shard_rows(page: Page, rank: int, has_place: bool) -> None:
    """Keep this rank's rows, which are not consecutive, with or without a word of where they lie."""
    rows = [rank, rank + 2]
    for shards in (page.weights, page.gradients):
        for name, shard in shards.items():
            assert shard is not None
            shape = tuple(shard.value.shape)
            ranges = [runs_of(rows), *([(0, n)] for n in shape[1:])] if has_place else None
            shards[name] = LocalShard(shard.value[rows], shard.dtype, shape if has_place else None, ranges)


def test_replicas_that_compute_alike_are_equal(tmp_path: Path) -> None:
    result = compare(tmp_path, two_ranks())
    assert result.equal
    assert [s.step for s in result.steps] == [0, 1]
    assert result.record()["first_difference"] is None
    assert 0 < result.noise.gradients < 1e-6


@pytest.mark.parametrize("has_place", [True, False])
def test_shards_are_put_together_by_their_place_or_by_their_values(has_place: bool, tmp_path: Path) -> None:
    ranks = run_of(slice(None), slice(None))
    for rank, pages in enumerate(ranks):
        for page in pages:
            shard_rows(page, rank, has_place)
    assert compare(tmp_path, ranks).equal


@pytest.mark.parametrize(("size", "equal"), [(1e-9, True), (0.1, False)])
def test_an_element_without_a_gradient_may_move_as_an_adaptive_optimizer_likes(size: float, equal: bool, tmp_path: Path) -> None:
    ranks = two_ranks()
    for pages in ranks:
        weight = pages[1].weights["up.bias"]
        assert weight is not None
        weight.value = weight.value + torch.tensor([0.0, 0.0, 0.0, 0.15])  # as Adam moves it, to the other side
    result = compare(tmp_path, ranks, {"up.bias": torch.tensor([1.0, 1.0, 1.0, size])})
    assert result.equal == equal, result.differences
    assert equal or result.verdict == "optimizer"


def test_other_names_are_found_by_values(tmp_path: Path) -> None:
    ranks = two_ranks()
    for page in ranks[1]:
        for shards in (page.weights, page.gradients, page.buffers):
            shards.update({name.replace("up", "layers.0"): shards.pop(name) for name in list(shards)})
        page.aliases = {name: [name] for name in page.weights}
    result = compare(tmp_path, ranks)
    assert result.equal
    assert "layers.0.weight = up.weight" in " ".join(result.notes)


def test_constant_parameters_without_a_common_name_are_matched_in_order(tmp_path: Path) -> None:
    ranks = two_ranks()
    for page in ranks[1]:
        for shards in (page.weights, page.gradients):
            shards["b.weight"], shards["c.bias"] = shards.pop("up.weight"), shards.pop("up.bias")
        page.aliases = {name: [name] for name in page.weights}
    assert compare(tmp_path, ranks).equal


def not_averaged(ranks: list[list[Page]]) -> None:
    for pages in ranks:
        scale(pages[0], 2.0)


def one_parameter(ranks: list[list[Page]]) -> None:
    for pages in ranks:
        scale(pages[1], 3.0, "up.bias")


def one_rank(ranks: list[list[Page]]) -> None:
    shard = ranks[1][1].gradients["up.weight"]
    assert shard is not None
    shard.value = shard.value.flip(1)


def not_reduced(ranks: list[list[Page]]) -> None:
    for rank, pages in enumerate(ranks):
        shard = pages[0].gradients["up.weight"]
        assert shard is not None
        shard.value = shard.value + (1 - 2 * rank) * shard.value.flip(1)


def same_samples(ranks: list[list[Page]]) -> None:
    ranks[1][1].inputs = ranks[0][1].inputs


def other_start(ranks: list[list[Page]]) -> None:
    replace_weights(ranks[1][0], lambda x: x + 1)


def still_weights(ranks: list[list[Page]]) -> None:
    replace_weights(ranks[1][1], lambda x: x + 0.1)


def other_rate(ranks: list[list[Page]]) -> None:
    for pages in ranks:
        replace_weights(pages[1], lambda x: x - 0.1)
        pages[0].optimizers[0]["settings"] = [{"lr": 0.2, "weight_decay": 0.0}]


def other_average(ranks: list[list[Page]]) -> None:
    ranks[1][2].buffers["up.average"] = take_shard(torch.tensor([0.7, 1.0]))


def missing_parameter(ranks: list[list[Page]]) -> None:
    for pages in ranks:
        del pages[0].weights["up.weight"]


def kept_gradients(ranks: list[list[Page]]) -> None:
    for pages in ranks:
        for name, shard in pages[1].gradients.items():
            earlier = pages[0].gradients[name]
            assert shard is not None
            assert earlier is not None
            shard.value = shard.value + earlier.value


FAULTS: dict[str, tuple[Callable[[list[list[Page]]], None], dict[str, Any], str]] = {
    "factor": (not_averaged, {"step": 0, "factor": 2.0, "wrong": 2, "compared": 2}, "the number of ranks"),
    "factor of one": (one_parameter, {"step": 1, "factor": 3.0, "parameter": "up.bias", "wrong": 1}, "1 of 2 (up.bias) gradients"),
    "gradients": (one_rank, {"step": 1, "parameter": "up.weight", "ranks": [1]}, "on rank 1 only"),
    "not reduced": (not_reduced, {"step": 0, "parameter": "up.weight", "wrong": 1}, "mean is the serial one"),
    "not cleared": (kept_gradients, {"step": 1, "wrong": 2}, "zero_grad"),
    "data": (same_samples, {"step": 1, "ranks": [0, 1]}, "ranks 0 and 1 read the same samples"),
    "start": (other_start, {"step": 0, "ranks": [1]}, "initial weights differ"),
    "optimizer": (still_weights, {"step": 0, "ranks": [1]}, "do not move on rank 1"),
    "optimizer of all": (other_rate, {"step": 0, "factor": 2.0}, "lr 0.1 / 0.2"),
    "statistics": (other_average, {"step": 1, "parameter": "up.average", "ranks": [1]}, "buffers change differently"),
    "parameters": (missing_parameter, {"parameter": "up.weight"}, "on no rank"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_named_with_its_place(name: str, tmp_path: Path) -> None:
    plant, expected, words = FAULTS[name]
    ranks = two_ranks()
    plant(ranks)
    record = compare(tmp_path, ranks).record()
    assert record["verdict"] == name.partition(" of ")[0]
    assert record["verdict"] in KINDS
    first = record["first_difference"]
    for key, value in expected.items():
        assert first[key] == (pytest.approx(value) if key == "factor" else value), key
    assert words in first["text"]


def test_sums_of_hashes_do_not_depend_on_the_division() -> None:
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    whole = sum_of_hashes(x.numpy())
    assert (sum_of_hashes(x[:, :2].numpy()) + sum_of_hashes(x[:, 2:].numpy())) % 2**64 == whole
    assert sum_of_hashes((x + 1e-6).numpy()) != whole


@pytest.mark.parametrize("factor", [0.0, 1.0])
def test_a_run_that_trains_nothing_is_told(factor: float, tmp_path: Path) -> None:
    result = compare(tmp_path, run_of(slice(None)), {name: value * factor for name, value in GRADIENTS.items()})
    assert any("nothing is trained" in note for note in result.notes) == (factor == 0)
