"""All-reduce of gradients during a user's own `backward`: averaged over the ranks that hold partial gradients, complete when it returns.

Gradient hooks of the parameters in flat groups overlap it with backward; every parameter's `.grad` ends as in one process. It is a view of
its bucket where it was None before (`run/gradients/lent_gradients`).

Ranks that run the same graph use the same parameters. An uncaptured model may branch on its samples, so that they do not
(`uses_differ=True`): ranks then all-reduce which parameters they used, since an optimizer decays a parameter whose gradient is zero but
skips one without a gradient.

torch's DistributedDataParallel does not suffice: it reduces over one set of ranks, sharded weights need several; it raises if a parameter
is used in two reentrant checkpoints, by the loop only, or in the first of two calls, hangs if a rank's output depends on no parameter, and
leaves `torch.autograd.grad` local to a rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import Infeasible, ModelError, UsageError
from shardwise.run.gradients.lent_gradients import LentGradients
from shardwise.run.gradients.parameter_hooks import ParameterHooks, register_after_accumulation, register_on_gradient
from shardwise.run.gradients.replica_watch import ReplicaWatch
from shardwise.run.state.parameters import Bucket, FlatGroup, share_gradient_memory, shares_memory
from shardwise.world import private
from shardwise.world.world import World

_NO_CHANGE = nullcontext()
LARGE_ELEMENTS = 1 << 14  # a gradient of so many is scaled and copied at once; smaller ones all together, which takes fewer calls


class LoopGradientReducer:
    """Averages gradients over ranks during backward. An earlier content of `.grad` is equal on all ranks, so averaging preserves it.

    `uses_differ`: ranks may use different parameters. `reduces_at_end`: reduce at the end of backward only, for models with collectives of
    their own in backward, which could otherwise start in different orders. `outputs`: those whose rows are counted.
    """

    def __init__(
        self,
        groups: Sequence[FlatGroup],
        parameters: Mapping[str, nn.Parameter],
        world: World,
        uses_differ: bool = False,
        reduces_at_end: bool = False,
        outputs: Sequence[str] = (),
    ) -> None:
        sums = [world.group(group.sum_ranks) if len(group.sum_ranks) > 1 else None for group in groups]
        share_gradient_memory(groups, sums)
        for group, over in zip(groups, sums, strict=True):
            if over is None:
                group.free_gradient_memory()
        self._reduced_groups = [(group, over) for group, over in zip(groups, sums, strict=True) if over is not None]
        self._watch = ReplicaWatch(self._reduced_groups, parameters, world)
        self._ordered_buckets = [(group, over, bucket) for group, over in self._reduced_groups for bucket in group.buckets]
        self._parameters, self._uses_differ, self._reduces_at_end = parameters, uses_differ, reduces_at_end
        with private.as_base_tensor():
            self._lent = LentGradients([group for group, over in self._reduced_groups if not shares_memory(over)], parameters)
        self._in_backward = False
        self._fresh: set[str] = set()  # parameters without a gradient before this backward
        self._arriving: set[str] = set()  # parameters whose gradient is not in `.grad` yet
        self._used: dict[str, None] = {}  # in the order of backward
        self._num_missing: list[int] = []
        self._works: list[Any] = []
        self._rows = dict.fromkeys(outputs, 0.0)
        self._is_accumulating, self._reduces_now = False, True
        self._used_before: dict[str, None] = {}  # used by backwards without a reduction
        reduced = {name for group, _ in self._reduced_groups for name in group.views}
        self._reduced_names = frozenset(reduced)
        trained = {member.name: parameters[member.name] for group in groups for member in group.members}
        for number, (_, _, bucket) in enumerate(self._ordered_buckets):
            for name in bucket.names:
                with private.as_base_tensor():
                    register_on_gradient(parameters[name], partial(self._on_gradient, name))
                    register_after_accumulation(parameters[name], partial(self._on_accumulated, number, name))
        self._hooks = ParameterHooks(trained, reduced, self._queue_hooks)  # the user's

    @contextmanager
    def accumulate_locally(self) -> Iterator[None]:
        """Accumulate gradients locally within a block; the first backward after it reduces them together. If ranks may use different
        parameters, or the user has hooks on them, each backward is reduced all the same."""
        was_accumulating, self._is_accumulating = self._is_accumulating, not self._uses_differ
        try:
            yield
        finally:
            self._is_accumulating = was_accumulating

    def forget_interrupted_backward(self) -> None:
        """Forget a backward that an exception ended, of which torch runs no callback; called when a forward begins."""
        if self._in_backward and not private.is_in_backward():
            self._in_backward = False

    def begin_backward(self) -> None:
        """Begin a backward; called from gradient hooks only."""
        if self._in_backward:
            return
        self._in_backward = True
        self._reduces_now = not self._is_accumulating or bool(self._hooks)
        self._arriving.clear()
        self._used.clear()
        self._fresh.clear()
        self._works.clear()
        self._rows = dict.fromkeys(self._rows, 0.0)
        self._num_missing = [len(bucket.names) for _, _, bucket in self._ordered_buckets]
        if self._reduces_now:
            with private.as_base_tensor():
                self._lent.protect_holders()
        private.after_backward(self._finish)

    def count_rows(self, output: str, rows: float, grad: Tensor) -> None:
        """Count rows of an output that have a gradient, relative to equal shares of samples (a hook). Ranks must have equally many, or the
        mean of their means is not the mean over all."""
        self.begin_backward()
        self._rows[output] += rows

    def _on_gradient(self, name: str, grad: Tensor) -> None:
        if grad.requires_grad:
            self._in_backward = False  # backward ends here on every rank
            raise UsageError(
                f"a gradient of {name} that has a gradient itself (create_graph=True) is this rank's alone, which is not summed over "
                "ranks; differentiate by the model's inputs or outputs, or use shardwise.parallelize"
            )
        if not self._in_backward:
            self.begin_backward()
        self._arriving.add(name)
        with private.as_base_tensor():
            if self._hooks.are_any and self._hooks.changes(name):
                self._lent.take_back(name)
                self._hooks.set_aside(name)
            if self._parameters[name].grad is None:
                self._fresh.add(name)

    def _on_accumulated(self, number: int, name: str, p: Tensor) -> None:
        self._arriving.discard(name)
        if number < len(self._works):
            raise ModelError(
                f"the gradient of {name} arrives twice in one backward, after it was summed over ranks; checkpoint with use_reentrant=False"
            )
        if name not in self._used:
            self._used[name] = None
            self._num_missing[number] -= 1
            if self._reduces_now and not (self._num_missing[number] or self._reduces_at_end):
                self._launch(is_finished=False)

    def _launch(self, is_finished: bool) -> None:
        """Start the all-reduces of complete buckets, in the same order on all ranks."""
        while len(self._works) < len(self._ordered_buckets) and (is_finished or not self._num_missing[len(self._works)]):
            group, over, bucket = self._ordered_buckets[len(self._works)]
            with torch.no_grad() if torch.is_grad_enabled() else _NO_CHANGE:  # backward has it off, but with create_graph
                self._fill_bucket(group, bucket, 1 / over.size)
            self._watch.observe_gradients(group, bucket)
            self._works.append(over.all_reduce(group.grad[bucket.start : bucket.stop], wait=False))

    def _fill_bucket(self, group: FlatGroup, bucket: Bucket, scale: float) -> None:
        """Write the scaled gradients of a bucket's parameters, in one pass over each; missing ones are zero."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        with private.as_base_tensor():
            for name in bucket.names:
                if name not in self._used:
                    self._lent.take_back(name)  # it stays as it is, unless another rank used it
                grad, view = self._parameters[name].grad, group.views[name]
                if grad is None:
                    view.zero_()
                elif grad.numel() > LARGE_ELEMENTS or grad.is_sparse or grad.dtype is not view.dtype:
                    torch.mul(grad.to_dense() if grad.is_sparse else grad, scale, out=view)
                else:
                    targets.append(view)
                    sources.append(grad)
            if len(targets) == len(bucket.names):
                private.copy_tensors(targets, sources)
                group.grad[bucket.start : bucket.stop].mul_(scale)
            elif targets:
                private.copy_tensors(targets, sources)
                private.scale_tensors(targets, scale)
            for name in bucket.names:
                self._lend_early(name)

    def _lend_early(self, name: str) -> None:
        """Free a gradient that is in its bucket, and that nothing but the parameter holds: `.grad` is a view of the bucket from now on."""
        grad = self._parameters[name].grad
        is_own = name in self._used and name in self._fresh and self._lent.lends(name)
        if is_own and grad is not None and not grad.is_sparse:
            self._parameters[name].grad = self._lent.lend(name)

    def _finish(self) -> None:
        self._in_backward = False
        if not self._reduces_now:
            self._check_arrived()
            self._used_before |= self._used
            return
        self._launch(is_finished=True)
        for work in self._works:
            work.wait()
        self._check_arrived()
        if self._used_before:
            self._used |= {name: None for name in self._used_before if self._parameters[name].grad is not None}
            self._used_before.clear()
        with private.as_base_tensor():
            written = self._write_gradients(self._all_reduce_used() if self._uses_differ else None)
        self._watch.finish_backward()
        # Ranks call hooks in one order, since an optimizer's step may communicate.
        if not self._hooks.are_any:
            return
        self._hooks.call(written if self._uses_differ else [*self._used, *(name for name in written if name not in self._used)])

    def _queue_hooks(self, name: str) -> None:
        """Call a parameter's hooks at the end of backward; its gradient is complete."""
        self.begin_backward()
        self._used[name] = None

    def _check_arrived(self) -> None:
        """Raise UsageError if a gradient was computed that does not go to `.grad`."""
        if self._arriving:
            raise UsageError(
                f"torch.autograd.grad by {min(self._arriving)} gives this rank's gradient, not that of all ranks; call loss.backward() and "
                "read its .grad"
            )

    def _all_reduce_used(self) -> set[str]:
        """Return the parameters that any rank used.

        Raises:
            Infeasible: ranks had different numbers of rows of an output.
        """
        names = [name for group, _ in self._reduced_groups for name in group.views]
        over, outputs = self._reduced_groups[0][1], list(self._rows)
        used = [float(name in self._used) for name in names]
        rows = [self._rows[output] for output in outputs]
        counts = torch.tensor([*used, *rows, *(n * n for n in rows)], dtype=torch.float64, device=over.device)
        over.all_reduce(counts)
        total, squares = counts[len(names) :].view(2, -1)
        for output, local, sum_, square in zip(outputs, rows, total.tolist(), squares.tolist(), strict=True):
            if abs(square * over.size - sum_**2) > 1e-9 * sum_**2:
                raise Infeasible(
                    f"the output {output or 'of the model'} has {local:g} rows on this rank and {sum_:.0f} on all {over.size}, so the "
                    "mean over ranks of a mean over rows is not that of all; return rows of fixed number, or the loss's sum and count from "
                    "forward, or use one rank"
                )
        return {name for name, times in zip(names, counts.tolist(), strict=False) if times}

    def _write_gradients(self, used: set[str] | None) -> list[str]:
        """Write the averaged gradient of every parameter that any rank used; as in one process, other gradients stay unchanged. Return the
        names of those written."""
        written: list[str] = []
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        used = self._find_nonzero_gradients() if used is None else used
        lent, parameters = self._lent, self._parameters
        for group, _ in self._reduced_groups:
            for name, view in group.views.items():
                p = parameters[name]
                if name not in self._used and not (p.requires_grad and name in used):
                    continue
                written.append(name)
                if lent.is_lent(name):
                    continue
                grad = p.grad
                if grad is None or grad.is_sparse:
                    p.grad = self._lent.lend(name) if self._lent.lends(name) else view.clone()
                elif name in self._fresh and self._lent.lends(name):  # nothing but the parameter holds it
                    p.grad = self._lent.lend(name)
                else:
                    targets.append(grad)
                    sources.append(view)
        if targets:
            private.copy_tensors(targets, sources)
        return written

    def _find_nonzero_gradients(self) -> set[str]:
        """Return the parameters unused here whose averaged gradient is not zero, so that other ranks used them; one read for all."""
        if self._reduced_names <= self._used.keys():
            return set()
        views = {
            name: view
            for group, _ in self._reduced_groups
            for name, view in group.views.items()
            if name not in self._used and self._parameters[name].requires_grad
        }
        if not views:
            return set()
        flags = torch.stack([view.any() for view in views.values()]).tolist()
        return {name for name, is_nonzero in zip(views, flags, strict=True) if is_nonzero}
