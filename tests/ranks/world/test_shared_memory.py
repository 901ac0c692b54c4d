"""Collectives through shared memory against sums that each rank works out alone; faults; and twins that must fail.

Every rank draws the inputs of all ranks from the same seeds, so it knows the results. They are compared bit for bit.
"""

from __future__ import annotations

import gc
import io
import json
import os
import random
import signal
import subprocess
import time
from contextlib import redirect_stderr, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.errors import RankError, RunError
from shardwise.world import private
from shardwise.world.comm.group import Group
from shardwise.world.comm.pending import LostPeer, is_peer_loss
from shardwise.world.shared_memory import library, native, segment
from shardwise.world.shared_memory.setup import SharedMemory, _SharedBufferFactory
from shardwise.world.world import World

SHARED = "shared_memory"
ENV = {"SHARDWISE_TRANSPORT": SHARED}
DTYPES = ("float32", "float64", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8")
SIZES = (0, 1, 3, 64, 1001, 70_001, 300_007)  # the largest has more bytes than any chunk in every type but the narrowest


def drawn(seed: int, rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """What `rank` brings to the operation `seed`."""
    generator = torch.Generator().manual_seed(seed * 1009 + rank)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator).to(dtype)
    return torch.randint(-5, 50, (numel,), generator=generator).to(dtype)


def combined(parts: list[Tensor], op: str) -> Tensor:
    """The parts in their order, narrow ones in float32."""
    dtype = parts[0].dtype
    wide = [part.float() if dtype in (torch.bfloat16, torch.float16) else part for part in parts]
    total = wide[0]
    for part in wide[1:]:
        total = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[op](total, part)
    return total.to(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def over(world: World) -> Group:
    """All ranks, over the transport that was asked for and no other."""
    group = world.world_group
    group.connect()
    if world.num_ranks > 1:
        assert type(group._transport) is native.NativeChannel
    return group


def all_sizes(world: World, name: str, sizes: tuple[int, ...] = SIZES) -> None:
    group, n, me, dtype = over(world), world.num_ranks, world.rank, getattr(torch, name)
    for seed, numel in enumerate(sizes):
        parts = [drawn(seed, r, numel, dtype) for r in range(n)]
        for op in ("sum", "max", "min"):
            x = parts[me].clone()
            group.all_reduce(x, op=op)  # type: ignore[arg-type]
            assert same_bits(x, combined(parts, op)), (numel, op)
        buffer = group.shared_buffer(numel + 5, dtype)
        for op in ("sum", "max"):
            part = buffer[2 : 2 + numel]
            part.copy_(parts[me])
            group.all_reduce(part, op=op)  # type: ignore[arg-type]
            assert same_bits(part, combined(parts, op)), (numel, op, "shared")
            group.barrier()
        assert not buffer[:2].any()
        assert not buffer[2 + numel :].any()
        x = parts[me].clone()
        group.broadcast(x, n - 1)
        assert same_bits(x, parts[-1])
        assert same_bits(group.reduce_scatter(parts[me]), combined(parts, "sum").tensor_split(n)[me]) or numel % n
        gathered = group.all_gather(parts[me])
        assert same_bits(gathered, torch.cat(parts))
        own = numel // n
        whole = group.shared_buffer(own * n, dtype)
        group.all_gather_into(whole, parts[me][:own])
        assert same_bits(whole, torch.cat([part[:own] for part in parts]))
        group.barrier()
        whole.copy_(parts[me][: own * n])
        out = torch.empty(own, dtype=dtype)
        group.reduce_scatter_into(out, whole)
        assert same_bits(out, combined([part[own * me : own * (me + 1)] for part in parts], "sum"))
        shapes = [(seed + 3 * r + me,) for r in range(n)]
        got = group.exchange([drawn(seed, 50 * me + r, seed + 3 * me + r, dtype) for r in range(n)], shapes)
        assert all(same_bits(x, drawn(seed, 50 * r + me, seed + 3 * r + me, dtype)) for r, x in enumerate(got))


@pytest.mark.parametrize("name", DTYPES)
def test_every_type_and_size_bit_for_bit(ranks: Any, name: str) -> None:
    ranks(all_sizes, 3, name, env=ENV)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 5])
def test_any_number_of_ranks(ranks: Any, num_ranks: int) -> None:
    ranks(all_sizes, num_ranks, "float32", env=ENV)
    ranks(all_sizes, num_ranks, "bfloat16", (1, 7, 1001, 300_007), env=ENV)


