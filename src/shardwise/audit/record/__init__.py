"""Recorder of the audit: runs inside any training script and writes what its first steps read, computed and changed.

A *page* is what lies between two optimizer steps: weights at its start, inputs, outputs, losses, gradients. Each process writes its own
shards, with their places in the full tensors; nothing is communicated, since a collective in a hook deadlocks where ranks hold different
parameters. Loaded by `audit/hook/sitecustomize` under a name of its own, without the package around it: torch, numpy and the standard
library.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from .hooks import install_hooks
from .recorder import Recorder, RecorderOptions
from .shardwise_engine import record_engine

_INSTALLED: list[Recorder] = []  # one a process


def install_recorder(environment: Mapping[str, str]) -> Recorder:
    """Start recording in this process, by the variables that the audit set."""
    recorder = Recorder(RecorderOptions.from_environment(environment))
    install_hooks(recorder)
    _INSTALLED.append(recorder)
    return recorder


def watch_engine(module: ModuleType) -> None:
    """Record the steps of shardwise's own engine, which calls no optimizer of the script's."""
    record_engine(module, _INSTALLED[-1])
