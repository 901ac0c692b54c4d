"""This machine as a `Cluster`: measured in a few seconds, kept in the user's cache, read from there the next time. [torch]

Every figure is of training: forward and backward together, at shapes that real models have. What runs at once in training is
measured at once: all ranks multiply and copy together, so shared caches, memory and clocks are in the figures.
Not measured: long runs that heat the machine, and other work on it. Between CUDA devices the figures are the catalogue's.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn import functional as F

from weft.cluster.block import HEADS, HIDDEN, LAYERS, SEQUENCE, SEQUENCES, rate_name
from weft.cluster.catalogue import dump, loads
from weft.cluster.cluster import Cluster, Device, Level, Link, Speed, Table
from weft.errors import ConfigError
from weft.plan.program import Action, Program, Recv, Send, Value

VERSION = 9  # of what is measured; a stored result of another version is measured again
QUICK_SIZES = (4096, 65536, 1 << 20, 4 << 20, 16 << 20)
FULL_SIZES = (1024, 4096, 16384, 65536, 262144, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
MESSAGE_SIZES = tuple(4**k << 10 for k in range(1, 8))  # 4 KiB to 16 MiB: between points a straight line in logarithms must do
MESSAGE_RANKS = (2, 4)
PIECES = 4
Pieces = tuple[torch.Tensor, ...]
LAUNCH_OPERATORS = 64
BUSY = "while the machine was busy"
BUSY_S = 300.0  # for which such a result is used all the same
LOOKS = 10
WARM_S = 0.02  # threads that were just started take this long to find their cores
CLOCK_S = 0.03  # per figure and round, at least
SHARE = "share"  # of its cores that a rank got while it multiplied: less than 1 where others ran
LEAST_SHARE = 0.85
ROUNDS = 3  # of all figures, seconds apart: what disturbs one of them for a moment does not become the machine's speed


def probe(quick: bool = True, *, fresh: bool = False, path: Path | None = None) -> Cluster:
    """This machine as a cluster. The first call measures for a few seconds; later ones read the stored result.

    What was measured while other programs ran is measured again when they do not, some minutes later at the earliest. Processes that
    ask at the same time wait for the first of them, and read what it found.

    Args:
        quick: fewer sizes and at most two ranks. `fresh`: measure even where a stored result fits.
        path: where the result is kept; by default `cache_path()`.

    >>> probe().device.kind  # doctest: +SKIP
    'cpu'
    """
    path = path or cache_path()
    mark = fingerprint()
    if not fresh and (stored := _usable(path, mark)) is not None:
        return stored
    with _alone(path):
        if not fresh and (stored := _usable(path, mark)) is not None:
            return stored
        # Read back from its text, so that the first call and the later ones plan with the same digits.
        cluster = loads(dump(_of_gpus(mark) if torch.cuda.is_available() else _of_cores(mark, quick)))
        with contextlib.suppress(OSError):  # a cache that cannot be written costs a few seconds next time, and nothing else
            part = path.with_suffix(f".{os.getpid()}")
            part.write_text(dump(cluster))
            part.replace(path)
    return cluster


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """While no other process is in here for the same file; measurements that run at once would measure one another."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = held.enter_context(open(path.with_suffix(".lock"), "a"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _load() -> float:
    """Other processes that want a core now; 0 where the system does not tell.

    The load average looks a minute back, so an idle machine would seem busy after work of its own; it only bounds the count.
    """
    if not hasattr(os, "getloadavg"):
        return 0.0
    try:
        counts = []
        for _ in range(LOOKS):
            time.sleep(0.01)
            counts.append(int(Path("/proc/loadavg").read_text().split()[3].split("/")[0]) - 1)
    except (OSError, ValueError, IndexError):
        return os.getloadavg()[0]
    return min(sum(counts) / LOOKS, os.getloadavg()[0])


def cache_path() -> Path:
    """Where the measured cluster is kept: `.cache/weft` in the user's home."""
    return Path.home() / ".cache" / "weft" / "cluster.toml"