def mixed(world: World, seed: int, count: int) -> None:
    """`count` operations drawn alike on all ranks, in groups that overlap, waited for in an order of each rank's own."""
    over(world)
    n, me = world.num_ranks, world.rank
    shared_draw, own_draw = random.Random(seed), random.Random(seed * 31 + me)
    sets = [tuple(range(n)), tuple(range(0, n, 2)), tuple(range(1, n, 2)), tuple(range(n // 2 + 1)), (n - 1, 0)]
    sets = [ranks for ranks in sets if len(ranks) > 1]
    groups = {ranks: world.group(ranks) for ranks in sets if me in ranks}
    buffers = {ranks: group.shared_buffer(50_000, torch.float32) for ranks, group in groups.items()}
    under_way: list[tuple[Any, Tensor, Tensor]] = []
    in_use: set[tuple[int, ...]] = set()

    def settle(keep: int) -> None:
        own_draw.shuffle(under_way)
        while len(under_way) > keep:
            work, got, expected = under_way.pop()
            work.wait()
            assert same_bits(got, expected)
        if not under_way:
            in_use.clear()

    for number in range(count):
        ranks = shared_draw.choice(sets)
        what = shared_draw.choice(("reduce", "shared", "gather", "scatter", "broadcast", "message", "exchange"))
        dtype = shared_draw.choice((torch.float32, torch.bfloat16, torch.int32))
        numel = shared_draw.choice((9, 11, 300, 9000, 40_000))
        later = shared_draw.random() < 0.6
        pair = shared_draw.sample(range(len(ranks)), 2)
        if shared_draw.random() < 0.1:
            settle(0)
        if me not in ranks:
            continue
        group, i = groups[ranks], ranks.index(me)
        parts = [drawn(seed + number, r, numel, dtype) for r in ranks]
        if what == "shared" and ranks not in in_use:
            in_use.add(ranks)
            x = buffers[ranks][7 : 7 + numel]
            parts = [drawn(seed + number, r, numel, torch.float32) for r in ranks]
            x.copy_(parts[i])
            under_way.append((group.all_reduce(x, wait=False), x, combined(parts, "sum")))
        elif what == "reduce" or what == "shared":
            x = parts[i].clone()
            under_way.append((group.all_reduce(x, wait=False), x, combined(parts, "sum")))
        elif what == "gather":
            out = torch.empty(numel * len(ranks), dtype=dtype)
            under_way.append((group.all_gather_into(out, parts[i], wait=False), out, torch.cat(parts)))
        elif what == "scatter":
            whole = [part.repeat(len(ranks)) for part in parts]
            out = torch.empty(numel, dtype=dtype)
            under_way.append((group.reduce_scatter_into(out, whole[i], wait=False), out, combined(parts, "sum")))
        elif what == "broadcast":
            x = parts[i].clone()
            under_way.append((group.broadcast(x, pair[0], wait=False), x, parts[pair[0]]))
        elif what == "exchange":
            got = group.exchange([parts[i][:k] for k in range(len(ranks))], [(i,)] * len(ranks))
            assert all(same_bits(x, part[:i]) for x, part in zip(got, parts, strict=True))
        elif i == pair[0]:
            x = parts[i].clone()
            under_way.append((group.isend(x, pair[1], tag=number), x, parts[i]))
        elif i == pair[1]:
            x = torch.empty_like(parts[i])
            under_way.append((group.irecv(x, pair[0], tag=number), x, parts[pair[0]]))
        settle(8 if later else 2)
    settle(0)


@pytest.mark.parametrize("num_ranks", [2, 4, 5])
def test_hundreds_of_mixed_operations(ranks: Any, num_ranks: int) -> None:
    ranks(mixed, num_ranks, num_ranks, 300, env=ENV)


def crossed(world: World) -> list[float]:
    """Rank 0 waits for the message first and the sum last, rank 1 the other way round: each needs what the other does while it waits."""
    group = over(world)
    pair, other = world.group((1, 0)), 1 - world.rank
    found = []
    for size in (10, 3_000_000):
        x, y, z = torch.full((size,), float(world.rank + 1)), torch.full((size,), float(world.rank + 3)), torch.empty(size)
        works = [group.all_reduce(x, wait=False), pair.all_reduce(y, wait=False)]
        works += [pair.irecv(z, pair.index ^ 1, tag=2), pair.isend(torch.full((size,), float(world.rank)), pair.index ^ 1, tag=2)]
        for work in works if world.rank else works[::-1]:
            work.wait()
        assert all(work.is_done for work in works)
        found += [float(x[-1]), float(y[-1]), float(z[-1])]
        assert x.eq(3).all()
        assert y.eq(7).all()
        assert z.eq(other).all()
    return found


def test_the_order_of_waiting_is_free(ranks: Any) -> None:
    assert ranks(crossed, 2, env=ENV) == [[3.0, 7.0, 1.0] * 2, [3.0, 7.0, 0.0] * 2]


def many_jobs(world: World) -> None:
    """More sums under way than the segment has places for, none waited for before all are posted; the last is waited for first."""
    group = over(world)
    each = 17_000  # more bytes than those that are copied instead
    buffer = group.shared_buffer(100 * each, torch.float32)
    for _ in range(3):
        buffer.fill_(float(world.rank + 1))
        works = [group.all_reduce(buffer[each * i : each * i + each], wait=False) for i in range(100)]
        for work in works[::-1]:
            work.wait()
        assert buffer.eq(sum(range(1, world.num_ranks + 1))).all()
        group.barrier()


def test_more_sums_than_places(ranks: Any) -> None:
    ranks(many_jobs, 3, env=ENV)


def long_messages(world: World) -> None:
    """Both ways at once, larger than the ring, tags in another order than they were sent in, some before they are asked for."""
    group, other = over(world), 1 - world.rank
    sizes = [1, 6_000_001, 17, 0, 5_000_000]
    given = [torch.arange(size, dtype=torch.float32).mul_(world.rank + 1) for size in sizes]
    sends = [group.isend(x, other, tag=i) for i, x in enumerate(given)]
    if world.rank:
        time.sleep(0.05)
    rooms = {i: torch.empty(sizes[i]) for i in (4, 2, 0, 3, 1)}
    receives = [group.irecv(room, other, tag=i) for i, room in rooms.items()]
    for work in sends + receives:
        work.wait()
    for i, room in rooms.items():
        assert torch.equal(room, torch.arange(sizes[i], dtype=torch.float32).mul_(other + 1))


def test_messages_longer_than_the_ring(ranks: Any) -> None:
    ranks(long_messages, 2, env=ENV)


def fault(world: World, what: str, folder: str) -> str:
    """Rank 1 of a second world dies while the others are in `what`. It is a process that the launcher does not know: it lets them go on."""
    child = os.fork() if world.rank == 1 else 0
    if child:
        return signal.Signals(os.WTERMSIG(os.waitpid(child, 0)[1])).name
    try:
        again = World(world.rank, 3, private.file_store(f"{folder}/fault", 3), timeout_s=30, transport=SHARED)
        group = over(again)
        buffer = group.shared_buffer(1_000_000, torch.float32)
        x = torch.ones(1_000_000)
        group.barrier()
        if world.rank == 1:
            if what == "half":
                group.all_reduce(buffer, wait=False)
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        if what == "sum":
            group.all_reduce(x)
        elif what == "shared":
            group.all_reduce(buffer)
        elif what == "half":
            group.all_reduce(buffer, wait=False)
            group.all_gather(x)
        elif what == "receive":
            group.irecv(x, 1).wait()
        else:
            group.isend(torch.ones(30_000_000), 1).wait()
    except LostPeer as error:
        # Nobody leaves before all were told, or the others could be told of this one.
        Path(folder, f"told-{world.rank}").touch()
        while not all(Path(folder, f"told-{rank}").exists() for rank in (0, 2)):
            time.sleep(0.01)
        return f"{time.monotonic() - began < 5} {error}"
    finally:
        if world.rank == 1:
            os._exit(1)
    return "no error"


@pytest.mark.parametrize("what", ["sum", "shared", "half", "receive", "send"])
def test_a_rank_that_dies_is_named_and_leaves_nothing(ranks: Any, what: str, tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    told = ranks(fault, 3, what, str(tmp_path))
    assert told[1] == "SIGKILL"
    for said in (told[0], told[2]):
        assert said.startswith("True ")
        assert "remote process exited: rank 1 (process" in said
    assert not {name for name in set(os.listdir("/dev/shm")) - before if "shardwise" in name}
    assert not mapped_by_anyone()


def dies(world: World) -> None:
    group = over(world)
    group.barrier()
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    group.all_reduce(torch.ones(1000))


def test_the_launcher_tells_the_first_cause(ranks: Any) -> None:
    with pytest.raises(RankError, match=r"rank 1 was killed by SIGKILL"):
        ranks(dies, 3, env=ENV)
    assert not mapped_by_anyone()


def mapped_by_anyone() -> list[int]:
    """Processes that this one started, at whatever remove, and orphans that have a segment mapped."""
    parents = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit():
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])

    def ours(pid: int) -> bool:
        while pid > 1 and pid != os.getpid():
            pid = parents.get(pid, 0)
        return pid == os.getpid()

    found = []
    for pid, parent in parents.items():
        with suppress(OSError):
            if (parent == 1 or ours(pid)) and pid != os.getpid() and "memfd:shardwise" in Path(f"/proc/{pid}/maps").read_text():
                found.append(pid)
    return found


def late(world: World, folder: str) -> str:
    again = World(world.rank, 2, private.file_store(f"{folder}/late", 2), timeout_s=0.5, transport=SHARED)
    again.world_group.barrier()
    if world.rank:
        time.sleep(1.5)
        return ""
    try:
        again.world_group.all_reduce(torch.ones(3))
    except LostPeer as error:
        return str(error)
    return "no error"


def test_a_late_rank_is_named(ranks: Any, tmp_path: Path) -> None:
    assert "Timed out after 0.5 s waiting for rank 1" in ranks(late, 2, str(tmp_path))[0]


def late_or_stopped(world: World, what: str, call: str, folder: str) -> str:
    """What a rank is told while rank 1 comes late or is stopped; rank 2 comes a little after rank 0, and so gives up later."""
    again = World(world.rank, 3, private.file_store(f"{folder}/{what}-{call}", 3), timeout_s=1.0, transport=SHARED)
    group, said = again.world_group, "no error"
    buffer = group.shared_buffer(300_000, torch.float32) if call == "shared" else torch.ones(300_000)
    group.barrier()
    if world.rank == 1 and what == "late":
        time.sleep(3)
    if world.rank == 1 and what == "stopped":
        subprocess.Popen(["sh", "-c", f"sleep 3; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.1 * world.rank)
    try:
        if call == "gather":
            group.all_gather(buffer)
        else:
            group.all_reduce(buffer)
    except LostPeer as error:
        said = str(error)
    return said


@pytest.mark.parametrize("what", ["late", "stopped"])
@pytest.mark.parametrize("call", ["reduce", "shared", "gather"])
def test_nobody_blames_who_waits_too(ranks: Any, what: str, call: str, tmp_path: Path) -> None:
    """Of three ranks both that waited name the third, which is told that they did where it cannot end."""
    first, second, third = ranks(late_or_stopped, 3, what, call, str(tmp_path))
    for said in (first, third):
        assert "Timed out after 1 s waiting for rank 1 (process" in said
        assert ("stopped: rank 1 (process" in said) is (what == "stopped")
    # In shared buffers it has all that it needs to add up by itself.
    assert ("no error" if call == "shared" else "the other ranks waited for this one, and gave up") in second


def unlike(world: World, what: str) -> str:
    group, me = over(world), world.rank
    buffer = group.shared_buffer(20_001, torch.float32)
    group.barrier()
    try:
        if what == "size":
            group.all_reduce(torch.ones(3 + me))
        elif what == "type":
            group.all_reduce(torch.ones(4, dtype=torch.float64 if me else torch.float32))
        elif what == "operation":
            group.all_reduce(torch.ones(4), op="max" if me else "sum")
        elif what == "collective":
            group.broadcast(torch.ones(4)) if me else group.all_reduce(torch.ones(4))
        elif what == "shared size":
            group.all_reduce(buffer[: 20_000 + me])
        elif what == "exchange":
            group.exchange([torch.ones(2)] * 2, [(2 + me * (1 - i),) for i in range(2)])
        else:
            (group.isend(torch.ones(3), 0) if me else group.irecv(torch.ones(2), 1)).wait()
        group.barrier()
    except RunError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("what", ["size", "type", "operation", "collective", "shared size", "exchange", "message"])
def test_calls_that_differ_are_an_error_on_every_rank(ranks: Any, what: str) -> None:
    for said in ranks(unlike, 2, what, env=ENV):
        assert "differs from another rank's" in said


def waiting(world: World) -> float:
    """Seconds of computing of a rank that waits for a late one, as a share of the time waited."""
    group = over(world)
    group.barrier()
    began, used = time.monotonic(), time.process_time()
    if world.rank == 0:
        time.sleep(1.0)
    group.all_reduce(torch.ones(10))
    return (time.process_time() - used) / (time.monotonic() - began)


def test_waiting_burns_no_core(ranks: Any) -> None:
    assert max(ranks(waiting, 3, env=ENV)) < 0.3


def test_more_ranks_than_cores(ranks: Any) -> None:
    num_ranks = len(os.sched_getaffinity(0)) + 5
    ranks(mixed, num_ranks, 1, 100, env=ENV)


def freed(world: World) -> list[int]:
    """Segments mapped before a buffer is there, with it, and after it was dropped."""
    group = over(world)

    def count() -> int:
        group.barrier()
        return Path("/proc/self/maps").read_text().count("memfd:shardwise")

    found = [count()]
    buffer = group.shared_buffer(20_000, torch.float32)
    view = buffer[10:19_000]
    view.fill_(1.0)
    group.all_reduce(view)
    found.append(count())
    del buffer
    found.append(count())
    del view
    found.append(count())
    x = torch.ones(10)
    group.all_reduce(x)
    assert x.eq(world.num_ranks).all()
    return found


def test_a_dropped_buffer_returns_its_memory(ranks: Any) -> None:
    for found in ranks(freed, 3, env=ENV):
        assert found[0] == found[3]
        assert found[1] == found[2] == found[0] + 3


def without_a_compiler(world: World, folder: str) -> list[str]:
    """Rank 1 can build no library: all ranks use gloo, and the first says why. Of its second group, nothing more."""
    load = library.load
    if world.rank == 1:
        library.load = lambda: load(Path(folder), compiler="no-such-compiler")
    again = World(world.rank, 3, private.file_store(f"{folder}/without", 3), transport=SHARED)
    said = io.StringIO()
    with redirect_stderr(said):
        for group in (again.world_group, again.group((0, 2, 1))):
            x = torch.ones(3)
            group.all_reduce(x)
            assert x.eq(3).all()
            assert not group.shares_memory
    return said.getvalue().splitlines()


def test_where_one_rank_has_no_compiler_all_use_gloo_and_one_says_so(ranks: Any, tmp_path: Path) -> None:
    (said,), *others = ranks(without_a_compiler, 3, str(tmp_path), env=ENV)
    assert "no C compiler 'no-such-compiler' in PATH" in said
    assert "over gloo" in said
    assert "apt install gcc" in said
    assert others == [[], []]


class Told(dict[str, str]):
    """A store in which the other member has said what it says, before it ended."""

    set = dict.__setitem__
    get = dict.__getitem__


@pytest.mark.parametrize("index", [0, 1])
def test_a_member_that_ends_before_its_memory_is_mapped_is_lost(index: int) -> None:
    """And is no reason to wait for it over gloo. Nothing stays open."""
    memory = SharedMemory(True, 10.0)
    other = subprocess.Popen(["true"])
    other.wait()
    place = f"{other.pid}:3:4096"
    said = {"host": segment.host_identity(), "failure": "", "pid": other.pid}
    told = {f"can/{1 - index}": json.dumps(said), "place": json.dumps([place, ""]), f"mapped/{1 - index}": '""'}
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RuntimeError, match="remote process exited") as caught:
        memory.open(Told(told), index, (0, 1))
    assert is_peer_loss(caught.value)
    buffers = _SharedBufferFactory(SimpleNamespace(index=index, size=2), Told({f"buffer/0/{1 - index}": json.dumps(place)}))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="remote process exited"):
        buffers(4, torch.float32)
    del caught
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_without_a_compiler_there_is_a_reason_and_no_error(tmp_path: Path) -> None:
    assert "no C compiler" in str(library.load(tmp_path, compiler="no-such-compiler"))
    assert "CalledProcessError" in str(library.load(tmp_path, compiler="false"))
    closed = tmp_path / "closed"
    closed.write_text("not a folder")
    assert isinstance(library.load(closed / "cache"), str)


def skipping(world: World) -> None:
    """The library with a barrier that is skipped: a reader does not wait for the writer."""
    library.FLAGS = (*library.FLAGS, "-DSHARDWISE_TWIN_SKIPS_THE_BARRIER")
    all_sizes(world, "float32", (1001,) * 20)


def test_a_skipped_barrier_is_seen(ranks: Any) -> None:
    with pytest.raises(RankError):
        ranks(skipping, 3, env=ENV)
