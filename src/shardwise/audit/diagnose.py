"""Name of the first difference, by what explains it: a factor, counts, clipping, statistics, a missing reduction, or its place.

Each rule returns a difference or None; they are tried from the most to the least specific.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from shardwise.audit.difference import RunDifference
from shardwise.audit.match import GatheredShard, ParameterMatch
from shardwise.audit.pages import Pages, RecordedPage
from shardwise.audit.samples import compare_targets, explain_counts, pages_of_step
from shardwise.audit.tensor_verdict import TensorVerdict, judge_tensor

_CLOSE = 1e-3  # a factor is a number of ranks, or a norm another norm, within this
_OUTPUT_NOISE = 8  # as of gradients
_SAME_NOISE = 1e-3  # a gradient counts as the sum of two others within this
_UNIMPORTANT = ("fused", "foreach", "capturable", "maximize", "differentiable", "initial_lr")


@dataclass(frozen=True)
class Evidence:
    """All that a step's diagnosis may use. `verdicts`: of the tensors compared; `division`: how samples lie on ranks."""

    serial: list[RecordedPage]
    perturbed: list[list[RecordedPage]]
    ranks: Pages
    match: ParameterMatch
    step: int
    verdicts: dict[str, TensorVerdict]
    division: str

    @property
    def pages(self) -> dict[int, RecordedPage]:
        """The page of this step of each rank."""
        return pages_of_step(self.ranks, self.step)

    @property
    def wrong(self) -> dict[str, TensorVerdict]:
        """The tensors that differ, in forward order."""
        names = sorted((n for n, v in self.verdicts.items() if v.kind != "equal"), key=lambda n: forward_position(self.serial[0], n))
        return {name: self.verdicts[name] for name in names}

    def of_kind(self, *kinds: str) -> list[str]:
        """Names of tensors whose verdict is of these kinds, in forward order."""
        return [name for name, v in self.wrong.items() if v.kind in kinds]

    def report(self, kind: str, text: str, name: str | None = None, factor: float | None = None) -> RunDifference:
        """Return a difference of this step, at `name` or at the first tensor that differs."""
        first = name or next(iter(self.wrong))
        return RunDifference(kind, text, self.step, first, self.verdicts[first].ranks, factor, len(self.wrong), len(self.verdicts))


def forward_position(page: RecordedPage, name: str) -> int:
    """Return the place of a tensor's module in the order of the forward pass."""
    order = {module: i for i, module in enumerate(page.outputs)}
    stem = name.rpartition(".")[0]
    while stem and stem not in order:
        stem = stem.rpartition(".")[0]
    # Modules put out something when they end: the innermost first, and one that holds others last.
    return order.get(stem, -1) if stem else -1


def name_difference(what: str, evidence: Evidence) -> RunDifference | None:
    """Name the difference of gradients, updates or buffers; None where all are equal."""
    if not evidence.wrong:
        return None
    if what == "updates":
        return _name_update(evidence)
    if what == "buffers":
        first, verdict = next(iter(evidence.wrong.items()))
        text = (
            f"gradients and weights agree, but {len(evidence.wrong)} of {len(evidence.verdicts)} buffers change differently, first {first}"
        )
        reason = "statistics of each rank's own samples, or other settings"
        if 0 < len(verdict.ranks) < len(evidence.ranks):
            reason = f"wrong on rank {', '.join(map(str, verdict.ranks))} only, which does not update it"
        return evidence.report("statistics", f"{text} ({verdict.text}): {reason}?")
    for rule in _GRADIENT_RULES:
        difference = rule(evidence)
        if difference is not None:
            return difference
    return _locate_gradient(evidence)


# ----------------------------------------------------------------------------------------------- gradients
def _has_factor(evidence: Evidence) -> RunDifference | None:
    """Explain all wrong gradients by one constant."""
    wrong = evidence.wrong
    names = evidence.of_kind("factor")
    if len(names) != len(wrong):
        return None
    factors = [wrong[n].factor for n in names]
    limit = max(_CLOSE, _OUTPUT_NOISE * median(_noise_between(evidence, n) for n in names))
    if max(factors) - min(factors) > limit * max(map(abs, factors)):
        return None
    c = median(factors)
    micro = {len(getattr(p, what)) for p in evidence.pages.values() for what in ("inputs", "targets", "losses")} - {0, 1}
    counts = [("ranks", len(evidence.ranks)), *(("micro-batches", n) for n in sorted(micro))]
    hints = [
        f"{c:.4g} = {'' if c > 1 else '1 / '}the number of {what}"
        for what, n in counts
        if n > 1 and min(abs(c / n - 1), abs(c * n - 1)) < _CLOSE
    ]
    listed = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    which = "all" if len(names) == len(evidence.verdicts) else f"{len(names)} of {len(evidence.verdicts)} ({listed})"
    norms = _unequal_norms(evidence)
    text = f"{which} gradients are {c:.4f} x the serial ones; " + (
        ", ".join(hints) or norms or "neither the number of ranks nor of micro-batches: clipped, or a loss scale?"
    )
    return evidence.report("factor", text, factor=c)


