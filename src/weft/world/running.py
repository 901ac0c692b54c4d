"""Execute collectives from their programs, over messages of a group's side connection. In: tensors. Out: results, or `CollectiveWork`.

All members call the same collectives in the same order; `runner` runs them in sequence, overlapping backward, and explains failures.
bfloat16 and float16 of more than two members are added in float32. Receive buffers of reductions are reused.
Not modelled: which program is best (`weft.cost`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from weft.errors import ProgramError, UsageError
from weft.plan.placement import piece
from weft.plan.program import Program, Value
from weft.world import recorder
from weft.world.group import Group
from weft.world.pending import NARROW, Work
from weft.world.programs import Away, Route, Step, Sum, Take, routes
from weft.world.runner import NUMBERS, Call, Note, Runner

Room = Callable[[int, int], Tensor]  # (first, last) -> the tensor of these places


class _Coming(NamedTuple):
    room: Tensor  # buffer to release afterwards
    part: Tensor  # tensor that is received into
    work: Work


class Programs:
    """Runs programs between the members of the runner's group."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self._group, self._side_group = runner, runner.group, runner.side_group
        self._routes: dict[tuple[int, bool], tuple[Program, Route]] = {}
        self._rooms = _Rooms()

    def all_reduce(self, program: Program, x: Tensor, wait: bool = True) -> Work:
        """Replace `x`, of any size and a type that can be added, by the sum over the members."""
        flat = x.detach().reshape(-1)  # a view, or a copy of what is not contiguous

        def work(route: Route, note: Note, tag: int) -> None:
            wide = self._widened(flat)
            self._run(route, _cut(wide, route.places), note, tag)
            if wide.data_ptr() != x.data_ptr():
                x.detach().copy_(wide.view(x.shape))

        return self._start(program, recorder.ALL_REDUCE, x, (x.numel(),), work, wait)

    def broadcast(self, program: Program, x: Tensor, wait: bool = True) -> Work:
        """Replace `x` on every member by that of the program's root."""

        def work(route: Route, note: Note, tag: int) -> None:
            flat = _bytes(_flat(x))
            self._run(route, _cut(flat, route.places, x.element_size()), note, tag)
            if flat.data_ptr() != x.data_ptr():
                x.detach().copy_(flat.view(x.dtype).view(x.shape))

        return self._start(program, recorder.BROADCAST, x, (x.numel(),), work, wait)

    def reduce_scatter(self, program: Program, out: Tensor, x: Tensor, wait: bool = True) -> Work:
        """Reduce-scatter flat `x` into flat `out`, this member's shard of the sum; shards are those of `plan.placement.piece`.

        If `out` lies in `x`, the rest of `x` is overwritten. Raises UsageError for a program with other shards.
        """
        self._check_pieces(program, program.wants, x, out)
        inside = x.data_ptr() <= out.data_ptr() < x.data_ptr() + x.nbytes

        def work(route: Route, note: Note, tag: int) -> None:
            wide = self._widened(x.detach())
            if wide.data_ptr() == x.data_ptr() and not inside:
                wide = wide.clone()
            view = _cut(wide, route.places)
            self._run(route, view, note, tag)
            shard = view(self._group.index, self._group.index + 1)
            if shard.data_ptr() != out.data_ptr():
                out.detach().copy_(shard)

        return self._start(program, recorder.REDUCE_SCATTER, x, (x.numel(),), work, wait)

    def all_gather(self, program: Program, out: Tensor, x: Tensor, wait: bool = True) -> Work:
        """Gather flat `x` of every member into flat `out`, member after member; shards are those of `plan.placement.piece`."""
        self._check_pieces(program, program.initial, out, x)

        def work(route: Route, note: Note, tag: int) -> None:
            view = _cut(_bytes(out.detach()), route.places, out.element_size())
            shard = view(self._group.index, self._group.index + 1)
            if shard.data_ptr() != x.data_ptr():
                shard.copy_(_bytes(x.detach()))
            self._run(route, view, note, tag)

        return self._start(program, recorder.ALL_GATHER, x, (out.numel(),), work, wait)

    def exchange(self, program: Program, sent: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Send `sent[i]` to member i by an all-to-all program, and return the tensors received, member i's of `shapes[i]`; of one dtype."""
        size, me = self._group.size, self._group.index
        if len(sent) != size or len(shapes) != size:
            raise UsageError(f"exchange of {len(sent)} tensors for {len(shapes)} shapes; a group of {size} needs one for each member")
        like = sent[0]
        received = [torch.empty(tuple(shape), dtype=like.dtype, device=like.device) for shape in shapes]
        blocks = {Value("block", (me, t)): _flat(x) for t, x in enumerate(sent)} | {
            Value("block", (s, me)): x.view(-1) for s, x in enumerate(received) if s != me
        }
        received[me].copy_(sent[me])
        values = _moved(program)
        forwarded = [[action.value for action in row if rank not in action.value.index] for rank, row in enumerate(program.actions)]  # type: ignore[union-attr]

        def work(route: Route, note: Note, tag: int) -> None:
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
        values = _moved(program)

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
        work: Callable[[Route, Note, int], None],
        wait: bool,
        lineup: Sequence[Value] | None = None,
    ) -> Work:
        """Start a program. `sizes`: must be equal on all members. `lineup`: the program's values, if they are not chunks of one tensor."""
        route = self._route(program, lineup)
        call = Call(op, program.name, route.mark, sizes)
        return self._runner.start(call, x, lambda note, tag: work(route, note, tag), wait)

    def _route(self, program: Program, lineup: Sequence[Value] | None) -> Route:
        """Return this member's route, built once for a program; cached with the program, so that its id stays unique."""
        key = (id(program), lineup is None)
        if key not in self._routes:
            if program.num_ranks != self._group.size:
                raise UsageError(f"{program.name} is for {program.num_ranks} ranks, and {self._group} has {self._group.size}")
            places = chunks_of(program) if lineup is None else lineup
            self._routes[key] = program, routes(program, places, joined=lineup is None)[self._group.index]
        return self._routes[key][1]

    def _check_pieces(self, program: Program, pieces: Sequence[Mapping[Value, object]], full: Tensor, part: Tensor) -> None:
        n = program.num_ranks
        if any(set(held) != {Value("chunk", (r,))} for r, held in enumerate(pieces)):
            raise UsageError(f"{program.name} does not leave piece r of {n} with rank r; use ring, naive or a power of two")
        if not full.is_contiguous() or not part.is_contiguous() or full.dtype != part.dtype:
            raise UsageError(f"pieces of {part.dtype} for {full.dtype}; give contiguous tensors of one dtype")
        expected = piece(full.numel(), n, self._group.index)[1]
        if part.numel() != expected:
            raise UsageError(f"a piece of {part.numel()} elements for {full.numel()} of {n} ranks; this rank's has {expected}")

    def _widened(self, flat: Tensor) -> Tensor:
        if flat.dtype is torch.bool or flat.is_complex():
            raise UsageError(f"{flat.dtype} is not added by programs; use native")
        return flat.float() if flat.dtype in NARROW and self._group.size > 2 else flat

    def _run(self, route: Route, room: Room, note: Note, tag: int) -> None:
        _Run(self._side_group, self._rooms, room, note, tag).steps(route.steps)


