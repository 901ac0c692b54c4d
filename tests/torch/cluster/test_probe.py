"""The probe measures, keeps what it measured, and does not trust a stored result of another machine; the doctor sees faults."""

from __future__ import annotations

import math
import os
import shutil
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import pytest
import torch

from shardwise.capture.capture import capture
from shardwise.cluster import doctor as doctor_module
from shardwise.cluster.block import LARGE_BLOCK, SMALL_BLOCK
from shardwise.cluster.cluster import Cluster, Speed
from shardwise.cluster.doctor import check_machine, check_writable
from shardwise.cluster.probe import cache, measure, probe, sampling
from shardwise.cluster.probe.cache import BUSY_S, SETTLED_S, VERSION
from shardwise.cluster.probe.machine import machine_fingerprint
from shardwise.cluster.probe.measure import BUSY_NOTE, MESSAGE_RANKS, fingerprint_rates
from shardwise.cluster.probe.operators import ProbeLayers, operator_cases
from shardwise.cluster.probe.rank import measure_alone, measure_pace, measure_rank
from shardwise.cluster.probe.sampling import (
    CONFIDENCE,
    ProbeCase,
    ProbeSetting,
    SamplingBudget,
    median_interval,
    median_spread,
    sample_cases,
)
from shardwise.cost.devices.compute import RankRates, block_work
from shardwise.cost.network.collectives import algorithm_times, choose_algorithms
from shardwise.cost.network.network import RankGroup
from shardwise.model.work import OperatorWork, operator_work
from shardwise.world.launch.launch import Launcher, LaunchOptions
from shardwise.world.matmul_backend import PRECISIONS, PRODUCTS, load_or_measure_timings
from shardwise.world.world import TRANSPORT, World


@pytest.fixture(scope="module")
def measured(home: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Cluster, Path]:
    """What the session has measured of this machine, and where it is stored, apart from what other tests read."""
    path = tmp_path_factory.mktemp("cache") / "cluster.toml"
    shutil.copyfile(home / ".cache" / "shardwise" / "cluster.toml", path)
    return Cluster.parse(str(path)), path


def test_ranks_of_the_probe_take_the_machines_own_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run asked for another one plans on the machine as it is: one of three ranks divides no two."""
    found: list[int] = []

    def joined(launcher: Launcher, function: object, ranks: int, *args: object, options: LaunchOptions) -> None:
        found.extend(launch(launcher, num_ranks_of, ranks, options=options))
        raise InterruptedError

    launch = Launcher.launch
    monkeypatch.setenv(TRANSPORT, "boxes=2,1")
    monkeypatch.setattr(Launcher, "launch", joined)
    with pytest.raises(InterruptedError):
        measure.measure_here("mark", quick=True)
    assert found == [len(found)] * len(found) != []


def num_ranks_of(world: World) -> int:
    return world.num_ranks


def test_rates_of_other_products_are_of_another_cluster(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own setting counts; the one that a launcher gives its ranks is this machine's own."""
    monkeypatch.delenv(PRODUCTS, raising=False)
    own = fingerprint_rates(VERSION)
    chosen = load_or_measure_timings().chosen
    marks = {}
    for name in PRECISIONS:
        monkeypatch.setenv(PRODUCTS, name)
        marks[name] = fingerprint_rates(VERSION)
    assert marks[chosen] == own
    assert len(set(marks.values())) == len(PRECISIONS)


def test_this_machine_is_a_cluster(tmp_path: Path) -> None:
    cluster = probe(path=tmp_path / "deep" / "cluster.toml")
    assert cluster.name == "here"
    assert cluster.fingerprint == machine_fingerprint(VERSION)
    assert dict(cluster.speed(1).flops)["float32"] > 1e8
    if cluster.kind.shares_hosts:
        assert cluster.table("all_reduce", 2) is not None
        for count in MESSAGE_RANKS:
            for name in ("send", "exchange", "all_reduce", "send.gloo", "exchange.gloo", "all_reduce.gloo", "add"):
                table = cluster.table(name, count)
                assert table is not None, (name, count)
                assert {size for size, _ in table.points} >= {4096, 1 << 20, 16 << 20}
            for name in ("call", "step", "call.gloo", "step.gloo"):
                assert cluster.table(name, count) is not None, (name, count)
        # What is chosen by these figures is a choice among the algorithms, whatever the machine was doing meanwhile.
        for transport in ("", "gloo"):
            assert set(choose_algorithms(cluster, RankGroup(4), transport).names) <= set(algorithm_times(cluster, RankGroup(4), transport))
        assert {(s.ranks, s.threads) for s in cluster.speeds} >= {(1, 1)}


