"""Comparison of recorded runs: in the order of causes, so that what is found first is what happened first.

Parameters, ties, initial weights; then for each step samples, dropout masks, gradients, updates, buffers. The tolerance of a tensor is
`_NOISE_FACTOR` times what one unit of rounding in all weights changes it by, measured in perturbed serial runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean, median

import torch
from torch import Tensor

from shardwise.audit import diagnose
from shardwise.audit.difference import AuditResult, Noise, RunDifference, StepErrors
from shardwise.audit.match import GatheredShard, ParameterMatch, canonical_name, match_parameters
from shardwise.audit.pages import Pages, RecordedPage
from shardwise.audit.samples import compare_masks, compare_samples, pages_of_step
from shardwise.audit.tensor_verdict import TensorVerdict, judge_tensor, relative_difference

_NOISE_FACTOR = 8  # a difference counts when it is this many times the measured noise
_DEAF = 0.5  # a tolerance above this says that a tensor is nothing but noise


def unit_of_rounding(dtype: str) -> float:
    """Return the unit of rounding of a dtype by name.

    >>> unit_of_rounding("float64") < 1e-15
    True
    """
    return float(torch.finfo(getattr(torch, dtype)).eps)


@dataclass
class RunComparison:
    """The serial pages, those of perturbed serial runs, the ranks' pages, and what has been found."""

    serial: list[RecordedPage]
    perturbed: list[list[RecordedPage]]
    ranks: Pages
    match: ParameterMatch
    result: AuditResult

    @property
    def unit(self) -> float:
        """One unit of rounding of the coarsest type that the serial run computes with."""
        return unit_of_rounding(self.serial[0].coarsest)

    @property
    def num_steps(self) -> int:
        """The number of steps of which all pages are there, with the weights after them."""
        return min(len(self.serial), *(len(p) for p in self.ranks.values())) - 1

    def _find(self, difference: RunDifference | None) -> None:
        if difference is not None:
            self.result.differences.append(difference)

    # ------------------------------------------------------------------------------------------- before the first step
    def check_start(self) -> None:
        """Compare parameters, their ties and their initial values."""
        match, start = self.match, self.match.gather(self.ranks, 0, "weights")
        whole = [n for n in match.serial if canonical_name(match.aliases, n) == n]
        absent = [n for n in whole if n not in start]
        if absent:
            shape = list(match.serial[absent[0]].full_shape)
            self._find(
                RunDifference("parameters", f"{absent[0]} {shape} is on no rank", None, absent[0], wrong=len(absent), compared=len(whole))
            )
        if match.unmatched:
            rank, name = match.unmatched[0]
            text = f"{len(match.unmatched)} of the parallel run's parameters match none of the serial run's, first {name} on rank {rank}"
            self._find(RunDifference("parameters", text, None, name, (rank,), wrong=len(match.unmatched)))
        self._check_ties()
        limit = max(64 * self.unit, 1e-6)
        verdicts = {n: judge_tensor(start[n], match.serial[n].tensor.flatten(), limit) for n in whole if n in start}
        wrong = [n for n, v in verdicts.items() if v.kind != "equal"]
        if wrong:
            first = min(wrong, key=self._forward_position)
            verdict = verdicts[first]
            text = f"{len(wrong)} of {len(whole)} initial weights differ, first {first} ({verdict.text})"
            self._find(RunDifference("start", text, 0, first, verdict.ranks, None, len(wrong), len(whole)))
        self._note_matches()

    def _check_ties(self) -> None:
        for name, names in self.match.aliases.items():
            if len(names) < 2 or name != names[0]:
                continue
            for rank, pages in self.ranks.items():
                aliases = pages[0].aliases
                if all(n in aliases for n in names) and len({tuple(aliases[n]) for n in names}) > 1:
                    text = f"{' and '.join(names)} are one parameter in the serial run, and several on rank {rank}"
                    return self._find(RunDifference("ties", text, None, name, (rank,)))

    def _note_matches(self) -> None:
        if self.match.renamed:
            name, serial_name = next(iter(self.match.renamed.items()))
            self.result.notes.append(
                f"{len(self.match.renamed)} parameters matched by values or by a part of their name, as {name} = {serial_name}"
            )
        if self.match.guessed:
            self.result.notes.append(f"{len(set(self.match.guessed))} constant parameters placed by rank, as {self.match.guessed[0]}")

    def _forward_position(self, name: str) -> int:
        return diagnose.forward_position(self.serial[0], name)

    # ------------------------------------------------------------------------------------------- steps
    def check_step(self, step: int) -> None:
        """Compare one step until a difference is found."""
        pages = pages_of_step(self.ranks, step)
        comparison = StepErrors(step)
        self.result.steps.append(comparison)
        losses = [mean(p.losses) for p in pages.values() if p.losses]
        if self.serial[step].losses and losses:
            comparison.serial_loss, comparison.parallel_loss = mean(self.serial[step].losses), mean(losses)
        difference, note = compare_samples(self.serial, self.ranks, step)
        masks, mask_note = compare_masks(self.serial[step], pages, step)
        if step == 0:
            self.result.notes += [text for text in (note, mask_note) if text]
        self._find(difference)
        self._find(masks)
        if difference is not None:
            return
        for what in ("gradients", "updates", "buffers"):
            if self.result.equal:
                verdicts = self._judge_all(what, step)
                worst = max((v.error for v in verdicts.values()), default=0.0)
                if what != "buffers":
                    setattr(comparison, what, worst)
                evidence = diagnose.Evidence(self.serial, self.perturbed, self.ranks, self.match, step, verdicts, note)
                self._find(diagnose.name_difference(what, evidence))

    def _judge_all(self, what: str, step: int) -> dict[str, TensorVerdict]:
        """Judge all tensors of a kind; of those that are nothing but noise none is kept."""
        shards = self._shards(what, step)
        expected = {n: x for n in self._serial_names(what, step) if (x := self._serial_value(self.serial, what, n, step)) is not None}
        noise = {n: self._noise_of(what, n, step, x) for n, x in expected.items()}
        usual = median(noise.values()) if noise else 0.0
        verdicts, ignored, largest = {}, 0, 0.0
        for name, x in expected.items():
            tolerance = _NOISE_FACTOR * max(noise[name], usual, 2 * self.unit)
            if what != "gradients":  # a weight is rounded when it is stored
                stored = self._stored(what, name, step)
                tolerance = max(tolerance, 2 * self.unit * float(stored.norm()) / max(float(x.norm()), 1e-300))
            if what == "updates":
                tolerance = max(tolerance, self._noise_through_gradient(name, step, x))
            ignored += tolerance > _DEAF
            if name in shards:
                verdicts[name] = verdict = judge_tensor(shards[name], x, tolerance)
                largest = max(largest, verdict.error if verdict.kind == "equal" and tolerance <= _DEAF else 0.0)
            elif what == "gradients" and float(x.norm()):
                verdicts[name] = TensorVerdict("missing", 1.0, "no rank has one", ranks=tuple(self.ranks))
            if tolerance > _DEAF and name in verdicts and verdicts[name].kind != "missing":
                del verdicts[name]
        if what == "gradients" and step == 0:
            self.result.noise = Noise(self.unit, usual, largest, ignored)
        return verdicts

    def _noise_of(self, what: str, name: str, step: int, serial: Tensor) -> float:
        values = (self._serial_value(pages, what, name, step) for pages in self.perturbed)
        return max((relative_difference(x, serial) for x in values if x is not None), default=0.0)

    def _noise_through_gradient(self, name: str, step: int, update: Tensor) -> float:
        """Return what the noise of a gradient may change of the update: an optimizer that divides by the size of each element, as Adam,
        moves an element whose gradient is nothing but noise as far as any other, to either side. A few of these are the
        whole difference of a tensor, and two perturbed runs seldom show the largest. Of an optimizer that does not divide it is the
        tolerance of the gradient."""
        gradient = self._serial_value(self.serial, "gradients", name, step)
        if gradient is None or gradient.numel() != update.numel():
            return 0.0
        noise = max(self._noise_of("gradients", name, step, gradient), 2 * self.unit)
        usual = noise * float(gradient.norm()) / max(1, gradient.numel()) ** 0.5
        share = (_NOISE_FACTOR * usual / gradient.abs().clamp(min=1e-300)).clamp(max=2.0)
        return float((share * update).norm()) / max(float(update.norm()), 1e-300)

    def _serial_names(self, what: str, step: int) -> list[str]:
        if what == "buffers":
            return list(self.serial[step].buffers)
        held = set(self.match.names.values())
        return [n for n in self.match.serial if n in held and canonical_name(self.match.aliases, n) == n]

    def _stored(self, what: str, name: str, step: int) -> Tensor:
        shard = self.serial[step].shards_of("buffers" if what == "buffers" else "weights")[name]
        assert shard is not None
        return shard.tensor.flatten()

    def _serial_value(self, pages: list[RecordedPage], what: str, name: str, step: int) -> Tensor | None:
        """Return a gradient, or the change that a step makes to a weight or a buffer; None where nothing was recorded or changed."""
        if what == "gradients":
            shard = pages[step].gradients.get(name) if step < len(pages) else None
            return None if shard is None else shard.tensor.flatten()
        kind = "buffers" if what == "buffers" else "weights"
        before, after = (pages[i].shards_of(kind).get(name) if i < len(pages) else None for i in (step, step + 1))
        if before is None or after is None or before.full_shape != after.full_shape:
            return None
        change = after.tensor.flatten() - before.tensor.flatten()
        return change if what == "updates" or bool(change.any()) else None

    def _shards(self, what: str, step: int) -> dict[str, list[GatheredShard]]:
        if what == "buffers":
            return self._buffer_shards(step)
        if what == "gradients":
            return self.match.gather(self.ranks, step, "gradients")
        before, after = (self.match.gather(self.ranks, i, "weights") for i in (step, step + 1))
        return {
            name: [GatheredShard(b.rank, b.index, b.values - a.values, b.partial) for a, b in zip(before[name], shards, strict=True)]
            for name, shards in after.items()
            if len(before.get(name, ())) == len(shards)
        }

    def _buffer_shards(self, step: int) -> dict[str, list[GatheredShard]]:
        """Return the changes of the buffers that a rank holds whole under the serial name, or under that of its module."""
        found: dict[str, list[GatheredShard]] = {}
        modules = {name.rpartition(".")[0]: serial.rpartition(".")[0] for name, serial in self.match.renamed.items()}
        for rank, pages in self.ranks.items():
            for name, before in pages[step].buffers.items():
                stem, _, leaf = name.rpartition(".")
                serial_name = name if name in self.serial[step].buffers else f"{modules.get(stem, stem)}.{leaf}"
                serial, after = self.serial[step].buffers.get(serial_name), pages[step + 1].buffers.get(name)
                if before is None or after is None or serial is None or before.full_shape != serial.full_shape or before.partial:
                    continue
                change = after.tensor.flatten() - before.tensor.flatten()
                if change.numel() == serial.tensor.numel():
                    found.setdefault(serial_name, []).append(GatheredShard(rank, torch.arange(change.numel()), change, False))
        return found


