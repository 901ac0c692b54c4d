"""Backward, which a process that forks ranks for GPUs must not run: in a fork of its own. In: what runs it. Out: what that returns.

torch's autograd counts the GPUs when backward first runs, on tensors without memory and on those of the host too. CUDA's driver answers,
and in forks of a process that it has answered it does not work.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import TypeVar

import torch

from weft import errors
from weft.errors import RunError, WeftError

T = TypeVar("T")
_OTHER = ""  # in the place of an error's class: none of weft's


def apart(call: Callable[[], T], written: Callable[[T], object], read: Callable[[object], T]) -> T:
    """`call()`, in a fork where there is a GPU that this process has not used yet. `written`: its result as what JSON holds; `read`: back.

    Raises:
        WeftError: as the call does. RunError: the fork ended without an answer.
    """
    if not torch.cuda.device_count() or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return call()
    sys.stdout.flush()
    sys.stderr.flush()
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reads)
        _answer(lambda: written(call()), writes)
    os.close(writes)
    with open(reads, encoding="utf-8") as pipe:
        answer = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if not answer:
        raise RunError(f"a process that looks at the model's backward pass ended with status {status} before it answered; is there memory?")
    result, raised, message = json.loads(answer)
    if raised is None:
        return read(result)
    if raised == _OTHER:
        return call()  # which raises here, for whoever looks for the reason
    raise getattr(errors, raised)(message)


def _answer(call: Callable[[], object], descriptor: int) -> None:
    """Writes [result, class of an error, message], and ends this process."""
    torch.set_num_threads(1)  # the pool of threads did not come along
    try:
        answer: list[object] = [call(), None, ""]
    except WeftError as error:
        answer = [None, next(c.__name__ for c in type(error).__mro__ if getattr(errors, c.__name__, None) is c), str(error)]
    except BaseException:
        answer = [None, _OTHER, ""]
    try:
        with open(descriptor, "w", encoding="utf-8") as pipe:
            pipe.write(json.dumps(answer))
    finally:
        os._exit(0)
