"""What a step's time went to: components add up to the step, and the command line sets them beside the prediction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.cli.train import components_table
from shardwise.plan.ir.mesh import Mesh
from shardwise.plan.ir.timeline import Span, Timeline
from shardwise.train.components import NAMES, StepComponents
from shardwise.world.recorder import ALL_REDUCE, CollectiveRecorder


class FakeGroup:
    total_time_s = 0.0


class FakeWorld:
    rank, num_ranks = 0, 1

    class device:
        type = "cpu"

    def __init__(self) -> None:
        self.tensor = FakeGroup()

    def group(self, ranks: tuple[int, ...]) -> FakeGroup:
        return self.tensor

    def all_reduce_max(self, values: list[int]) -> list[int]:
        return values


class FakeEngine:
    def __init__(self, forward_s: float, backward_s: float) -> None:
        spans = (
            Span(0, "compute", "0F0", 0, forward_s, "F"),
            Span(0, "compute", "0B0", 1, 1 + backward_s, "B"),
            Span(0, "recv", "", 2, 9, "recv"),
        )
        self.timeline = Timeline("step", 1, spans)
        self.phase_times_s = {"program": forward_s + backward_s + 0.5, "gradients": 0.25, "optimizer": 0.125}


def test_components_are_the_step() -> None:
    world: Any = FakeWorld()
    components = StepComponents(world, Mesh((("tensor", 1),)))
    assert components.gather() is None
    for extra in (0.0, 0.0, 7.0):  # one slow step does not count
        components.start_step()
        world.tensor.total_time_s += 1.0  # of collectives inside layers
        engine: Any = FakeEngine(1.0 + extra, 2.0)
        components.record_step(engine, 4.0 + extra)
    found = components.gather()
    assert found is not None
    assert tuple(found) == NAMES
    assert found == pytest.approx({"compute": 2, "tensor": 1, "pipeline": 0.5, "gradients": 0.25, "optimizer": 0.125, "overhead": 0.125})
    assert sum(found.values()) == pytest.approx(4.0)


def test_a_device_that_runs_ahead_is_not_timed_by_its_launches() -> None:
    world: Any = FakeWorld()
    world.device = type("device", (), {"type": "cuda"})
    components = StepComponents(world, Mesh((("tensor", 1),)))
    engine: Any = FakeEngine(1.0, 2.0)
    components.record_step(engine, 4.0)
    assert components.gather() is None


def test_seconds_of_collectives_are_kept_by_group() -> None:
    recorder = CollectiveRecorder()
    first, second = recorder.slot((0, 1)), recorder.slot((0, 2))
    for _ in range(300):  # more than the ring holds
        recorder.finish(recorder.start(ALL_REDUCE, first, 0, (1,), 4))
    assert 0 < recorder.time_by_slot_s[first] < 1
    assert recorder.time_by_slot_s[second] == 0


def test_predicted_and_measured_stand_side_by_side() -> None:
    summary = {
        "predicted_parts_s": {"compute": 0.9, "tensor": 0.0},
        "measured_parts_s": {"compute": 0.8, "tensor": 0.1},
        "predicted_step_time_s": 0.9,
    }
    table = components_table(summary)
    assert [row[0] for row in table.rows] == ["compute", "tensor", "step"]
    assert [row[3] for row in table.rows] == ["+11.1%", "-11.1%", "+0.0%"]
    assert not components_table({"measured_parts_s": None}).rows


def test_a_run_on_one_rank_measures_itself(tmp_path: Path) -> None:
    from shardwise.plan.layout import Layout
    from shardwise.plan.plan import Plan
    from shardwise.train.config import TrainingConfig
    from shardwise.train.flow import PlannedRun, train

    config = TrainingConfig.read(write(tmp_path), [])
    summary = train(config, lambda config, known: PlannedRun(Plan(Layout(), "gpt-tiny", "here", 4)))
    parts = summary["measured_parts_s"]
    assert tuple(parts) == NAMES
    assert parts["compute"] > 0
    assert sum(parts.values()) == pytest.approx(summary["step_time_s"], rel=0.9)


CONFIG = """
[model]
name = "gpt-tiny"
[data]
source = "synthetic"
[train]
batch = 4
steps = 6
[run]
sample = 0
"""


def write(folder: Path) -> Path:
    path = folder / "run.toml"
    path.write_text(CONFIG + f'folder = "{folder / "run"}"\n')
    return path