def compare_records(serial: Pages, perturbed: list[Pages], ranks: Pages) -> AuditResult:
    """Compare a parallel run with a serial one, and with runs of it that are perturbed by rounding."""
    result = AuditResult(ranks=len(ranks))
    first = serial[min(serial)]
    comparison = RunComparison(first, [p[min(p)] for p in perturbed], ranks, match_parameters(serial, ranks), result)
    if comparison.num_steps < 1:
        counts = sorted({len(p) - 1 for p in ranks.values()})
        text = f"no whole step was recorded: serial {len(first) - 1}, parallel {', '.join(map(str, counts))}"
        result.differences.append(RunDifference("record", text))
        return result
    if len(serial) > 1:
        result.notes.append(f"the serial command has {len(serial)} ranks; rank {min(serial)} is taken for it")
    if any(p.coarsest != first[0].coarsest for p in (pages[0] for pages in ranks.values())):
        coarsest = sorted({pages[0].coarsest for pages in ranks.values()})
        result.notes.append(f"the coarsest type of the serial run is {first[0].coarsest}, of the parallel run {', '.join(coarsest)}")
    shards = [shard for page in first[: comparison.num_steps] for shard in page.gradients.values() if shard is not None]
    if shards and not any(shard.tensor.any() for shard in shards):
        result.notes.append("all gradients of the serial run are 0: nothing is trained, so that equal runs say little")
    comparison.check_start()
    for step in range(comparison.num_steps):
        if result.equal:
            comparison.check_step(step)
    return result
