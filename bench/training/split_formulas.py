"""What a rank sends in one step by the formula of its kind of splitting, in bytes of float32. In: a model's shapes. No shardwise but the
zoo's.

n ranks, P parameters, B samples of S positions, width H, L layers, vocabulary V. An all-reduce of x bytes sends 2 (n-1)/n x a rank, a
gather or scatter of x in all (n-1)/n x (Patarasuk and Yuan 2009).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from bench.common.case import Case
from bench.training.split_models import ROWS, WIDTHS
from shardwise.plan.ir.placement import even_shard_ranges
from shardwise.zoo.resolve import resolve

WORD = 4.0
WAYS = 2  # there and back


def _gpt(case: Case) -> tuple[nn.Module, float, float, int]:
    """(model, bytes of its parameters, of what lies between layers, layers)."""
    model = resolve(case.model).make()
    size = WORD * sum(p.numel() for p in model.parameters())
    return model, size, WORD * case.batch * case.sequence * model.config.hidden, len(model.layers)  # type: ignore[union-attr, arg-type]


def data(case: Case, n: int) -> float:
    """Gradients all-reduced: 2 (n-1)/n P; ZeRO-1 and 2 scatter gradients and gather weights, as many bytes (Rajbhandari et al. 2020)."""
    return 2 * (n - 1) / n * _gpt(case)[1]


def zero_3(case: Case, n: int) -> float:
    """Weights gathered for forward and for backward, gradients scattered: 3 (n-1)/n P; the tied embedding is gathered for both its uses."""
    model, size, _, _ = _gpt(case)
    tied = WORD * model.tokens.weight.numel()  # type: ignore[union-attr, operator]
    return (n - 1) / n * (3 * size + 2 * tied)


def tensor(case: Case, n: int) -> float:
    """Megatron-LM: B S H all-reduced twice a layer forward and twice backward, behind the embedding and before the head."""
    _, _, between, layers = _gpt(case)
    return 2 * (n - 1) / n * between * (4 * layers + 2)


def pipeline(case: Case, n: int) -> float:
    """A stage sends B S H forward and another backward; the ends all-reduce the tied embedding's gradient among two."""
    model, _, between, _ = _gpt(case)
    return (1 if n == 2 else WAYS) * between + WORD * model.tokens.weight.numel()  # type: ignore[union-attr, operator]


def ring(case: Case, n: int) -> float:
    """Keys and values passed on n-1 times forward and backward, and their gradients as often: 6 (n-1)/n B S H a layer (Liu et al. 2023,
    with gradients that go home from the last); gradients of weights all-reduced, as for all ranks that share a sequence."""
    _, _, between, layers = _gpt(case)
    return 6 * (n - 1) / n * between * layers + data(case, n)


def ulysses(case: Case, n: int) -> float:
    """Queries, keys, values and results exchanged, of each of n pieces all but one n-th: 4 (n-1)/n^2 B S H a layer and way."""
    _, _, between, layers = _gpt(case)
    return WAYS * 4 * (n - 1) / n**2 * between * layers + data(case, n)


def both(case: Case, n: int) -> float:
    """Exchanged by two, 2 (q, k, v and results) of n pieces a layer and way; half of the heads of keys and values passed on n/2-1 times
    forward and backward, and their gradients: 6 (n/2-1)/n B S H (Fang and Zhao 2024)."""
    _, _, between, layers = _gpt(case)
    return (WAYS * 2 / n + 6 * (n // 2 - 1) / n) * between * layers + data(case, n)


def gather(case: Case, n: int) -> float:
    """Keys and values gathered, their gradients scattered: 2 (n-1)/n B S H a layer and way."""
    _, _, between, layers = _gpt(case)
    return WAYS * 2 * (n - 1) / n * between * layers + data(case, n)


def grid(case: Case, n: int) -> float:
    """2 x 2 ranks: outputs in halves summed over pairs forward, gradients of inputs backward (Agarwal et al. 1995; AxoNN)."""
    outputs = sum(ROWS * b / 2 for b in WIDTHS[1:])
    inputs = sum(ROWS * a / 2 for a in WIDTHS[1:-1])  # of the first none is asked for
    return WORD * (outputs + inputs)


def spatial(case: Case, n: int) -> float:
    """Borders of strips, B C W rows of each window that another rank has, forward and backward. Gradients are summed besides, as `data`."""
    torch.manual_seed(0)
    model = resolve(case.model).make()
    sent = [0.0] * n
    for rows, windows, row_bytes in _windows(case, model, n):
        for other, (first, last) in enumerate(windows):
            for rank, (start, stop) in enumerate(rows):
                if rank != other:
                    shared = row_bytes * max(0, min(stop, last) - max(start, first))
                    sent[rank] += shared
                    sent[other] += shared  # its gradient, back
    return max(sent)


def _windows(case: Case, model: nn.Module, n: int) -> Iterator[tuple[tuple[tuple[int, int], ...], list[tuple[int, int]], float]]:
    """Of every layer behind the image: rows of each rank, rows that each reads, bytes of a row."""
    side = round((case.sequence // 3) ** 0.5)
    seen: list[tuple[torch.Size, int, int, int]] = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            size, stride, padding = (int(pair[0]) for pair in (module.kernel_size, module.stride, module.padding))

            def note(_: nn.Module, given: tuple[Tensor, ...], k: int = size, s: int = stride, p: int = padding) -> None:  # type: ignore[assignment]
                seen.append((given[0].shape, k, s, p))

            module.register_forward_pre_hook(note)
    model.eval()(torch.zeros(case.batch, 3, side, side))
    pooled = torch.Size((case.batch, model.stem.conv.out_channels, side // 2, side // 2))  # type: ignore[union-attr]
    for shape, k, s, p in [(pooled, 3, 2, 1), *seen[1:]]:
        length = (shape[2] + 2 * p - k) // s + 1
        reads = [(a * s - p, (b - 1) * s - p + k) if a < b else (0, 0) for a, b in even_shard_ranges(length, n)]
        yield even_shard_ranges(shape[2], n), reads, WORD * shape[0] * shape[1] * shape[3]


def expert(case: Case, n: int) -> float:
    """Places of experts, B E C H of all ranks: there and back, forward and backward (GShard, section 3.2); other weights all-reduced."""
    model = resolve(case.model).make()
    config = model.config
    mixed = [module for module in model.modules() if hasattr(module, "up") and isinstance(module.up, nn.Parameter)]
    spread = sum(one.up.numel() + one.down.numel() for one in mixed)  # type: ignore[union-attr, operator]
    of_rank = WORD * case.batch / n * config.experts * config.expert_capacity * config.hidden  # type: ignore[union-attr, operator]
    shared = WORD * (sum(p.numel() for p in model.parameters()) - spread)
    return 4 * len(mixed) * of_rank * (n - 1) / n + 2 * (n - 1) / n * shared


FORMULAS: dict[str, Callable[[Case, int], float]] = {
    "data": data, "zero=1": data, "zero=2": data, "zero=3": zero_3, "tensor": tensor, "sequence": tensor, "grid": grid,
    "pipeline": pipeline, "spatial": spatial, "expert": expert, "ring": ring, "ulysses": ulysses, "ulysses:2+ring": both,
    "gather": gather,
}  # fmt: skip
