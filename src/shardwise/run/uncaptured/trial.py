"""Trial whether data parallelism of a model that could not be captured trains what one process does.

The model is run on some of the batch, in full and in shards, and left as it was; loss, gradients and written state are compared, and a
difference raises `Infeasible` by name. In a plain loop, whose loss is not known, the outputs are compared instead, which also yields the
sample dimension of each output. Tried are both ends of the batch, and batches whose shards differ most: each one sample repeated.

Not modelled: models that are data-parallel on the tried batches and not on others.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwise.capture.capture import Loss, call_model, call_with_loss
from shardwise.capture.in_fork import in_fork
from shardwise.capture.modes import in_modes, modes_of
from shardwise.capture.module_state import changed_attributes, set_state, state_of
from shardwise.capture.nesting import batch_size_of, named_leaves, replace_leaves
from shardwise.capture.python_randomness import preserve_python_random_state, python_random_state
from shardwise.errors import Infeasible, ModelError
from shardwise.lower.float64_mode import cast_to_float64, compute_in_float64
from shardwise.plan.plan import Plan
from shardwise.world import private

_SAMPLES_PER_SHARD = 4  # samples of each shard in the trial
_NUM_SINGLE_SAMPLE_BATCHES = 4  # batches whose shards are one repeated sample each
_TOLERANCE, _TOLERANCE_FLOAT64 = 1e-4, 1e-9  # relative tolerances, beyond rounding in float32 and in float64
_ZERO_GRADIENT = 1e-12  # of the largest gradient: rounding in float64 of a gradient that is zero


class _NoFloat64(Exception):
    """The model does not support float64."""


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """One tensor of a model's output. `dim`: its sample dimension, sharded over ranks; None if the output is a mean over samples."""

    dim: int | None
    has_gradient: bool


def check_data_parallel(plan: Plan, model: nn.Module, batch: Any, loss: Loss | None) -> None:
    """Raise Infeasible if `num_shards` ranks with shards of the batch would train something else than one process with the full batch.

    That is if the model takes statistics over the batch, if the loss or its gradients are not the mean over the shards (a sum, or a mean
    over a varying number of terms), if the model fails on a shard, or if state that it writes (a running mean, a queue of keys) depends on
    the samples it sees. The trial is in float64 if the model supports it: a maximum over the batch that only scales an initial guess
    changes the loss by less than float32's rounding, and gradients by more.
    """
    if plan.layout.data > 1:
        in_fork(lambda: _run_trial(plan, model, batch, lambda inputs: call_with_loss(model, inputs, loss)) is not None, bool, bool)


def infer_output_specs(plan: Plan, model: nn.Module, batch: Any) -> dict[str, OutputSpec]:
    """Return the spec of each output by path: concatenated over the shards of the batch along a dimension, or their mean.

    Raises:
        Infeasible: as for `check_data_parallel`; or an output is neither of the two.
    """
    trial = _run_trial(plan, model, batch, None)
    return {path: OutputSpec(dim, path in trial.with_gradient) for path, dim in trial.dims.items()}


def _run_trial(plan: Plan, model: nn.Module, batch: Any, loss: Callable[[Any], Tensor] | None) -> _DataParallelTrial:
    """Run a trial in float64, or in the model's own precision if it does not support float64."""
    values, attributes = [(p, p.data) for p in model.parameters()], state_of(model)
    try:
        return _DataParallelTrial(plan, cast_to_float64(model), batch, loss, True).run()
    except _NoFloat64:
        pass
    finally:
        for p, value in values:
            p.data = value
        set_state(model, attributes)
    return _DataParallelTrial(plan, model, batch, loss, False).run()


@dataclass(frozen=True, slots=True)
class _CallResult:
    """Result of a call of the model: loss, state (parameters and buffers) after it, gradients if requested, and outputs in a loop."""

    loss: float
    state: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]


