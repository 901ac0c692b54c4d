"""Small models under layouts that between them use every collective of the runtime; and runs of a case, whole and broken."""

from __future__ import annotations

import copy
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.verify.mutations.collectives import Broken
from bench.verify.mutations.target import Active, Change, Mutation
from bench.verify.mutations.weights import install, prepared
from shardwise.errors import ShardwiseError
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Plan
from shardwise.run.engine import Engine
from shardwise.run.verify.serial import SerialRun
from shardwise.run.verify.verify import Options, verify_on_rank
from shardwise.world.launch.launch import launch
from shardwise.world.world import World
from tests.support.verified_models import EAGER, Subject

ROOT = Path(__file__).resolve().parents[3]
ODD = "tests/support/odd_models.py"
GPT = "gpt:layers=2,hidden=16,heads=2,sequence=8,vocabulary=32"
LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Case:
    """A model under a layout; cut by the prices `eager` of `tests.support.verified_models`, or by the usual ones; gradients are clipped
    at `clip`."""

    model: str
    layout: str
    eager: str = "free links"
    clip: float = 0.0

    def __str__(self) -> str:
        model = self.model.rpartition(":")[2] if ".py" in self.model else self.model.partition(":")[0]
        return f"{model}, {self.layout}{', clipped' if self.clip else ''}{'' if self.eager else ', usual prices'}"


CASES = (
    Case("bench/verify/mutations/models.py:scattered", "data=2"),
    Case("bench/verify/mutations/models.py:scattered", "data=2 tensor=2"),
    Case(GPT, "data=2 tensor=2", clip=0.05),
    Case(f"{ODD}:two_inputs", "data=2 tensor=2"),
    Case(GPT, "data=2 tensor=2", ""),
    Case(GPT, "data=2 tensor=2 sequence_parallel=on zero=1", clip=0.05),
    Case(GPT, "data=2 pipeline=2 microbatches=2", clip=0.05),
    Case(GPT, "data=2 tensor=2 zero=3 recompute=full"),
    Case(GPT, "data=2 zero=2 microbatches=3"),
    Case(GPT, "data=2 staleness=1"),
    Case(GPT, "data=2 compress=topk:0.3"),
    Case(GPT, "data=2 compress=int8"),
    Case(GPT, "data=2 all_reduce=ring"),
    Case(GPT, "data=2 zero=1 all_reduce=halving_doubling"),
    Case(GPT, "tensor=2x2"),
    Case(GPT, "pipeline=2 inner=2x1/1x2 microbatches=2"),
    Case(GPT, "tensor=2 pipeline=2 microbatches=2 schedule=zb-h1"),
    Case("t5-tiny", "data=2 tensor=2 sequence_parallel=on", "dear links"),
    Case("moe-tiny", "data=2 tensor=2 sample_parallel=on"),
    Case("resnet-tiny", "data=2 tensor=2"),
    Case("resnet-tiny", "data=2 spatial=2"),
    Case("resnet-tiny", "pipeline=2 microbatches=2 schedule=chimera"),
    Case(f"{ODD}:norms", "data=2"),
    Case(f"{ODD}:statistics", "data=2 tensor=2"),
    Case(f"{ODD}:losses", "data=2 tensor=2"),
    Case(f"{ODD}:slices", "data=2 tensor=2 sequence_parallel=on"),
    Case(f"{ODD}:rotary", "data=2 tensor=2"),
    Case(f"{ODD}:alexnet", "tensor=2 sample_parallel=on", "dear links"),
    Case(f"{ODD}:contrastive", "data=2"),
    Case(f"{ODD}:branch", "data=2 microbatches=2"),
)


@dataclass(frozen=True)
class Outcome:
    """What one run showed. `error`: of ranks that failed. `worst`: of what verify compared. `fired`: by mutation how often, on all ranks.

    `moved`: how far from where the whole run ends some rank's training state ends (weights, buffers, optimizer), relative.
    """

    ok: bool
    error: str = ""
    first: str = ""
    worst: float = 0.0
    fired: Mapping[Mutation, int] = field(default_factory=dict)
    moved: float = 0.0


