"""Capture models with value checks: data-dependent Python branches (`if tensor:`) on tensors without values, if they are only checks.

The model is traced with preset answers. A branch is accepted if no value chooses what is computed: one of the two answers makes the model
raise (`if labels.max() >= n: raise`, `assert`), or both compute the same (`if bad.any(): print(...)`). To find out, the model is traced
again for each branch, up to the next one, without values, output or input. As other checks (`capture/patches/assertions`), these are not
repeated in a run.

Refused as data-dependent: reads of numbers (`int()`, `float()`), and a branch that leads to another branch before it raises.
"""

from __future__ import annotations

import contextlib
import io
import pdb
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

from weft.capture.fakes import DATA_DEPENDENT, NO_FAKE, put
from weft.errors import ModelError

T = TypeVar("T")
_MOST = 64  # a loop with a data-dependent end (`while error > tolerance`) never stops asking
_MOST_SKIPPED = 3  # questions that one answer may skip: `if a or b or c or d`


class Answers:
    """Answers to the branch questions of one trace, in order; with None, torch handles (refuses) the questions.

    default_to_false: answer questions beyond `preset_answers` with False.
    """

    def __init__(self, told: Sequence[bool] | None = None, guesses: bool = False) -> None:
        self._told, self._guesses = told, guesses
        self.answers: list[bool] = []
        self._of: dict[int, tuple[object, bool]] = {}  # by question, kept alive so that no id is reused
        self.of_torch: BaseException | None = None  # last error raised by torch, perhaps since tensors have no values
        self.raised = False  # the model's own code ended the trace

    def of(self, asked: object) -> bool | None:
        """Return the answer to a question, the same each time; None without one."""
        if id(asked) not in self._of:
            answer = self._next()
            if answer is None:
                return None
            self._of[id(asked)] = asked, answer
        return self._of[id(asked)][1]

    def _next(self) -> bool | None:
        if self._told is None or len(self.answers) >= _MOST:
            return None
        if len(self.answers) < len(self._told):
            self.answers.append(self._told[len(self.answers)])
        elif self._guesses:
            self.answers.append(False)
        else:
            return None
        return self.answers[-1]

    def again(self) -> None:
        """Replay the answers from the first on, for a second call of the model, without further ones."""
        if self._told is not None:
            self._told, self._guesses, self.answers = self.answers, False, []
            self._of.clear()

    @property
    def are_used_up(self) -> bool:
        """Return whether all answers were used."""
        return self._told is None or len(self.answers) >= len(self._told)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """A block of the model's code; records that it raised, except for errors that may be due to missing values."""
        try:
            yield
        except SystemExit as error:
            if self._told is None:
                raise
            raise ModelError("the model ends the process depending on a value") from error
        except (ModelError, *DATA_DEPENDENT, *NO_FAKE, TypeError, AttributeError):  # a symbol is no number
            raise
        except Exception as error:
            causes: list[BaseException] = [error]
            while cause := causes[-1].__cause__ or causes[-1].__context__:
                causes.append(cause)
            self.raised = self.of_torch not in causes
            raise

    @contextlib.contextmanager
    def withheld(self) -> Iterator[None]:
        """A block in which questions are left to torch."""
        answers, self._told = self._told, None
        try:
            yield
        finally:
            self._told = answers


def with_checks_passed(run: Callable[[Answers], T], equal: Callable[[T, T], bool]) -> T:
    """Return the result of `run` with the answers under which the model's checks pass.

    Raises:
        ModelError: the model cannot be captured; for a branch that changes what is computed it is torch's own error.
    """
    try:
        return run(Answers())
    except ModelError as error:
        if not isinstance(error.__cause__, DATA_DEPENDENT):
            raise
    with _aside():
        answers, result, raising = _guessed(run)
        asked = answers.answers
        for k in range(len(asked)):
            if not (k in raising or _raises(run, [*asked[:k], True]) or _changes_nothing(run, asked, k, partial(equal, result))):
                return run(Answers(asked[:k]))  # raises torch's error at question k
    return result


@contextlib.contextmanager
def _aside() -> Iterator[None]:
    """A block without output; code that waits for input, such as a debugger, is refused."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ModelError("the model waits for input depending on a value")

    empty_input = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.ExitStack() as stack:
        for owner, name in ((empty_input, "readline"), (sys, "breakpointhook"), (pdb, "set_trace")):
            stack.enter_context(put(owner, name, refuse))
        stack.enter_context(put(sys, "stdin", empty_input))
        yield


def _guessed(run: Callable[[Answers], T]) -> tuple[Answers, T, set[int]]:
    """Search answers under which the model runs through, False if possible: these, the result, the questions where False raises."""
    preset: list[bool] = []
    raising: set[int] = set()
    while True:
        answers = Answers(preset, guesses=True)
        try:
            return answers, run(answers), raising
        except ModelError:
            if not answers.raised or len(answers.answers) == len(preset):
                raise
            preset = [*answers.answers[:-1], True]
            raising.add(len(preset) - 1)


def _raises(run: Callable[[Answers], T], told: list[bool]) -> bool:
    """Return whether the last of these answers makes the model raise before its next question."""
    answers = Answers(told)
    try:
        run(answers)
    except ModelError:
        return answers.raised
    return False


def _changes_nothing(run: Callable[[Answers], T], asked: list[bool], k: int, equal: Callable[[T], bool]) -> bool:
    """Return whether the other answer to question k computes the same; it may skip questions that follow."""
    for skipped in range(_MOST_SKIPPED + 1):
        preset = [*asked[:k], True, *asked[k + 1 + skipped :]]
        answers = Answers(preset)
        try:
            result = run(answers)
        except ModelError:
            continue
        if answers.answers == preset:
            return equal(result)
    return False
