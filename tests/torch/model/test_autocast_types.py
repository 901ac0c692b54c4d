"""Which values autocast makes bfloat16 on processors, and what operators keep for backward, against torch that runs them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.api import ModelSource
from shardwise.cost.devices.kernel_memory import ProcessorMemory
from shardwise.cost.memory.memory import Inventory
from shardwise.model.graph import Graph, Operator, Ref, Word
from shardwise.model.strides import autocast_dtypes as module
from shardwise.model.strides.autocast_dtypes import apply_autocast
from shardwise.ops import autocast_policy
from shardwise.ops.vocabulary import AutocastPolicy


def _runs_lstm() -> bool:
    """Return whether this processor's library has a recurrent product in bfloat16."""
    try:
        with torch.autocast("cpu", torch.bfloat16):
            nn.LSTM(8, 8, batch_first=True)(torch.zeros(1, 2, 8))
    except RuntimeError:
        return False
    return True


RUNS_LSTM = _runs_lstm()


class _Many(nn.Module):
    """Operators of every kind of torch's table, and such as are not in it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.conv = nn.Linear(8, 16), nn.Linear(16, 8), nn.Conv2d(4, 4, 3, padding=1)
        self.batch, self.group, self.layer = nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.LayerNorm(8)
        self.scale, self.lstm = nn.Parameter(torch.full((8,), 0.5)), nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor, image: Tensor, y: Tensor) -> Tensor:
        hidden = self.down(F.gelu(self.up(x)))
        hidden = self.layer(hidden) * self.scale + hidden.softmax(-1) + hidden.cumsum(1) * 0.1
        hidden = torch.cat([hidden, self.down(self.up(hidden))], 1) + torch.fft.irfft(torch.fft.rfft(hidden, n=8), n=8).repeat(1, 2, 1)
        recurrent = self.lstm(hidden)[0] if RUNS_LSTM else hidden
        hidden = hidden + recurrent + torch.einsum("bsd,bst->btd", hidden, hidden @ hidden.transpose(1, 2))
        seen = self.group(F.silu(self.batch(self.conv(image))))
        seen = F.max_pool3d(seen, 2) + F.avg_pool2d(seen, 2)[:, :2] + seen.float().amax() + seen.prod(-1).mean() + seen.logsumexp(-1).mean()
        apart = F.scaled_dot_product_attention(hidden[:, None], hidden[:, None], hidden[:, None])
        size = (
            torch.linalg.vector_norm(hidden)
            + torch.reciprocal(hidden.exp() + 1).mean()
            + torch.cumprod(hidden.sigmoid(), 1).max(-1).values.sum()
        )
        rows = torch.tensor([1, 0, 1])
        picked = hidden.index_select(1, rows) + hidden.gather(1, rows[None, :, None].expand(2, 3, 8)) + hidden[:, :3].clamp(-1, 1)
        placed = torch.zeros(2, 8, 8).index_add(1, rows, picked.float()).scatter(1, rows[None, :, None].expand(2, 3, 8), picked.float())
        shown = (
            F.pixel_shuffle(F.interpolate(image * self.scale, scale_factor=1.0, mode="bilinear"), 2)
            + F.pad(image, (4, 4, 4, 4)).roll(1, 2)[:, :1]
        )
        size = size + placed.var() + picked.topk(2, 1).values.sum() + torch.where(shown > 0, shown, shown * 0.1).log1p().abs().mean()
        size = size + F.adaptive_avg_pool2d(shown, 1).sum() + F.adaptive_avg_pool2d(shown * self.scale[0], 2).pow(2).sum()
        size = size + hidden.masked_fill(hidden > 0.5, 0.0).log_softmax(-1).amin() + hidden.sort(1).values[:, 0].sum().sqrt()
        return F.cross_entropy(hidden.mean(1), y) + F.mse_loss(apart.sum((1, 2)), hidden[:, 0]) + seen.mean() + size * 0.01


@pytest.fixture(scope="module")
def graph() -> Graph:
    batch = {"x": torch.randn(2, 4, 8), "image": torch.randn(2, 4, 8, 8), "y": torch.tensor([1, 5])}
    return ModelSource.from_model(_Many).capture(batch, None, 2).graph


def _called(graph: Graph, narrow: bool) -> Iterator[tuple[Any, list[Tensor], dict[str, Tensor], list[Tensor]]]:
    """Every operator as torch runs it: with what came out, what it read, and what it kept for backward."""
    drawn = torch.Generator().manual_seed(0)
    values: dict[str, Any] = {}
    for v in (*graph.parameters, *graph.buffers, *graph.inputs, *graph.constants):
        dtype = getattr(torch, v.tensor.dtype)
        made = torch.rand(v.tensor.shape, generator=drawn) if dtype.is_floating_point else torch.zeros(v.tensor.shape, dtype=dtype)
        values[v.value] = nn.Parameter(made) if v in graph.parameters else made

    def arg(a: Any) -> Any:
        if isinstance(a, Ref):
            return values[a.value]
        if isinstance(a, tuple):
            return [arg(item) for item in a]
        return (torch.device("cpu") if a.kind == "device" else getattr(torch, a.name)) if isinstance(a, Word) else a

    kept: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x), x)[1], lambda x: x)
    with torch.autocast("cpu", torch.bfloat16, enabled=narrow), hooks:
        for op in graph.operators:
            kept.clear()
            space, packet, overload = op.target.split(".")
            if packet.endswith("_"):  # counts of batches
                values[op.outputs[0]] = values[op.inputs[0]]
                continue
            out = getattr(getattr(getattr(torch.ops, space), packet), overload)(*map(arg, op.args), **{k: arg(a) for k, a in op.kwargs})
            values.update(zip(op.outputs, out if op.returns_sequence else [out], strict=True))
            yield op, [values[v] for v in op.outputs], values, list(kept)


def _misjudged(graph: Graph) -> list[str]:
    told = apply_autocast(graph).tensors
    return [
        f"{op.target}: {told[value].dtype}, and is {made.dtype}"
        for op, out, *_ in _called(graph, narrow=True)
        for value, made in zip(op.outputs, out, strict=True)
        if getattr(torch, told[value].dtype) != made.dtype and "lstm" not in op.target
    ]


def test_values_have_the_types_that_autocast_gives_them(graph: Graph) -> None:
    assert len(graph.operators) > 50
    assert _misjudged(graph) == []


@pytest.mark.parametrize("how", [AutocastPolicy.LOW_PRECISION, AutocastPolicy.FLOAT32, AutocastPolicy.FIRST_OPERAND])
def test_broken_twin_records_that_leave_a_cast_out_are_noticed(graph: Graph, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(op: Operator, tensors: dict[str, Any]) -> AutocastPolicy:
        policy = autocast_policy(op, tensors)
        return AutocastPolicy.NONE if policy == how else policy

    monkeypatch.setattr(module, "autocast_policy", without)
    assert _misjudged(graph)


def test_what_operators_keep_of_values_is_what_autograd_keeps(graph: Graph) -> None:
    inventory = Inventory.of(graph, ProcessorMemory)
    wrong = []
    for op, _, values, kept in _called(graph, narrow=False):
        mine = {values[v].untyped_storage().data_ptr(): v for v in (*op.inputs, *op.outputs)}
        saved = {mine[p] for x in kept if (p := x.untyped_storage().data_ptr()) in mine}
        roots = {inventory.storage_root.get(v, v) for v in saved} - inventory.persistent_values
        told = {inventory.storage_root.get(v, v) for v, *_ in inventory.saved[op.name].storages}
        # Copies that an operator makes for itself are not its operands; einsum makes them where letters change places.
        if roots != told and not any(name in op.target for name in ("einsum", "lstm")) and any(v in inventory.grads for v in op.outputs):
            wrong.append(f"{op.target}: {told}, and are {roots}")
    assert wrong == []


class _OnFloats(nn.Module):
    """A norm of the batch itself, whose input is float32, and one of what a product makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.second = nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.up(self.first(x))).float().sum()


def test_norms_of_float32_keep_float32_weights_where_others_are_held_in_16_bits() -> None:
    """torch's kernels take weights no narrower than their input: the twin, all of whose weights are narrow, raises."""
    graph = ModelSource.from_model(_OnFloats).capture((torch.zeros(2, 8),), None, 2).graph
    narrow = module.narrow_parameters(graph)
    assert narrow == {"up.weight", "up.bias", "second.weight", "second.bias"}
    model = _OnFloats()
    for name, p in model.named_parameters():
        p.data = p.data.bfloat16() if name in narrow else p.data
    with torch.autocast("cpu", torch.bfloat16):
        assert model(torch.ones(2, 8)).isfinite()
        model.first.bfloat16()
        with pytest.raises(RuntimeError, match="mixed dtype"):
            model(torch.ones(2, 8))