def apart(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """How far two training states lie apart: the most of any tensor, relative; infinite for other tensors and for NaN."""
    if mine.keys() != theirs.keys() or any(x.shape != theirs[name].shape for name, x in mine.items()):
        return float("inf")
    most = 0.0
    for name, x in mine.items():
        if x.numel():
            difference = float((x - theirs[name]).abs().max()) / (float(theirs[name].abs().max()) + 1e-3)
            most = max(most, difference if difference == difference else float("inf"))
    return most


class Runs:
    """Runs cases; models are traced once, and all changes of a case run in one launch until one ends it."""

    def __init__(self) -> None:
        self._subjects: dict[str, Subject] = {}

    def subject(self, name: str) -> Subject:
        if name not in self._subjects:
            torch.set_num_threads(1)
            self._subjects[name] = Subject(str(ROOT / name) if ".py" in name else name, 8)
        return self._subjects[name]

    def run(self, case: Case, changes: Sequence[Change], steps: int = 2) -> list[Outcome]:
        """One verification for each change. The last outcome is that of a whole run, after all others in the same ranks."""
        outcomes: list[Outcome] = []
        while len(outcomes) <= len(changes):
            outcomes += self._launch(case, [*changes, None][len(outcomes) :], steps)
        return outcomes

    def _launch(self, case: Case, changes: Sequence[Change | None], steps: int) -> list[Outcome]:
        """Outcomes up to the first that ends the launch. Ranks run the case whole before, to know where it ends."""
        subject = self.subject(case.model)
        plan, source = subject.plan(replace(Layout.parse(case.layout), precision="float64")), subject.source
        if case.eager and plan.layout.tensor > 1 and not plan.uncaptured:
            plan, source = replace(plan, shards=()), replace(source, prices=EAGER[case.eager])
        source.capture_all(plan, subject.batch, subject.loss)
        prepared()
        optimizer = {"name": "adamw", "clip": case.clip}

        def on_rank(world: World) -> None:
            active = Active()
            engines = _patch(active, world, plan)
            with active.pause():  # nothing is broken before it is built, since groups connect there
                world.world_group.connect()
            whole: dict[str, Tensor] | None = None
            for number, change in enumerate([None, *changes]):
                active.begin(change)
                own = copy.deepcopy(source) if plan.uncaptured else source  # a model that runs whole is trained where it is
                seen = verify_on_rank(
                    world, plan, subject.make, subject.batch, subject.loss, own,
                    Options(steps=steps, seed=subject.seed, optimizer=optimizer),
                )  # fmt: skip
                state = _state(engines.pop())
                whole = whole or state
                verdict = None if seen is None else (seen.ok, seen.first_difference or "", max(seen.worst.values()))
                fired = [(m.site, m.kind, m.how, count) for m, count in active.fired.items()]
                torch.save((verdict, fired, apart(state, whole)), Path(folder, f"{number}.{world.rank}"))

        with tempfile.TemporaryDirectory() as folder:
            error = ""
            try:
                launch(on_rank, plan.layout.num_ranks, timeout_s=LIMIT_S, show=False)
            except ShardwiseError as failure:
                error = f"{type(failure).__name__}: {failure}".split("\n")[0]
            outcomes = []
            for number in range(1, len(changes) + 1):
                files = [Path(folder, f"{number}.{rank}") for rank in range(plan.layout.num_ranks)]
                if not all(file.exists() for file in files):
                    if changes[number - 1] is None or not Path(folder, "0.0").exists():
                        raise RuntimeError(f"{case} with nothing broken: {error}")
                    return [*outcomes, Outcome(False, error)]
                outcomes.append(_outcome([torch.load(file) for file in files]))
        return outcomes


def _outcome(of_ranks: Sequence[Any]) -> Outcome:
    fired: Counter[Mutation] = Counter()
    for _, counts, _ in of_ranks:
        for site, kind, how, count in counts:
            fired[Mutation(site, kind, how)] += count
    ok, first, worst = of_ranks[0][0]
    return Outcome(ok, "", first, worst, fired, max(moved for _, _, moved in of_ranks))


def _patch(active: Active, world: World, plan: Plan) -> list[Engine]:
    """Install everything in this rank; returns where its engines will be."""
    engines: list[Engine] = []
    begin, step = Engine.__init__, SerialRun.step

    def init(self: Engine, *args: Any, **options: Any) -> None:
        engines.append(self)
        begin(self, *args, **options)

    def serially(self: SerialRun, *args: Any, **options: Any) -> Any:
        with active.pause():
            return step(self, *args, **options)

    install(active)
    Broken(active, lambda: (world, plan.layout.mesh_of(world.rank))).install()
    Engine.__init__ = init  # type: ignore[method-assign]
    SerialRun.step = serially  # type: ignore[method-assign]
    return engines


def _state(engine: Engine) -> dict[str, Tensor]:
    pieces = engine.state_shards(drain=False)
    return {f"{p.kind} {p.name} {p.slot} {p.flat}": p.tensor.detach().double().clone() for p in pieces if not p.tensor.is_complex()}
