"""How float32 matrices are multiplied: a way that is fast and wrong is not taken, what was found is kept, ranks do as they are told."""

import json
from pathlib import Path

import pytest
import torch

from shardwise.errors import UsageError
from shardwise.world import matmul_backend
from shardwise.world.launch.join import join
from shardwise.world.launch.launch import launch
from shardwise.world.matmul_backend import HIGHEST, PRECISIONS, PRODUCTS, MatmulTiming, MatmulTimings
from shardwise.world.world import World


def precision(world: World) -> str:
    return torch.get_float32_matmul_precision()


@pytest.mark.parametrize(
    ("ways", "chosen"),
    [
        ((MatmulTiming("high", 1.02, 1.0), MatmulTiming("medium", 1.11, 1.9)), HIGHEST),
        ((MatmulTiming("high", 1.4, 1.0), MatmulTiming("medium", 1.6, 1.9)), "medium"),
        ((MatmulTiming("high", 1.4, 1.0), MatmulTiming("medium", 3.9, 700.0)), "high"),
        ((), HIGHEST),
    ],
)
def test_the_fastest_exact_way_is_taken(ways: tuple[MatmulTiming, ...], chosen: str) -> None:
    assert MatmulTimings(ways).chosen == chosen


def test_a_narrow_product_is_seen_by_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin that must fail: one way rounds its operands to bfloat16, as a processor with such instructions would."""
    state = {"now": HIGHEST}
    plain = torch.Tensor.__matmul__

    def narrow(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return plain(a.bfloat16().float(), b.bfloat16().float()) if state["now"] == "medium" and a.dtype == torch.float32 else plain(a, b)

    monkeypatch.setattr(matmul_backend, "set_matmul_precision", lambda name: state.update(now=name))
    monkeypatch.setattr(torch.Tensor, "__matmul__", narrow)
    high, medium = matmul_backend.measure(("high", "medium"), shapes=((16, 64, 32),))
    assert high.error == 1.0
    assert medium.error > 100
    assert not MatmulTiming("medium", 4.0, medium.error).is_worth_using


def test_measuring_leaves_the_process_as_it_was() -> None:
    threads, before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    found = matmul_backend.measure(PRECISIONS[1:], shapes=((8, 16, 8),))
    assert [way.name for way in found] == list(PRECISIONS[1:])
    assert all(way.speedup > 0 and way.error > 0 for way in found)
    assert (torch.get_num_threads(), torch.get_float32_matmul_precision()) == (threads, before)


def test_what_was_found_is_kept_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []

    def once(ways: object) -> list[MatmulTiming]:
        measured.append(1)
        return [MatmulTiming("high", 1.5 - len(measured) / 10, 1.0), MatmulTiming("medium", 1.0, 1.0)]

    monkeypatch.setattr(matmul_backend, "measure", once)
    first = matmul_backend.load_or_measure_timings(tmp_path)
    assert len(measured) == 2, "a way that is taken was measured twice"
    assert first.ways[0].speedup == pytest.approx(1.3), "the lesser of the two counts"
    assert matmul_backend.load_or_measure_timings(tmp_path) == first
    assert len(measured) == 2
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text())["ways"][0]["name"] == "high"


def test_where_nothing_can_be_kept_torchs_own_stays(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert matmul_backend.load_or_measure_timings(tmp_path / "file" / "folder").chosen == HIGHEST


def test_ranks_multiply_as_they_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where this machine would multiply otherwise by itself."""
    monkeypatch.setattr(matmul_backend, "load_or_measure_timings", lambda: MatmulTimings((MatmulTiming("medium", 2.0, 1.0),)))
    assert launch(precision, 1) == ["medium"]
    assert launch(precision, 2, env={PRODUCTS: "high"}) == ["high"] * 2
    monkeypatch.setenv(PRODUCTS, HIGHEST)
    assert launch(precision, 1) == [HIGHEST]
    assert matmul_backend.matmul_environment({PRODUCTS: "high"}, "cpu") == matmul_backend.matmul_environment({}, "cuda") == {}


def test_who_is_told_nothing_multiplies_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forked rank goes on as its user's process did."""
    monkeypatch.setattr(matmul_backend, "load_or_measure_timings", lambda: MatmulTimings())
    monkeypatch.delenv(PRODUCTS, raising=False)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert launch(lambda world: torch.get_float32_matmul_precision(), 1) == ["high"]
    finally:
        torch.set_float32_matmul_precision(before)


def test_whom_a_launcher_started_multiplies_as_the_environment_says() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        for way in PRECISIONS:
            join({PRODUCTS: way}, "cpu")
            assert torch.get_float32_matmul_precision() == way
        join({}, "cpu")
        assert torch.get_float32_matmul_precision() == PRECISIONS[-1], "it says nothing"
        with pytest.raises(UsageError, match="SHARDWISE_PRODUCTS=fast is not one of highest, high, medium"):
            join({PRODUCTS: "fast"}, "cpu")
    finally:
        torch.set_float32_matmul_precision(before)
