"""Whether data ranks with a part of the samples each train what one with all of them does, of a model that is no graph.

In: a plan of a model that could not be captured, the model, its batch and loss. Out: nothing, or `Infeasible` by name. The model is run on
some of the batch, whole and in parts, and left as it was.

Tried are both ends of the batch, and batches whose parts are as unlike as its samples are: each one sample over and over.

Not modelled: models that are divisible on what was tried, and are not on other batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.capture.capture import Loss, call
from weft.capture.nesting import batch_size_of, leaves, rebuild
from weft.capture.randomness import python_randomness, python_randomness_kept
from weft.capture.state import changes, set_state, state_of
from weft.errors import Infeasible, ModelError
from weft.lower.double import doubled, widened
from weft.plan.plan import Plan
from weft.run.steady import Steady
from weft.world import private

_TRIED = 4  # samples of each part on which the model is tried
_UNLIKE = 4  # batches of parts that are one sample each
_CLOSE, _CLOSE_DOUBLE = 1e-4, 1e-9  # relative, beyond rounding in float32 and in float64
_NOTHING = 1e-12  # of the largest gradient: what float64 may leave of a gradient that is zero


class _NotInDouble(Exception):
    """The model does not compute in float64."""


def refuse_division(plan: Plan, model: nn.Module, batch: Any, loss: Loss | None) -> None:
    """Raise Infeasible where `data` ranks with a part of the samples each would train something else than one with all of them.

    That is where the model takes statistics over the batch, where the loss is not the mean over the parts (a sum, or a mean over what they
    differ in), or its gradients are not, where a part alone makes the model fail, and where what the model writes while it runs (a running
    mean, a queue of keys) depends on the samples that it sees. It is tried in float64 where the model computes in it: a maximum over the
    batch that only scales a first guess changes the loss by less than float32's rounding, and gradients by more.
    """
    if plan.layout.data > 1:
        tried(model, lambda double: Trial(plan, model, batch, loss, double).run())


def tried(model: nn.Module, run: Callable[[bool], object]) -> None:
    """Run a trial in float64, or in the model's own precision where it does not compute in it."""
    values, held = [(p, p.data) for p in model.parameters()], [(m._buffers, dict(m._buffers)) for m in model.modules()]
    try:
        widened(model)
        run(True)
        return
    except _NotInDouble:
        pass
    finally:
        for p, value in values:
            p.data = value
        for table, before in held:
            table.update(before)
    run(False)


@dataclass(frozen=True)
class _Ran:
    """What a call of the model gave: its loss, what it left in parameters and buffers, and gradients, where they were asked for.

    In a plain loop, tensors of its output by path, too.
    """

    loss: float
    left: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]


