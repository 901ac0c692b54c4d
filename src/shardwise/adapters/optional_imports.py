"""Import of the optional libraries that adapters need, with an error that names the extra to install."""

from __future__ import annotations

import importlib
from typing import Any

from shardwise.errors import UsageError


def import_required(library: str, extra: str) -> Any:
    """Import a library's module.

    Raises:
        UsageError: the library is not installed; names the extra of shardwise that installs it.

    >>> import_required("json", "hf").__name__
    'json'
    """
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise UsageError(f'{library} is needed here, and could not be imported ({error}): pip install "shardwise[{extra}]"') from error
