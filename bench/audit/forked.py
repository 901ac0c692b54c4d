"""Runs of audited scripts in forks of a process that has imported torch: a run then takes a second where a command takes ten.

The scripts, the recorder and the comparison are those of `shardwise audit`; only the start of the processes differs.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import runpy
import shlex
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType

import torch

from shardwise.audit.pages import Pages, read_pages
from shardwise.audit.run import AuditOptions, recorder_environment
from shardwise.errors import RunError

PRELOADED = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
    "torch.utils.data",
    "torch.utils.checkpoint",
    "accelerate",
    "lightning",
    "shardwise.run.engine",
    "shardwise.api",
)  # what scripts import, if it is installed
SCRIPTS = Path(__file__).parent / "scripts"
RECORD = Path(sys.modules["shardwise.audit.pages"].__file__ or "").parent / "record" / "__init__.py"


def preload_modules(names: Iterable[str] = PRELOADED) -> None:
    """Import what scripts import, once for all forks. DeepSpeed and Megatron-Core, which change torch, are left to the scripts."""
    for name in names:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)


def record_script(
    script: str, num_ranks: int, folder: Path, options: AuditOptions, noise: tuple[int, str] = (0, "float32"), timeout_s: float = 300.0
) -> Pages:
    """Run a script (file and arguments) on ranks of a process group, as torchrun would, and return what they recorded.

    Raises:
        RunError: a rank failed; the end of its output is in the message.
    """
    environment = recorder_environment(folder, options, os.environ)
    environment |= {"SHARDWISE_AUDIT_NOISE": str(noise[0]), "SHARDWISE_AUDIT_UNIT": noise[1]}
    if num_ranks > 1:
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "TORCHELASTIC_RUN_ID": "audit", "GROUP_RANK": "0"}
        environment |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), "TORCHELASTIC_RESTART_COUNT": "0"}
    folder.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    children: dict[int, int] = {}
    for rank in range(num_ranks):
        pid = os.fork()
        if pid == 0:
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if num_ranks > 1 else {}
            _run_child(shlex.split(script), {**environment, **own}, folder / f"log{rank}")
        children[pid] = rank
    failed = _wait_for_all(children, time.monotonic() + timeout_s)
    if failed is not None:
        text = (folder / f"log{failed}").read_text(errors="replace").splitlines()
        raise RunError(f"{script}: rank {failed} failed\n" + "\n".join(text[-12:]))
    return read_pages(folder)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _wait_for_all(children: dict[int, int], deadline: float) -> int | None:
    """Wait for all children; end them when one fails or the time is over. Returns the first failed rank."""
    left, failed = dict(children), None
    while left:
        for pid in list(left):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                rank = left.pop(pid)
                failed = rank if status and failed is None else failed
        if left and (failed is not None or time.monotonic() > deadline):
            failed = next(iter(left.values())) if failed is None else failed
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return failed


def _run_child(words: list[str], environment: Mapping[str, str], log: Path) -> None:
    """Run a script as the main module, with the recorder, and end the process."""
    code = 1
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.environ.clear()
        os.environ.update(environment)
        recorder = _load_recorder()
        sys.argv = [str(SCRIPTS / words[0]), *words[1:]]
        sys.path.insert(0, str(SCRIPTS))
        torch.set_num_threads(1)
        installed = recorder.install_recorder(environment)
        if words[0].startswith("shardwise_"):
            recorder.watch_engine(importlib.import_module("shardwise.run.engine"))
        try:
            runpy.run_path(sys.argv[0], run_name="__main__")
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
        installed.finish()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _load_recorder() -> ModuleType:
    """Load the recorder as the hook does: under a name of its own, without the package around it."""
    spec = importlib.util.spec_from_file_location("_shardwise_audit", RECORD, submodule_search_locations=[str(RECORD.parent)])
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["_shardwise_audit"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