class Trial:
    """One model in one precision."""

    def __init__(self, plan: Plan, model: nn.Module, batch: Any, loss: Loss | None, double: bool) -> None:
        self.plan, self.model, self.batch, self.loss, self.double = plan, model, batch, loss, double
        self.samples, self.data = batch_size_of(batch), plan.layout.data
        self.size = min(self.samples // self.data, _TRIED) * self.data
        self.batches = self._batches()
        self.close = _CLOSE_DOUBLE if double else _CLOSE
        self.named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.values = {name: x.detach().clone() for name, x in self.named.items()}
        self.tables: list[tuple[Any, Any]] = [(t, dict(t)) for m in model.modules() for t in (m._parameters, m._buffers)]
        self.attributes, self.drawn = state_of(model), torch.random.get_rng_state()
        self.draws = False  # random numbers that are not steady
        self.keeps: list[str] = []  # state in attributes, which the next call may read
        self.why = f"{plan.model} could not be captured ({plan.uncaptured})"

    def _batches(self) -> list[list[int]]:
        """Samples of the batches that are tried. At both ends parts may by accident have the same number of what the mean is over."""
        first, each = list(range(self.size)), self.size // self.data
        found = [first, [self.samples - self.size + i for i in first]]
        rounds = min(_UNLIKE, self.samples // self.data)
        for n in range(rounds):
            chosen = [(n * self.data + part) * self.samples // (rounds * self.data) for part in range(self.data)]
            found.append([sample for sample in chosen for _ in range(each)])
        return [rows for i, rows in enumerate(found) if rows not in found[:i]]

    def parts_of(self, rows: list[int]) -> list[list[int]]:
        """The part of every rank."""
        each = self.size // self.data
        return [rows[i * each : (i + 1) * each] for i in range(self.data)]

    def run(self) -> None:
        """Raise Infeasible for the first thing that parts do otherwise."""
        coupled = [name for name, m in self.model.named_modules() if isinstance(m, private.BatchNorm) and m.training]
        if coupled:
            raise Infeasible(
                f"{self.why}, and {coupled[0]} takes statistics over the whole batch, which data={self.data} would divide; "
                "use data=1, or make the model capturable"
            )
        modes = [(m, m.training) for m in self.model.modules()]
        try:
            with python_randomness_kept():
                self.compare_writes()
                if self.draws:
                    self.model.eval()  # what is drawn would tell them apart
                for rows in self.batches:
                    for calls in (1, 2) if self.keeps else (1,):
                        self.compare_losses(rows, calls)
        finally:
            for module, training in modes:
                module.training = training

    def compare_writes(self) -> None:
        whole = self.ran(self.batches[0]).left
        for part in self.parts_of(self.batches[0]):
            left = self.ran(part).left
            for name, x in whole.items():
                if left[name].shape != x.shape or not torch.allclose(left[name], x, rtol=self.close, atol=1e-9):
                    raise Infeasible(
                        f"{self.why}, and it writes {name} while it runs, by the samples that it sees, which differ between the "
                        f"data={self.data} ranks; use data=1"
                    )

    def compare_losses(self, rows: list[int], calls: int) -> None:
        whole = self.ran(rows, True, calls)
        parts = [self.ran(part, True, calls) for part in self.parts_of(rows)]
        mean = sum(part.loss for part in parts) / self.data
        if math.isfinite(whole.loss) and not abs(whole.loss - mean) <= self.close * max(abs(whole.loss), abs(mean)):
            raise Infeasible(
                f"{self.when(calls)}, and its loss over {self.size} samples is {whole.loss:.6g} where the mean over data={self.data} parts "
                f"of them is {mean:.6g}, so data={self.data} would train something else; use data=1, or a loss that is a mean over samples"
            )
        largest = max((float(g.abs().max()) for g in whole.gradients.values() if g.numel()), default=0.0)
        for name, gradient in whole.gradients.items():
            of_parts = [part.gradients[name] for part in parts if name in part.gradients]
            error = float((gradient - sum(of_parts) / self.data).abs().max()) if gradient.numel() else 0.0
            own = float(gradient.abs().max()) if gradient.numel() else 0.0
            if math.isfinite(error) and error > max(self.close * own, _NOTHING * largest):
                raise Infeasible(
                    f"{self.when(calls)}, and its gradient of {name} over {self.size} samples is not the mean of those over "
                    f"data={self.data} parts of them (relative difference {error / max(own, error):.1e}), so data={self.data} would train "
                    "something else; use data=1"
                )

    def when(self, calls: int) -> str:
        """Why the model runs whole, and what the call was."""
        if calls == 1:
            return self.why
        return f"{self.why}, and it reads in the next call what it keeps in its attribute {', '.join(self.keeps[:3])}"

    def ran(self, rows: list[int], learns: bool = False, calls: int = 1) -> _Ran:
        """The model called on some samples; `learns`: with gradients, in float64, where it has them in evaluation. The last of `calls`."""
        cut = {path: x[rows] if isinstance(x, Tensor) and x.dim() and x.shape[0] == self.samples else x for path, x in leaves(self.batch)}
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        moved = {p: x.to(device) if isinstance(x, Tensor) else x for p, x in cut.items()}
        moved = {p: x.double() if self.double and isinstance(x, Tensor) and x.is_floating_point() else x for p, x in moved.items()}
        kept = {name: x.grad for name, x in self.named.items()}
        gradients: dict[str, Tensor] = {}
        drawn = python_randomness()
        try:
            with doubled(self.double), Steady():  # type: ignore[no-untyped-call]
                for _ in range(calls - 1):
                    self.called(rebuild(self.batch, moved))
                found, outputs = self.called(rebuild(self.batch, moved))
                if learns and self.double and found.requires_grad:
                    gradients = self.gradients_of(found)
            now = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
            self.draws |= not torch.equal(self.drawn, torch.random.get_rng_state()) or python_randomness() != drawn
            self.keeps = self.keeps or changes(self.attributes, state_of(self.model))
            return _Ran(float(found.detach()), {name: x.detach().clone() for name, x in now.items()}, gradients, outputs)
        except Exception as error:
            if self.double and self.plan.layout.precision != "float64" and rows == self.batches[0] and not learns:
                raise _NotInDouble from error
            if len(rows) == self.samples or isinstance(error, ModelError):
                raise
            raise Infeasible(
                f"{self.why}, and with {len(rows)} of its {self.samples} samples it raises {type(error).__name__}: "
                f"{str(error).partition(chr(10))[0]}; use data=1"
            ) from error
        finally:
            for table, before in self.tables:  # what may have been replaced
                table.update(before)
            set_state(self.model, self.attributes)
            with torch.no_grad():
                for name, x in self.named.items():
                    x.copy_(self.values[name])
                    x.grad = kept[name]
            torch.random.set_rng_state(self.drawn)

    def called(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and the outputs that are looked at beside it."""
        return call(self.model, batch, self.loss), {}

    def gradients_of(self, loss: Tensor) -> dict[str, Tensor]:
        trained = {name: p for name, p in self.named.items() if p.requires_grad}
        try:
            found = torch.autograd.grad(loss, list(trained.values()), retain_graph=True, allow_unused=True)
        except RuntimeError:  # what autograd cannot do in evaluation, or without sparse gradients, the run itself tells
            return {}
        return {name: g for name, g in zip(trained, found, strict=True) if g is not None and g.layout is torch.strided}
