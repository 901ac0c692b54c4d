"""The exchange of gradients while a user's own `backward` runs: averaged over the ranks that sum them, and complete when it returns.

In: flat groups whose parameters have gradient hooks from here on. Out: every parameter's `.grad` as one process would have it.

Ranks that run the same graph use the same parameters. A model that runs whole may branch on its samples, so that they do not
(`unlike=True`): they then tell each other which parameters they used, since an optimizer decays one whose gradient is zero, and leaves
alone one that has none.

torch's DistributedDataParallel is no such exchange: it sums over one set of ranks, cut weights over several; it raises where a parameter
is used in two reentrant checkpoints, by the loop alone, or in the first of two calls, hangs where a rank's output depends on no parameter,
and leaves `torch.autograd.grad` as it is on one rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import Infeasible, ModelError, UsageError
from weft.run.state.parameters import FlatGroup, share
from weft.world import private
from weft.world.world import World


class Exchange:
    """Averages gradients over ranks while backward runs. What `.grad` held before is the same on all ranks, and so is its own mean.

    `uses_differ`: ranks may use different parameters. `at_end`: nothing is summed before backward is at its end, for models that have sums
    of their own in backward, which ranks might otherwise begin in different orders. `outputs`: those whose rows are counted.
    """

    def __init__(
        self,
        groups: Sequence[FlatGroup],
        parameters: Mapping[str, nn.Parameter],
        world: World,
        uses_differ: bool = False,
        at_end: bool = False,
        outputs: Sequence[str] = (),
    ) -> None:
        sums = [world.group(group.sum_ranks) if len(group.sum_ranks) > 1 else None for group in groups]
        share(groups, sums)
        self._summed = [(group, over) for group, over in zip(groups, sums, strict=True) if over is not None]
        self._order = [(group, over, bucket) for group, over in self._summed for bucket in group.buckets]
        self._parameters, self._uses_differ, self._at_end = parameters, uses_differ, at_end
        self._running = False
        self._arriving: set[str] = set()  # gradients that are not in `.grad` yet
        self._used: set[str] = set()
        self._left: list[int] = []
        self._works: list[Any] = []
        self._rows = dict.fromkeys(outputs, 0.0)
        self._holds = False
        self._before: set[str] = set()  # used by backwards that exchanged nothing
        for number, (_, _, bucket) in enumerate(self._order):
            for name in bucket.names:
                with private.as_base_tensor():
                    parameters[name].register_hook(partial(self._arrives, name))  # type: ignore[no-untyped-call]
                    parameters[name].register_post_accumulate_grad_hook(partial(self._arrived, number, name))  # type: ignore[no-untyped-call]

    @contextmanager
    def holding(self) -> Iterator[None]:
        """A block whose gradients are added up on each rank, for the first backward behind it to exchange together. Of ranks that may use
        different parameters each backward is exchanged all the same."""
        held, self._holds = self._holds, not self._uses_differ
        try:
            yield
        finally:
            self._holds = held

    def begin(self) -> None:
        """Backward runs. Only from within a gradient hook."""
        if self._running:
            return
        self._running = True
        self._arriving.clear()
        self._used.clear()
        self._works.clear()
        self._rows = dict.fromkeys(self._rows, 0.0)
        self._left = [len(bucket.names) for _, _, bucket in self._order]
        private.after_backward(self._finish)

    def count(self, output: str, rows: float, grad: Tensor) -> None:
        """A hook: so many rows of an output have a gradient, by equal parts of the samples. Ranks must have as many, or the mean of their
        means is not that of all."""
        self.begin()
        self._rows[output] += rows

    def _arrives(self, name: str, grad: Tensor) -> None:
        if grad.requires_grad:
            self._running = False  # backward ends here, on every rank
            raise UsageError(
                f"a gradient of {name} that has a gradient itself (create_graph=True) is this rank's alone, which is not summed over "
                "ranks; differentiate by the model's inputs or outputs, or use weft.parallelize"
            )
        self.begin()
        self._arriving.add(name)

    def _arrived(self, number: int, name: str, p: Tensor) -> None:
        self._arriving.discard(name)
        if number < len(self._works):
            raise ModelError(
                f"the gradient of {name} arrives twice in one backward, after it was summed over ranks; checkpoint with use_reentrant=False"
            )
        if name not in self._used:
            self._used.add(name)
            self._left[number] -= 1
            if not self._holds:
                self._launch(finished=False)

    def _launch(self, finished: bool) -> None:
        """Begin the sums whose turn it is: in one order on all ranks."""
        while len(self._works) < len(self._order) and (finished or not (self._at_end or self._left[len(self._works)])):
            group, over, bucket = self._order[len(self._works)]
            with private.as_base_tensor():
                for name in bucket.names:
                    grad = self._parameters[name].grad
                    if grad is None:
                        group.views[name].zero_()
                    else:
                        torch.mul(grad.to_dense() if grad.is_sparse else grad, 1 / over.size, out=group.views[name])
            self._works.append(over.all_reduce(group.grad[bucket.start : bucket.stop], wait=False))

    def _finish(self) -> None:
        self._running = False
        if self._holds:
            self._check_arrived()
            self._before |= self._used
            return
        self._launch(finished=True)
        for work in self._works:
            work.wait()
        self._check_arrived()
        self._used |= {name for name in self._before if self._parameters[name].grad is not None}
        self._before.clear()
        with private.as_base_tensor():
            self._hand_over(self._told() if self._uses_differ else None)

    def _check_arrived(self) -> None:
        """Raise where a gradient was asked for that is no `.grad`."""
        if self._arriving:
            raise UsageError(
                f"torch.autograd.grad by {min(self._arriving)} gives this rank's gradient, not that of all ranks; call loss.backward() and "
                "read its .grad"
            )

    def _told(self) -> set[str]:
        """The parameters that any rank used.

        Raises:
            Infeasible: ranks had different numbers of rows of an output.
        """
        names = [name for group, _ in self._summed for name in group.views]
        over, outputs = self._summed[0][1], list(self._rows)
        used = [float(name in self._used) for name in names]
        rows = [self._rows[output] for output in outputs]
        told = torch.tensor([*used, *rows, *(n * n for n in rows)], dtype=torch.float64, device=over.device)
        over.all_reduce(told)
        total, squares = told[len(names) :].view(2, -1)
        for output, mine, all_, square in zip(outputs, rows, total.tolist(), squares.tolist(), strict=True):
            if abs(square * over.size - all_**2) > 1e-9 * all_**2:
                raise Infeasible(
                    f"the output {output or 'of the model'} has {mine:g} rows on this rank and {all_:.0f} on all {over.size}, so the "
                    "mean over ranks of a mean over rows is not that of all; return rows of fixed number, or the loss's sum and count from "
                    "forward, or use one rank"
                )
        return {name for name, times in zip(names, told.tolist(), strict=False) if times}

    def _hand_over(self, used: set[str] | None) -> None:
        """Give every parameter that was used, on whatever rank, its mean; as for one process, the others' gradients stay what they were."""
        for group, _ in self._summed:
            for name, view in group.views.items():
                p = self._parameters[name]
                used_there = bool(view.any()) if used is None else name in used
                if name not in self._used and not (p.requires_grad and used_there):
                    continue
                if p.grad is None or p.grad.is_sparse:
                    p.grad = view.clone()
                else:
                    p.grad.copy_(view)
