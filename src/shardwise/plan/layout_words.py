"""Words of a layout: the values of keys that are chosen by name, and names of keys in other programs."""

from __future__ import annotations

from functools import cache

from shardwise.errors import did_you_mean
from shardwise.plan.compatibility import SPLIT_BY_LENGTH, SPLIT_FIXED
from shardwise.plan.ir.axis import ATTENTION, attention_kind
from shardwise.plan.ir.choice import AUTO
from shardwise.plan.ir.choice import NAMES as ALL_REDUCE
from shardwise.plan.ir.precision import PRECISIONS
from shardwise.plan.ir.schedule_sizes import SCHEDULES
from shardwise.plan.residency import strip_layers

CHOICES: dict[str, tuple[str, ...]] = {
    "schedule": SCHEDULES,
    "sequence_parallel": ("off", "on"),
    "sample_parallel": ("off", "on"),
    "recompute": ("none", "selective", "full"),
    "offload": ("none", "activations", "optimizer", "all"),
    "precision": tuple(PRECISIONS),
    "all_reduce": (AUTO, *ALL_REDUCE),
    "lend": (AUTO, "off", "on"),
    "batch_norm": ("exact", "local"),
    "attention": ATTENTION,
    "neighbours": ("branch", "data", "pipeline"),
    "compile": ("off", "on"),
    "split": (SPLIT_FIXED, SPLIT_BY_LENGTH),
}
# Names of keys in other programs.
KEY_ALIASES = {
    "dp": "data", "ddp": "data", "replicas": "data", "tp": "tensor", "mp": "tensor", "pp": "pipeline", "stages": "pipeline",
    "ep": "expert", "cp": "context", "sp": "sequence_parallel", "fsdp": "zero", "accumulation": "microbatches",
    "checkpointing": "recompute", "dtype": "precision", "recompute_num_layers": "segment",
}  # fmt: skip


@cache
def refuse_words(words: tuple[str, ...]) -> str:
    """Return why one of the `words` for the keys of `CHOICES`, in their order, is invalid; empty where none is. Cached, since a search
    builds thousands of layouts of the same few words.

    >>> refuse_words(("1f1b", "off", "off", "none", "none", "float4", "auto", "off", "exact", "auto", "branch", "off", "fixed"))
    'precision=float4 is unknown (did you mean float64?); use one of float32, tf32, bfloat16, float16, float8, float64'
    """
    return next((reason for key, word in zip(CHOICES, words, strict=True) if (reason := refuse_word(key, word))), "")


def refuse_word(key: str, word: str) -> str:
    """Return why a word is invalid for a key of `CHOICES`; empty where it is valid.

    >>> refuse_word("sequence_parallel", "om")
    'sequence_parallel=om is unknown (did you mean on?); use one of off, on'
    """
    value, values = attention_kind(word) if key == "attention" else strip_layers(key, word), CHOICES[key]
    if value in values:
        return ""
    return f"{key}={value} is unknown{did_you_mean(value, values)}; use one of {', '.join(values)}"
