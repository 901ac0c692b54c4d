"""The exchange of gradients while a user's own `backward` runs: averaged over the ranks that sum them, and complete when it returns.

In: flat groups whose parameters have gradient hooks from here on. Out: every parameter's `.grad` as one process would have it.

Ranks that run the same graph use the same parameters. A model that runs whole may branch on its samples, so that they do not
(`unlike=True`): they then tell each other which parameters they used, since an optimizer decays one whose gradient is zero, and leaves
alone one that has none.

torch's DistributedDataParallel is no such exchange: it sums over one set of ranks, cut weights over several; it raises where a parameter is
used twice in reentrant checkpoints, by the loop alone, or in the first of two calls, hangs where a rank's output depends on no parameter, and
leaves `torch.autograd.grad` as it is on one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import Infeasible, ModelError, UsageError
from weft.run.parameters import FlatGroup, share
from weft.world import private
from weft.world.world import Group, World


class Exchange:
    """Averages each backward's gradients over ranks while it runs, and adds them to what the parameters' `.grad` already held.

    `unlike`: ranks may use different parameters. `late`: nothing is summed before backward is at its end, for models that have sums of
    their own in backward, which ranks might otherwise begin in different orders. `outputs`: those whose rows are counted.
    """

    def __init__(
        self,
        groups: Sequence[FlatGroup],
        parameters: dict[str, nn.Parameter],
        world: World,
        unlike: bool = False,
        late: bool = False,
        outputs: Sequence[str] = (),
    ) -> None:
        sums: list[Group | None] = [world.group(group.sum_ranks) if len(group.sum_ranks) > 1 else None for group in groups]
        share(groups, sums)
        self._groups, self._parameters, self._sums = list(groups), parameters, sums
        self._unlike, self._late = unlike, late
        self._order = [(n, bucket) for n, group in enumerate(groups) for bucket in group.buckets]
        self._earlier: dict[str, Tensor | None] = {}
        self._held: dict[str, tuple[int, int]] = {}  # which tensor `.grad` was before, and how often it had been written
        self._left: list[int] = []
        self._next = 0
        self._works: list[Any] = []
        self._running = False
        self._rows = dict.fromkeys(outputs, 0)
        for number, (n, bucket) in enumerate(self._order):
            for name in bucket.names:
                if sums[n] is not None:
                    weight = 1 / len(groups[n].sum_ranks)
                    parameters[name].register_hook(self._hook(number, name, groups[n].views[name], weight))  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Backward runs. Only from within a gradient hook."""
        if self._running:
            return
        self._running = True
        self._earlier.clear()
        self._rows = dict.fromkeys(self._rows, 0)
        self._left = [len(bucket.names) for _, bucket in self._order]
        self._next = 0
        private.after_backward(self._finish)

    def count(self, output: str, rows: int) -> None:
        """So many rows of an output have a gradient: all ranks must have as many, or the mean of their means is not that of all."""
        self.begin()
        self._rows[output] += rows

    def _hook(self, number: int, name: str, view: Tensor, weight: float) -> Any:
        def arrived(grad: Tensor) -> None:
            if grad.requires_grad:
                self._running = False  # backward ends here, on every rank
                raise UsageError(
                    f"a gradient of {name} that has a gradient itself (create_graph=True) is this rank's alone, which is not summed over "
                    "ranks; differentiate by the model's inputs or outputs, or use weft.parallelize"
                )
            self.begin()
            again = name in self._earlier
            if again and number < self._next:
                raise ModelError(
                    f"the gradient of {name} arrives twice in one backward, after it was summed over ranks; checkpoint with "
                    "use_reentrant=False"
                )
            with private.as_plain():
                grad = grad.to_dense() if grad.is_sparse else grad
                if again:
                    view.add_(grad, alpha=weight)
                    return
                before = self._parameters[name].grad
                self._earlier[name] = None if before is None else before.detach().clone()
                self._held[name] = _state_of(before)
                torch.mul(grad, weight, out=view)
            self._left[number] -= 1
            self._launch(finished=False)

        return arrived

    def _launch(self, finished: bool) -> None:
        if self._late and not finished:
            return
        while self._next < len(self._order) and (finished or self._left[self._next] <= 0 or self._sums[self._order[self._next][0]] is None):
            n, bucket = self._order[self._next]
            over = self._sums[n]
            if over is not None:
                for name in bucket.names:
                    if name not in self._earlier:
                        self._groups[n].views[name].zero_()
                self._works.append(over.all_reduce(self._groups[n].grad[bucket.start : bucket.stop], wait=False))
            self._next += 1

    def _finish(self) -> None:
        self._running = False
        self._launch(finished=True)
        for work in self._works:
            work.wait()
        self._works.clear()
        with private.as_plain():
            self._hand_over(self._told() if self._unlike else None)

    def _told(self) -> set[str]:
        """The parameters that any rank used.

        Raises:
            Infeasible: ranks had different numbers of rows of an output.
        """
        names = [name for n, group in enumerate(self._groups) if self._sums[n] is not None for name in group.views]
        over = next(group for group in self._sums if group is not None)
        outputs = list(self._rows)
        told = torch.zeros(len(names) + 2 * len(outputs), dtype=torch.float64, device=over.device)
        told[: len(names)] = torch.tensor([float(name in self._earlier) for name in names], dtype=torch.float64)
        rows = torch.tensor([float(self._rows[output]) for output in outputs], dtype=torch.float64, device=over.device)
        told[len(names) :] = torch.cat([rows, rows.square()])
        over.all_reduce(told)
        total, squares = told[len(names) :].view(2, -1)
        for output, mine, all_, square in zip(outputs, rows.tolist(), total.tolist(), squares.tolist(), strict=True):
            if square * over.size != all_**2:
                raise Infeasible(
                    f"the output {output or 'of the model'} has {int(mine)} rows on this rank and {all_:.0f} on all {over.size}, so the "
                    "mean over ranks of a mean over rows is not that of all; return rows of fixed number, or the loss's sum and count from "
                    "forward, or use one rank"
                )
        return {name for name, used in zip(names, told.tolist(), strict=False) if used}

    def _hand_over(self, used: set[str] | None) -> None:
        """Give every parameter that was used, on whatever rank, its mean; as for one process, the others' gradients stay what they were."""
        for n, group in enumerate(self._groups):
            if self._sums[n] is None:
                continue
            for name, view in group.views.items():
                p, used_here = self._parameters[name], name in self._earlier
                if used_here and _state_of(p.grad) == self._held[name]:
                    raise UsageError(
                        f"torch.autograd.grad by {name} gives this rank's gradient, not that of all ranks; call loss.backward() and read "
                        "its .grad"
                    )
                used_there = bool(view.any()) if used is None else name in used
                if not used_here and not (p.requires_grad and used_there):
                    continue
                before = self._earlier[name] if used_here else p.grad
                if p.grad is None or p.grad.is_sparse:
                    p.grad = view.clone() if before is None else before + view
                elif before is None:
                    p.grad.copy_(view)
                else:
                    torch.add(before, view, out=p.grad)


def _state_of(grad: Tensor | None) -> tuple[int, int]:
    return (0, 0) if grad is None else (id(grad), grad._version)
