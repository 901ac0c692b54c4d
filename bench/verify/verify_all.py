"""Every model under every layout: the parallel run against the serial one, in float64, over two steps.

In: models by name, rank counts, which choices of microbatches, schedule, ZeRO and recomputation, or how many random ones. Out: a table of
worst errors (or of why a layout is refused), `--json` rows, exit status 4 where anything differs or fails. `--device cuda`: several ranks
share a GPU.

Each model is traced in this process; ranks are forked from it, so that none of them traces again. A case that is silent for longer
than the limit is ended and reported by name. Not modelled: more than one machine.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from bench.verify import proven_pairs
from bench.verify.outside_models import MODELS
from shardwise.plan.layout import Layout
from shardwise.zoo.names import published_sizes
from tests.support.verified_models import LIMIT_S, OTHER_AXES, TOLERANCE, Row, Subject, layouts, random_layouts, run_case

ROOT = Path(__file__).resolve().parents[2]


def models() -> list[str]:
    """The tiny size of every family, the Hugging Face configurations, and the models of the tests and examples."""
    zoo = [name for name in published_sizes() if name.endswith("-tiny")]
    library = [f"hf:{path.relative_to(ROOT)}" for path in sorted((ROOT / "tests/torch/hf").glob("*.json"))]
    return [*zoo, *library, "examples/own_model.py:make", *odd_models()]


def odd_models() -> list[str]:
    """Models that nobody wrote for shardwise: `tests/support/odd_models.py:NAME`."""
    file = ROOT / "tests/support/odd_models.py"
    if not file.is_file():
        return []
    factories = re.findall(r"^def ([a-z]\w*)\(\) -> Any:", file.read_text(encoding="utf-8"), re.MULTILINE)
    return [f"tests/support/odd_models.py:{name}" for name in factories]


def outside_models() -> list[str]:
    """Models that are none of the zoo's nor of the tests'."""
    return [f"bench/verify/outside_models.py:{name}" for name in MODELS]


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


def document(rows: Sequence[Row], name: str = "verify") -> str:
    """The table as Markdown. `name`: of the page, and of its data."""
    by_model: dict[str, list[Row]] = {}
    for row in rows:
        by_model.setdefault(row.model, []).append(row)
    equal = [row for row in rows if row.status == "equal"]
    lines = [
        "# Parallel equals serial: models of other people's kinds" if name == "outside" else "# Parallel equals serial",
        "",
        f"`scripts/verify_all {'--outside --random N ' if name == 'outside' else ''}--document FILE`: models "
        "under factorisations data x tensor x pipeline of "
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
    for model, mine in by_model.items():
        good = [r for r in mine if r.status == "equal"]
        whole = sorted({op for r in mine for op in r.replicated})
        lines.append(
            f"| {model} | {len(good)} | {max((r.error for r in good), default=0.0):.1e} | {sum(r.status == 'refused' for r in mine)} | "
            f"{sum(r.status in ('differs', 'failed') for r in mine)} | {', '.join(whole[:4])}{' ...' if len(whole) > 4 else ''} |"
        )
    lines += refusals(rows)
    lines += ["", f"Every case: [data/{name}.csv](data/{name}.csv)."]
    return "\n".join(lines) + "\n"


def refusals(rows: Sequence[Row]) -> list[str]:
    """Return the table of what layouts were refused for, most frequent first; names and numbers left out."""
    reasons = Counter(re.sub(r"[\w./:]*[/\d_][\w./:]*", "..", _line(row.note))[:110] for row in rows if row.status == "refused")
    return (
        ["", "| refused by | cases |", "|---|---|", *(f"| {why} | {count} |" for why, count in reasons.most_common(40))] if reasons else []
    )


def cases_csv(rows: Sequence[Row]) -> str:
    """Every case as a line of comma-separated values: model, layout, worst error or why it is refused."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["model", "layout", "result"])
    for row in rows:
        prices = f", {row.eager}" if row.eager and "tensor=1 " not in row.layout else ""
        result = f"{row.error:.1e}" if row.status == "equal" else f"{row.status}: {_line(row.note)}"
        table.writerow([row.model, row.layout + prices, result])
    return text.getvalue()


def _line(text: str) -> str:
    return " ".join(text.split())[:400].replace("|", "/")


def main(arguments: Sequence[str]) -> int:
    """Run what the arguments choose; see `--help`."""
    if "--axes" in arguments:
        from bench.planning import coverage  # which is about the models of this one
        from bench.verify import proven_models

        table = proven_models if "--prove" in arguments else coverage
        return table.main([word for word in arguments if word not in ("--axes", "--prove")])
    if "--prove" in arguments:
        return proven_pairs.main([word for word in arguments if word != "--prove"])
    parser = argparse.ArgumentParser(prog="scripts/verify_all", description="Every model under every layout against the serial run.")
    parser.add_argument("models", nargs="*", help="models, or parts of their names; all of them by default")
    parser.add_argument("--axes", action="store_true", help="each axis that a model admits: docs/coverage.md; with --prove: proven.md")
    parser.add_argument("--ranks", default="1,2,4,8", help="numbers of ranks, as 1,2,4")
    parser.add_argument("--choices", choices=("plain", "mixed", "grids", "all"), default="all", help="plain layouts, mixed, grids, or all")
    parser.add_argument("--outside", action="store_true", help="models that are none of the zoo's; --random N: N pairs of all of them")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="N random layouts of each model instead")
    parser.add_argument("--prove", action="store_true", help="prove random graphs under random layouts; --prove --help says how")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random layouts")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="take every Nth case of each model")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="S", help="seconds after which a silent case is ended")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where ranks run; several share a GPU")
    parser.add_argument("--json", metavar="FILE", help="write the rows there, after every case")
    parser.add_argument("--merge", metavar="FILE", nargs="+", help="run nothing: take the rows of these files, the last word on each case")
    parser.add_argument(
        "--document", metavar="FILE", help="write the table there, as docs/benchmarks/verify.md is made, and every case beside it in data/"
    )
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    counts = [int(word) for word in given.ranks.split(",")]
    known = outside_models() if given.outside else models()
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
            number = max(1, -(-given.random // len(names))) if given.outside else given.random
            return random_layouts(counts, size, number, rng, OTHER_AXES if given.outside else ())
        return list(layouts(counts, size, given.choices))[:: given.every]

    rows = merged(given.merge) if given.merge else run(names, cases, given.limit, tell, given.device)
    total_s = time.perf_counter() - began
    if given.document:
        page = Path(given.document)
        page.write_text(document(rows, page.stem), encoding="utf-8")
        data = page.parent / "data" / f"{page.stem}.csv"
        data.parent.mkdir(exist_ok=True)
        data.write_text(cases_csv(rows), encoding="utf-8")
    bad = sum(row.status in ("differs", "failed") for row in rows)
    print(f"{len(rows)} cases, {bad} bad, {total_s:.0f} s")
    return 4 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
