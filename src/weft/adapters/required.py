"""Libraries that adapters need, and who has them not is told of."""

from __future__ import annotations

import importlib
from typing import Any

from weft.errors import UsageError


def required(library: str, extra: str) -> Any:
    """The module of a library.

    Raises:
        UsageError: it is not installed; with the extra of weft that installs it.

    >>> required("json", "hf").__name__
    'json'
    """
    try:
        return importlib.import_module(library)
    except ImportError as error:
        raise UsageError(f'{library} is needed here, and could not be imported ({error}): pip install "weft[{extra}]"') from error
