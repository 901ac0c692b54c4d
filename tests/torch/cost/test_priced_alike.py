"""What a rank computes follows from its own samples, and one step has one time: whichever verb tells it, with the same parts."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import run
from shardwise.cli.pricing_context import PricingContext
from shardwise.cluster.cluster import Cluster
from shardwise.cost.step import Pricer
from shardwise.model.stages.stages import stage_cuts
from shardwise.plan.layout import Layout
from shardwise.plan.plan import MemoryBreakdown

GPT = "gpt:layers=4,hidden=256,heads=8,sequence=64,vocabulary=1000"
# Model, layout without its data, samples a rank and microbatch. Sizes of both kinds: samples that do and do not divide by 2.
RANKS = (
    (GPT, "tensor=2 pipeline=2 microbatches=3 precision=float16", 1),
    (GPT, "tensor=2x2 microbatches=2 sequence_parallel=on precision=bfloat16", 3),
    ("moe-tiny", "tensor=2 pipeline=2 microbatches=2 precision=bfloat16", 2),
    ("t5-tiny", "tensor=2 pipeline=2 microbatches=5 precision=float16", 1),
    ("resnet-tiny", "pipeline=2 microbatches=3 precision=bfloat16", 1),
    ("resnet-tiny:image=256,base=64", "tensor=2 microbatches=2 precision=float32", 3),
)


def rank_of(model: str, rest: str, each: int, data: int) -> tuple[Any, ...]:
    """Cuts of weights, and by stage seconds of compute and bytes held, of a rank beside which there are `data` replicas."""
    layout = Layout.parse(f"data={data} {rest}")
    batch = data * layout.microbatches * each
    setting = PricingContext(model, Cluster.parse(f"{2 * data}xdgx-a100-80"), batch)
    pricer = Pricer(setting.graph, setting.cluster, batch)
    sites = [cut.site for cut in stage_cuts(setting.graph) if cut.index > 0]
    sites = [sites[len(sites) * i // layout.num_stages] for i in range(1, layout.num_stages)]
    costs = pricer.stages(layout, sites)
    sharding = pricer.sharding(layout)
    shards = {} if sharding is None else {axis: cut for axis, cut in sharding.shards.items() if axis != "data"}
    seconds = [s for cost in costs for s in (cost.compute.forward, cost.compute.backward, cost.weight_s)]
    held = {f.name: [getattr(cost.memory.alone, f.name) for cost in costs] for f in fields(MemoryBreakdown)}
    return shards, seconds, held


@pytest.mark.parametrize(("model", "rest", "each"), RANKS)
def test_what_a_rank_computes_does_not_depend_on_the_replicas_beside_it(model: str, rest: str, each: int) -> None:
    """A batch of five replicas was priced as rows that fill no tile, and one of three was divided among two."""
    of_data = {data: rank_of(model, rest, each, data) for data in (1, 2, 3, 5, 15)}
    shards, seconds, held = of_data[2]
    for data, (other_shards, other_seconds, other_held) in of_data.items():
        assert other_shards == shards, data
        assert other_seconds == pytest.approx(seconds, rel=1e-9), data
        for part in ("parameters", "gradients", "optimizer", "activations"):
            assert other_held[part] == pytest.approx(held[part], rel=1e-9), (data, part)
        # What an operator's backward works on counts as following the samples, also where little of it (a loss, a bias of scores) does not.
        assert other_held["buffers"] == pytest.approx(held["buffers"], rel=0.02), data


def answer(words: list[str], capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capfd.readouterr()
    assert run([*words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return found


STEPS = (
    (GPT, "2xp4d.24xlarge", "data=4 tensor=2 pipeline=2 microbatches=4 zero=1 precision=bfloat16"),
    (GPT, "2xp3.16xlarge", "pipeline=4 tensor=4 microbatches=8 schedule=zb-h1 precision=float16 offload=optimizer"),
    (GPT, "4xcpu-2", "data=2 pipeline=2 microbatches=6"),
    ("moe-tiny", "1xdgx-h100", "data=4 tensor=2 microbatches=2 zero=3 recompute=full precision=bfloat16"),
    ("resnet-tiny", "1xdgx-a100-80", "data=2 pipeline=2 microbatches=3 schedule=gpipe"),
    ("t5-tiny", "2xdgx-h100", "data=8 pipeline=2 microbatches=2 chunks=2 schedule=interleaved precision=bfloat16"),
)


@pytest.mark.parametrize(("model", "machines", "layout"), STEPS)
def test_every_verb_tells_one_step(model: str, machines: str, layout: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """To the last digit, and the timeline is as long: it was the pipeline's alone, and said another time than the plan."""
    file, trace = tmp_path / "plan.toml", tmp_path / "trace.json"
    planned = answer(["plan", model, "--cluster", machines, "--batch", "48", "--layout", layout, "-o", str(file)], capfd)
    told = {
        "simulate": answer(["simulate", str(file), "-o", str(trace)], capfd),
        "simulate by name": answer(["simulate", model, "--cluster", machines, "--batch", "48", "--layout", layout], capfd),
        "explain": answer(["explain", str(file), "--brief"], capfd),
    }
    whatif = answer(["whatif", str(file), "batch=48"], capfd)
    compared = answer(["compare", str(file), str(file)], capfd)
    told |= {"whatif": whatif["rows"][0], "compare": compared["plans"][0], "compare with itself": compared["plans"][1]}
    for verb, found in told.items():
        assert found["step_time_s"] == planned["step_time_s"], verb
        assert found["step_time_parts_s"] == planned["step_time_parts_s"], verb
    assert sum(planned["step_time_parts_s"].values()) == pytest.approx(planned["step_time_s"], rel=1e-9)
    spans = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(1e6 * planned["step_time_s"], rel=1e-9)


def test_the_page_and_the_terminal_say_the_step_in_the_plan_s_words(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Also of a plan that was edited since: its file still has what was predicted before."""
    model, machines, layout = STEPS[0]
    file, html = tmp_path / "plan.toml", tmp_path / "page.html"
    planned = answer(["plan", model, "--cluster", machines, "--batch", "48", "--layout", layout, "-o", str(file)], capfd)
    said = next(one["reason"] for one in planned["reasons"] if one["choice"] == "step")
    assert run(["simulate", str(file)]) == 0
    assert said in capfd.readouterr().out
    assert run(["report", str(file), "-o", str(html)]) == 0
    assert html.read_text().count(said) == 2  # among the reasons and over the picture
    edited = re.sub(r"microbatches = 4", "microbatches = 2", file.read_text())
    assert edited != file.read_text()
    file.write_text(edited)
    again = answer(["simulate", str(file)], capfd)
    assert again["step_time_s"] != planned["step_time_s"]
    assert run(["report", str(file), "-o", str(html)]) == 0
    assert answer(["explain", str(file), "--brief"], capfd)["step_time_s"] == again["step_time_s"]