def test_the_second_call_reads_the_stored_result(measured: tuple[Cluster, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, path = measured

    def fail(*_: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(cache, "measure_here", fail)
    monkeypatch.setattr(cache, "num_waiting_processes", lambda: 99.0)  # what was measured while busy is measured again once idle
    assert probe(path=path) == cluster
    assert Cluster.parse(str(path)) == cluster
    for broken in (path.read_text().replace(cluster.fingerprint, "0" * 16), "not TOML at all", ""):
        path.write_text(broken)
        with pytest.raises(AssertionError, match="measured again"):
            probe(path=path)


def test_a_pause_of_the_system_is_no_size_s_time() -> None:
    assert measure._monotone_points({16: 9e-3, 64: 2e-3, 4: 1e-3}) == ((4.0, 1e-3), (16.0, 2e-3), (64.0, 2e-3))
    assert measure._monotone_points({4: 1.0, 16: 2.0}) == ((4.0, 1.0), (16.0, 2.0))


@dataclass
class Watched:
    """A machine whose measuring is counted, and whose load is told; `path`: where what was found is kept."""

    gives: Cluster
    path: Path
    waiting: float = 0.0
    times: int = 0

    def measure(self, *_: object) -> Cluster:
        self.times += 1
        return self.gives

    def age(self, seconds: float) -> None:
        long_ago = self.path.stat().st_mtime - seconds
        os.utime(self.path, (long_ago, long_ago))


@pytest.fixture
def watched(measured: tuple[Cluster, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    made = Watched(measured[0], tmp_path / "cluster.toml")
    monkeypatch.setattr(cache, "measure_here", made.measure)
    monkeypatch.setattr(cache, "num_waiting_processes", lambda: made.waiting)
    return made


def test_what_a_busy_machine_gave_is_used_for_minutes(watched: Watched) -> None:
    """Commands in a row would otherwise each measure for seconds, where a neighbour comes and goes."""
    busy = watched.gives = replace(watched.gives, device=replace(watched.gives.device, source=f"measured {BUSY_NOTE}"))
    assert probe(path=watched.path) == probe(path=watched.path) == busy
    assert watched.times == 1
    watched.age(2 * BUSY_S)
    watched.waiting = 99.0
    assert probe(path=watched.path) == busy
    assert watched.times == 1, "it is as busy as before"
    watched.waiting = 0.0
    probe(path=watched.path)
    assert watched.times == 2
    probe(path=watched.path, fresh=True)
    assert watched.times == 3


@pytest.mark.parametrize(("now", "again"), [(1.0, 0), (1.1, 0), (0.5, 1), (2.0, 1)])
def test_a_machine_that_computes_at_another_speed_is_measured_again(
    now: float, again: int, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`now`: its speed against what was stored, some minutes ago at least and while nothing else runs."""
    if not watched.gives.kind.shares_hosts:
        pytest.skip("GPUs keep their speed")
    idle = watched.gives = replace(watched.gives, device=replace(watched.gives.device, source="measured"))
    then = dict(idle.speed(1, 1).rates)["pulse"]
    monkeypatch.setattr(cache, "measure_pace", lambda stored: now * then / stored)
    probe(path=watched.path)
    assert probe(path=watched.path) == idle
    assert watched.times == 1, "it has just been measured"
    watched.age(2 * SETTLED_S)
    watched.waiting = 99.0
    assert probe(path=watched.path) == idle
    assert watched.times == 1, "others compute now"
    watched.waiting = 0.0
    probe(path=watched.path)
    assert watched.times == 1 + again


def test_the_pace_is_the_part_of_the_speed_that_is_asked_about() -> None:
    """Ten times as many pulses a second as there were is a tenth of the pace, whatever the machine does meanwhile."""
    threads = torch.get_num_threads()
    paces = [(measure_pace(1.0), measure_pace(10.0)) for _ in range(5)]
    assert torch.get_num_threads() == threads
    assert median(one / ten for one, ten in paces) == pytest.approx(10.0, rel=0.5)


def test_processes_that_ask_at_the_same_time_measure_once(
    measured: tuple[Cluster, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []

    def slow(*_: object) -> Cluster:
        counted.append(1)
        time.sleep(0.2)
        return measured[0]

    monkeypatch.setattr(cache, "measure_here", slow)
    monkeypatch.setattr(cache, "num_waiting_processes", lambda: 99.0)
    with ThreadPoolExecutor(3) as pool:  # every call opens the file of the lock by itself, as processes do
        found = list(pool.map(lambda _: probe(path=tmp_path / "cluster.toml"), range(3)))
    assert found == [measured[0]] * 3
    assert len(counted) == 1


def test_ranks_that_did_not_get_their_cores_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that the system does not tell of shows in what ranks got: one that multiplies needs its core all the time."""
    figures = {"linear.float32": 1e-11, "elementwise": 1e-10, "launch": 1e-6}
    table = [("all_reduce", 2, [(4096, 1e-5), (1 << 20, 1e-4)])]

    def measured(share: float) -> str:
        ranks = [{"speeds": [(1, 1, figures, share)], "scratch": 1e8}] * 2

        class Told:
            """Answers in place of ranks."""

            def __enter__(self) -> Told:
                return self

            def __exit__(self, *_: object) -> None:
                pass

            def launch(self, function: object, *_: object, options: LaunchOptions) -> object:
                return ranks if function is measure_rank else [table]

        monkeypatch.setattr("shardwise.world.launch.launch.Launcher", lambda **_: Told())
        monkeypatch.setattr(measure, "num_waiting_processes", lambda: 0.0)
        return measure._measure_processor("mark", True).device.source

    assert measured(0.97) == "measured"
    assert f"{BUSY_NOTE} (ranks got 60% of their cores)" in measured(0.6)


def test_what_meeting_adds_is_what_sums_do_not_explain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apart 1 s, together 1.3 s, the sums alone 0.2 s: a tenth. One round of ten is disturbed; so is every first one."""
    taken = [9.0, 9.0, 9.0] + [1.0, 1.3, 0.2] * 4 + [1.0, 7.0, 0.2] + [1.0, 1.3, 0.2] * (measure.ROUNDS - 5)
    ticks = iter([tick for each in taken for tick in (0.0, each)])
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(ticks))
    alone = SimpleNamespace(world_group=SimpleNamespace(barrier=lambda: None, all_reduce=lambda x, op="sum": None))
    assert measure.measure_waits(alone) == pytest.approx(0.1)


def test_rounds_end_where_every_median_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calm cases take the least rounds and are left alone then; restless ones go on, up to the most or until the time is over."""
    wild = [1.0, 2.0, 1.0, 2.0, 1.0, 2.0]
    given = {"calm": [1.0] * 6, "wild": wild, "late": [1.0, 2.0, 1.0, 1.0, 1.0, 1.0]}
    calls: list[str] = []

    def told(case: ProbeCase, device: torch.device) -> float:
        calls.append(case.name)
        return given[case.name][calls.count(case.name) - 1]

    monkeypatch.setattr(sampling, "_time_case", told)

    def rounds(patience: SamplingBudget, elsewhere: float = 0.0) -> dict[str, int]:
        calls.clear()
        setting = ProbeSetting(1, 1, tuple(ProbeCase(name, 2.0, lambda: None) for name in given))
        sample_cases([setting], tuple(given), torch.device("cpu"), patience, lambda mine: [max(x, elsewhere) for x in mine])
        assert setting.seconds()["calm"] == 0.5
        return {name: len(times) for name, times in setting.times.items()}

    assert rounds(SamplingBudget(2, 6, 0.05)) == {"calm": 2, "wild": 6, "late": 5}
    assert rounds(SamplingBudget(3, 5, 0.05)) == {"calm": 3, "wild": 5, "late": 5}
    assert rounds(SamplingBudget(2, 6, 0.05, seconds=0.0)) == {"calm": 2, "wild": 2, "late": 2}
    assert rounds(SamplingBudget(2, 4, 0.05), elsewhere=0.1) == dict.fromkeys(given, 4), "on another rank none is known"
    assert rounds(SamplingBudget(1, 6, 0.6)) == {"calm": 2, "wild": 2, "late": 2}, "one sample tells nothing of its spread"


@pytest.mark.parametrize("n", [2, 3, 4, 5, 7, 12, 20])
def test_the_interval_holds_the_true_median_as_often_as_it_says(n: int) -> None:
    """Against random samples of known median, of a skewed law as pauses make it."""
    samples = torch.randn(4000, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64).exp()  # of median 1
    held = sum(low <= 1 <= high for low, high in map(median_interval, samples.tolist()))
    assert held > (CONFIDENCE - 0.03) * len(samples)


def test_the_spread_is_a_part_of_the_median() -> None:
    assert median_spread([1e-6]) == median_spread([]) == math.inf
    assert median_spread([2e-6, 2e-6]) == 0.0
    assert median_spread([1e-6, 3e-6]) == pytest.approx(0.5)
    assert median_spread([1e-6, 1e-6, 9e-6, 1e-6, 1e-6]) == 0.0, "one pause is not the median's"


def test_every_figure_is_of_the_operator_it_names() -> None:
    """A product makes hundreds of FLOPs a byte: catches units that were swapped, also on a busy machine."""
    torch.set_num_threads(1)
    found = measure_alone(torch.device("cpu"))
    assert all(0 < s < 1 for s in found.values())
    assert found["linear.float32"] < 20 * found["elementwise"]
    assert found["launch"] > 100 * found["linear.float32"]


def test_the_price_of_the_block_is_that_of_its_operators() -> None:
    """What the cost model takes for the probe's layers is what a capture of them costs, kind by kind."""

    class Learned(torch.nn.Module):
        """So that gradients go all the way back."""

        def __init__(self) -> None:
            super().__init__()
            self.start, self.block = torch.nn.Parameter(torch.zeros(LARGE_BLOCK.hidden)), ProbeLayers(LARGE_BLOCK)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.block(x + self.start)

    graph = capture(Learned(), (torch.randn(3, LARGE_BLOCK.sequence, LARGE_BLOCK.hidden),), lambda out, _: out.sum()).graph
    captured = list(operator_work(graph).values())[1:-1]
    priced = list(block_work(LARGE_BLOCK, 3))
    for kind in {w.kind for w in captured}:
        for name in ("flops", "backward_flops", "bytes", "backward_bytes"):
            want, got = (sum(getattr(w, name) for w in works if w.kind == kind) for works in (captured, priced))
            assert got == pytest.approx(want, rel=0.01), (kind, name)
    assert Counter(w.kind for w in priced) == Counter(w.kind for w in captured)


def test_what_the_block_took_prices_every_operator() -> None:
    apart = Speed(1, 2, (("float32", 1e11),), 1e10, 1e-6)
    rates = RankRates.of(apart, "float32")
    assert rates.size_factor == rates.launch_factor == 1.0
    alone = sum(rates.seconds(w).total for w in block_work(LARGE_BLOCK, 2 * LARGE_BLOCK.sequences))
    slower = RankRates.of(
        replace(apart, rates=((LARGE_BLOCK.rate_key("float32"), 2 / (1.25 * alone)),)), "float32"
    )  # blocks/s of one thread's batch
    assert slower.size_factor == pytest.approx(1.25)
    assert slower.launch_factor == pytest.approx(1.25)
    assert slower.seconds(OperatorWork("linear", 1e9)).total == pytest.approx(1.25 * rates.seconds(OperatorWork("linear", 1e9)).total)


def test_two_blocks_tell_what_begins_from_what_follows_sizes() -> None:
    """Blocks of which sizes take 1.1 times and beginnings 1.7 times as long as alone: both are found."""
    apart = Speed(1, 1, (("float32", 1e11),), 1e10, 1e-5, (("start.linear", 5e4), ("weights.linear", 2e10)))
    told = replace(RankRates.of(apart, "float32"), size_factor=1.1, launch_factor=1.7)
    took = {b: sum(told.seconds(w).total for w in block_work(b, b.sequences)) for b in (LARGE_BLOCK, SMALL_BLOCK)}
    measured = replace(apart, rates=(*apart.rates, *((b.rate_key("float32"), 1 / seconds) for b, seconds in took.items())))
    found = RankRates.of(measured, "float32")
    assert (found.size_factor, found.launch_factor) == (pytest.approx(1.1), pytest.approx(1.7))
    few = sum(found.seconds(w).total for w in block_work(SMALL_BLOCK, SMALL_BLOCK.sequences))
    assert few == pytest.approx(took[SMALL_BLOCK])


def test_what_two_cases_share_is_told_apart() -> None:
    """Seconds made up of a FLOP's, a byte's and a score's, as the cases hold them, give these back."""
    flop, byte, score, weight = 1e-11, 5e-11, 3e-10, 1e-10
    taps, each = 9, 6 * 64 / 20  # FLOPs of a byte that a convolution with one tap moves
    seconds = {
        "linear.float32": flop, "weights.linear": weight + 8 * flop,
        "convolution.float32": flop + byte / (taps * each), "besides.convolution.float32": byte + each * flop,
        "convolution.bfloat16": flop + byte / (2 * taps * each), "besides.convolution.bfloat16": byte + 2 * each * flop,
        "weights.convolution": weight + 4 * flop,
        "attention.float32": flop + score / 256, "scores.float32": score + 64 * flop,
        "recurrent.float32": flop + weight * 2 / 128, "weights.recurrent": weight + 4 * flop,
        "elementwise": byte, "launch": 1e-6,
    }  # fmt: skip
    found = measure._measured_speed(1, 2, seconds)
    want = {
        "convolution.float32": flop, "besides.convolution.float32": byte, "besides.convolution.bfloat16": byte, "scores.float32": score,
        "attention.float32": flop, "recurrent.float32": flop, "weights.linear": weight, "weights.convolution": weight,
        "weights.recurrent": weight,
    }  # fmt: skip
    assert {key: 1 / rate for key, rate in found.rates if key in want} == {key: pytest.approx(s) for key, s in want.items()}


def test_the_cases_are_as_their_pairs_have_them() -> None:
    """FLOPs and bytes by torch's shapes: of convolutions with nine taps and with one, and of recurrences of many and of few samples."""
    units = {case.name: case.units for case in operator_cases(torch.device("cpu"), 1)}
    assert units["convolution.float32"] == 9 * units["besides.convolution.float32"] * 6 * 64 / 20
    assert units["weights.recurrent"] * 64 / 2 == units["recurrent.float32"]


def test_the_doctor_finds_this_machine_well_and_sees_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = check_machine()
    assert all(c.ok for c in checks if c.needed), [c for c in checks if not c.ok]
    assert all(c.remedy for c in checks if not c.ok)
    monkeypatch.setattr(doctor_module, "version", lambda name: {"torch": "1.13.0"}.get(name, "99.0"))
    old = {c.name: c for c in check_machine()}["torch"]
    assert not old.ok
    assert "1.13.0" in old.found
    assert "torch" in old.remedy


@pytest.mark.parametrize(("control", "ok"), [("bbr\n", False), ("bbr2", False), ("cubic\n", True), ("reno", True), (None, True)])
def test_the_doctor_knows_what_stalls_ranks_of_several_hosts(tmp_path: Path, control: str | None, ok: bool) -> None:
    file = tmp_path / "tcp_congestion_control"
    if control is not None:
        file.write_text(control)
    check = doctor_module._check_congestion_control(file)
    assert check.ok is ok
    assert not check.needed
    assert (control or "not known").strip() in check.found
    assert "tcp_congestion_control=cubic" in check.remedy or control is None


def test_a_run_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_writable(tmp_path / "a" / "b").ok
    monkeypatch.setattr("os.access", lambda *_: False)
    assert not check_writable(tmp_path).ok
