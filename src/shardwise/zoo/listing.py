"""Names of the zoo's models, read from its source: to refuse an unknown one without loading torch, which takes seconds."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cache
from importlib import resources
from pathlib import Path

from shardwise.errors import ModelError, did_you_mean


@cache
def zoo_names() -> tuple[str, ...]:
    """Return the names of published sizes, the keys of every file's `SIZES`, and of families, those of `FAMILIES`.

    >>> "gpt-39b" in zoo_names(), "gpt" in zoo_names(), "gpt-10n" in zoo_names()
    (True, True, False)
    """
    names: dict[str, None] = {}
    for file in sorted(resources.files("shardwise.zoo").iterdir(), key=lambda file: file.name):
        if file.name.endswith(".py"):
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
                wanted = any(isinstance(t, ast.Name) and (t.id.endswith("SIZES") or t.id == "FAMILIES") for t in targets)
                if wanted and isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict):
                    keys = [key.value for key in node.value.keys if isinstance(key, ast.Constant)]
                    names |= dict.fromkeys(key for key in keys if isinstance(key, str))
    return tuple(names)


def suggest_nearest(word: str, words: Iterable[str], fallback: str | None = None) -> str:
    """Return the end of an error message: `; did you mean a or b?`, or without a close match `fallback` (default: all known words)."""
    words = sorted(words)
    known = f"; known: {', '.join(words)}" if fallback is None else fallback
    return did_you_mean(word, words, cutoff=0.6, count=3, form="; {}") or known


def check_model_text(text: str) -> None:
    """Refuse a MODEL whose file is missing or whose zoo name is unknown, by its text alone.

    Raises:
        ModelError: with the nearest names.
    """
    if text.startswith("hf:"):
        file = text.removeprefix("hf:")
        if file.endswith(".json") and not Path(file).expanduser().is_file():
            raise ModelError(f"there is no file {file}; MODEL is hf:path/to/config.json, or hf:FOLDER with weights beside it")
    elif ".py:" in text or text.endswith(".py"):
        file = text if text.endswith(".py") else text.rpartition(":")[0]
        if not Path(file).expanduser().is_file():
            raise ModelError(f"there is no file {file}; MODEL is path/file.py:factory")
    elif (name := text.partition(":")[0]) not in zoo_names():
        raise ModelError(f"model {name} is unknown{suggest_nearest(name, zoo_names())}")