class _Rooms:
    """A pool of receive buffers for reductions, reused between runs."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, like: Tensor) -> Tensor:
        for i, buffer in enumerate(self._free):
            if buffer.dtype is like.dtype and buffer.numel() >= like.numel():
                return self._free.pop(i)
        self._free = [buffer for buffer in self._free if buffer.dtype is not like.dtype or buffer.numel() >= like.numel()]
        return torch.empty(like.numel(), dtype=like.dtype, device=like.device)

    def give(self, rooms: Iterable[Tensor]) -> None:
        self._free += rooms


class _Run:
    """One run of a route: its pending sends, and by step its pending receives."""

    def __init__(self, group: Group, rooms: _Rooms, room: Room, note: Note, tag: int) -> None:
        self.group, self.rooms, self.room, self.note, self.tag = group, rooms, room, note, tag
        self.sends: dict[int, tuple[int, Work]] = {}
        self.coming: dict[int, list[_Coming]] = {}

    def steps(self, steps: Sequence[Step]) -> None:
        for i, step in enumerate(steps):
            if isinstance(step, Away):
                self._send(step)
                continue
            if step.step not in self.coming:
                if isinstance(step, Take):
                    self._settle(step.after)
                self._post(step)
                for ahead in _ahead(steps, i):
                    if ahead.step not in self.coming:
                        self._post(ahead)
            arrived = self.coming.pop(step.step)
            if isinstance(step, Take):
                self._take(step, arrived)
            elif arrived:
                self._add(step, arrived)
        self._settle(tuple(self.sends))

    def _settle(self, after: Sequence[int]) -> None:
        for number in after:
            if number in self.sends:
                member, work = self.sends.pop(number)
                self.note(number + 1, member)
                work.wait()

    def _begin(self, room: Tensor, part: Tensor, member: int, number: int) -> _Coming:
        return _Coming(room, part, self.group.irecv(part, member, self.tag + number % NUMBERS))

    def _post(self, step: Take | Sum) -> None:
        place = self.room(step.first, step.last)
        size = place.numel()
        if isinstance(step, Take):
            part = place if place.is_contiguous() else torch.empty_like(place, memory_format=torch.contiguous_format)
            self.coming[step.step] = [self._begin(part, part, step.peer, step.number)] if size else []
        else:
            buffers = [self.rooms.take(place) for _ in step.peers] if size else []
            receives = zip(buffers, step.peers, step.numbers, strict=False)
            self.coming[step.step] = [self._begin(buffer, buffer[:size], peer, number) for buffer, peer, number in receives]

    def _send(self, step: Away) -> None:
        x = self.room(step.first, step.last)
        if x.numel():
            sent = x.clone(memory_format=torch.contiguous_format) if step.copied else x.contiguous()
            self.sends[step.step] = step.peer, self.group.isend(sent, step.peer, self.tag + step.number % NUMBERS)

    def _take(self, step: Take, arrived: list[_Coming]) -> None:
        for receive in arrived:
            self.note(step.step + 1, step.peer)
            receive.work.wait()
            place = self.room(step.first, step.last)
            if receive.part.data_ptr() != place.data_ptr():
                place.copy_(receive.part)

    def _add(self, step: Sum, arrived: list[_Coming]) -> None:
        total = place = self.room(step.first, step.last)
        for i, ((_, part, work), peer) in enumerate(zip(arrived, step.peers, strict=True)):
            if i == step.place:
                self._settle(step.after)
                if i:
                    torch.add(total, place, out=place)
                    total = place
            self.note(step.step + 1, peer)
            work.wait()
            if i == 0 and step.place:
                total = part
            else:
                total.add_(part)
        if step.place == len(arrived):
            self._settle(step.after)
            torch.add(total, place, out=place)
        self.rooms.give(receive.room for receive in arrived)


def chunks_of(program: Program) -> list[Value]:
    """Return the chunks of a program's tensor, in order.

    Raises:
        ProgramError: its values are not `chunk(0)`, `chunk(1)` and so on.
    """
    values = list(program.pieces)
    if values != [Value("chunk", (i,)) for i in range(len(values))]:
        raise ProgramError(
            f"{program.name} has the values {', '.join(map(str, values[:4]))}; a collective of one tensor has chunk(0), chunk(1), ..."
        )
    return values


def _moved(program: Program) -> list[Value]:
    """Return the values that a program's messages carry, in order."""
    return sorted({action.value for row in program.actions for action in row})  # type: ignore[union-attr]


def _ahead(steps: Sequence[Step], at: int) -> list[Take | Sum]:
    """Return the receives right after step `at` that can be posted at once."""
    receives: list[Take | Sum] = []
    first = steps[at]
    used = [(first.first, first.last)]
    for step in steps[at + 1 :]:
        if isinstance(step, Away) or (isinstance(step, Take) and step.after):
            break
        if any(step.first < last and first < step.last for first, last in used):
            break
        used.append((step.first, step.last))
        receives.append(step)
    return receives


def _cut(flat: Tensor, places: int, unit: int = 1) -> Room:
    """Return the view of places of a flat tensor; `unit`: number of elements that are not separated."""
    lengths = [piece(flat.numel() // unit, places, i)[1] * unit for i in range(places)]
    starts = [0, *accumulate(lengths)]
    return lambda first, last: flat[starts[first] : starts[last]]


def _flat(x: Tensor) -> Tensor:
    return x.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def _bytes(flat: Tensor) -> Tensor:
    """Return the same memory as bytes, so that tensors of any type can be moved."""
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)
