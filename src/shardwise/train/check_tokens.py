"""Checks before launch that a model can take the data: its embedding has a row for each token, and attention respects document boundaries.

Not modelled: embedding tables that are indexed by values computed from the tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwise.capture.capture import Loss
from shardwise.errors import ConfigError, ModelError
from shardwise.lower.torch_calls import torch_operator
from shardwise.model.graph import Graph
from shardwise.ops.attention import attention_mask_of, is_fused_attention
from shardwise.run.rank_model.model_source import CachedModelSource
from shardwise.train.config import TrainingConfig
from shardwise.train.corpus import DESCRIPTION, VOCABULARY, read_description
from shardwise.train.training_task import POSITIONS
from shardwise.world import private


def check_tokens(config: TrainingConfig, source: CachedModelSource, batch: Any, loss: Loss | None) -> None:
    """Raise ConfigError if the data in the run folder, or byte tokens, exceed the rows of an embedding table; or if documents share samples
    and the model's attention has no mask from their positions."""
    if not config.data.is_text:
        return
    try:
        graph = source.capture(batch, loss, config.train.batch).graph
    except ModelError:  # it trains uncaptured, and reports an index error itself
        return
    corpus = read_description(Path(config.run.folder, DESCRIPTION)) if config.run.folder else None
    have = corpus.vocabulary if corpus is not None else VOCABULARY
    table = smallest_token_table(graph)
    if table is not None and table[1] < have:
        name, rows = table
        raise ConfigError(
            f'{config.model.name} looks its tokens up in {name}, which has {rows} rows, and data.tokenizer = "{config.data.tokenizer}" '
            f"makes tokens from 0 to {have - 1}: use a vocabulary of at least {have} (as in model.name=gpt-tiny:vocabulary={have}, or "
            'vocab_size in an hf: configuration), or data.source="synthetic" for the batch that comes with the model'
        )
    if config.data.packing == "documents" and (blind := attention_without_mask(graph)):
        raise ConfigError(
            f"{config.model.name} takes {POSITIONS}, but its attention ({blind}) has no mask that follows from them, so documents in one "
            'sample would see one another; use data.packing = "none", which pads, or "windows", which has no boundaries'
        )


def attention_without_mask(graph: Graph) -> str:
    """Return the site of an attention without a mask computed from positions; empty if every attention has one."""
    reached = {v.value for v in graph.inputs if v.name.rpartition(".")[2] == POSITIONS}
    has_mask = False
    for op in graph.operators:
        if is_fused_attention(op):
            if attention_mask_of(op) not in reached:
                return op.site
            has_mask = True
        if reached.intersection(op.inputs):
            reached.update(op.outputs)
    return "" if has_mask else "no operator that torch knows as attention"


def smallest_token_table(graph: Graph) -> tuple[str, int] | None:
    """Return (name, rows) of the smallest parameter that is indexed by the batch's tokens (integers except positions), or None."""
    names = {v.value: v.name for v in graph.parameters}
    integers = [v for v in graph.inputs if v.tensor.dtype in ("int64", "int32")]
    tokens = {v.value for v in integers if v.name.rpartition(".")[2] != POSITIONS}
    tables = []
    for op in graph.operators:
        rule = graph.rules[op.name]
        if op.function is None and tokens.intersection(op.inputs) and private.makes_view(torch_operator(op.target)):
            tokens.update(op.outputs)
        elif rule is not None and "vocabulary" in rule.kernels.values() and op.inputs[0] in names and tokens.intersection(op.inputs[1:]):
            label = next(label for label, kernel in rule.kernels.items() if kernel == "vocabulary")
            row = rule.inputs[0]
            if row is not None and label in row:
                tables.append((names[op.inputs[0]], graph.tensors[op.inputs[0]].shape[row.index(label)]))
    return min(tables, key=lambda table: table[1]) if tables else None
