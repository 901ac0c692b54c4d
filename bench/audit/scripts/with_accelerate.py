"""Accelerate."""

import torch
from accelerate import Accelerator
from common import GPT, arguments, loss_fn, samples
from torch.utils.data import DataLoader, TensorDataset

a = arguments(accum=1)
torch.set_num_threads(1)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=a.accum)
torch.manual_seed(a.seed)
model = GPT()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(*samples(a)), batch_size=a.batch)
model, opt, loader = accelerator.prepare(model, opt, loader)
step = 0
for xs, ys in loader:
    with accelerator.accumulate(model):
        loss = loss_fn(model(xs), ys)
        if a.bug == "accum" and accelerator.num_processes > 1:
            loss = loss / a.accum  # accelerate divides by itself
        accelerator.backward(loss)
        opt.step()
        opt.zero_grad()
    step += accelerator.sync_gradients
    if step == a.steps:
        break
