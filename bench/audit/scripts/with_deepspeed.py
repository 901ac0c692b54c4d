"""DeepSpeed ZeRO; the serial run is plain PyTorch."""

import os

import torch
from common import GPT, arguments, loss_fn, samples

a = arguments(stage=1)
torch.manual_seed(a.seed)
model = GPT()
x, y = samples(a)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
if "RANK" not in os.environ:
    torch.set_num_threads(1)
    for i in range(a.steps):
        loss_fn(model(x[i * 8 : i * 8 + 8]), y[i * 8 : i * 8 + 8]).backward()
        opt.step()
        opt.zero_grad()
    raise SystemExit
import deepspeed  # noqa: E402

torch.set_num_threads(1)
deepspeed.init_distributed("gloo")
rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
config = {
    "train_micro_batch_size_per_gpu": a.batch,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {"stage": a.stage},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    **({"gradient_clipping": 0.05} if a.bug == "clip" else {}),
}
engine, *_ = deepspeed.initialize(model=model, optimizer=opt, config=config)
for i in range(a.steps):
    rows = slice(i * 8 + rank * a.batch, i * 8 + (rank + 1) * a.batch)
    loss = loss_fn(engine(x[rows]), y[rows])
    engine.backward(loss)
    engine.step()
