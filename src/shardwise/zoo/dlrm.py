"""DLRM (Naumov et al. 2019), a recommendation model. Input: `dense` BF, `sparse` BT. Output: logits B.

Dense features go through an MLP, each sparse feature through an embedding table; the dot products of all pairs of these vectors, with the
dense one, go through a second MLP. The batch has `labels` B as well: clicked or not.

Shape letters: B batch, F dense features, T tables, D width, P pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwise.errors import ModelError
from shardwise.zoo import shared_layers

# Rows of the tables for Criteo's Kaggle data, as the authors' code counts them: 33,762,577.
CRITEO = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18,
    15, 286181, 105, 142572,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DLRMConfig:
    """Sizes. `tables`: rows of each; `bottom` and `top`: widths of the two MLPs, the last of `bottom` is `width`."""

    tables: tuple[int, ...] = CRITEO
    numbers: int = 13
    width: int = 16
    bottom: tuple[int, ...] = (512, 256, 64, 16)
    top: tuple[int, ...] = (512, 256)

    def __post_init__(self) -> None:
        shared_layers.check_sizes(self)
        if self.bottom[-1] != self.width:
            raise ModelError(f"bottom = {'x'.join(map(str, self.bottom))} must end with width = {self.width}, that of the tables")

    @property
    def classes(self) -> int:
        """Number of classes of a label: clicked or not."""
        return 2


def _mlp_layers(*widths: int) -> nn.Sequential:
    parts: list[nn.Module] = []
    for in_width, out_width in pairwise(widths):
        parts += [nn.Linear(in_width, out_width), nn.ReLU()]
    return nn.Sequential(*parts)


class DLRM(nn.Module):
    """Map `dense` BF and `sparse` BT (a row of each table) to logits B; `labels` are read by the loss only."""

    def __init__(self, config: DLRMConfig) -> None:
        super().__init__()
        self.config = config
        self.bottom = _mlp_layers(config.numbers, *config.bottom)
        self.tables = nn.ModuleList(nn.Embedding(rows, config.width) for rows in config.tables)
        vectors = len(config.tables) + 1
        self.top = _mlp_layers(config.width + vectors * (vectors - 1) // 2, *config.top)
        self.head = nn.Linear(config.top[-1], 1)

    def forward(self, dense: Tensor, sparse: Tensor, labels: Tensor | None = None) -> Tensor:
        numbers_BD = self.bottom(dense)
        vectors_BTD = torch.stack([numbers_BD, *(table(sparse[:, i]) for i, table in enumerate(self.tables))], 1)
        products_BTT = torch.bmm(vectors_BTD, vectors_BTD.transpose(1, 2))
        row, column = torch.tril_indices(vectors_BTD.shape[1], vectors_BTD.shape[1], -1, device=dense.device)
        pairs_BP = products_BTT[:, row, column]
        logits_B: Tensor = self.head(self.top(torch.cat((numbers_BD, pairs_BP), 1))).squeeze(1)
        return logits_B


SIZES = {
    "dlrm-tiny": DLRMConfig(tables=(32, 16, 8, 24), numbers=6, width=8, bottom=(16, 8), top=(16, 8)),
    "dlrm-540m": DLRMConfig(),  # Naumov et al. 2019, section 5.2: roughly 540 million parameters
}


def example_batch(config: DLRMConfig, batch_size: int, seed: int = 0) -> dict[str, Tensor]:
    """Return random features and clicks: `dense` BF, `sparse` BT, `labels` B."""
    draw = torch.Generator().manual_seed(seed)
    rows = torch.stack([torch.randint(n, (batch_size,), generator=draw) for n in config.tables], 1)
    dense = torch.randn((batch_size, config.numbers), generator=draw)
    return {"dense": dense, "sparse": rows, "labels": (dense.sum(1) > 0).float()}


def compute_loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy of clicks, in nats."""
    return F.binary_cross_entropy_with_logits(output, batch["labels"])
