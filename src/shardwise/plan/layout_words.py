"""Words of a layout: the values of keys that are chosen by name, and names of keys and values in other programs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod

from shardwise.errors import did_you_mean
from shardwise.plan.compatibility import EACH, LAST, SPLIT_BY_LENGTH, SPLIT_FIXED
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
    "recompute": ("none", "selective", "cheap", "full"),
    "offload": ("none", "activations", "optimizer", "all"),
    "precision": tuple(PRECISIONS),
    "gradients": ("float32", "bfloat16"),
    "scatter": (EACH, LAST),
    "all_reduce": (AUTO, *ALL_REDUCE),
    "lend": (AUTO, "off", "on"),
    "batch_norm": ("exact", "local"),
    "attention": ATTENTION,
    "neighbours": ("branch", "data", "pipeline"),
    "compile": ("off", "on"),
    "split": (SPLIT_FIXED, SPLIT_BY_LENGTH),
}
# Names of keys in other programs, lower case.
KEY_ALIASES = {
    "dp": "data", "ddp": "data", "replicas": "data", "data_parallel": "data", "tp": "tensor", "mp": "tensor", "tensor_parallel": "tensor",
    "pp": "pipeline", "stages": "pipeline", "pipeline_parallel": "pipeline", "ep": "expert", "expert_parallel": "expert", "cp": "context",
    "context_parallel": "context", "sp": "sequence_parallel", "vpp": "chunks", "vp": "chunks", "virtual_stages": "chunks",
    "accumulation": "microbatches", "grad_accum": "microbatches", "gas": "microbatches", "zero_stage": "zero", "shard_degree": "shard",
    "checkpointing": "recompute", "ac": "recompute", "dtype": "precision", "recompute_num_layers": "segment",
}  # fmt: skip
_FULLY_SHARDED = ("fsdp", "hsdp")  # a number of replicas that share all state: data=N zero=3
VALUE_ALIASES = {
    "precision": {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "fp8": "float8", "fp64": "float64"},
    "sequence_parallel": {"true": "on", "1": "on", "yes": "on", "false": "off", "0": "off", "no": "off"},
    "recompute": {"true": "full", "1": "full", "on": "full", "false": "none", "0": "none", "off": "none"},
}


def resolve_aliases(words: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Replace names of other programs in (key, value) words by a layout's; `fsdp` and `dp` together multiply, as in hybrid sharding.

    >>> resolve_aliases([("tp", "8"), ("fsdp", "4"), ("dp", "2"), ("vpp", "2"), ("dtype", "bf16")])
    [('tensor', '8'), ('data', '8'), ('shard', '4'), ('zero', '3'), ('chunks', '2'), ('schedule', 'interleaved'), ('precision', 'bfloat16')]
    """
    if not any(_is_alias(key, value) for key, value in words):
        return list(words)
    given = {key for key, _ in words}
    replicas = [value for key, value in words if key in ("dp", *_FULLY_SHARDED)]
    factor = prod(int(value) for value in replicas) if len(replicas) == 2 and all(v.isdecimal() and len(v) < 5 for v in replicas) else 0
    resolved: list[tuple[str, str]] = []
    for key, value in words:
        if key == "dp" and factor:
            continue
        if key in _FULLY_SHARDED:
            if value not in ("off", "false"):
                sizes = [] if value in ("on", "true") else [("data", str(factor or value))]
                sizes += [("shard", value)] if factor and value != "1" and "zero" not in given else []
                resolved += sizes if "zero" in given else [*sizes, ("zero", "3")]
            continue
        name = KEY_ALIASES.get(key, key)
        resolved.append((name, VALUE_ALIASES.get(name, {}).get(value.lower(), value)))
        if name == "chunks" and key != name and value != "1" and "schedule" not in given:
            resolved.append(("schedule", "interleaved"))
    return resolved


def _is_alias(key: str, value: str) -> bool:
    return key in KEY_ALIASES or key in _FULLY_SHARDED or value.lower() in VALUE_ALIASES.get(key, {})


@cache
def refuse_words(words: tuple[str, ...]) -> str:
    """Return why one of the `words` for the keys of `CHOICES`, in their order, is invalid; empty where none is. Cached, since a search
    builds thousands of layouts of the same few words.

    >>> refuse_words(("1f1b", "off", "off", "none", "none", "float4", "auto", "off", "exact", "auto", "branch", "off", "fixed"))
    'precision=float4 is unknown (did you mean float64?); use one of float32, tf32, bfloat16, bfloat16-mixed, float16, float8, float8-rows, float64'
    """  # noqa: E501
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
