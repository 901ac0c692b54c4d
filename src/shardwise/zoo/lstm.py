"""A language model of LSTM layers (Zaremba et al. 2014). Input: `input_ids` BS. Output: logits BSV.

The batch has `labels` BS as well, each the *next* token. Not supported: state carried from one batch to the next.

Shape letters: B batch, S sequence, D model, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from shardwise.zoo import shared_layers


@dataclass(frozen=True, slots=True)
class LSTMConfig:
    """Sizes. `span`: initial weights are uniform in [-span, span]."""

    vocabulary: int = 10000
    sequence: int = 35
    hidden: int = 650
    layers: int = 2
    span: float = 0.05
    dropout: float = 0.0

    def __post_init__(self) -> None:
        shared_layers.check_sizes(self)


class LSTMLanguageModel(nn.Module):
    """Map `input_ids` BS to logits BSV; `labels` are read by the loss only."""

    def __init__(self, config: LSTMConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleList(nn.LSTM(config.hidden, config.hidden, batch_first=True) for _ in range(config.layers))
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(config.hidden, config.vocabulary)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -config.span, config.span)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        x_BSD = self.dropout(self.tokens(input_ids))
        for layer in self.layers:
            x_BSD = self.dropout(layer(x_BSD)[0])
        logits_BSV: Tensor = self.head(x_BSD)
        return logits_BSV


# Zaremba et al. 2014, section 4.1.
SIZES = {
    "lstm-tiny": LSTMConfig(vocabulary=96, sequence=16, hidden=64, layers=4, span=0.1),
    "lstm-medium": LSTMConfig(),
    "lstm-large": LSTMConfig(hidden=1500, span=0.04),
}

example_batch = shared_layers.draw_text_batch
compute_loss = shared_layers.compute_token_loss
