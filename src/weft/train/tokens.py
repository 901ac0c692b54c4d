"""Whether a model has a row for every token that a configuration's text is made of, told before ranks start.

In: a configuration and the captured model. Out: nothing, or an error with the numbers and what to set instead. Not modelled: tables that a
model looks up in what it computes of its tokens.
"""

from __future__ import annotations

from typing import Any

from weft.capture.capture import Loss
from weft.errors import ConfigError, ModelError
from weft.lower.lowering import operator_of
from weft.model.graph import Graph
from weft.run.build import Traced
from weft.train.config import Config
from weft.world import private

NUM_TOKENS = {"bytes": 256}  # of each tokenizer


def check_tokens(config: Config, source: Traced, batch: Any, loss: Loss | None) -> None:
    """Raise ConfigError where the text has more tokens than a table of the model has rows in which they are looked up."""
    if config.data.source != "text":
        return
    try:
        graph = source.capture(batch, loss, config.train.batch).graph
    except ModelError:  # it trains whole, and says itself what it cannot look up
        return
    have = NUM_TOKENS[config.data.tokenizer]
    found = least_table(graph)
    if found is not None and found[1] < have:
        name, rows = found
        raise ConfigError(
            f'{config.model.name} looks its tokens up in {name}, which has {rows} rows, and data.tokenizer = "{config.data.tokenizer}" '
            f"makes tokens from 0 to {have - 1}: use a vocabulary of at least {have} (as in model.name=gpt-tiny:vocabulary={have}, or "
            'vocab_size in an hf: configuration), or data.source="synthetic" for the batch that comes with the model'
        )


def least_table(graph: Graph) -> tuple[str, int] | None:
    """(name, rows) of the smallest parameter in whose rows the batch's own whole numbers are looked up; None where there is none."""
    names = {v.value: v.name for v in graph.parameters}
    tokens = {v.value for v in graph.inputs if v.tensor.dtype in ("int64", "int32")}
    found = []
    for op in graph.operators:
        rule = graph.rules[op.name]
        if op.function is None and tokens.intersection(op.inputs) and private.makes_view(operator_of(op.target)):
            tokens.update(op.outputs)
        elif rule is not None and "vocabulary" in rule.kernels.values() and op.inputs[0] in names and tokens.intersection(op.inputs[1:]):
            label = next(label for label, kernel in rule.kernels.items() if kernel == "vocabulary")
            row = rule.inputs[0]
            if row is not None and label in row:
                found.append((names[op.inputs[0]], graph.tensors[op.inputs[0]].shape[row.index(label)]))
    return min(found, key=lambda one: one[1]) if found else None
