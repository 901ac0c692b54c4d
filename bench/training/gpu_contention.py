"""`python -m bench.training.gpu_contention`: how much slower products are beside copies, by the multiprocessors that the copies hold.

In: numbers of multiprocessors (`--held`). Out: a table of the slowdown of large bfloat16 products beside a kernel that copies with as many
blocks, and beside the copy engine. It decides `contention` of the catalogue's efficiency sets: NCCL holds up to 16 of an H100's 132. With
`--device cpu --tiny` all runs but the kernel, since processors have no multiprocessors to hold.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

try:  # torch brings it where it is built for GPUs
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

Work = Callable[[], object]


def median_seconds(device: str, work: Work, beside: Work | None, rounds: int) -> float:
    """Return the median seconds of `work`, while `beside` runs on a stream of its own."""
    seconds = []
    for _ in range(rounds):
        if device != "cuda":
            began = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - began)
            continue
        stream, first, last = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        if beside is not None:
            with torch.cuda.stream(stream):
                beside()
        first.record()
        work()
        last.record()
        torch.cuda.synchronize()
        seconds.append(first.elapsed_time(last) / 1e3)
    return median(seconds)


def copy_with_blocks(source: torch.Tensor, target: torch.Tensor, num_blocks: int, passes: int) -> Work:
    """Return a copy by a kernel of `num_blocks` persistent blocks, each of which holds one multiprocessor."""
    kernel = triton.jit(_copy_persistently)
    return lambda: kernel[(num_blocks,)](source, target, source.numel(), passes, block=8192, num_warps=32)


def _copy_persistently(read, write, size, passes, block: tl.constexpr):  # type: ignore[no-untyped-def]
    for _ in range(passes):
        for start in range(tl.program_id(0) * block, size, tl.num_programs(0) * block):
            at = start + tl.arange(0, block)
            tl.store(write + at, tl.load(read + at, mask=at < size), mask=at < size)


def measure(device: str, side: int, held: Sequence[int], rounds: int) -> list[tuple[str, float]]:
    """Return (what runs beside, seconds of the products)."""
    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    size = 64 * side * side if device == "cuda" else side * side
    source = torch.ones(size, device=device, dtype=torch.float32)
    target = torch.empty_like(source)

    def products() -> None:
        for _ in range(8):
            left @ right

    products()
    found = [("nothing", median_seconds(device, products, None, rounds))]
    engine = torch.empty(size, dtype=torch.float32, pin_memory=device == "cuda")
    found.append(("copy engine", median_seconds(device, products, lambda: engine.copy_(source, non_blocking=True), rounds)))
    for num_blocks in held if device == "cuda" else ():
        beside = copy_with_blocks(source, target, num_blocks, 16) if num_blocks else None
        found.append((f"{num_blocks} multiprocessors", median_seconds(device, products, beside, rounds)))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="small products, to try the command")
    parser.add_argument("--held", default="0,4,8,16,32", help="multiprocessors that the copies hold")
    parser.add_argument("--rounds", type=int, default=20)
    asked = parser.parse_args(arguments)
    if asked.device == "cuda" and not torch.cuda.is_available():
        print("torch sees no GPU here; try the command with --device cpu --tiny")
        return 0
    rows = measure(asked.device, 128 if asked.tiny else 8192, [int(n) for n in asked.held.split(",")], asked.rounds)
    print("| beside | products, ms | slower |\n|---|---|---|")
    for name, seconds in rows:
        print(f"| {name} | {1e3 * seconds:.3f} | {seconds / rows[0][1] - 1:+.1%} |")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