class _DataParallelTrial:
    """A trial of one model in one precision. Without a loss, as in a plain loop, outputs and the gradient of a sum of them are compared.

    `dims`: sample dimension of each output; `with_gradient`: outputs that have a gradient.
    """

    def __init__(self, plan: Plan, model: nn.Module, batch: Any, loss: Callable[[Any], Tensor] | None, in_float64: bool) -> None:
        self.plan, self.model, self.batch, self.loss, self.in_float64 = plan, model, batch, loss, in_float64
        self.num_samples, self.num_shards = batch_size_of(batch), plan.layout.data
        self.size = min(self.num_samples // self.num_shards, _SAMPLES_PER_SHARD) * self.num_shards
        self.batches = self._choose_batches()
        self.tolerance = _TOLERANCE_FLOAT64 if in_float64 else _TOLERANCE
        self.named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.values = {name: x.detach().clone() for name, x in self.named.items()}
        self.attributes, self.generator_state = state_of(model), torch.random.get_rng_state()
        self.has_draws = False  # whether it draws random numbers that `ConstantDraws` does not cover
        self.attribute_state: list[str] = []  # attributes that it writes and the next call may read
        self.dims: dict[str, int | None] = {}
        self.with_gradient: set[str] = set()
        self.message_prefix = f"{plan.model} could not be captured ({plan.uncaptured})"

    def _choose_batches(self) -> list[list[int]]:
        """Choose samples of the batches to try. Shards at both ends of the batch may by chance have equally many terms of a mean."""
        first, per_shard = list(range(self.size)), self.size // self.num_shards
        batches = [first, [self.num_samples - self.size + i for i in first]]
        rounds = min(_NUM_SINGLE_SAMPLE_BATCHES, self.num_samples // self.num_shards)
        for n in range(rounds):
            chosen = [(n * self.num_shards + part) * self.num_samples // (rounds * self.num_shards) for part in range(self.num_shards)]
            batches.append([sample for sample in chosen for _ in range(per_shard)])
        return [rows for i, rows in enumerate(batches) if rows not in batches[:i]]

    def run(self) -> Self:
        """Raise Infeasible for the first difference between the full batch and its shards."""
        coupled = [name for name, m in self.model.named_modules() if isinstance(m, private.BatchNorm) and m.training]
        if coupled:
            raise self._infeasible(
                f"{coupled[0]} takes statistics over the whole batch, which data={self.num_shards} would divide",
                "make the model capturable",
            )
        with in_modes(self.model, modes_of(self.model)), preserve_python_random_state():
            training = self._compare_writes()
            if self.has_draws:
                self.model.eval()  # random draws would make shards differ
                if self.loss is None and self._call_on(self.batches[0]).outputs.keys() != training.outputs.keys():
                    differs = "it draws random numbers in training and returns something else in evaluation"
                    raise self._infeasible(f"{differs}, so that its parts cannot be compared", "return the same in both")
            for rows in self.batches:
                for calls in (1, 2) if self.attribute_state else (1,):
                    if self.loss is None:
                        self._compare_outputs(rows, calls)
                    self._compare_losses(rows, calls)
        return self

    def _infeasible(self, finding: str, remedy: str = "", calls: int = 1) -> Infeasible:
        """Build the error; `calls`: number of successive calls after which the difference shows."""
        state = f", and it reads in the next call what it keeps in its attribute {', '.join(self.attribute_state[:3])}" if calls > 1 else ""
        return Infeasible(f"{self.message_prefix}{state}, and {finding}; use data=1{remedy and f', or {remedy}'}")

    @property
    def _consequence(self) -> str:
        return f"so data={self.num_shards} would train something else"

    def _compare_writes(self) -> _CallResult:
        """Compare parameters and buffers after a call; return the result of the full batch."""
        full, *parts = self._call_full_and_shards(self.batches[0])
        for name, x in full.state.items():
            written = [part.state[name] for part in parts]
            if any(y.shape != x.shape or not torch.allclose(y, x, rtol=self.tolerance, atol=1e-9) for y in written):
                raise self._infeasible(
                    f"it writes {name} while it runs, by the samples that it sees, which differ between the data={self.num_shards} ranks"
                )
        return full

    def _compare_losses(self, rows: list[int], calls: int) -> None:
        """Compare the loss and its gradients."""
        full, *parts = self._call_full_and_shards(rows, True, calls)
        mean = sum(part.loss for part in parts) / self.num_shards
        if math.isfinite(full.loss) and not abs(full.loss - mean) <= self.tolerance * max(abs(full.loss), abs(mean)):
            raise self._infeasible(
                f"its loss over {self.size} samples is {full.loss:.6g} where the mean over data={self.num_shards} parts of them is "
                f"{mean:.6g}, "
                f"{self._consequence}", "a loss that is a mean over samples", calls,
            )  # fmt: skip
        largest = max((_max_abs(g) for g in full.gradients.values()), default=0.0)
        for name, gradient in full.gradients.items():
            shard_gradients = [part.gradients[name] for part in parts if name in part.gradients]
            error, scale = _max_abs(gradient - sum(shard_gradients) / self.num_shards), _max_abs(gradient)
            if math.isfinite(error) and error > max(self.tolerance * scale, _ZERO_GRADIENT * largest):
                raise self._infeasible(
                    f"its gradient of {name} over {self.size} samples is not the mean of those over data={self.num_shards} parts of them "
                    f"(relative difference {error / max(scale, error):.1e}), {self._consequence}", calls=calls,
                )  # fmt: skip

    def _compare_outputs(self, rows: list[int], calls: int) -> None:
        """Find the sample dimension of each output, which the weighting of their sum then depends on."""
        full, *parts = self._call_full_and_shards(rows, calls=calls)
        if any(part.outputs.keys() != full.outputs.keys() for part in parts):
            raise Infeasible(
                f"{self.message_prefix}, and what it returns depends on its samples; return the same tensors always, or use data=1"
            )
        dims = {path: self._sample_dim(path, x, [part.outputs[path] for part in parts], calls) for path, x in full.outputs.items()}
        self.dims = {path: self.dims.get(path) if dim is None else dim for path, dim in dims.items()}

    def _sample_dim(self, path: str, full: Tensor, shards: list[Tensor], calls: int) -> int | None:
        """Return the dimension along which shards of an output concatenate to the full one; None if it is their mean."""
        name = f"its output {path}" if path else "its output"
        shapes = [tuple(x.shape) for x in shards]
        for dim in range(full.dim()):
            if len({(*s[:dim], *s[dim + 1 :]) for s in (*shapes, full.shape)}) > 1:
                continue
            if sum(s[dim] for s in shapes) == full.shape[dim] and self._is_close(torch.cat(shards, dim), full):
                if len({s[dim] for s in shapes}) > 1:
                    raise self._infeasible(
                        f"{name} has {', '.join(str(s[dim]) for s in shapes)} rows for equal parts of the samples, so the mean over "
                        f"data={self.num_shards} ranks of a mean over rows is not that of all", "return rows of fixed number", calls,
                    )  # fmt: skip
                return dim
        if all(s == tuple(full.shape) for s in shapes):
            agrees = all(self._is_close(x, full) for x in shards)
            if agrees or (full.is_floating_point() and self._is_close(sum(shards[1:], shards[0]) / self.num_shards, full)):
                return None
        raise self._infeasible(
            f"{name} over {self.size} samples is neither made of those of data={self.num_shards} parts of them, one after the other, nor "
            f"their "
            f"mean, {self._consequence}", "leave it out of what forward returns", calls,
        )  # fmt: skip

    def _is_close(self, a: Tensor, b: Tensor) -> bool:
        if not b.is_floating_point():
            return torch.equal(a, b)
        return bool(torch.allclose(a, b, rtol=0.0, atol=self.tolerance * max(_max_abs(b), 1e-300), equal_nan=True))

    def _call_full_and_shards(self, rows: list[int], with_gradients: bool = False, calls: int = 1) -> list[_CallResult]:
        """Call the model on some samples, and on every rank's shard of them."""
        n = self.size // self.num_shards
        return [
            self._call_on(samples, with_gradients, calls)
            for samples in (rows, *(rows[i * n : (i + 1) * n] for i in range(self.num_shards)))
        ]

    def _call_on(self, rows: list[int], with_gradients: bool = False, calls: int = 1) -> _CallResult:
        """Call the model `calls` times on some samples; return the last result, with gradients if asked for (in float64 only)."""
        inputs = {path: self._select_samples(x, rows) for path, x in named_leaves(self.batch)}
        gradients_before, python_state = {name: x.grad for name, x in self.named.items()}, python_random_state()
        try:
            with compute_in_float64(self.in_float64), ConstantDraws():  # type: ignore[no-untyped-call]
                for _ in range(calls - 1):
                    self._call_model(replace_leaves(self.batch, inputs))
                loss, outputs = self._call_model(replace_leaves(self.batch, inputs))
                gradients = self._gradients_of(loss) if with_gradients and self.in_float64 and loss.requires_grad else {}
            state = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
            self.has_draws |= not torch.equal(self.generator_state, torch.random.get_rng_state()) or python_random_state() != python_state
            self.attribute_state = self.attribute_state or changed_attributes(self.attributes, state_of(self.model))
            return _CallResult(float(loss.detach()), {name: x.detach().clone() for name, x in state.items()}, gradients, outputs)
        except Exception as error:
            if self.in_float64 and self.plan.layout.precision != "float64" and rows == self.batches[0] and not with_gradients:
                raise _NoFloat64 from error
            if _raised_in_higher_order(error):
                raise self._infeasible(
                    "it calls an operator that runs functions, as torch.cond, which the trial on fewer samples cannot run", "torch.where"
                ) from error
            if len(rows) == self.num_samples or isinstance(error, ModelError | Infeasible):
                raise
            message = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise self._infeasible(f"with {len(rows)} of its {self.num_samples} samples it raises {message}") from error
        finally:
            set_state(self.model, self.attributes)  # undoes replaced attributes too
            with torch.no_grad():
                for name, x in self.named.items():
                    x.copy_(self.values[name])
                    x.grad = gradients_before[name]
            torch.random.set_rng_state(self.generator_state)

    def _select_samples(self, x: Any, rows: list[int]) -> Any:
        """Return some samples of a leaf of the batch, on the model's device and in the precision of the trial."""
        if not isinstance(x, Tensor):
            return x
        x = x[rows] if x.dim() and x.shape[0] == self.num_samples else x
        x = x.to(next((p.device for p in self.model.parameters()), torch.device("cpu")))
        return x.double() if self.in_float64 and x.is_floating_point() else x

    def _call_model(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss; in a plain loop a weighted sum of the differentiable outputs, and all outputs by path."""
        if self.loss is not None:
            return self.loss(batch), {}
        with _ForeignParameters(self.model):
            outputs = {path: x for path, x in named_leaves(call_model(self.model, batch)) if isinstance(x, Tensor)}
        if not outputs:
            raise ModelError("the model's output holds no tensor; it must return tensors")
        differentiable = {path: x for path, x in outputs.items() if x.is_floating_point() and x.requires_grad}
        self.with_gradient |= differentiable.keys()
        total = sum((_weighted_mean(x, self.dims[path]) for path, x in differentiable.items() if path in self.dims), torch.zeros(()))
        return total, {path: x.detach() for path, x in outputs.items()}

    def _gradients_of(self, loss: Tensor) -> dict[str, Tensor]:
        """Return gradients by parameter. In a loop they must be linear in those of the outputs: a loss over one shard is steeper."""
        gradients = self._differentiate(loss)
        for scale in (2.0**-20, 2.0**20) if self.loss is None else ():  # powers of two do not change rounding
            for name, gradient in self._differentiate(loss * scale).items():
                if not self._is_close(gradient / scale, gradients[name]):
                    raise self._infeasible(
                        f"its gradient of {name} is not in proportion to that of its outputs (a hook or a function that cuts off gradients "
                        f"in backward), {self._consequence}"
                    )
        return gradients

    def _differentiate(self, loss: Tensor) -> dict[str, Tensor]:
        trained = {name: p for name, p in self.named.items() if p.requires_grad}
        try:
            gradients = torch.autograd.grad(loss, list(trained.values()), retain_graph=True, allow_unused=True)
        except RuntimeError:  # what autograd cannot do in evaluation, or without sparse gradients, fails in the run itself
            return {}
        return {name: g for name, g in zip(trained, gradients, strict=True) if g is not None and g.layout is torch.strided}


def _raised_in_higher_order(error: Exception) -> bool:
    """Return whether an operator that runs functions (torch.cond, a scan) is on the way to where an error was raised."""
    return any("_higher_order_ops" in frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))


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


def _max_abs(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _weighted_mean(x: Tensor, dim: int | None) -> Tensor:
    """Return the mean over samples of a sum of the other elements, each with its own factor, so that none cancels another."""
    rows = x if dim is None else x.movedim(dim, 0)
    terms = rows.reshape(1, -1) if dim is None else rows.reshape(rows.shape[0], -1)
    if not terms.numel():
        return terms.sum()
    return (terms * torch.arange(terms.shape[1], dtype=x.dtype, device=x.device).cos()).sum(1).mean()


_NUM_DEVIATIONS = 0.5  # standard deviations; not 0, which would hide factors of the noise


class ConstantDraws(private.DispatchMode):  # type: ignore[no-untyped-call]
    """Dropout keeps everything, uniform numbers are the midpoint, normal ones half a standard deviation above the mean."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.__name__.partition(".")[0].removesuffix("_").removesuffix("_like").removesuffix("_functional")
        if name not in _DRAWS or not hasattr(func, "_schema"):
            return func(*args, **kwargs)
        generator_state = torch.random.get_rng_state()
        result = func(*args, **kwargs)
        torch.random.set_rng_state(generator_state)
        arguments = {a.name: x for a, x in zip(func._schema.arguments, args, strict=False)} | kwargs
        with torch.no_grad():
            if name == "native_dropout":
                return arguments["input"] / (1 - arguments["p"]), torch.ones_like(result[1])
            number = _DRAWS[name](arguments)
            return result.copy_(number) if isinstance(number, Tensor) else result.fill_(number)


def _normal_value(arguments: dict[str, Any]) -> Any:
    return arguments.get("mean", 0.0) + _NUM_DEVIATIONS * arguments.get("std", 1.0)


_DRAWS: dict[str, Any] = {
    "rand": lambda arguments: 0.5,
    "uniform": lambda arguments: (arguments.get("from", 0.0) + arguments.get("to", 1.0)) / 2,
    "randn": lambda arguments: _NUM_DEVIATIONS,
    "normal": _normal_value,
    "bernoulli": lambda arguments: 1.0,
    "native_dropout": None,
    "exponential": lambda arguments: 1.0 / arguments.get("lambd", 1.0),
}