def _has_unequal_counts(evidence: Evidence) -> RunDifference | None:
    text = explain_counts(evidence.serial[evidence.step], evidence.pages)
    if not text:
        return None
    first = next(iter(evidence.wrong.values())).text
    return evidence.report("unequal counts", f"{len(evidence.wrong)} of {len(evidence.verdicts)} gradients are wrong ({first}); {text}")


def _has_rank_factors(evidence: Evidence) -> RunDifference | None:
    names = evidence.of_kind("rank factors", "factor")
    if len(names) < len(evidence.verdicts) or not evidence.of_kind("rank factors"):
        return None
    several = evidence.of_kind("rank factors")[0]
    text = f"every rank's gradients have a factor of their own ({evidence.verdicts[several].text})"
    return evidence.report("rank factor", f"{text}: clipped by the norm of the rank's own part?", several)


def _unequal_norms(evidence: Evidence) -> str:
    """Say how the norms that clipping measured differ from the serial one; empty where they agree or nothing was clipped."""
    serial = evidence.serial[evidence.step].norms
    ranks = [p.norms[-1] for p in evidence.pages.values() if p.norms]
    if not serial or not ranks or all(abs(norm / max(serial[-1], 1e-300) - 1) < _CLOSE for norm in ranks):
        return ""
    return f"clipping measures the norm {', '.join(f'{norm:.4g}' for norm in ranks)} on the ranks, and {serial[-1]:.4g} in the serial run"


def _has_local_clipping(evidence: Evidence) -> RunDifference | None:
    text, norms = _unequal_norms(evidence), [p.norms[-1] for p in evidence.pages.values() if p.norms]
    if not text or max(norms) / max(min(norms), 1e-300) - 1 < _CLOSE:
        return None
    return evidence.report("clipping", f"{text}: each rank clips by a norm of its own, before gradients are averaged or without it")


def _has_local_statistics(evidence: Evidence) -> RunDifference | None:
    if "divided over the ranks" not in evidence.division:
        return None
    order, output = list(evidence.serial[0].outputs), _first_output(evidence)
    end = order.index(output[0]) if output else len(order)
    kinds = {name: kind for p in evidence.pages.values() for name, kind in p.kinds.items()}
    local = [n for n in order[: end + 1] if "BatchNorm" in kinds.get(n, "") and kinds[n] != "SyncBatchNorm"]
    if not local:
        return None
    text = f"{local[0]} ({kinds[local[0]]}) takes the statistics of each rank's own samples; SyncBatchNorm takes those of all; "
    return evidence.report("statistics", f"{text}{len(evidence.wrong)} of {len(evidence.verdicts)} gradients follow")


def _is_not_cleared(evidence: Evidence) -> RunDifference | None:
    """Explain the gradients by those of the step before that were not cleared."""
    if evidence.step == 0:
        return None
    now, before = (evidence.match.gather(evidence.ranks, step, "gradients") for step in (evidence.step, evidence.step - 1))
    for name in evidence.wrong:
        serial = evidence.serial[evidence.step].gradients.get(name)
        shards, earlier = now.get(name, []), before.get(name, [])
        if serial is None or not shards or len(shards) != len(earlier):
            return None
        rest = [GatheredShard(a.rank, a.index, a.values - b.values, a.partial) for a, b in zip(shards, earlier, strict=True)]
        limit = max(_SAME_NOISE, 20 * _noise_between(evidence, name))
        if judge_tensor(rest, serial.tensor.flatten(), limit).kind != "equal":
            return None
    text = f"{len(evidence.wrong)} of {len(evidence.verdicts)} gradients still have those of step {evidence.step - 1} in them"
    return evidence.report("not cleared", f"{text}: zero_grad not called?")


