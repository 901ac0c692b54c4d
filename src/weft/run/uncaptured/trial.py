"""Trial whether data parallelism of a model that could not be captured trains what one process does.

The model is run on some of the batch, in full and in shards, and left as it was; loss, gradients and written state are compared, and a
difference raises `Infeasible` by name. In a plain loop, whose loss is not known, the outputs are compared instead, which also yields the
sample dimension of each output. Tried are both ends of the batch, and batches whose shards differ most: each one sample repeated.

Not modelled: models that are data-parallel on the tried batches and not on others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft.capture.apart import apart
from weft.capture.capture import Loss, call, called
from weft.capture.modes import in_modes, modes_of
from weft.capture.nesting import batch_size_of, leaves, rebuild
from weft.capture.python_randomness import python_randomness, python_randomness_kept
from weft.capture.state import changes, set_state, state_of
from weft.errors import Infeasible, ModelError
from weft.lower.double import doubled, widened
from weft.plan.plan import Plan
from weft.run.uncaptured.constant_draws import ConstantDraws
from weft.world import private

_TRIED = 4  # samples of each shard in the trial
_SINGLE_SAMPLES = 4  # batches whose shards are one repeated sample each
_CLOSE, _CLOSE_DOUBLE = 1e-4, 1e-9  # relative tolerances, beyond rounding in float32 and in float64
_NOTHING = 1e-12  # of the largest gradient: rounding in float64 of a gradient that is zero


class _NotInDouble(Exception):
    """The model does not support float64."""


@dataclass(frozen=True, slots=True)
class Output:
    """One tensor of a model's output. `dim`: its sample dimension, sharded over ranks; None if the output is a mean over samples."""

    dim: int | None
    learns: bool


def refuse_division(plan: Plan, model: nn.Module, batch: Any, loss: Loss | None) -> None:
    """Raise Infeasible if `data` ranks with shards of the batch would train something else than one process with the full batch.

    That is if the model takes statistics over the batch, if the loss or its gradients are not the mean over the shards (a sum, or a mean
    over a varying number of terms), if the model fails on a shard, or if state that it writes (a running mean, a queue of keys) depends on
    the samples it sees. The trial is in float64 if the model supports it: a maximum over the batch that only scales an initial guess
    changes the loss by less than float32's rounding, and gradients by more.
    """
    if plan.layout.data > 1:
        apart(lambda: _tried(plan, model, batch, lambda inputs: call(model, inputs, loss)) is not None, bool, bool)


def outputs_of_parts(plan: Plan, model: nn.Module, batch: Any) -> dict[str, Output]:
    """Return the spec of each output by path: concatenated over the shards of the batch along a dimension, or their mean.

    Raises:
        Infeasible: as for `check_data_parallel`; or an output is neither of the two.
    """
    trial = _tried(plan, model, batch, None)
    return {path: Output(dim, path in trial.learns) for path, dim in trial.dims.items()}


def _tried(plan: Plan, model: nn.Module, batch: Any, loss: Callable[[Any], Tensor] | None) -> _Trial:
    """Run a trial in float64, or in the model's own precision if it does not support float64."""
    values, attributes = [(p, p.data) for p in model.parameters()], state_of(model)
    try:
        return _Trial(plan, widened(model), batch, loss, True).run()
    except _NotInDouble:
        pass
    finally:
        for p, value in values:
            p.data = value
        set_state(model, attributes)
    return _Trial(plan, model, batch, loss, False).run()


@dataclass(frozen=True, slots=True)
class _Ran:
    """Result of a call of the model: loss, state (parameters and buffers) after it, gradients if requested, and outputs in a loop."""

    loss: float
    left: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]


