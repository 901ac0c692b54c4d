"""Megatron-Core: its tensor-parallel layers, embedding and cross-entropy in the same GPT (tensor=2), or its data parallelism (tensor=1).

Its own attention needs Transformer Engine for a fused kernel; scaled_dot_product_attention stands there instead, which is faster.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional as F

from bench.common.case import Case
from bench.peers.common import Step, adamw, loss_of, model_of, my_rows
from shardwise.zoo import gpt, shared_layers


def _config(size: int) -> ModelParallelConfig:
    return ModelParallelConfig(tensor_model_parallel_size=size, use_cpu_initialization=True, params_dtype=torch.float32)


def _init(weight: Tensor) -> None:
    nn.init.zeros_(weight)


class Linear(nn.Module):
    """One of Megatron's layers with the values of a plain one, returning only the output."""

    def __init__(self, plain: nn.Linear, config: ModelParallelConfig, column: bool) -> None:
        super().__init__()
        more: dict[str, Any] = {"config": config, "init_method": _init, "bias": True, "skip_bias_add": False}
        if column:
            self.inner = tensor_parallel.ColumnParallelLinear(plain.in_features, plain.out_features, gather_output=False, **more)
        else:
            self.inner = tensor_parallel.RowParallelLinear(plain.in_features, plain.out_features, input_is_parallel=True, **more)
        rank, size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()
        with torch.no_grad():
            self.inner.weight.copy_(plain.weight.chunk(size, 0 if column else 1)[rank])
            self.inner.bias.copy_(plain.bias.chunk(size)[rank] if column else plain.bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)[0]
        return y


class Attention(nn.Module):
    """Attention with one column-parallel layer for q, k and v, as Megatron has it: its input's gradient is summed over ranks once."""

    def __init__(self, plain: shared_layers.Attention, config: ModelParallelConfig, size: int) -> None:
        super().__init__()
        hidden = plain.q.in_features
        self.qkv = tensor_parallel.ColumnParallelLinear(
            hidden, 3 * hidden, config=config, init_method=_init, bias=True, gather_output=False, skip_bias_add=False
        )
        self.o = Linear(plain.o, config, False)
        self.heads = plain.heads // size
        rank = parallel_state.get_tensor_model_parallel_rank()
        with torch.no_grad():
            self.qkv.weight.copy_(torch.cat([part.weight.chunk(size)[rank] for part in (plain.q, plain.k, plain.v)]))
            self.qkv.bias.copy_(torch.cat([part.bias.chunk(size)[rank] for part in (plain.q, plain.k, plain.v)]))

    def forward(self, x: Tensor, rotary: None = None, bias: None = None) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x)[0].chunk(3, dim=-1))
        mixed: Tensor = self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return mixed


class TensorParallel(nn.Module):
    """The GPT with Megatron's layers: BS tokens and labels -> loss."""

    def __init__(self, model: gpt.GPT, size: int) -> None:
        super().__init__()
        config = _config(size)
        rank = parallel_state.get_tensor_model_parallel_rank()
        for block in model.layers:
            block.attention = Attention(block.attention, config, size)
            block.mlp.up, block.mlp.down = Linear(block.mlp.up, config, True), Linear(block.mlp.down, config, False)
        rows, width = model.tokens.weight.shape
        self.tokens = tensor_parallel.VocabParallelEmbedding(rows, width, init_method=_init, config=config)
        with torch.no_grad():
            self.tokens.weight.copy_(model.tokens.weight.chunk(size)[rank])
        self.positions, self.layers, self.norm = model.positions, model.layers, model.norm

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1]))
        for block in self.layers:
            x = block(x)
        x = tensor_parallel.copy_to_tensor_model_parallel_region(self.norm(x))
        logits = F.linear(x, self.tokens.weight)
        loss: Tensor = tensor_parallel.vocab_parallel_cross_entropy(logits, labels).mean()
        return loss


def build(case: Case, rank: int, num_ranks: int, tensor: int) -> Step:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor)
    return _tensor(case) if tensor > 1 else _data(case, rank, num_ranks)


def _tensor(case: Case) -> Step:
    model = TensorParallel(model_of(case), parallel_state.get_tensor_model_parallel_world_size())
    optimizer = adamw(model.parameters(), case)

    def step(tokens: Tensor) -> Tensor:
        loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _data(case: Case, rank: int, num_ranks: int) -> Step:
    torch.cuda.current_device = lambda: torch.device("cpu")  # where its buffers are made, whatever the parameters' device
    plain = model_of(case)
    sizes = gpt.SIZES[case.model]
    config = TransformerConfig(
        num_layers=sizes.layers, hidden_size=sizes.hidden, num_attention_heads=sizes.heads, use_cpu_initialization=True
    )
    options = DistributedDataParallelConfig(grad_reduce_in_fp32=False, overlap_grad_reduce=True)
    model = DistributedDataParallel(config, options, plain)
    optimizer = adamw(model.parameters(), case)

    def step(tokens: Tensor) -> Tensor:
        model.zero_grad_buffer()
        loss = loss_of(model, my_rows(tokens, rank, num_ranks))
        loss.backward()
        finalize_model_grads([model])
        for parameter in model.parameters():
            parameter.grad = parameter.main_grad
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
