"""TOML files of users, with errors that state the position. In: a path or text. Out: tables."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError, UsageError, did_you_mean


def read(path: str | Path, what: str, remedy: str = "") -> str:
    """Return the text of a file. Raises `UsageError` if it cannot be read, `ConfigError` if it is not UTF-8."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read the {what} {path}: {error.strerror}{f'; {remedy}' if remedy else ''}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the {what} {path} is no text: byte {error.start} is not UTF-8") from error


def check_keys(where: str, table: Mapping[str, Any], keys: Collection[str], text: str = "") -> None:
    """Raise `ConfigError` for a key that is not among `keys`, with the nearest of them, and with its line if `text` is given."""
    for key in table:
        if key not in keys:
            line = next((f" (line {i})" for i, row in enumerate(text.splitlines(), 1) if re.match(rf"\s*\[*{re.escape(key)}\b", row)), "")
            raise ConfigError(f"{where}: unknown key {key}{line}{did_you_mean(key, keys)}; known: {', '.join(sorted(keys))}")
