"""Execute collectives from their programs, over messages of a group's side connection. In: tensors. Out: results, or `CollectiveWork`.

All members call the same collectives in the same order; `runner` runs them in sequence, overlapping backward, and explains failures.
bfloat16 and float16 of more than two members are added in float32. Receive buffers of reductions are reused.
Not modelled: which program is best (`shardwise.cost`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.errors import ProgramError, UsageError
from shardwise.plan.ir.placement import even_shard_range
from shardwise.plan.ir.program import Program, Value
from shardwise.world import recorder
from shardwise.world.comm.group import Group
from shardwise.world.comm.pending import NARROW, CollectiveWork
from shardwise.world.comm.programs import ReceiveStep, ReduceStep, Route, RouteStep, SendStep, build_routes
from shardwise.world.comm.runner import TAGS_PER_COLLECTIVE, CollectiveRunner, CollectiveSignature, ReportWait

PlaceView = Callable[[int, int], Tensor]  # (first, last) -> the tensor of these places


class _PostedReceive(NamedTuple):
    buffer: Tensor  # buffer to release afterwards
    target: Tensor  # tensor that is received into
    work: CollectiveWork


class ProgramRunner:
    """Runs programs between the members of the runner's group."""

    def __init__(self, runner: CollectiveRunner) -> None:
        self._runner, self._group, self._side_group = runner, runner.group, runner.side_group
        self._routes: dict[tuple[int, bool], tuple[Program, Route]] = {}
        self._pool = _BufferPool()

    def all_reduce(self, program: Program, x: Tensor, wait: bool = True) -> CollectiveWork:
        """Replace `x`, of any size and a type that can be added, by the sum over the members."""
        flat = x.detach().reshape(-1)  # a view, or a copy of what is not contiguous

        def work(route: Route, note: ReportWait, tag: int) -> None:
            wide = self._to_accumulation_dtype(flat)
            self._run(route, _place_view(wide, route.num_places), note, tag)
            if wide.data_ptr() != x.data_ptr():
                x.detach().copy_(wide.view(x.shape))

        return self._start(program, recorder.ALL_REDUCE, x, (x.numel(),), work, wait)

    def broadcast(self, program: Program, x: Tensor, wait: bool = True) -> CollectiveWork:
        """Replace `x` on every member by that of the program's root."""

        def work(route: Route, note: ReportWait, tag: int) -> None:
            flat = _byte_view(_flat_view(x))
            self._run(route, _place_view(flat, route.num_places, x.element_size()), note, tag)
            if flat.data_ptr() != x.data_ptr():
                x.detach().copy_(flat.view(x.dtype).view(x.shape))

        return self._start(program, recorder.BROADCAST, x, (x.numel(),), work, wait)

    def reduce_scatter(self, program: Program, out: Tensor, x: Tensor, wait: bool = True) -> CollectiveWork:
        """Reduce-scatter flat `x` into flat `out`, this member's shard of the sum; shards are those of `plan.placement.piece`.

        If `out` lies in `x`, the rest of `x` is overwritten. Raises UsageError for a program with other shards.
        """
        self._check_pieces(program, program.wants, x, out)
        inside = x.data_ptr() <= out.data_ptr() < x.data_ptr() + x.nbytes

        def work(route: Route, note: ReportWait, tag: int) -> None:
            wide = self._to_accumulation_dtype(x.detach())
            if wide.data_ptr() == x.data_ptr() and not inside:
                wide = wide.clone()
            view = _place_view(wide, route.num_places)
            self._run(route, view, note, tag)
            shard = view(self._group.index, self._group.index + 1)
            if shard.data_ptr() != out.data_ptr():
                out.detach().copy_(shard)

        return self._start(program, recorder.REDUCE_SCATTER, x, (x.numel(),), work, wait)

    def all_gather(self, program: Program, out: Tensor, x: Tensor, wait: bool = True) -> CollectiveWork:
        """Gather flat `x` of every member into flat `out`, member after member; shards are those of `plan.placement.piece`."""
        self._check_pieces(program, program.initial, out, x)

        def work(route: Route, note: ReportWait, tag: int) -> None:
            view = _place_view(_byte_view(out.detach()), route.num_places, out.element_size())
            shard = view(self._group.index, self._group.index + 1)
            if shard.data_ptr() != x.data_ptr():
                shard.copy_(_byte_view(x.detach()))
            self._run(route, view, note, tag)

        return self._start(program, recorder.ALL_GATHER, x, (out.numel(),), work, wait)

    def exchange(self, program: Program, sent: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Send `sent[i]` to member i by an all-to-all program, and return the tensors received, member i's of `shapes[i]`; of one dtype."""
        size, me = self._group.size, self._group.index
        if len(sent) != size or len(shapes) != size:
            raise UsageError(f"exchange of {len(sent)} tensors for {len(shapes)} shapes; a group of {size} needs one for each member")
        like = sent[0]
        received = [torch.empty(tuple(shape), dtype=like.dtype, device=like.device) for shape in shapes]
        blocks = {Value("block", (me, t)): _flat_view(x) for t, x in enumerate(sent)} | {
            Value("block", (s, me)): x.view(-1) for s, x in enumerate(received) if s != me
        }
        received[me].copy_(sent[me])
        values = _transferred_values(program)
        forwarded = [[action.value for action in row if rank not in action.value.index] for rank, row in enumerate(program.actions)]  # type: ignore[union-attr]

        def work(route: Route, note: ReportWait, tag: int) -> None:
            if any(forwarded):
                all_sizes = self._side_group.all_gather(torch.tensor([x.numel() for x in sent], device=self._side_group.device))
                sizes = all_sizes.view(size, size).tolist()
                for value in forwarded[me]:
                    blocks.setdefault(value, torch.empty(sizes[value.index[0]][value.index[1]], dtype=like.dtype, device=like.device))
            self._run(route, lambda first, last: blocks[values[first]], note, tag)

        self._start(program, recorder.ALL_TO_ALL, like, (), work, True, values)
        return received

    def halo(self, program: Program, sent: Mapping[tuple[int, int], Tensor], taken: Mapping[tuple[int, int], Tensor]) -> None:
        """Send borders to the neighbours of a grid and receive theirs into `taken`, both by (grid dimension, 0 for the lower side or 1).

        Any tensors, usually views of one with halo margins: a border that includes the margins of earlier dimensions also sends corners.
        """
        me = self._group.index
        values = _transferred_values(program)

        def border(first: int, last: int) -> Tensor:
            rank, dim, side = values[first].index
            return sent[dim, side] if rank == me else taken[dim, 1 - side]

        like = next(iter((*sent.values(), *taken.values())), torch.empty(0))
        self._start(program, recorder.SEND, like, (), lambda route, note, tag: self._run(route, border, note, tag), True, values)

    def _start(
        self,
        program: Program,
        op: int,
        x: Tensor,
        sizes: tuple[int, ...],
        work: Callable[[Route, ReportWait, int], None],
        wait: bool,
        lineup: Sequence[Value] | None = None,
    ) -> CollectiveWork:
        """Start a program. `sizes`: must be equal on all members. `lineup`: the program's values, if they are not chunks of one tensor."""
        route = self._route(program, lineup)
        call = CollectiveSignature(op, program.name, route.checksum, sizes)
        return self._runner.start(call, x, lambda note, tag: work(route, note, tag), wait)

    def _route(self, program: Program, lineup: Sequence[Value] | None) -> Route:
        """Return this member's route, built once for a program; cached with the program, so that its id stays unique."""
        key = (id(program), lineup is None)
        if key not in self._routes:
            if program.num_ranks != self._group.size:
                raise UsageError(f"{program.name} is for {program.num_ranks} ranks, and {self._group} has {self._group.size}")
            places = program_chunks(program) if lineup is None else lineup
            self._routes[key] = program, build_routes(program, places, is_contiguous=lineup is None)[self._group.index]
        return self._routes[key][1]

    def _check_pieces(self, program: Program, pieces: Sequence[Mapping[Value, object]], full: Tensor, part: Tensor) -> None:
        n = program.num_ranks
        if any(set(held) != {Value("chunk", (r,))} for r, held in enumerate(pieces)):
            raise UsageError(f"{program.name} does not leave piece r of {n} with rank r; use ring, naive or a power of two")
        if not full.is_contiguous() or not part.is_contiguous() or full.dtype != part.dtype:
            raise UsageError(f"pieces of {part.dtype} for {full.dtype}; give contiguous tensors of one dtype")
        expected = even_shard_range(full.numel(), n, self._group.index)[1]
        if part.numel() != expected:
            raise UsageError(f"a piece of {part.numel()} elements for {full.numel()} of {n} ranks; this rank's has {expected}")

    def _to_accumulation_dtype(self, flat: Tensor) -> Tensor:
        if flat.dtype is torch.bool or flat.is_complex():
            raise UsageError(f"{flat.dtype} is not added by programs; use native")
        return flat.float() if flat.dtype in NARROW and self._group.size > 2 else flat

    def _run(self, route: Route, room: PlaceView, note: ReportWait, tag: int) -> None:
        _RouteRun(self._side_group, self._pool, room, note, tag).run_steps(route.steps)


class _BufferPool:
    """A pool of receive buffers for reductions, reused between runs."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, like: Tensor) -> Tensor:
        for i, buffer in enumerate(self._free):
            if buffer.dtype is like.dtype and buffer.numel() >= like.numel():
                return self._free.pop(i)
        self._free = [buffer for buffer in self._free if buffer.dtype is not like.dtype or buffer.numel() >= like.numel()]
        return torch.empty(like.numel(), dtype=like.dtype, device=like.device)

    def release(self, rooms: Iterable[Tensor]) -> None:
        self._free += rooms


class _RouteRun:
    """One run of a route: its pending sends, and by step its pending receives."""

    def __init__(self, group: Group, rooms: _BufferPool, room: PlaceView, note: ReportWait, tag: int) -> None:
        self.group, self.pool, self.view, self.note, self.tag = group, rooms, room, note, tag
        self.sends: dict[int, tuple[int, CollectiveWork]] = {}
        self.receives: dict[int, list[_PostedReceive]] = {}

    def run_steps(self, steps: Sequence[RouteStep]) -> None:
        for i, step in enumerate(steps):
            if isinstance(step, SendStep):
                self._send(step)
                continue
            if step.step not in self.receives:
                if isinstance(step, ReceiveStep):
                    self._wait_for_sends(step.wait_for_sends)
                self._post_receives(step)
                for ahead in _receives_without_wait(steps, i):
                    if ahead.step not in self.receives:
                        self._post_receives(ahead)
            arrived = self.receives.pop(step.step)
            if isinstance(step, ReceiveStep):
                self._finish_receive(step, arrived)
            elif arrived:
                self._reduce(step, arrived)
        self._wait_for_sends(tuple(self.sends))

    def _wait_for_sends(self, after: Sequence[int]) -> None:
        for number in after:
            if number in self.sends:
                member, work = self.sends.pop(number)
                self.note(number + 1, member)
                work.wait()

    def _start_receive(self, room: Tensor, part: Tensor, member: int, number: int) -> _PostedReceive:
        return _PostedReceive(room, part, self.group.irecv(part, member, self.tag + number % TAGS_PER_COLLECTIVE))

    def _post_receives(self, step: ReceiveStep | ReduceStep) -> None:
        place = self.view(step.first, step.last)
        size = place.numel()
        if isinstance(step, ReceiveStep):
            part = place if place.is_contiguous() else torch.empty_like(place, memory_format=torch.contiguous_format)
            self.receives[step.step] = [self._start_receive(part, part, step.peer, step.number)] if size else []
        else:
            buffers = [self.pool.take(place) for _ in step.peers] if size else []
            receives = zip(buffers, step.peers, step.numbers, strict=False)
            self.receives[step.step] = [self._start_receive(buffer, buffer[:size], peer, number) for buffer, peer, number in receives]

    def _send(self, step: SendStep) -> None:
        x = self.view(step.first, step.last)
        if x.numel():
            sent = x.clone(memory_format=torch.contiguous_format) if step.is_copied else x.contiguous()
            self.sends[step.step] = step.peer, self.group.isend(sent, step.peer, self.tag + step.number % TAGS_PER_COLLECTIVE)

    def _finish_receive(self, step: ReceiveStep, arrived: list[_PostedReceive]) -> None:
        for receive in arrived:
            self.note(step.step + 1, step.peer)
            receive.work.wait()
            place = self.view(step.first, step.last)
            if receive.target.data_ptr() != place.data_ptr():
                place.copy_(receive.target)

    def _reduce(self, step: ReduceStep, arrived: list[_PostedReceive]) -> None:
        total = place = self.view(step.first, step.last)
        for i, ((_, part, work), peer) in enumerate(zip(arrived, step.peers, strict=True)):
            if i == step.own_position:
                self._wait_for_sends(step.wait_for_sends)
                if i:
                    torch.add(total, place, out=place)
                    total = place
            self.note(step.step + 1, peer)
            work.wait()
            if i == 0 and step.own_position:
                total = part
            else:
                total.add_(part)
        if step.own_position == len(arrived):
            self._wait_for_sends(step.wait_for_sends)
            torch.add(total, place, out=place)
        self.pool.release(receive.buffer for receive in arrived)


def program_chunks(program: Program) -> list[Value]:
    """Return the chunks of a program's tensor, in order.

    Raises:
        ProgramError: its values are not `chunk(0)`, `chunk(1)` and so on.
    """
    values = list(program.boundary_values)
    if values != [Value("chunk", (i,)) for i in range(len(values))]:
        raise ProgramError(
            f"{program.name} has the values {', '.join(map(str, values[:4]))}; a collective of one tensor has chunk(0), chunk(1), ..."
        )
    return values


def _transferred_values(program: Program) -> list[Value]:
    """Return the values that a program's messages carry, in order."""
    return sorted({action.value for row in program.actions for action in row})  # type: ignore[union-attr]


def _receives_without_wait(steps: Sequence[RouteStep], at: int) -> list[ReceiveStep | ReduceStep]:
    """Return the receives right after step `at` that can be posted at once."""
    receives: list[ReceiveStep | ReduceStep] = []
    first = steps[at]
    used = [(first.first, first.last)]
    for step in steps[at + 1 :]:
        if isinstance(step, SendStep) or (isinstance(step, ReceiveStep) and step.wait_for_sends):
            break
        if any(step.first < last and first < step.last for first, last in used):
            break
        used.append((step.first, step.last))
        receives.append(step)
    return receives


def _place_view(flat: Tensor, places: int, unit: int = 1) -> PlaceView:
    """Return the view of places of a flat tensor; `unit`: number of elements that are not separated."""
    lengths = [even_shard_range(flat.numel() // unit, places, i)[1] * unit for i in range(places)]
    starts = [0, *accumulate(lengths)]
    return lambda first, last: flat[starts[first] : starts[last]]


def _flat_view(x: Tensor) -> Tensor:
    return x.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def _byte_view(flat: Tensor) -> Tensor:
    """Return the same memory as bytes, so that tensors of any type can be moved."""
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)
