"""DeepSpeed with ZeRO-1 on processors: float32, its own communication where it can be built, otherwise gloo."""

from __future__ import annotations

import deepspeed
from torch import Tensor

from bench.common.case import Case
from bench.peers.common import Step, adamw, loss_of, model_of, my_rows


def build(case: Case, rank: int, num_ranks: int) -> Step:
    plain = model_of(case)
    config = {
        "train_batch_size": case.batch,
        "train_micro_batch_size_per_gpu": case.batch // num_ranks,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.0,  # its default of 1 would train another model than the others
        "steps_per_print": 2**30,
    }
    model, *_ = deepspeed.initialize(model=plain, optimizer=adamw(plain.parameters(), case), config=config, dist_init_required=False)

    def step(tokens: Tensor) -> Tensor:
        loss = loss_of(model, my_rows(tokens, rank, num_ranks))
        model.backward(loss)
        model.step()
        return loss.detach()

    return step
