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

from shardwise.capture.fakes import DATA_DEPENDENT_ERRORS, FAKE_TENSOR_ERRORS, patched_attribute
from shardwise.errors import ModelError

T = TypeVar("T")
_MAX_QUESTIONS = 64  # a loop with a data-dependent end (`while error > tolerance`) never stops asking
_MAX_SKIPPED = 3  # questions that one answer may skip: `if a or b or c or d`


class BranchAnswers:
    """Answers to the branch questions of one trace, in order; with None, torch handles (refuses) the questions.

    default_to_false: answer questions beyond `preset_answers` with False.
    """

    def __init__(self, preset_answers: Sequence[bool] | None = None, default_to_false: bool = False) -> None:
        self._preset_answers, self._default_to_false = preset_answers, default_to_false
        self.answers: list[bool] = []
        self._by_question: dict[int, tuple[object, bool]] = {}  # by question, kept alive so that no id is reused
        self.last_torch_error: BaseException | None = None  # last error raised by torch, perhaps since tensors have no values
        self.model_raised = False  # the model's own code ended the trace

    def answer_to(self, question: object) -> bool | None:
        """Return the answer to a question, the same each time; None without one."""
        if id(question) not in self._by_question:
            answer = self._next_answer()
            if answer is None:
                return None
            self._by_question[id(question)] = question, answer
        return self._by_question[id(question)][1]

    def _next_answer(self) -> bool | None:
        if self._preset_answers is None or len(self.answers) >= _MAX_QUESTIONS:
            return None
        if len(self.answers) < len(self._preset_answers):
            self.answers.append(self._preset_answers[len(self.answers)])
        elif self._default_to_false:
            self.answers.append(False)
        else:
            return None
        return self.answers[-1]

    def replay(self) -> None:
        """Replay the answers from the first on, for a second call of the model, without further ones."""
        if self._preset_answers is not None:
            self._preset_answers, self._default_to_false, self.answers = self.answers, False, []
            self._by_question.clear()

    @property
    def are_used_up(self) -> bool:
        """Return whether all answers were used."""
        return self._preset_answers is None or len(self.answers) >= len(self._preset_answers)

    @contextlib.contextmanager
    def watching_model(self) -> Iterator[None]:
        """A block of the model's code; records that it raised, except for errors that may be due to missing values."""
        try:
            yield
        except SystemExit as error:
            if self._preset_answers is None:
                raise
            raise ModelError("the model ends the process depending on a value") from error
        except (ModelError, *DATA_DEPENDENT_ERRORS, *FAKE_TENSOR_ERRORS, TypeError, AttributeError):  # a symbol is no number
            raise
        except Exception as error:
            causes: list[BaseException] = [error]
            while cause := causes[-1].__cause__ or causes[-1].__context__:
                causes.append(cause)
            self.model_raised = self.last_torch_error not in causes
            raise

    @contextlib.contextmanager
    def without_answers(self) -> Iterator[None]:
        """A block in which questions are left to torch."""
        answers, self._preset_answers = self._preset_answers, None
        try:
            yield
        finally:
            self._preset_answers = answers


def capture_past_checks(run: Callable[[BranchAnswers], T], equal: Callable[[T, T], bool]) -> T:
    """Return the result of `run` with the answers under which the model's checks pass.

    Raises:
        ModelError: the model cannot be captured; for a branch that changes what is computed it is torch's own error.
    """
    try:
        return run(BranchAnswers())
    except ModelError as error:
        if not isinstance(error.__cause__, DATA_DEPENDENT_ERRORS):
            raise
    with _without_output_or_input():
        answers, result, raising = _search_answers(run)
        asked = answers.answers
        for k in range(len(asked)):
            if not (
                k in raising or _makes_model_raise(run, [*asked[:k], True]) or _is_equivalent_branch(run, asked, k, partial(equal, result))
            ):
                return run(BranchAnswers(asked[:k]))  # raises torch's error at question k
    return result


@contextlib.contextmanager
def _without_output_or_input() -> Iterator[None]:
    """A block without output; code that waits for input, such as a debugger, is refused."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ModelError("the model waits for input depending on a value")

    empty_input = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.ExitStack() as stack:
        for owner, name in ((empty_input, "readline"), (sys, "breakpointhook"), (pdb, "set_trace")):
            stack.enter_context(patched_attribute(owner, name, refuse))
        stack.enter_context(patched_attribute(sys, "stdin", empty_input))
        yield


def _search_answers(run: Callable[[BranchAnswers], T]) -> tuple[BranchAnswers, T, set[int]]:
    """Search answers under which the model runs through, False if possible: these, the result, the questions where False raises."""
    preset: list[bool] = []
    raising: set[int] = set()
    while True:
        answers = BranchAnswers(preset, default_to_false=True)
        try:
            return answers, run(answers), raising
        except ModelError:
            if not answers.model_raised or len(answers.answers) == len(preset):
                raise
            preset = [*answers.answers[:-1], True]
            raising.add(len(preset) - 1)


def _makes_model_raise(run: Callable[[BranchAnswers], T], preset_answers: list[bool]) -> bool:
    """Return whether the last of these answers makes the model raise before its next question."""
    answers = BranchAnswers(preset_answers)
    try:
        run(answers)
    except ModelError:
        return answers.model_raised
    return False


def _is_equivalent_branch(run: Callable[[BranchAnswers], T], asked: list[bool], k: int, equal: Callable[[T], bool]) -> bool:
    """Return whether the other answer to question k computes the same; it may skip questions that follow."""
    for skipped in range(_MAX_SKIPPED + 1):
        preset = [*asked[:k], True, *asked[k + 1 + skipped :]]
        answers = BranchAnswers(preset)
        try:
            result = run(answers)
        except ModelError:
            continue
        if answers.answers == preset:
            return equal(result)
    return False