def _noise_between(evidence: Evidence, name: str) -> float:
    serial = evidence.serial[evidence.step].gradients[name]
    assert serial is not None
    x = serial.tensor
    others = [p[evidence.step].gradients.get(name) for p in evidence.perturbed if evidence.step < len(p)]
    return max((float((o.tensor - x).norm()) / max(float(x.norm()), 1e-300) for o in others if o is not None), default=0.0)


def _is_not_reduced(evidence: Evidence) -> RunDifference | None:
    for kind, text in (("sum", "an all-reduce that sums is missing"), ("mean", "an all-reduce that averages is missing")):
        names = evidence.of_kind(kind)
        if not names:
            continue
        tied = [" = ".join(a) for a in (evidence.match.aliases.get(n, [n]) for n in names) if len(a) > 1]
        text += f" (tied: {', '.join(tied)})" if tied else ""
        others = [n for n in evidence.wrong if n not in names and evidence.wrong[n].kind not in ("rank factors", "factor")]
        listed = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        text = (
            f"{len(names)} of {len(evidence.verdicts)} gradients differ between ranks, and their {kind} is the serial one: {text}: {listed}"
        )
        return evidence.report("not reduced", text + (f"; also wrong: {', '.join(others[:3])}" if others else ""), names[0])
    return None


def _has_other_targets(evidence: Evidence) -> RunDifference | None:
    return compare_targets(evidence.serial[evidence.step], evidence.pages, evidence.step)


def _first_output(evidence: Evidence) -> tuple[str, str, float] | None:
    """Return the first module, in forward order, whose outputs over all ranks have other sums than the serial ones: name, class, error."""
    step, serial = evidence.step, evidence.serial[evidence.step]
    for name, (elements, total, squares, _) in serial.outputs.items():
        parts = [p.outputs[name] for p in evidence.pages.values() if name in p.outputs]
        count = sum(p[0] for p in parts)
        if not parts or not elements or count % elements or any(p[3] for p in parts):
            continue  # not called here, padded, or partial sums
        times, scale = count // elements, max((squares * elements) ** 0.5, 1e-300)
        noise = [p[step].outputs[name] for p in evidence.perturbed if step < len(p) and name in p[step].outputs]
        noise_errors = [max(abs(x[1] - total) / scale, abs(x[2] / max(squares, 1e-300) - 1)) for x in noise]
        tolerance = max([1e-6, *(_OUTPUT_NOISE * error for error in noise_errors)])
        sums, sums_of_squares = sum(p[1] for p in parts), sum(p[2] for p in parts)
        error = max(abs(sums / times - total) / scale, abs(sums_of_squares / times / max(squares, 1e-300) - 1))
        if error > tolerance and not (times > 1 and abs(sums - total) / scale <= tolerance):
            return name, serial.kinds.get(name, ""), error
    return None


def _find_coarse_values(evidence: Evidence) -> str:
    """Say that all wrong gradients are values of a 16-bit type, where the serial ones are not; empty otherwise."""
    gathered = evidence.match.gather(evidence.ranks, evidence.step, "gradients")
    values = [shard.values for name in evidence.wrong for shard in gathered.get(name, ())]
    for dtype in (torch.bfloat16, torch.float16):
        serial = [evidence.serial[evidence.step].gradients[name] for name in evidence.wrong]
        is_own = all(x is not None and bool((x.tensor.to(dtype) == x.tensor).all()) for x in serial)
        if values and not is_own and all(bool((x.to(dtype).to(x.dtype) == x).all()) for x in values):
            return f"; every value of them is one of {str(dtype).removeprefix('torch.')}: reduced in 16 bits?"
    return ""


def _locate_gradient(evidence: Evidence) -> RunDifference:
    """Locate gradients that no rule explains: the first output that differs, or the last parameter whose gradient does."""
    wrong, output = evidence.wrong, _first_output(evidence)
    first, last = next(iter(wrong)), list(wrong)[-1]
    text = f"{len(wrong)} of {len(evidence.verdicts)} gradients are wrong; "
    if output:
        text += f"the first output that differs is that of {output[0]} ({output[1]}), by {output[2]:.1g}"
    else:
        text += "all outputs agree, so it is the loss, its targets, the backward pass or the reduction; "
        text += f"the last wrong one in forward order is {last}"
        text += _find_coarse_values(evidence)
    text += f"; first {first} ({wrong[first].kind}: {wrong[first].text})"
    ranks = {rank for v in wrong.values() for rank in v.ranks}
    if 0 < len(ranks) < len(evidence.ranks):
        text += f"; on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))} only"
    missing = evidence.of_kind("missing")
    return evidence.report("gradients", text + (f"; no gradient: {', '.join(missing[:3])}" if missing else ""))


