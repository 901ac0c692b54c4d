"""docs/benchmarks/rules.md: how many rules are right, and which right cuts shardwise does not offer."""

from __future__ import annotations

import platform
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.verify.rules.compare import Cut, Finding
from shardwise.ops import RECORDS
from shardwise.ops.creation import replicated_rule

HEAD = """# Factor rules beside brute force

Written by `scripts/validate rules`. PyTorch has samples of the arguments of some 700 operators (`OpInfo`). Each is traced, and each
operator that comes out is held against every way to cut it over two ranks.

- A cut that a rule offers is run as shardwise lowers it, kernels and collectives included, in float64: outputs, gradients of all inputs and
  buffers must equal the operator on whole tensors. Where it needs no kernel, `torch.distributed.tensor._ops.strategy_validation` must
  find it right, too.
- Right cuts are enumerated: each input whole or in pieces of a dimension, each output whole, in pieces or as summands. What the same
  validation finds right and no rule offers stands below, with the number of samples in which it was right. Some are right for those
  samples alone (a window of one element, a row that repeats), some are right and of no use (what does not read its input may
  have it anyhow), and some are work to do. Inputs that are summands are not enumerated, nor operators of more than four tensors.
  Operators that are told the shape of their result (views) are tried with the shape of the whole, so their right cuts are found by the
  first check alone.

Operators that rules name and no sample of PyTorch's reaches: REACHED.

Not compared: operators that draw, whose results differ from call to call; those that write in place, of which a graph has none; and those
whose kernels ended the process, as some read where wrong pieces of indices point: ENDED.
"""


def summary(found: Sequence[Finding]) -> str:
    """Markdown: the counts."""
    ruled = {f.operator for f in found if f.ruled}
    bare = {f.operator for f in found} - ruled
    rows = [
        ("operators with a rule", len(ruled)),
        ("operators without one, which are replicated and listed", len(bare)),
        ("calls", len(found)),
        ("cuts that rules offer", sum(f.offers for f in found)),
        ("of these wrong", sum(len(f.wrong) for f in found)),
        ("right cuts that a rule lacks (operator and cut)", len(_lacks(found, True))),
        ("right cuts of operators without a rule", len(_lacks(found, False))),
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {count} |" for name, count in rows)])


def write(path: Path, found: Sequence[Finding], ended: Sequence[str] = ()) -> None:
    """The whole page. `ended`: operators of which torch's own kernels ended the process."""
    missed = sorted(_names() - {f.operator.split(".")[1] for f in found if f.ruled})
    head = HEAD.replace("REACHED", ", ".join(missed) or "none").replace("ENDED", ", ".join(ended) or "none")
    parts = [head, f"{platform.machine()}, PyTorch {torch.__version__}.\n", summary(found)]
    wrong = [line for f in found for line in f.wrong]
    if wrong:
        parts += ["\n## Wrong\n", *(f"- {line}" for line in wrong)]
    parts += ["\n## Right cuts that rules lack\n", _table(found, True), "\n## Operators without a rule\n", _table(found, False), ""]
    path.write_text("\n".join(parts))


def _names() -> set[str]:
    """Operators that rules name."""
    return {name.split(".")[1] for name, op in RECORDS.items() if op.rule is not None and op.rule is not replicated_rule}


def _lacks(found: Sequence[Finding], ruled: bool) -> dict[tuple[str, Cut], int]:
    with_rule = {f.operator for f in found if f.ruled}
    counts: dict[tuple[str, Cut], int] = defaultdict(int)
    for finding in found:
        if (finding.operator in with_rule) == ruled:
            for cut in finding.lacks:
                counts[finding.operator, cut] += 1
    return counts


def _table(found: Sequence[Finding], ruled: bool) -> str:
    rows: dict[str, list[str]] = defaultdict(list)
    for (operator, (inputs, outputs)), count in sorted(_lacks(found, ruled).items()):
        rows[operator].append(f"{', '.join(inputs)} → {', '.join(outputs)} ({count})")
    lines = [f"| {operator.removeprefix('aten.').removesuffix('.default')} | {'; '.join(cuts)} |" for operator, cuts in rows.items()]
    return "\n".join(["| operator | inputs → outputs (samples) |", "|---|---|", *lines])
