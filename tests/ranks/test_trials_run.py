"""Plans tried by ranks of their own, as `weft plan --trials` does."""

from __future__ import annotations

from dataclasses import replace

import weft
from weft.plan.layout import Layout
from weft.train.trials import num_steps, try_all


def test_plans_are_tried_and_one_that_cannot_run_is_told() -> None:
    plans = [weft.plan("gpt-tiny", 8, cluster="1xcpu-2", layout=layout) for layout in ("data=2", "pipeline=2 microbatches=2")]
    missing = weft.plan("gpt-tiny", 8, cluster="1xcpu-2", layout=Layout())
    plans.append(replace(missing, model="no-such-model"))
    heard: list[str] = []
    found = try_all(plans, device="cpu", say=heard.append)
    assert [t.plan for t in found] == plans
    assert [t.measured_s is not None for t in found] == [True, True, False]
    assert "no-such-model" in found[2].note
    assert len(heard) == 3
    assert num_steps(plans[0]) > 1