def fingerprint() -> str:
    """Of the machine and the software whose speed it is: processor, cores, memory, GPUs, torch."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    parts = (VERSION, _cpu_model(), num_cores(), memory_bytes() >> 28, gpus, torch.__version__)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """Memory of the machine, or of the container where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path(limit).read_text()))
        except (OSError, ValueError):
            continue
    return total


def has_bfloat16() -> bool:
    """Whether this machine multiplies bfloat16 in hardware."""
    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine() == "arm64"
    return any(flag in flags for flag in ("avx512_bf16", "amx_bf16", " bf16"))


def capabilities() -> dict[str, Any]:
    """What this torch can do here: `gloo`, `nccl` (bool), `gpus` (count), `gpu` (name of the first)."""
    here = torch.distributed.is_available()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "gloo": here and torch.distributed.is_gloo_available(),
        "nccl": here and torch.distributed.is_nccl_available(),
        "gpus": gpus,
        "gpu": torch.cuda.get_device_name(0) if gpus else "",
    }


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _usable(path: Path, mark: str) -> Cluster | None:
    """What is stored of this machine, unless it was busy then, some time ago, and is not now."""
    stored = _stored(path, mark)
    if stored is None or BUSY not in stored.device.source:
        return stored
    with contextlib.suppress(OSError):
        if 0 <= time.time() - path.stat().st_mtime < BUSY_S:
            return stored
    return stored if _load() >= num_cores() else None


def _stored(path: Path, mark: str) -> Cluster | None:
    try:
        cluster = loads(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError, ConfigError):
        return None
    return cluster if cluster.fingerprint == mark else None


def _of_gpus(mark: str) -> Cluster:
    """GPUs of one host: their own products and copies measured, their links as NVLink where peers see each other."""
    count = torch.cuda.device_count()
    properties = torch.cuda.get_device_properties(0)
    device = torch.device("cuda", 0)
    figures = measure_compute(device, quick=True)
    peers = count > 1 and torch.cuda.can_device_access_peer(0, 1)
    link = Link(3.4e-6, 250e9 if peers else 12e9, source="assumed: peer access" if peers else "assumed: no peer access, through the host")
    speed = _speed(1, 0, figures)
    return Cluster(
        "here",
        _device(properties.name, "gpu", speed, float(properties.total_memory), 0.8e9),
        (Level("node", count, link),),
        speeds=(speed,) if count == 1 else tuple(_speed(ranks, 0, figures) for ranks in range(1, count + 1)),
        fingerprint=mark,
    )


def _of_cores(mark: str, quick: bool) -> Cluster:
    from weft.world.launch import Launcher

    cores = num_cores()
    busy = _load()
    said = "measured"
    if busy >= cores:
        said += f" {BUSY} (load {busy:.1f} on {cores} cores); measure again when it is idle"
    ranks = min(max(2, cores), 4) if quick else min(max(4, cores), 8)
    with Launcher() as launcher:
        found = launcher.launch(measure_rank, ranks, cores, quick)
        messages = [table for count in MESSAGE_RANKS for table in launcher.launch(measure_messages, count)[0]]
    share = min(figures.pop(SHARE) for result in found for _, _, figures in result["speeds"])
    if BUSY not in said and share < LEAST_SHARE:
        said += f" {BUSY} (ranks got {share:.0%} of their cores); measure again when it is idle"
    alone: dict[str, float] = next(figures for r, t, figures in found[0]["speeds"] if (r, t) == (1, 1))
    speeds = []
    for count, threads in dict.fromkeys((r, t) for r, t, _ in found[0]["speeds"]):
        mine = [figures for result in found for r, t, figures in result["speeds"] if (r, t) == (count, threads)]
        # Ranks wait for the slowest of them.
        figures = {key: max(f[key] for f in mine) for key in mine[0]}
        if count == 1:
            # More threads never make a large operator slower where nothing else runs; if they did, something else ran.
            figures = {key: min(s, alone[key]) for key, s in figures.items()}
        speeds.append(_speed(count, threads, figures))
    measured: dict[tuple[str, int], dict[int, float]] = {}
    for name, n, points in (*messages, *found[0]["tables"]):  # of a size that both measured, what the first ranks did counts
        measured.setdefault((name, n), {}).update(points)
    tables = [Table(*key, _rising(points)) for key, points in sorted(measured.items())]
    reduce = next(t for t in tables if t.collective == "all_reduce" and t.ranks == 2)
    size, seconds = reduce.points[-1]
    one = next(s for s in speeds if (s.ranks, s.threads) == (1, 1))
    return Cluster(
        "here",
        _device(_cpu_model(), "cpu", one, memory_bytes() / cores, found[0]["scratch"], said),
        (Level("node", cores, Link(reduce.points[0][1] / 2, size / seconds, source="measured between two ranks")),),
        speeds=tuple(sorted(speeds, key=lambda s: (s.ranks, s.threads))),
        tables=tuple(tables),
        fingerprint=mark,
    )


