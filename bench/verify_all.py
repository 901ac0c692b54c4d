"""Every model under every layout: the parallel run against the serial one, in float64, over two steps.

In: models by name, rank counts, which choices of microbatches, schedule, ZeRO and recomputation, or how many random ones. Out: a table of
worst errors (or of why a layout is refused), `--json` rows, exit status 4 where anything differs or fails. `--device cuda`: several ranks
share a GPU.

Each model is traced in this process; ranks are forked from it, so that none of them traces again. A case that is silent for longer
than the limit is ended and reported by name. Not modelled: more than one machine.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from weft.api import plan as make_plan
from weft.capture.nesting import batch_size_of
from weft.errors import Infeasible, LayoutError, ModelError
from weft.model.sharding.sharding import FREE_LINKS, Prices
from weft.plan.grid import grids_of
from weft.plan.layout import Layout
from weft.plan.plan import Plan
from weft.plan.schedule_sizes import refuse_sizes
from weft.run.build import Traced
from weft.run.proof.verification import Verification
from weft.run.proof.verify import verify_plan
from weft.zoo.names import sizes
from weft.zoo.resolve import resolve
from weft.zoo.resolved import Resolved

ROOT = Path(__file__).resolve().parents[1]
TOLERANCE = 1e-9
LIMIT_S = 60.0
BATCH = 16  # divides into data=8 x microbatches=2
# A pipeline takes them in turn; with one rank they are the same but for what splits backward or has several stages a rank.
SCHEDULES = ("1f1b", "zb-h1", "interleaved", "chimera", "gpipe", "zb-v", "gems-master", "zb-h2", "sequential")
# These models are so small that the planner would rarely cut them. Where links cost nothing everything is cut that can be, and moved at
# will; where they cost a little, few bytes are moved.
EAGER = {
    "free links": FREE_LINKS,  # `--cut-everything`
    "dear links": Prices(flops_per_s=1e6, memory_bytes_per_s=1e7, link_bytes_per_s=1e8, latency_s=0.0),
}
REFUSED = (Infeasible, LayoutError, ModelError)


@dataclass(frozen=True)
class Row:
    """One case. `eager`: prices by which tensors were cut. `status`: equal, differs, refused (why: `note`) or failed."""

    model: str
    layout: str
    eager: str
    status: str
    worst: dict[str, float] = field(default_factory=dict)
    note: str = ""
    replicated: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def error(self) -> float:
        return max(self.worst.values(), default=0.0)


class Subject:
    """One model, traced once, verified under many layouts. `model`: where the name is not one that resolves."""

    def __init__(self, name: str, batch: int = BATCH, seed: int = 0, model: Resolved | None = None, device: str = "cpu") -> None:
        resolved = model or resolve(name)
        most = resolved.default_batch if ".py" in name else batch
        self.name, self.make, self.loss, self.seed, self.device = name, resolved.make, resolved.loss, seed, device
        self.batch = resolved.batch(min(batch, most))
        self.size = batch_size_of(self.batch)
        torch.manual_seed(seed)
        self.source = Traced.of(self.make)

    def plan(self, layout: Layout) -> Plan:
        """The plan of a layout, as `weft.plan` makes it. Raises Infeasible, LayoutError or ModelError where weft refuses it."""
        state = torch.random.get_rng_state()
        single = replace(layout, precision="float32")
        found = make_plan(self.make, self.batch, loss=self.loss, cluster="1xcpu-2", layout=single, source=self.source)
        torch.random.set_rng_state(state)
        return replace(found, layout=layout, model=self.name)

    def check(self, layout: Layout, steps: int = 2, limit_s: float = LIMIT_S, eager: str = "", **options: Any) -> Verification:
        """Verify one layout. Raises WeftError where it is refused or a rank fails.

        `eager`: one of EAGER's prices, by which tensors are cut instead of the planner's.
        """
        plan, source = self.plan(layout), self.source
        if eager and layout.tensor > 1 and not plan.uncaptured:
            plan, source = replace(plan, shards=()), replace(source, prices=EAGER[eager])
        limits: dict[str, Any] = {"timeout_s": limit_s, "device": self.device}
        return verify_plan(plan, self.make, self.batch, self.loss, source, steps=steps, seed=self.seed, **limits, **options)


def factorisations(num_ranks: int) -> Iterator[tuple[int, int, int]]:
    """Every (data, tensor, pipeline) whose product is `num_ranks`."""
    for data in range(1, num_ranks + 1):
        for tensor in range(1, num_ranks // data + 1):
            if num_ranks % (data * tensor) == 0:
                yield data, tensor, num_ranks // (data * tensor)


def layouts(counts: Sequence[int], size: int, which: str) -> Iterator[tuple[Layout, str]]:
    """(layout, eager) of each factorisation: `plain`, `mixed` with the other choices taken in turn, `grids` of the tensor ranks."""
    turn = 0
    for count in counts:
        for data, tensor, pipeline in factorisations(count):
            if which in ("plain", "all"):
                yield Layout(data, tensor, pipeline, precision="float64"), ""
            if which in ("mixed", "all"):
                most = max(size // data, 1)
                microbatches = min(4 if turn % 2 else 2, most)
                zero, recompute = (turn + 1) % 4, ("none", "selective", "full")[turn // 2 % 3]
                offload = ("none", "none", "activations", "optimizer", "all")[turn % 5]
                schedule = SCHEDULES[turn % len(SCHEDULES)]
                if refuse_sizes(schedule, microbatches):
                    schedule = "1f1b"
                chunks = 2 if schedule == "interleaved" else 1
                layout = Layout(data, tensor, pipeline, microbatches, schedule, zero, recompute, "float64", chunks=chunks, offload=offload)
                yield replace(layout, sequence_parallel="on" if tensor > 1 and turn % 3 else "off"), list(EAGER)[turn % 2]
            if which in ("grids", "all"):
                for number, grid in enumerate(grids_of(tensor)):
                    layout = Layout(data, tensor, pipeline, zero=(turn + number) % 4, precision="float64", grid=grid)
                    yield replace(layout, sequence_parallel="on" if (turn + number) % 2 else "off"), ("", *EAGER)[(turn + number) % 3]
            turn += 1


def random_layouts(counts: Sequence[int], size: int, number: int, rng: random.Random) -> Iterator[tuple[Layout, str]]:
    """`number` (layout, eager), every key drawn by itself: what nobody thought of putting together."""
    made = 0
    while made < number:
        data, tensor, pipeline = rng.choice(list(factorisations(rng.choice(list(counts)))))
        schedule = rng.choice(SCHEDULES) if pipeline > 1 else "1f1b"
        layers = rng.choice(["", "", ":1", ":2"])
        try:
            layout = Layout(
                data, tensor, pipeline,
                rng.randint(1, max(1, min(6, size // data))),
                schedule,
                rng.randrange(4),
                rng.choice(["none", "none", "selective", "full", f"full{layers}"]),
                "float64",
                chunks=rng.choice([2, 3]) if schedule == "interleaved" else 1,
                sequence_parallel=rng.choice(["off", "on"]) if tensor > 1 else "off",
                offload=rng.choice(["none", "none", "activations", f"activations{layers}", "optimizer", "all"]),
                all_reduce=rng.choice(["auto", "auto", "native", "ring", "tree", "halving_doubling"]) if data > 1 else "auto",
                staleness=rng.choice([0, 0, 0, 1]) if data > 1 else 0,
                lend=rng.choice(["off", "on"]),
                grid=rng.choice(["", *grids_of(tensor)]),
                sample_parallel=rng.choice(["off", "on"]) if tensor > 1 else "off",
                segment=rng.choice([1, 1, 1, 2]),
            )  # fmt: skip
        except LayoutError:
            continue  # words that do not go together
        made += 1
        yield layout, rng.choice(["", *EAGER])


def models() -> list[str]:
    """The tiny size of every family, the Hugging Face configurations, and the models of the tests and examples."""
    zoo = [name for name in sizes() if name.endswith("-tiny")]
    library = [f"hf:{path.relative_to(ROOT)}" for path in sorted((ROOT / "tests/torch/hf").glob("*.json"))]
    return [*zoo, *library, "examples/own_model.py:make", *odd_models()]


def odd_models() -> list[str]:
    """Models that nobody wrote for weft: `tests/ranks/odd_models.py:NAME`."""
    file = ROOT / "tests/ranks/odd_models.py"
    if not file.is_file():
        return []
    factories = re.findall(r"^def ([a-z]\w*)\(\) -> Any:", file.read_text(encoding="utf-8"), re.MULTILINE)
    return [f"tests/ranks/odd_models.py:{name}" for name in factories]


def run_case(subject: Subject, layout: Layout, eager: str, limit_s: float) -> Row:
    """One row; never raises for what the model or weft does."""
    began = time.perf_counter()
    shown = str(replace(layout, precision="float32"))
    try:
        found = subject.check(layout, limit_s=limit_s, eager=eager)
    except REFUSED as error:
        return Row(subject.name, shown, eager, "refused", {}, str(error), seconds=time.perf_counter() - began)
    except Exception as error:
        # A crash is a finding, not the end of the run.
        return Row(subject.name, shown, eager, "failed", {}, f"{type(error).__name__}: {error}", seconds=time.perf_counter() - began)
    status = "equal" if found.ok and found.tolerance <= TOLERANCE else "differs"
    seconds = time.perf_counter() - began
    return Row(subject.name, shown, eager, status, found.worst, found.first_difference or "", found.replicated_operators, seconds)


def merged(files: Sequence[str]) -> list[Row]:
    """The rows of several files, the last word on each case."""
    found: dict[tuple[str, str, str], Row] = {}
    for file in files:
        for entry in json.loads(Path(file).read_text(encoding="utf-8"))["rows"]:
            row = Row(**{**entry, "replicated": tuple(entry["replicated"])})
            found[row.model, row.layout, row.eager] = row
    return list(found.values())


def run(
    names: Sequence[str],
    cases: Callable[[int], Iterable[tuple[Layout, str]]],
    limit_s: float,
    tell: Callable[[Row], None],
    device: str = "cpu",
) -> list[Row]:
    """All `cases` of all models; they depend on how many samples a batch has."""
    rows: list[Row] = []
    for name in names:
        try:
            subject = Subject(name, device=device)
        except Exception as error:
            rows.append(Row(name, "", "", "failed", {}, f"{type(error).__name__}: {error}"))
            tell(rows[-1])
            continue
        for layout, eager in cases(subject.size):
            rows.append(run_case(subject, layout, eager, limit_s))
            tell(rows[-1])
    return rows


def listed(numbers: Sequence[int]) -> str:
    """In words.

    >>> listed([1]), listed([1, 2, 4])
    ('1', '1, 2 and 4')
    """
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}" if most else last


def document(rows: Sequence[Row]) -> str:
    """The table as Markdown."""
    by_model: dict[str, list[Row]] = {}
    for row in rows:
        by_model.setdefault(row.model, []).append(row)
    equal = [row for row in rows if row.status == "equal"]
    lines = [
        "# Parallel equals serial",
        "",
        "`scripts/verify_all --document FILE`: models under factorisations data x tensor x pipeline of "
        f"{listed(sorted({Layout.parse(row.layout).num_ranks for row in rows}))} ranks. Loss, every "
        "gradient (inputs included), and every weight and buffer after two AdamW steps in float64 are compared with plain PyTorch in one "
        f"process; the tolerance is {TOLERANCE:.0e} relative. `free links` and `dear links` are prices by which more tensors are cut than "
        "the planner would in models as small as these.",
        "",
        f"{len(rows)} cases, {sum(r.seconds for r in rows):.0f} s one after the other: "
        f"{len(equal)} equal (worst error {max((r.error for r in equal), default=0.0):.1e}), "
        + ", ".join(f"{sum(r.status == s for r in rows)} {s}" for s in ("refused", "differs", "failed"))
        + ".",
        "",
        "| model | equal | worst error | refused | differs or failed | computed whole, for want of a rule |",
        "|---|---|---|---|---|---|",
    ]
    for name, mine in by_model.items():
        good = [r for r in mine if r.status == "equal"]
        whole = sorted({op for r in mine for op in r.replicated})
        lines.append(
            f"| {name} | {len(good)} | {max((r.error for r in good), default=0.0):.1e} | {sum(r.status == 'refused' for r in mine)} | "
            f"{sum(r.status in ('differs', 'failed') for r in mine)} | {', '.join(whole[:4])}{' ...' if len(whole) > 4 else ''} |"
        )
    for name, mine in by_model.items():
        lines += ["", f"## {name}", "", "| layout | result |", "|---|---|"]
        for row in mine:
            said = f"{row.error:.1e}" if row.status == "equal" else f"{row.status}: {_line(row.note)}"
            lines.append(f"| {row.layout}{f', {row.eager}' if row.eager and 'tensor=1 ' not in row.layout else ''} | {said} |")
    return "\n".join(lines) + "\n"


def _line(text: str) -> str:
    return " ".join(text.split())[:400].replace("|", "/")


def main(arguments: Sequence[str]) -> int:
    """Run what the arguments choose; see `--help`."""
    if "--axes" in arguments:
        from bench import coverage  # which is about the models of this one

        return coverage.main([word for word in arguments if word != "--axes"])
    parser = argparse.ArgumentParser(prog="scripts/verify_all", description="Every model under every layout against the serial run.")
    parser.add_argument("models", nargs="*", help="models, or parts of their names; all of them by default")
    parser.add_argument("--axes", action="store_true", help="each axis that a model admits: makes docs/coverage.md")
    parser.add_argument("--ranks", default="1,2,4,8", help="numbers of ranks, as 1,2,4")
    parser.add_argument("--choices", choices=("plain", "mixed", "grids", "all"), default="all", help="plain layouts, mixed, grids, or all")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="N random layouts of each model instead")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random layouts")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="take every Nth case of each model")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="S", help="seconds after which a silent case is ended")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where ranks run; several share a GPU")
    parser.add_argument("--json", metavar="FILE", help="write the rows there, after every case")
    parser.add_argument("--merge", metavar="FILE", nargs="+", help="run nothing: take the rows of these files, the last word on each case")
    parser.add_argument("--document", metavar="FILE", help="write the table there, as docs/benchmarks/verify.md is made")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    counts = [int(word) for word in given.ranks.split(",")]
    known = models()
    names = [n for n in known if not given.models or any(word in n for word in given.models)] or list(given.models)
    began = time.perf_counter()

    told: list[Row] = []

    def keep() -> None:
        if given.json:
            rows = [asdict(row) for row in told]
            Path(given.json).write_text(
                json.dumps({"rows": rows, "total_s": time.perf_counter() - began}, indent=1) + "\n", encoding="utf-8"
            )

    def tell(row: Row) -> None:
        told.append(row)
        keep()
        said = f"{row.error:.1e}" if row.status == "equal" else _line(row.note)
        print(f"{row.status:8} {row.seconds:5.1f} s  {row.model}  {row.layout}  {row.eager}  {said}", file=sys.stderr, flush=True)

    rng = random.Random(given.seed)

    def cases(size: int) -> Iterable[tuple[Layout, str]]:
        if given.random:
            return random_layouts(counts, size, given.random, rng)
        return list(layouts(counts, size, given.choices))[:: given.every]

    rows = merged(given.merge) if given.merge else run(names, cases, given.limit, tell, given.device)
    total_s = time.perf_counter() - began
    if given.document:
        Path(given.document).write_text(document(rows), encoding="utf-8")
    bad = sum(row.status in ("differs", "failed") for row in rows)
    print(f"{len(rows)} cases, {bad} bad, {total_s:.0f} s")
    return 4 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