_GRADIENT_RULES: tuple[Callable[[Evidence], RunDifference | None], ...] = (
    _has_factor, _has_unequal_counts, _has_rank_factors, _has_local_clipping, _has_local_statistics, _is_not_cleared, _is_not_reduced,
    _has_other_targets,
)  # fmt: skip


# ----------------------------------------------------------------------------------------------- optimizers
def _name_update(evidence: Evidence) -> RunDifference:
    """Name a difference of the optimizers' updates, where gradients agree."""
    wrong = evidence.wrong
    settings = _different_settings(evidence)
    frozen = _ranks_that_do_not_move(evidence)
    if frozen and len(frozen) == len(evidence.ranks):
        optimizers = [o for p in evidence.pages.values() for o in p.optimizers]
        held = (
            f"; the optimizer holds {optimizers[0]['held']} parameters, {optimizers[0]['known']} of them the model's" if optimizers else ""
        )
        return evidence.report("optimizer", f"gradients agree, but the weights do not move{held} (made before the model was wrapped?)")
    factors = [wrong[n].factor for n in evidence.of_kind("factor")]
    text = "gradients agree, but the weights change differently: "
    if len(factors) == len(wrong) and max(factors) - min(factors) <= _CLOSE * max(map(abs, factors)):
        which = "all" if len(wrong) == len(evidence.verdicts) else f"{len(wrong)} of {len(evidence.verdicts)}"
        return evidence.report("optimizer", f"{text}{which} by {median(factors):.4f} x{settings}", factor=median(factors))
    first, verdict = next(iter(wrong.items()))
    text += f"{len(wrong)} of {len(evidence.verdicts)}, first {first} ({verdict.kind}: {verdict.text})"
    ranks = {rank for v in wrong.values() for rank in v.ranks}
    if 0 < len(verdict.ranks) < len(evidence.ranks):
        text += f"; {first} on rank{'s' if len(verdict.ranks) > 1 else ''} {', '.join(map(str, verdict.ranks))} only"
    if ranks and (stale := _stale_updates(evidence)):
        text += f"; {stale}"
    return evidence.report("optimizer", text + settings)


def _ranks_that_do_not_move(evidence: Evidence) -> set[int]:
    before, after = (evidence.match.gather(evidence.ranks, step, "weights") for step in (evidence.step, evidence.step + 1))
    moved = {
        b.rank for n, shards in after.items() for a, b in zip(before.get(n, ()), shards, strict=False) if bool((a.values != b.values).any())
    }
    return set(evidence.ranks) - moved


def _stale_updates(evidence: Evidence) -> str:
    """Say which ranks keep weights that others update: left out of an optimizer, or of the broadcast of one whose state is sharded."""
    before, after = (evidence.match.gather(evidence.ranks, step, "weights") for step in (evidence.step, evidence.step + 1))
    still: dict[int, list[str]] = {}
    for name in evidence.wrong:
        for a, b in zip(before.get(name, ()), after.get(name, ()), strict=False):
            if bool((a.values == b.values).all()):
                still.setdefault(a.rank, []).append(name)
    listed = [f"{len(names)} do not move on rank {rank} (first {names[0]})" for rank, names in sorted(still.items())]
    return f"{', '.join(listed)}: left out of the optimizer, or not broadcast after its step?" if listed else ""


def _different_settings(evidence: Evidence) -> str:
    """Return what the optimizers' settings differ in, as the end of a sentence; empty where they agree."""
    serial = [o for o in evidence.serial[evidence.step].optimizers if o["settings"]]
    ranks = [o for p in evidence.pages.values() for o in p.optimizers if o["settings"]]
    if not serial or not ranks:
        return ""
    found: list[str] = []
    if serial[0]["kind"] != ranks[0]["kind"]:
        found.append(f"{serial[0]['kind']} / {ranks[0]['kind']}")
    for optimizer in ranks:
        for a, b in zip(serial[0]["settings"], optimizer["settings"], strict=False):
            for key in (k for k in a if k in b and k not in _UNIMPORTANT and _is_different(a[k], b[k])):
                text = f"{key} {a[key]} / {b[key]}"
                found += [text] if text not in found else []
    return f"; settings, serial / parallel: {', '.join(found)}" if found else ""


def _is_different(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) > 1e-9 * max(abs(a), abs(b))
    return bool(a != b)