def _device(name: str, kind: str, speed: Speed, memory: float, scratch: float, source: str = "measured") -> Device:
    """A device whose peak is what it was measured to reach."""
    return Device(name, kind, speed.flops, memory, speed.memory_bandwidth_bytes_per_s, 1.0, speed.launch_s, scratch, source)


def _speed(ranks: int, threads: int, seconds: dict[str, float]) -> Speed:
    """Figures of `measure_compute` (seconds per FLOP, per byte, per operator) as a `Speed`."""
    flops = tuple((key.partition(".")[2], 1 / s) for key, s in seconds.items() if key.startswith("linear."))
    rates = tuple((key, 1 / s) for key, s in seconds.items() if not key.startswith(("linear.", "launch", "elementwise", SHARE)))
    return Speed(ranks, threads, flops, 1 / seconds["elementwise"], seconds["launch"], rates)


def measure_rank(world: Any, cores: int, quick: bool) -> dict[str, Any]:
    """What one rank of the probe does: alone while the others wait, then all at once, then collectives. Plain numbers out."""
    rank, size = world.rank, world.num_ranks
    scratch = float(_resident_bytes())
    device = torch.device("cpu")
    everyone = world.group(tuple(range(size)))
    speeds: list[tuple[int, int, dict[str, float]]] = []
    threads_before = torch.get_num_threads()
    for ranks, threads in dict.fromkeys(((1, 1), (1, cores), (min(cores, size), max(1, cores // size)))):
        everyone.all_reduce(torch.zeros(1))
        if rank < ranks:
            torch.set_num_threads(threads)
            meet = partial(_meet, world.group(tuple(range(ranks)))) if ranks > 1 else None
            rounds = [measure_compute(device, quick, meet) for _ in range(ROUNDS)]
            speeds.append((ranks, threads, {name: median(one[name] for one in rounds) for name in rounds[0]}))
    torch.set_num_threads(max(1, cores // size))
    tables = []
    counts = [n for n in (2, 4, 8) if n <= size]
    for count in counts:
        everyone.all_reduce(torch.zeros(1))
        if rank < count:
            tables += _measure_links(world, count, QUICK_SIZES if quick else FULL_SIZES)
    torch.set_num_threads(threads_before)
    return {"speeds": speeds, "tables": tables, "scratch": scratch}


def _meet(group: Any) -> None:
    group.all_reduce(torch.zeros(1))


def _measure_links(world: Any, count: int, sizes: Iterable[int]) -> list[tuple[str, int, list[tuple[int, float]]]]:
    """Seconds of all-reduce between the first `count` ranks, and of a message between the first two of them."""
    group = world.group(tuple(range(count)))

    def message(tensor: torch.Tensor) -> None:
        first, second = (group.isend, group.irecv) if group.index == 0 else (group.irecv, group.isend)
        first(tensor, 1 - group.index).wait()
        second(tensor, 1 - group.index).wait()

    calls: dict[str, tuple[Callable[[torch.Tensor], Any], float]] = {"all_reduce": (group.all_reduce, 1.0)}
    if count == 2:
        calls["send"] = (message, 0.5)  # there and back
    tables = []
    for name, (call, part) in calls.items():
        points = []
        for size in sizes:
            tensor = torch.zeros(max(1, size // 4))
            times = []
            for _ in range(20 if size <= 65536 else 6):
                start = time.perf_counter()
                call(tensor)
                times.append(time.perf_counter() - start)
            points.append((size, part * sorted(times)[len(times) // 4]))
        tables.append((name, count, points))
    return tables


def _rising(seconds: Mapping[int, float]) -> tuple[tuple[float, float], ...]:
    """(bytes, seconds), rising. Fewer bytes take no longer than more: where they seem to, the system paused (over gloo for milliseconds).

    >>> _rising({4096: 1e-5, 65536: 3e-3, 1 << 20: 1e-3})
    ((4096.0, 1e-05), (65536.0, 0.001), (1048576.0, 0.001))
    """
    found: list[tuple[float, float]] = []
    least = math.inf
    for size in sorted(seconds, reverse=True):
        least = min(least, max(seconds[size], 1e-9))
        found.append((float(size), least))
    return tuple(found[::-1])


def measure_messages(world: Any) -> list[tuple[str, int, list[tuple[int, float]]]]:
    """Tables of what collectives as programs are made of, over shared memory and over gloo (`.gloo`), all ranks at once.

    `send`: half of the ranks send to the others; `exchange`: each sends to the next and receives from the one before; `add`: each adds what
    it has; `all_reduce`: the transport's own. `call` and `step`, of one size: what running a program costs, and each of its messages,
    beyond those. Times are of the slowest rank. Large tensors come first: rings, windows and pages are then as in a long run.
    """
    from weft.world.running import Programs
    from weft.world.world import World

    n = world.num_ranks
    over_gloo = World(world.rank, n, world._store, generation=1, transport="gloo")
    tables: dict[str, list[tuple[int, float]]] = {}
    for end, group in (("", world.everyone), (".gloo", over_gloo.everyone)):
        half, index, programs = n // 2, group.index, Programs(group.runner)

        def send(x: Pieces, y: Pieces, group: Any = group, half: int = half, index: int = index) -> None:
            (group.isend(x[0], index + half) if index < half else group.irecv(y[0], index - half)).wait()
            (group.irecv(y[0], index + half) if index < half else group.isend(x[0], index - half)).wait()

        def exchange(x: Pieces, y: Pieces, group: Any = group, index: int = index) -> None:
            for leaves, comes in zip(x, y, strict=True):
                arriving, leaving = group.irecv(comes, (index - 1) % n), group.isend(leaves, (index + 1) % n)
                arriving.wait()
                leaving.wait()

        def add(x: Pieces, y: Pieces) -> None:
            for one, other in zip(x, y, strict=True):
                torch.add(one, other, out=one)
            if n > 2:
                world.everyone.barrier()  # ranks that have no core yet are waited for

        def reduce(x: Pieces, y: Pieces, group: Any = group) -> None:
            group.all_reduce(x[0])

        calls: dict[str, Callable[..., None]] = {"send": send, "exchange": exchange, "all_reduce": reduce, **({} if end else {"add": add})}
        for size in MESSAGE_SIZES[::-1]:
            # A program goes through pieces of a tensor: one that is sent again and again would stay in a core's own cache.
            count = PIECES if size < MESSAGE_SIZES[-1] else 2
            x, y = (torch.zeros(count, size // 4).unbind() for _ in range(2))
            repeats = 8 if size <= 65536 else 4 if size <= 1 << 20 else 2
            for name, call in calls.items():
                part = {"send": 0.5, "all_reduce": 1.0}.get(name, 1 / count)
                tables.setdefault(name + end, []).insert(0, (size, part * _typical(world, call, repeats, x, y)))
        small, few, many, seconds = torch.zeros(MESSAGE_SIZES[0] // 4), 1, 5, []
        for count in (few, many):
            program = _passing(n, count)
            seconds.append(_typical(world, lambda x, program=program, programs=programs: programs.all_reduce(program, x), 8, small))
        message = max(0.0, (seconds[1] - seconds[0]) / (many - few))
        tables[f"step{end}"] = [(MESSAGE_SIZES[0], max(0.0, message - tables[f"exchange{end}"][0][1]))]
        tables[f"call{end}"] = [(MESSAGE_SIZES[0], max(0.0, seconds[0] - few * message))]
    return [(name, n, points) for name, points in tables.items()]


def _passing(num_ranks: int, times: int) -> Program:
    """Every rank of an even number sends a piece to the next and takes one from the one before, `times` times; nothing is added."""
    pieces = [Value("chunk", (i,)) for i in range(2 * times)]
    rows: list[tuple[Action, ...]] = []
    for rank in range(num_ranks):
        before, after = (rank - 1) % num_ranks, (rank + 1) % num_ranks
        row: list[Action] = []
        for i in range(times):
            own, other = pieces[2 * i + rank % 2], pieces[2 * i + 1 - rank % 2]
            row += [Send(own, after), Recv(other, before)]
        rows.append(tuple(row))
    given = tuple({piece: {rank: 1} for piece in pieces} for rank in range(num_ranks))
    return Program("passing", 0, given, tuple(rows), ({},) * num_ranks)


def _typical(world: Any, call: Callable[..., Any], repeats: int, *inputs: Any) -> float:
    """Median seconds of a call of all ranks, each time the slowest one's; after one that does not count."""
    times = []
    for _ in range(repeats + 1):
        world.everyone.barrier()
        start = time.perf_counter()
        call(*inputs)
        times.append(time.perf_counter() - start)
    slowest = torch.tensor(times[1:])
    world.everyone.all_reduce(slowest, op="max")
    return float(slowest.median())


def measure_compute(device: torch.device, quick: bool = True, together: Callable[[], Any] | None = None) -> dict[str, float]:
    """Seconds per unit of each kind of operator, forward and backward, on this rank's threads.

    Units: `linear.P`, `attention.P`, `convolution.P`: a FLOP at precision P; `launch`: one operator; the others: a byte that the
    operator must move; and the `SHARE` of its cores. `together` is called before each figure, so that ranks that measure at once start at
    once.
    """
    made = torch.float32
    precisions = {"float32": made, **({"bfloat16": torch.bfloat16} if has_bfloat16() else {})}
    big = device.type != "cpu"
    # Tensors grow with the threads that share them, as a step's do: two threads on the tensors of one would find them in their caches.
    share = 1 if big else torch.get_num_threads()
    found: dict[str, float] = {}

    def take(name: str, units: float, call: Callable[[], Any]) -> None:
        if together is not None:
            together()
        found[name] = _clock(call, device, 2 if quick else 6) / units

    def train(name: str, units: float, call: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> None:
        """Forward and backward, from a gradient that is there already."""
        gradient = torch.ones_like(call(*inputs))
        take(name, units, lambda: torch.autograd.grad(call(*inputs), inputs, gradient))

    for precision, dtype in precisions.items():
        tokens, hidden, wide = (16384, 4096, 4096) if big else (512 * share, 384, 1536)
        x = torch.randn(tokens, hidden, device=device, dtype=dtype, requires_grad=True)
        w = torch.randn(wide, hidden, device=device, dtype=dtype, requires_grad=True)
        train(f"linear.{precision}", 6.0 * tokens * hidden * wide, F.linear, x, w)
        if SHARE not in found:
            if together is not None:
                together()
            began, used = time.perf_counter(), time.process_time()
            _clock(lambda x=x, w=w: F.linear(x, w), device, 2)  # type: ignore[misc]
            found[SHARE] = (time.process_time() - used) / (time.perf_counter() - began) / (1 if big else share)
        heads = (8, 16, 1024, 64) if big else (2 * share, 6, 256, 64)
        q, k, v = (torch.randn(heads, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
        flops = 4.0 * heads[0] * heads[1] * heads[2] ** 2 * heads[3]
        # Backward of attention forms the scores once more: 1 + 2.5 products in place of 1 + 2.
        train(f"attention.{precision}", 3.5 * flops, partial(F.scaled_dot_product_attention, is_causal=True), q, k, v)
        image = torch.randn(32 if big else 2 * share, 64, 56, 56, device=device, dtype=dtype, requires_grad=True)
        kernel = torch.randn(64, 64, 3, 3, device=device, dtype=dtype, requires_grad=True)
        train(f"convolution.{precision}", 6.0 * image.numel() * 64 * 9, partial(F.conv2d, padding=1), image, kernel)
    double = torch.randn(512, 512, device=device, dtype=torch.float64)
    take("linear.float64", 2.0 * 512**3, lambda: double @ double)
    rows = 16384 if big else 2048 * share
    a, b = (torch.randn(rows, 1024, device=device) for _ in range(2))
    take("elementwise", 3.0 * a.nbytes, lambda: a + b)
    if "bfloat16" in precisions:
        take("cast", 1.5 * a.nbytes, lambda: a.to(torch.bfloat16))
    h = torch.randn(rows, 1024, device=device, requires_grad=True)
    gain = torch.ones(1024, device=device, requires_grad=True)
    train("activation", 5.0 * h.nbytes, partial(F.gelu, approximate="tanh"), h)
    train("norm", 5.0 * h.nbytes, lambda h: F.layer_norm(h, (1024,), gain, gain), h)
    train("softmax", 5.0 * h.nbytes, partial(F.log_softmax, dim=-1), h)
    weights = [torch.nn.Parameter(torch.randn(1 << 20, device=device)) for _ in range(4)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW(weights, lr=1e-4, fused=True)
    # It reads weight, gradient and two moments, and writes three of them.
    take("optimizer", 7.0 * sum(weight.nbytes for weight in weights), optimizer.step)
    tiny = torch.ones(8, device=device, requires_grad=True)

    block = Block(device)
    x = torch.randn((1 if big else SEQUENCES * share), SEQUENCE, HIDDEN, device=device, requires_grad=True)
    for precision in () if big else precisions:
        with torch.autocast("cpu", precisions[precision], enabled=precision != "float32"):
            take(rate_name(precision), share, lambda: torch.autograd.grad(block(x).sum(), (x, *block.parameters())))

    def chain(y: torch.Tensor) -> torch.Tensor:
        for _ in range(LAUNCH_OPERATORS):
            y = y + tiny
        return y

    train("launch", 3.0 * LAUNCH_OPERATORS, chain, tiny)
    return found


class Block(torch.nn.Module):
    """The layers of `weft.cluster.block`: `x -> x`, [sequences, SEQUENCE, HIDDEN]. Norms have no weights, and attention is causal."""

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__()
        wide = {"qkv": (HIDDEN, 3 * HIDDEN), "out": (HIDDEN, HIDDEN), "up": (HIDDEN, 4 * HIDDEN), "down": (4 * HIDDEN, HIDDEN)}
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleDict({name: torch.nn.Linear(*sizes, device=device) for name, sizes in wide.items()}) for _ in range(LAYERS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layers in turn."""
        for layer in self.layers:
            qkv = layer["qkv"](F.layer_norm(x, (HIDDEN,)))  # type: ignore[index]
            q, k, v = qkv.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind()
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = x + layer["out"](mixed)  # type: ignore[index]
            up = F.gelu(layer["up"](F.layer_norm(x, (HIDDEN,))), approximate="tanh")  # type: ignore[index]
            x = x + layer["down"](up)  # type: ignore[index]
        return x


def _clock(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Median seconds of a call after those that warm up: the least is what threads that wait for one another rarely reach."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    began, calls = time.perf_counter(), 0
    while calls < 2 or time.perf_counter() - began < WARM_S:
        call()
        wait()
        calls += 1
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < repeats or (time.perf_counter() - began < CLOCK_S and len(times) < 50):
        start = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - start)
    return median(times)


def _resident_bytes() -> int:
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 300 << 20
    return pages * os.sysconf("SC_PAGE_SIZE")
