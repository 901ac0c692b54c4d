"""How the outputs of a model that is no graph, on parts of the samples, make those of the whole: for plain loops, whose loss is not known.

In: a plan of a model that could not be captured, the model and its batch. Out: for every tensor that it returns, where its samples lie or
that it is a mean, or `Infeasible` by name. See `weft.run.divisible`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft.capture.capture import called as run_on
from weft.capture.nesting import leaves
from weft.errors import Infeasible, ModelError
from weft.plan.plan import Plan
from weft.run.divisible import Trial, tried


@dataclass(frozen=True, slots=True)
class Output:
    """One tensor of a model's output. `dim`: where its samples lie, of which each rank has its own; None where all ranks have their mean.

    `learns`: whether it has a gradient.
    """

    dim: int | None
    learns: bool


def outputs_of_parts(plan: Plan, model: nn.Module, batch: Any) -> dict[str, Output]:
    """How the outputs of parts of the batch make those of the whole, by path.

    Raises:
        Infeasible: as `weft.run.divisible.refuse_division`; or outputs of parts neither follow one another nor are a mean.
    """
    found: dict[str, Output] = {}
    tried(model, lambda double: found.update(_Outputs(plan, model, batch, None, double).found()))
    return found


class _Outputs(Trial):
    """A trial of a model in a plain loop, whose loss is not known: of its outputs, and of the gradient of a sum of them."""

    def found(self) -> dict[str, Output]:
        """By path how outputs are divided. Raises Infeasible where they are not."""
        self.dims: dict[str, int | None] | None = None
        self.learns: set[str] = set()
        self.run()
        assert self.dims is not None
        return {path: Output(dim, path in self.learns) for path, dim in self.dims.items()}

    def called(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        with _Own(self.model):
            outputs = {path: x for path, x in leaves(run_on(self.model, batch)) if isinstance(x, Tensor)}
        if not outputs:
            raise ModelError("the model's output holds no tensor; it must return tensors")
        total = torch.zeros(())
        for path, x in outputs.items():
            if x.is_floating_point() and x.requires_grad:
                self.learns.add(path)
                if self.dims is not None and path in self.dims:
                    total = total + _weighed(x, self.dims[path])
        return total, {path: x.detach() for path, x in outputs.items()}

    def gradients_of(self, loss: Tensor) -> dict[str, Tensor]:
        found = super().gradients_of(loss)
        # A user's loss over a part is as many times as steep as there are parts.
        for scale in (1e-6, 1e6):
            for name, gradient in super().gradients_of(loss * scale).items():
                if not self._alike(gradient / scale, found[name]):
                    raise Infeasible(
                        f"{self.why}, and its gradient of {name} is not in proportion to that of its outputs (a hook or a function that "
                        f"cuts off gradients in backward), so data={self.data} would train something else; use data=1"
                    )
        return found

    def compare_writes(self) -> None:
        before = self.ran(self.batches[0]).outputs.keys()
        super().compare_writes()
        if self.draws:
            self.model.eval()
            if self.ran(self.batches[0]).outputs.keys() != before:
                raise Infeasible(
                    f"{self.why}, and it draws random numbers in training and returns something else in evaluation, so that its parts "
                    "cannot be compared; use data=1, or return the same in both"
                )

    def compare_losses(self, rows: list[int], calls: int) -> None:
        whole, parts = self.ran(rows, calls=calls), [self.ran(part, calls=calls) for part in self.parts_of(rows)]
        if any(part.outputs.keys() != whole.outputs.keys() for part in parts):
            raise Infeasible(f"{self.why}, and what it returns depends on its samples; return the same tensors always, or use data=1")
        dims = {path: self._dim_of(path, x, [part.outputs[path] for part in parts], calls) for path, x in whole.outputs.items()}
        if self.dims is not None and dims != self.dims:
            self.dims = {path: dim if dim is not None else self.dims[path] for path, dim in dims.items()}
        else:
            self.dims = dims
        super().compare_losses(rows, calls)

    def _dim_of(self, path: str, whole: Tensor, parts: list[Tensor], calls: int) -> int | None:
        """Along which dimension parts of an output follow one another; None where the whole is their mean."""
        name = f"its output {path}" if path else "its output"
        shapes = [tuple(x.shape) for x in parts]
        for dim in range(whole.dim()):
            if len({(*s[:dim], *s[dim + 1 :]) for s in shapes} | {(*whole.shape[:dim], *whole.shape[dim + 1 :])}) > 1:
                continue
            if sum(s[dim] for s in shapes) == whole.shape[dim] and self._alike(torch.cat(parts, dim), whole):
                if len({s[dim] for s in shapes}) > 1:
                    raise Infeasible(
                        f"{self.when(calls)}, and {name} has {', '.join(str(s[dim]) for s in shapes)} rows for equal parts of the samples, "
                        f"so the mean over data={self.data} ranks of a mean over rows is not that of all; return rows of fixed number, or "
                        "use data=1"
                    )
                return dim
        if all(s == tuple(whole.shape) for s in shapes):
            same = all(self._alike(x, whole) for x in parts)
            if same or (whole.is_floating_point() and self._alike(sum(parts[1:], parts[0]) / self.data, whole)):
                return None
        raise Infeasible(
            f"{self.when(calls)}, and {name} over {self.size} samples is neither made of those of data={self.data} parts of them, one "
            f"after the other, nor their mean, so data={self.data} would train something else; use data=1, or leave it out of what forward "
            "returns"
        )

    def _alike(self, a: Tensor, b: Tensor) -> bool:
        if not b.is_floating_point():
            return torch.equal(a, b)
        bound = self.close * max(float(b.abs().max()) if b.numel() else 0.0, 1e-300)
        return bool(torch.allclose(a, b, rtol=0.0, atol=bound, equal_nan=True))


class _Own(TorchFunctionMode):
    """A block in which parameters of others are found, whose gradients nobody would sum."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._own = {id(p) for p in model.parameters()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in args:
            if isinstance(x, nn.Parameter) and x.requires_grad and id(x) not in self._own:
                raise ModelError(
                    f"a parameter of shape {list(x.shape)} is read that is none of the model's, so that its gradient would not be summed "
                    "over ranks; make it a part of the model"
                )
        return func(*args, **(kwargs or {}))


def _weighed(x: Tensor, dim: int | None) -> Tensor:
    """A mean over the samples of a sum of other terms, each with a factor of its own, so that none cancels another."""
    rows = x if dim is None else x.movedim(dim, 0)
    terms = rows.reshape(1, -1) if dim is None else rows.reshape(rows.shape[0], -1)
    if not terms.numel():
        return terms.sum()
    return (terms * torch.arange(terms.shape[1], dtype=x.dtype, device=x.device).cos()).sum(1).mean()