class _Trial:
    """A trial of one model in one precision. Without a loss, as in a plain loop, outputs and the gradient of a sum of them are compared.

    `dims`: sample dimension of each output; `with_gradient`: outputs that have a gradient.
    """

    def __init__(self, plan: Plan, model: nn.Module, batch: Any, loss: Callable[[Any], Tensor] | None, double: bool) -> None:
        self.plan, self.model, self.batch, self.loss, self.double = plan, model, batch, loss, double
        self.samples, self.data = batch_size_of(batch), plan.layout.data
        self.size = min(self.samples // self.data, _TRIED) * self.data
        self.batches = self._batches()
        self.close = _CLOSE_DOUBLE if double else _CLOSE
        self.named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.values = {name: x.detach().clone() for name, x in self.named.items()}
        self.attributes, self.drawn = state_of(model), torch.random.get_rng_state()
        self.draws = False  # whether it draws random numbers that `ConstantDraws` does not cover
        self.keeps: list[str] = []  # attributes that it writes and the next call may read
        self.dims: dict[str, int | None] = {}
        self.learns: set[str] = set()
        self.why = f"{plan.model} could not be captured ({plan.uncaptured})"

    def _batches(self) -> list[list[int]]:
        """Choose samples of the batches to try. Shards at both ends of the batch may by chance have equally many terms of a mean."""
        first, per_shard = list(range(self.size)), self.size // self.data
        batches = [first, [self.samples - self.size + i for i in first]]
        rounds = min(_SINGLE_SAMPLES, self.samples // self.data)
        for n in range(rounds):
            chosen = [(n * self.data + part) * self.samples // (rounds * self.data) for part in range(self.data)]
            batches.append([sample for sample in chosen for _ in range(per_shard)])
        return [rows for i, rows in enumerate(batches) if rows not in batches[:i]]

    def run(self) -> Self:
        """Raise Infeasible for the first difference between the full batch and its shards."""
        coupled = [name for name, m in self.model.named_modules() if isinstance(m, private.BatchNorm) and m.training]
        if coupled:
            raise self._refused(
                f"{coupled[0]} takes statistics over the whole batch, which data={self.data} would divide", "make the model capturable"
            )
        with in_modes(self.model, modes_of(self.model)), python_randomness_kept():
            training = self._compare_writes()
            if self.draws:
                self.model.eval()  # random draws would make shards differ
                if self.loss is None and self._ran(self.batches[0]).outputs.keys() != training.outputs.keys():
                    differs = "it draws random numbers in training and returns something else in evaluation"
                    raise self._refused(f"{differs}, so that its parts cannot be compared", "return the same in both")
            for rows in self.batches:
                for calls in (1, 2) if self.keeps else (1,):
                    if self.loss is None:
                        self._compare_outputs(rows, calls)
                    self._compare_losses(rows, calls)
        return self

    def _refused(self, what: str, remedy: str = "", calls: int = 1) -> Infeasible:
        """Build the error; `calls`: number of successive calls after which the difference shows."""
        state = f", and it reads in the next call what it keeps in its attribute {', '.join(self.keeps[:3])}" if calls > 1 else ""
        return Infeasible(f"{self.why}{state}, and {what}; use data=1{remedy and f', or {remedy}'}")

    @property
    def _other(self) -> str:
        return f"so data={self.data} would train something else"

    def _compare_writes(self) -> _Ran:
        """Compare parameters and buffers after a call; return the result of the full batch."""
        full, *parts = self._full_and_parts(self.batches[0])
        for name, x in full.left.items():
            written = [part.left[name] for part in parts]
            if any(y.shape != x.shape or not torch.allclose(y, x, rtol=self.close, atol=1e-9) for y in written):
                raise self._refused(
                    f"it writes {name} while it runs, by the samples that it sees, which differ between the data={self.data} ranks"
                )
        return full

    def _compare_losses(self, rows: list[int], calls: int) -> None:
        """Compare the loss and its gradients."""
        full, *parts = self._full_and_parts(rows, True, calls)
        mean = sum(part.loss for part in parts) / self.data
        if math.isfinite(full.loss) and not abs(full.loss - mean) <= self.close * max(abs(full.loss), abs(mean)):
            raise self._refused(
                f"its loss over {self.size} samples is {full.loss:.6g} where the mean over data={self.data} parts of them is {mean:.6g}, "
                f"{self._other}", "a loss that is a mean over samples", calls,
            )  # fmt: skip
        largest = max((_largest(g) for g in full.gradients.values()), default=0.0)
        for name, gradient in full.gradients.items():
            shard_gradients = [part.gradients[name] for part in parts if name in part.gradients]
            error, scale = _largest(gradient - sum(shard_gradients) / self.data), _largest(gradient)
            if math.isfinite(error) and error > max(self.close * scale, _NOTHING * largest):
                raise self._refused(
                    f"its gradient of {name} over {self.size} samples is not the mean of those over data={self.data} parts of them "
                    f"(relative difference {error / max(scale, error):.1e}), {self._other}", calls=calls,
                )  # fmt: skip

    def _compare_outputs(self, rows: list[int], calls: int) -> None:
        """Find the sample dimension of each output, which the weighting of their sum then depends on."""
        full, *parts = self._full_and_parts(rows, calls=calls)
        if any(part.outputs.keys() != full.outputs.keys() for part in parts):
            raise Infeasible(f"{self.why}, and what it returns depends on its samples; return the same tensors always, or use data=1")
        dims = {path: self._dim_of(path, x, [part.outputs[path] for part in parts], calls) for path, x in full.outputs.items()}
        self.dims = {path: self.dims.get(path) if dim is None else dim for path, dim in dims.items()}

    def _dim_of(self, path: str, full: Tensor, parts: list[Tensor], calls: int) -> int | None:
        """Return the dimension along which shards of an output concatenate to the full one; None if it is their mean."""
        name = f"its output {path}" if path else "its output"
        shapes = [tuple(x.shape) for x in parts]
        for dim in range(full.dim()):
            if len({(*s[:dim], *s[dim + 1 :]) for s in (*shapes, full.shape)}) > 1:
                continue
            if sum(s[dim] for s in shapes) == full.shape[dim] and self._agree(torch.cat(parts, dim), full):
                if len({s[dim] for s in shapes}) > 1:
                    raise self._refused(
                        f"{name} has {', '.join(str(s[dim]) for s in shapes)} rows for equal parts of the samples, so the mean over "
                        f"data={self.data} ranks of a mean over rows is not that of all", "return rows of fixed number", calls,
                    )  # fmt: skip
                return dim
        if all(s == tuple(full.shape) for s in shapes):
            agrees = all(self._agree(x, full) for x in parts)
            if agrees or (full.is_floating_point() and self._agree(sum(parts[1:], parts[0]) / self.data, full)):
                return None
        raise self._refused(
            f"{name} over {self.size} samples is neither made of those of data={self.data} parts of them, one after the other, nor their "
            f"mean, {self._other}", "leave it out of what forward returns", calls,
        )  # fmt: skip

    def _agree(self, a: Tensor, b: Tensor) -> bool:
        if not b.is_floating_point():
            return torch.equal(a, b)
        return bool(torch.allclose(a, b, rtol=0.0, atol=self.close * max(_largest(b), 1e-300), equal_nan=True))

    def _full_and_parts(self, rows: list[int], learns: bool = False, calls: int = 1) -> list[_Ran]:
        """Call the model on some samples, and on every rank's shard of them."""
        n = self.size // self.data
        return [self._ran(samples, learns, calls) for samples in (rows, *(rows[i * n : (i + 1) * n] for i in range(self.data)))]

    def _ran(self, rows: list[int], learns: bool = False, calls: int = 1) -> _Ran:
        """Call the model `calls` times on some samples; return the last result, with gradients if asked for (in float64 only)."""
        inputs = {path: self._of_rows(x, rows) for path, x in leaves(self.batch)}
        gradients_before, python_state = {name: x.grad for name, x in self.named.items()}, python_randomness()
        try:
            with doubled(self.double), ConstantDraws():  # type: ignore[no-untyped-call]
                for _ in range(calls - 1):
                    self._called(rebuild(self.batch, inputs))
                loss, outputs = self._called(rebuild(self.batch, inputs))
                gradients = self._gradients_of(loss) if learns and self.double and loss.requires_grad else {}
            state = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
            self.draws |= not torch.equal(self.drawn, torch.random.get_rng_state()) or python_randomness() != python_state
            self.keeps = self.keeps or changes(self.attributes, state_of(self.model))
            return _Ran(float(loss.detach()), {name: x.detach().clone() for name, x in state.items()}, gradients, outputs)
        except Exception as error:
            if self.double and self.plan.layout.precision != "float64" and rows == self.batches[0] and not learns:
                raise _NotInDouble from error
            if len(rows) == self.samples or isinstance(error, ModelError | Infeasible):
                raise
            message = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise self._refused(f"with {len(rows)} of its {self.samples} samples it raises {message}") from error
        finally:
            set_state(self.model, self.attributes)  # undoes replaced attributes too
            with torch.no_grad():
                for name, x in self.named.items():
                    x.copy_(self.values[name])
                    x.grad = gradients_before[name]
            torch.random.set_rng_state(self.drawn)

    def _of_rows(self, x: Any, rows: list[int]) -> Any:
        """Return some samples of a leaf of the batch, on the model's device and in the precision of the trial."""
        if not isinstance(x, Tensor):
            return x
        x = x[rows] if x.dim() and x.shape[0] == self.samples else x
        x = x.to(next((p.device for p in self.model.parameters()), torch.device("cpu")))
        return x.double() if self.double and x.is_floating_point() else x

    def _called(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss; in a plain loop a weighted sum of the differentiable outputs, and all outputs by path."""
        if self.loss is not None:
            return self.loss(batch), {}
        with _ForeignParameters(self.model):
            outputs = {path: x for path, x in leaves(called(self.model, batch)) if isinstance(x, Tensor)}
        if not outputs:
            raise ModelError("the model's output holds no tensor; it must return tensors")
        differentiable = {path: x for path, x in outputs.items() if x.is_floating_point() and x.requires_grad}
        self.learns |= differentiable.keys()
        total = sum((_weighed(x, self.dims[path]) for path, x in differentiable.items() if path in self.dims), torch.zeros(()))
        return total, {path: x.detach() for path, x in outputs.items()}

    def _gradients_of(self, loss: Tensor) -> dict[str, Tensor]:
        """Return gradients by parameter. In a loop they must be linear in those of the outputs: a loss over one shard is steeper."""
        gradients = self._derived(loss)
        for scale in (2.0**-20, 2.0**20) if self.loss is None else ():  # powers of two do not change rounding
            for name, gradient in self._derived(loss * scale).items():
                if not self._agree(gradient / scale, gradients[name]):
                    raise self._refused(
                        f"its gradient of {name} is not in proportion to that of its outputs (a hook or a function that cuts off gradients "
                        f"in backward), {self._other}"
                    )
        return gradients

    def _derived(self, loss: Tensor) -> dict[str, Tensor]:
        trained = {name: p for name, p in self.named.items() if p.requires_grad}
        try:
            gradients = torch.autograd.grad(loss, list(trained.values()), retain_graph=True, allow_unused=True)
        except RuntimeError:  # what autograd cannot do in evaluation, or without sparse gradients, fails in the run itself
            return {}
        return {name: g for name, g in zip(trained, gradients, strict=True) if g is not None and g.layout is torch.strided}


class _ForeignParameters(TorchFunctionMode):
    """Refuse parameters that are not the model's within a block: their gradients would not be reduced."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._of_model = {id(p) for p in model.parameters()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in args:
            if isinstance(x, nn.Parameter) and x.requires_grad and id(x) not in self._of_model:
                raise ModelError(
                    f"a parameter of shape {list(x.shape)} is read that is none of the model's, so that its gradient would not be summed "
                    "over ranks; make it a part of the model"
                )
        return func(*args, **(kwargs or {}))


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _weighed(x: Tensor, dim: int | None) -> Tensor:
    """Return the mean over samples of a sum of the other elements, each with its own factor, so that none cancels another."""
    rows = x if dim is None else x.movedim(dim, 0)
    terms = rows.reshape(1, -1) if dim is None else rows.reshape(rows.shape[0], -1)
    if not terms.numel():
        return terms.sum()
    return (terms * torch.arange(terms.shape[1], dtype=x.dtype, device=x.device).cos()).sum(1).mean()
