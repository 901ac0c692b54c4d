"""Exception hierarchy. Each message says what happened, the numbers and the remedy; each class has its exit code.

Exit codes: 2 wrong use or configuration, 3 infeasible, 4 a run or a check failed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, words: Iterable[str], cutoff: float = 0.5, count: int = 1, form: str = " ({})") -> str:
    """Return a message's suffix for an unknown word, ` (did you mean ring?)`; empty where no known word is at least `cutoff` similar.

    >>> did_you_mean("rng", ("ring", "tree")), did_you_mean("zzz", ("ring", "tree"))
    (' (did you mean ring?)', '')
    """
    close = difflib.get_close_matches(word, list(words), n=count, cutoff=cutoff)
    return form.format(f"did you mean {' or '.join(close)}?") if close else ""


def format_error(error: BaseException) -> str:
    """Format an exception of another library in one line.

    >>> format_error(ValueError("no   such row"))
    'ValueError: no such row'
    """
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


class ShardwiseError(Exception):
    """Anything shardwise reports to a user. `exit_code` is what the command line ends with."""

    exit_code = 4
    second_hand = False  # True where another rank failed and this rank reports it


def first_error(error: BaseException) -> BaseException:
    """Return the original error where its clean-up raised `error`.

    >>> try:
    ...     try:
    ...         raise RunError("a rank failed")
    ...     finally:
    ...         open("/nowhere/at/all")
    ... except OSError as later:
    ...     first_error(later)
    RunError('a rank failed')
    """
    while error.__cause__ is None and not error.__suppress_context__ and isinstance(error.__context__, ShardwiseError | KeyboardInterrupt):
        error = error.__context__
    return error


class UsageError(ShardwiseError):
    """A wrong argument, key, type or file: the user's input has no meaning."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration file that cannot be read; names the file, the line and the nearest known key."""


class LayoutError(UsageError):
    """A layout that cannot be parsed, or names something that does not exist yet."""


class ModelError(UsageError):
    """A model that cannot be loaded, or that raises when it is called."""


class Infeasible(ShardwiseError):
    """The input is meaningful but no plan satisfies it: a size that does not divide, too few layers, too little memory."""

    exit_code = 3


class ProgramError(ShardwiseError):
    """A schedule or a collective algorithm that is not proven: names the rank, the step and the reason."""


class ProgramTextError(ProgramError):
    """Text that is no program; names the line. Wrong use, where a program that is refuted is a check that failed."""

    exit_code = 2


class CheckpointError(ShardwiseError):
    """A checkpoint that is missing, damaged, or of another model."""


class RunError(ShardwiseError):
    """A run that failed: the first rank that failed, the cause and the remedy."""


class RankError(RunError):
    """One rank failed. `rank` is the first that did."""

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


class OutOfMemory(RunError):
    """A rank needs more memory than its device has, or than it was allowed; names the bytes by purpose."""


class VerifyError(RunError):
    """The parallel run differs from the serial one by more than the tolerance."""
