"""Run a call that uses autograd's backward in a forked process, since a process that later forks GPU ranks must not run it.

torch's autograd counts the GPUs when backward first runs, for fake and host tensors too. This initializes the CUDA driver, which does not
work in forks of an initialized process.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import TypeVar

import torch

from shardwise import errors
from shardwise.errors import RunError, ShardwiseError

T = TypeVar("T")
_FOREIGN_ERROR = ""  # class name of an error that is none of shardwise's


def in_fork(call: Callable[[], T], serialize: Callable[[T], object], deserialize: Callable[[object], T]) -> T:
    """Return `call()`, run in a fork if there is a GPU that this process has not used. `serialize`, `deserialize`: result to JSON, back.

    Raises:
        ShardwiseError: raised by the call. RunError: the fork ended without a result.
    """
    if not torch.cuda.device_count() or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return call()
    sys.stdout.flush()
    sys.stderr.flush()
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reads)
        _write_result_and_exit(lambda: serialize(call()), writes)
    os.close(writes)
    with open(reads, encoding="utf-8") as pipe:
        reply = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if not reply:
        raise RunError(f"the process that traces the model's backward pass ended with status {status} without a result; is memory short?")
    result, raised, message = json.loads(reply)
    if raised is None:
        return deserialize(result)
    if raised == _FOREIGN_ERROR:
        return call()  # raises here, so that the traceback shows the reason
    raise getattr(errors, raised)(message)


def _write_result_and_exit(call: Callable[[], object], descriptor: int) -> None:
    """Write [result, class of an error, message], and end this process."""
    torch.set_num_threads(1)  # the thread pool does not survive a fork
    try:
        reply: list[object] = [call(), None, ""]
    except ShardwiseError as error:
        reply = [None, next(c.__name__ for c in type(error).__mro__ if getattr(errors, c.__name__, None) is c), str(error)]
    except BaseException:
        reply = [None, _FOREIGN_ERROR, ""]
    try:
        with open(descriptor, "w", encoding="utf-8") as pipe:
            pipe.write(json.dumps(reply))
    finally:
        os._exit(0)
