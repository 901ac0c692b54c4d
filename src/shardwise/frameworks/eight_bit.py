"""Recipes of products in 8 bits by the words of TransformerEngine, Megatron-Core, torchao and their users: the precision that is ours.

Not ours are scales of blocks of numbers, 4 bits, and weights or optimizer states in 8 bits: they are told by name, and priced in 16 bits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardwise.frameworks.mapping import ConfigurationKeys, Words

TENSORS, ROWS = "float8", "float8-rows"


@dataclass(frozen=True, slots=True)
class EightBitRecipe:
    """A recipe's precision in our words, empty where there is none, and what it does otherwise."""

    precision: str = ""
    difference: str = ""


# By a pattern of a recipe's name; the first that is found counts.
RECIPES: tuple[tuple[str, EightBitRecipe], ...] = (
    ("fp4", EightBitRecipe(difference="products in 4 bits")),
    ("mx", EightBitRecipe(difference="one scale for each block of 32 numbers")),
    (r"block|subchannel|_sc\b", EightBitRecipe(difference="one scale for each block of 128 numbers")),
    ("msamp", EightBitRecipe(difference="weights, gradients and optimizer states in 8 bits")),
    ("gw_hp", EightBitRecipe(ROWS)),
    ("rowwise", EightBitRecipe(ROWS, "its gradients of weights are products in 8 bits, ours in 16")),
    (r"tensorwise|current|_cs\b", EightBitRecipe(TENSORS)),
    ("delayed|fp8|transformer-engine", EightBitRecipe(TENSORS, "its scales are of steps before, ours of the tensor itself")),
)


def find_recipe(text: str) -> EightBitRecipe:
    """Return the recipe that a name denotes; none of ours for an unknown one.

    >>> find_recipe("rowwise_with_gw_hp").precision, find_recipe("bf16_with_fp8_current_scaling_mixed").precision
    ('float8-rows', 'float8')
    >>> find_recipe("mxfp8")
    EightBitRecipe(precision='', difference='one scale for each block of 32 numbers')
    """
    found = (recipe for pattern, recipe in RECIPES if re.search(pattern, text.lower()))
    return next(found, EightBitRecipe(difference="a recipe without a word here"))


def read_recipe_of_key(keys: ConfigurationKeys, words: Words, key: str, text: str) -> bool:
    """Set the precision that a recipe means, and tell under `key` what is otherwise. Return whether one of ours means it: else 16 bits are
    priced."""
    recipe = find_recipe(text)
    if recipe.precision:
        words["precision"] = recipe.precision
    elif words.get("precision", "float32") in ("float32", TENSORS):
        words["precision"] = "bfloat16"
    if recipe.difference:
        keys.leave(key, f"precision={words['precision']} is priced for {text}: {recipe.difference}")
    return bool(recipe.precision)


def read_format(keys: ConfigurationKeys, key: str, text: str) -> None:
    """Tell of a format of numbers that is not ours, E4M3 forward and E5M2 for gradients (`hybrid`)."""
    if text.lower() not in ("hybrid", "true"):
        keys.leave(key, f"gradients are E5M2 here, not {text}: as fast")
