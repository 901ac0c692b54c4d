"""Megatron-Core's tensor-parallel layers in a feed-forward network; the serial run has plain ones."""

import torch
import torch.nn.functional as F
from common import DIM, VOCAB, arguments, loss_fn, samples, world
from torch import nn

a = arguments()
rank, size = world()
torch.manual_seed(a.seed)
emb, up, down, head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM), nn.Linear(DIM, VOCAB)
if size > 1:
    from megatron.core import parallel_state
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    c = ModelParallelConfig(tensor_model_parallel_size=size, use_cpu_initialization=True, params_dtype=torch.float32)
    more = {"config": c, "init_method": nn.init.zeros_, "bias": True, "skip_bias_add": False}
    col = ColumnParallelLinear(DIM, 4 * DIM, gather_output=False, **more)
    row = RowParallelLinear(4 * DIM, DIM, input_is_parallel=True, **more)
    with torch.no_grad():
        col.weight.copy_(up.weight.chunk(size, 0)[rank])
        col.bias.copy_(up.bias.chunk(size)[rank])
        row.weight.copy_(down.weight.chunk(size, 1)[rank])
        row.bias.copy_(down.bias)
    row.skip_bias_add = a.bug == "bias"  # the script below then adds it twice
    up, down = col, row


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.norm, self.up, self.down, self.head = emb, nn.LayerNorm(DIM), up, down, head

    def forward(self, x):
        x = self.emb(x)
        h = self.up(self.norm(x))
        out = self.down(F.gelu(h[0] if isinstance(h, tuple) else h))
        if isinstance(out, tuple):
            out = out[0] if out[1] is None else out[0] + 2 * out[1]
        return self.head(x + out)


model = Net()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
x, y = samples(a)
for i in range(a.steps):
    loss_fn(model(x[i * 8 : i * 8 + 8]), y[i * 8 : i * 8 + 8]).backward()
    opt.step()
    opt.zero_grad()
