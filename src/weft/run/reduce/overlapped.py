"""Gradient exchange that overlaps backward (Li et al., VLDB 2020, Algorithm 1), and its ZeRO-1 form.

When the last action that adds to it completes a bucket, it is summed over the ranks that share it while backward goes on. Buckets are
launched strictly in order, so that all ranks launch the same ones in the same order, whatever autograd does. A parameter whose gradient
never comes (unused in this step) counts as zero.

Where a bucket has memory that others read, a hook on every parameter moves its gradient there as it comes. Elsewhere gradients stay where
autograd has made them until their bucket is complete, and are then moved in one call; a bucket has memory only from then until the next
step begins, so that forward finds none of it taken. Where nobody waits for a bucket no hook is called at all.

With ZeRO-1 (Rajbhandari et al. 2020) a bucket is reduced and scattered: each rank gets the sum of its own piece, where that piece
lies, half of an all-reduce's bytes; what lies beside it is this rank's alone until `gather` is called. From stage 2 on no rank keeps a
whole gradient: a bucket has memory from its first gradient until it is scattered, in every backward anew, and the pieces add up.

Compressed gradients (`reduce/compressed`) take two phases. The second of a bucket follows the first of the next, whatever has arrived,
so that it is the same on all ranks; where a rank of another stage takes part, which may be waiting for this one, it follows backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor

from weft.plan.compression import Compression
from weft.run.reduce.between_hosts import BetweenHosts, compressed
from weft.run.reduce.compressed import DTYPES, Compressed
from weft.run.reduce.scattered import Scattered, norm_of
from weft.run.state.parameters import Bucket, FlatGroup
from weft.world.memory import Accounts
from weft.world.world import Group, Work


class Gradients:
    """Collects the gradients of one rank's parameters over a step's microbatches and sums them over ranks.

    Call `begin(...)` before each action that adds to gradients, with the names of those that it completes, `finish()` after the last, and
    `wait()`; gradients then lie in the flat groups. `by_program`: what ZeRO scatters is scattered when `reduce` says so. `compress`: how
    what is summed whole, or scattered from whole gradients, travels. `memory`: told which memory is for gradients.
    """

    def __init__(
        self,
        groups: Sequence[FlatGroup],
        parameters: Mapping[str, torch.nn.Parameter],
        sums: Sequence[Group | None],
        sharded: bool = False,
        by_program: bool = False,
        compress: Compression | None = None,
        memory: Accounts | None = None,
    ) -> None:
        self._memory = memory or Accounts()
        self.groups, self.parameters = list(groups), parameters
        self._sums, self._sharded = list(sums), sharded
        # In the order in which backward completes them: a bucket that is complete late must not hold back those that are not.
        ready = {member.name: member.ready for group in groups for member in group.members}
        numbered = [(g, bucket) for g, group in enumerate(groups) for bucket in group.buckets if not group.scattered]
        self.order = sorted(numbered, key=lambda item: max(ready[name] for name in item[1].names))
        self._of = {name: k for k, (_, bucket) in enumerate(self.order) for name in bucket.names}
        self._views = {name: view for group in groups for name, view in group.views.items()}
        self._completes: frozenset[str] = frozenset()
        self._first = dict.fromkeys(self._of, True)
        self._waiting: list[int] = []  # by place in the order: how many are still to be complete
        self._next = 0
        self._works: list[Work] = []
        self.exchange = True
        self.has_norms = False  # whether those of this rank's own gradients are taken, before they are summed
        self._norms: list[Tensor] = []
        self.push: Callable[[int, Tensor], None] | None = None  # of servers: (place in the order, bucket)
        # By place in the order; and those of this step that were started, that are met, in that order.
        self.compressed = {k: compressed for k, (g, bucket) in enumerate(self.order) if (compressed := self._compress(compress, g, bucket))}
        self._started: list[Compressed | BetweenHosts] = []
        self._met: list[Compressed | BetweenHosts] = []
        self.before: dict[int, Tensor] | None = None  # where it is a dictionary, copies of what is compressed, by place in the order
        self._scattered = {
            number: Scattered(group, over, not by_program)
            for number, (group, over) in enumerate(zip(groups, sums, strict=True))
            if group.scattered and over is not None
        }
        self._scatters = {member.name: one for number, one in self._scattered.items() for member in groups[number].members}
        # What is collected bucket by bucket, and not as it comes.
        self._by_bucket = frozenset(name for number, bucket in self.order if groups[number].comes_and_goes for name in bucket.names)
        self._exchanged = [(over := self._sums[number]) is not None and over.size > 1 for number, _ in self.order]
        # Where nobody waits for a gradient, no hook says that it has come.
        hooked = (name for (_, bucket), has_hooks in zip(self.order, self._exchanged, strict=True) if has_hooks for name in bucket.names)
        for name in (*hooked, *self._scatters):
            self._hook(name)

    def _compress(self, how: Compression | None, number: int, bucket: Bucket) -> Compressed | BetweenHosts | None:
        over, group = self._sums[number], self.groups[number]
        if how is None or how.kind == "none" or over is None or over.size == 1 or group.grad.dtype not in DTYPES:
            return None
        early = not group.members[0].across
        size = bucket.stop - bucket.start
        return compressed(how, bucket.names[0], size, lambda: group.gradients(bucket), over, self._sharded, early=early)

    def _hook(self, name: str) -> None:
        # Through a parameter's hook no garbage collector sees; one that held this would keep all parameters for ever.
        mine = weakref.ref(self)

        def done(parameter: Tensor) -> None:
            gradients, grad = mine(), parameter.grad
            if grad is None or gradients is None:
                return
            view = gradients._views.get(name)
            if grad is view or name in gradients._by_bucket:  # autograd itself has added to it
                gradients._came(name)
            else:
                parameter.grad = view
                gradients.add(name, grad)

        self.parameters[name].register_post_accumulate_grad_hook(done)  # type: ignore[no-untyped-call]

    def add(self, name: str, grad: Tensor) -> None:
        """Add a gradient to a parameter's; once at most for each parameter between two calls of `begin`."""
        if name in self._scatters:
            self._scatters[name].add(name, grad)
            return
        view = self._view(name)
        if self._first[name]:
            view.copy_(grad)
            self._first[name] = False
        else:
            view.add_(grad)
        self._came(name)

    def add_product(self, name: str, a: Tensor, b: Tensor) -> None:
        """As `add` of the product of two matrices, without a tensor in between."""
        if name in self._scatters:
            self.add(name, a @ b)
            return
        view = self._view(name)
        torch.addmm(view, a, b, beta=0 if self._first[name] else 1, out=view)  # 0 also drops what is not a number
        self._first[name] = False
        self._came(name)

    def _view(self, name: str) -> Tensor:
        """Where a gradient is collected."""
        with self._memory.counting("gradients"):
            self.order[self._of[name]][1].hold()
        return self._views[name]

    def _came(self, name: str) -> None:
        if name in self._completes:
            self._waiting[self._of[name]] -= 1
            self._launch()

    def start(self) -> None:
        """Begin a step: nothing has been collected."""
        self._first = dict.fromkeys(self._first, True)
        self._waiting = [len(bucket.names) * waits for (_, bucket), waits in zip(self.order, self._exchanged, strict=True)]
        self._next = 0
        self._completes = frozenset()
        for name in self._views:
            self.parameters[name].grad = None
        for _, bucket in self.order:
            bucket.release()
        self._norms.clear()
        for scattered in self._scattered.values():
            scattered.start(self.has_norms)

    @property
    def norms(self) -> list[Tensor]:
        """Of this step's own gradients, bucket by bucket, as they were before they were summed; in one order in every step."""
        return [*self._norms, *(norm for scattered in self._scattered.values() for norm in scattered.norms)]

    def turn(self, number: int) -> None:
        """Collect in the groups' buffers of that number from now on; before `start`."""
        for group in self.groups:
            group.collect_in(group.turns[number])
            self._views.update(group.views)

    def begin(self, completes: frozenset[str]) -> None:
        """Before each backward, with the parameters that nothing adds to after it: a bucket whose last one comes is exchanged at once."""
        self._completes = completes

    def reduce(self, names: Collection[str]) -> None:
        """Scatter what has come of these parameters' gradients, whether or not all of them have; whole ones are summed by themselves."""
        for scattered in self._scattered.values():
            scattered.flush(names)

    def lying_together(self, names: Collection[str]) -> list[tuple[str, ...]]:
        """Those of `names` whose gradients lie together: with what they are scattered with, each other by itself."""
        together: dict[object, list[str]] = {}
        for name in sorted(names):
            key = (id(one), one.number_of(name)) if (one := self._scatters.get(name)) else name
            together.setdefault(key, []).append(name)
        return [tuple(those) for those in together.values()]

    def like(self, name: str) -> Tensor:
        """Of the size of what is collected of a parameter's gradient, or of what it is scattered with."""
        return one.piece(name) if (one := self._scatters.get(name)) is not None else self._views[name]

    def collected(self, name: str) -> tuple[Tensor, bool] | None:
        """What has come so far of that, and whether it has been moved to where it is exchanged; None: nothing.

        Raises:
            ValueError: it is not in one place.
        """
        if (one := self._scatters.get(name)) is not None:
            return one.settled(name), True
        grad, view, moved = self.parameters[name].grad, self._views[name], not self._first[name]
        if moved and grad is not None and grad is not view:
            raise ValueError(f"the gradient of {name} lies in two places")
        return (view, True) if moved else None if grad is None else (grad, False)

    @torch.no_grad()
    def put_back(self, name: str, value: Tensor, moved: bool) -> None:
        """After `start`: let that be what has come."""
        if (one := self._scatters.get(name)) is not None:
            one.piece(name).copy_(value)
        elif moved:
            self._view(name).copy_(value)
            self._first[name] = False
        else:
            self.parameters[name].grad = torch.empty_like(self.parameters[name]).copy_(value)

    def _launch(self) -> None:
        while self._next < len(self.order) and self._waiting[self._next] <= 0:
            self._sum(self._next)
            self._next += 1

    @torch.no_grad()
    def _complete(self, place: int) -> Tensor:
        """A bucket with all that has come, where that is not there yet; what has not come is zero."""
        number, bucket = self.order[place]
        views: list[Tensor] = []
        copied: list[Tensor] = []
        with self._memory.counting("gradients"):
            bucket.hold()
        for name in bucket.names:
            parameter, view = self.parameters[name], self._views[name]
            grad = parameter.grad
            if grad is not None and grad is not view:
                parameter.grad = None
                if self._first[name]:
                    views.append(view)
                    copied.append(grad)
                else:
                    view.add_(grad)
            elif self._first[name]:
                view.zero_()
            self._first[name] = False
        if copied:
            torch._foreach_copy_(views, copied)
        return self.groups[number].gradients(bucket)

    def _sum(self, place: int) -> None:
        over = self._sums[self.order[place][0]]
        if over is None or not self._exchanged[place]:
            return
        gradient = self._complete(place)
        if self.has_norms:
            self._norms.append(norm_of(gradient))
        if self.push is not None:
            self.push(place, gradient)
            return
        if not self.exchange:
            return
        if (one := self.compressed.get(place)) is not None:
            if self.before is not None:
                self.before[place] = gradient.clone()
            one.start()
            self._meet(backward=True)
            self._started.append(one)
        elif self._sharded:
            self._works.append(over.reduce_scatter_into(gradient.view(over.size, -1)[over.index], gradient, wait=False))
        else:
            self._works.append(over.all_reduce(gradient, wait=False))

    def _meet(self, backward: bool) -> None:
        """The next phase of what was started before."""
        waiting = [one for one in self._started if backward and not one.early]
        for one in self._started:
            if one.early or not backward:
                one.meet()
                self._met.append(one)
        self._started = waiting

    def finish(self) -> None:
        """After the last backward: launch what is left, in order, and collect what nobody waits for."""
        for scattered in self._scattered.values():
            scattered.flush()
        while self._next < len(self.order):
            self._sum(self._next)
            self._next += 1
        for place, is_exchanged in enumerate(self._exchanged):
            if not is_exchanged:
                gradient = self._complete(place)
                if self.has_norms:
                    self._norms.append(norm_of(gradient))

    def hand_over(self) -> list[Work]:
        """After `finish`, in the place of `wait`: the sums under way, of gradients that are whole and not compressed."""
        works, self._works = self._works, []
        return works

    def wait(self) -> None:
        """Wait for all sums."""
        self._meet(backward=False)
        for work in self._works:
            work.wait()
        self._works.clear()
        for one in self._met:
            one.finish()
        self._met.clear()
        for scattered in self._scattered.values():
            scattered.wait()

    def gather(self) -> None:
        """After `wait`: bring every rank's pieces together, so that each holds whole sums. Every rank calls it, or none."""
        if not self._sharded:
            return
        for number, bucket in self.order:
            over = self._sums[number]
            if over is not None and over.size > 1:
                gradient = self.groups[number].gradients(bucket)
                over.all_gather_into(gradient, gradient.view(over.size, -1)[over.index].clone())
