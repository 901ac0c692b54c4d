"""DTensor tensor parallelism: `parallelize_module`, column then row in every block, with or without the vocabulary; `sequence`: what lies
between the products in pieces of positions."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from bench.common.case import Case
from bench.peers.common import Step, adamw, loss_of, model_of


def build(case: Case, rank: int, num_ranks: int, vocabulary: bool = False, sequence: bool = False) -> Step:
    mesh = init_device_mesh("cpu", (num_ranks,))
    model = model_of(case)
    between = Shard(1) if sequence else Replicate()
    norms = {name: SequenceParallel(use_local_output=True) for name in ("attention_norm", "mlp_norm") if sequence}
    entering = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))
    for block in model.layers:
        plan = {
            **norms,
            # One distributed input for q, k and v: its gradient is summed over ranks once instead of three times.
            "attention": entering,
            **({"mlp": entering} if sequence else {}),
            "attention.q": ColwiseParallel(),
            "attention.k": ColwiseParallel(),
            "attention.v": ColwiseParallel(),
            "attention.o": RowwiseParallel(output_layouts=between),
            "mlp.up": ColwiseParallel(),
            "mlp.down": RowwiseParallel(output_layouts=between),
        }
        parallelize_module(block, mesh, plan)
        block.attention.heads //= num_ranks
        block.attention.kv_heads //= num_ranks
    if vocabulary:
        ends = {
            "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
            "head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
        }
        if sequence:
            ends["positions"] = PrepareModuleOutput(output_layouts=(Replicate(),), desired_output_layouts=(Shard(0),))
            ends["norm"] = SequenceParallel(use_local_output=True)
        parallelize_module(model, mesh, ends)
        model.head.weight = model.tokens.weight
    optimizer = adamw(model.parameters(), case)

    def step(tokens: Tensor) -> Tensor:
        if vocabulary:
            with loss_parallel():
                loss = loss_of(model, tokens)
                loss.backward()
            told = loss.full_tensor()
        else:
            loss = loss_of(model, tokens)
            loss.backward()
            told = loss
        optimizer.step()
        optimizer.zero_grad()
        return told.detach()

    return step
