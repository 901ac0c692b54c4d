"""What a trace is told where Python asks whether a tensor without values is true: checks pass, and anything else is refused.

In: a way to trace the model with given answers. Out: what it captures where no value chooses what is computed: of the two answers to each
question one makes the model raise (`if labels.max() >= n: raise`, `assert`), or both compute the same (`if bad.any(): print(...)`). The
model is traced again for each, up to the next question: what it does there is done once, without values, output or input. As other checks
(`capture/patches/assertions`), these are not repeated in a run.

Not modelled: questions for numbers (`int()`, `float()`), and a branch that asks more before it raises: refused as data-dependent.
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
_MOST = 64  # questions: a loop that ends by a value (`while error > tolerance`) asks for ever
_MOST_SKIPPED = 3  # questions that one answer may spare: `if a or b or c or d`


class Answers:
    """Answers to the questions of one trace, in order. Without any, torch is left to say what it thinks of such questions.

    guesses: whether what is asked beyond `told` is answered with False.
    """

    def __init__(self, told: Sequence[bool] | None = None, guesses: bool = False) -> None:
        self._told, self._guesses = told, guesses
        self.answers: list[bool] = []
        self._of: dict[int, tuple[object, bool]] = {}  # by what was asked, alive, so that no identity is used again
        self.of_torch: BaseException | None = None  # what a call of torch raised last, maybe since tensors here have no values
        self.raised = False  # whether the model's own code ended the trace

    def of(self, asked: object) -> bool | None:
        """The answer for something that is asked, the same each time; None where there is none."""
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
        """From the first on, for a second call of the model; no others are given."""
        if self._told is not None:
            self._told, self._guesses, self.answers = self.answers, False, []
            self._of.clear()

    @property
    def are_used_up(self) -> bool:
        """Whether as much was asked as there are answers."""
        return self._told is None or len(self.answers) >= len(self._told)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """A block in which the model's own code runs: that it raises is noted, but for what may be since nothing has values here."""
        try:
            yield
        except SystemExit as error:
            if self._told is None:
                raise
            raise ModelError("the model ends the process where a value is so") from error
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
        """A block in which torch is left to say what it thinks."""
        told, self._told = self._told, None
        try:
            yield
        finally:
            self._told = told


def with_checks_passed(run: Callable[[Answers], T], equal: Callable[[T, T], bool]) -> T:
    """What `run` makes with the answers with which the model goes on.

    Raises:
        ModelError: it cannot be captured; where a value chooses what is computed, as torch says it there.
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
                return run(Answers(asked[:k]))  # which ends at question k
    return result


@contextlib.contextmanager
def _aside() -> Iterator[None]:
    """A block that nobody sees: its words go nowhere, and what waits for somebody, as a debugger does, is refused."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ModelError("the model waits for input where a value is so")

    deaf = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.ExitStack() as stack:
        for owner, name in ((deaf, "readline"), (sys, "breakpointhook"), (pdb, "set_trace")):
            stack.enter_context(put(owner, name, refuse))
        stack.enter_context(put(sys, "stdin", deaf))
        yield


def _guessed(run: Callable[[Answers], T]) -> tuple[Answers, T, set[int]]:
    """Answers with which it goes on, False where either may be, what it makes with them, and those of which False made the model raise."""
    told: list[bool] = []
    raising: set[int] = set()
    while True:
        answers = Answers(told, guesses=True)
        try:
            return answers, run(answers), raising
        except ModelError:
            if not answers.raised or len(answers.answers) == len(told):
                raise
            told = [*answers.answers[:-1], True]
            raising.add(len(told) - 1)


def _raises(run: Callable[[Answers], T], told: list[bool]) -> bool:
    """Whether the last of these answers makes the model raise before it asks again."""
    answers = Answers(told)
    try:
        run(answers)
    except ModelError:
        return answers.raised
    return False


def _changes_nothing(run: Callable[[Answers], T], asked: list[bool], k: int, equal: Callable[[T], bool]) -> bool:
    """Whether the other answer to question k computes the same; it may spare the questions that follow."""
    for skipped in range(_MOST_SKIPPED + 1):
        told = [*asked[:k], True, *asked[k + 1 + skipped :]]
        answers = Answers(told)
        try:
            again = run(answers)
        except ModelError:
            continue
        if answers.answers == told:
            return equal(again)
    return False
