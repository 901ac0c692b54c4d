"""Explain why torch.export failed: the reason in one line, with the innermost line of the user's code."""

from __future__ import annotations

import linecache
import traceback
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

import shardwise
from shardwise.capture.fakes import DATA_DEPENDENT_ERRORS

_LIBRARY_FOLDERS = tuple(str(Path(package.__file__).parent) for package in (torch, shardwise) if package.__file__)

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def explain_export_failure(error: Exception) -> str:
    """Return the reason in one line; for data-dependent control flow a plain explanation instead of torch's symbols."""
    lines = str(error).strip().splitlines()
    where = _user_line_of(error)
    if any(isinstance(x, PackedSequence) for frame, _ in traceback.walk_tb(error.__traceback__) for x in frame.f_locals.values()):
        return (
            f"packed sequences{where}: their shapes follow the values of the lengths; give the layer the padded batch, and mask what it "
            "makes of the padding"
        )
    if isinstance(error, DATA_DEPENDENT_ERRORS):
        for frame, _ in traceback.walk_tb(error.__traceback__):
            module = frame.f_locals.get("self")
            if isinstance(module, _BATCH_NORMS) and module.momentum is None:
                return (
                    f"{type(module).__name__} with momentum=None{where} weighs its statistics by the value of a counter, which a graph "
                    "that is the same in every step does not hold; give it a momentum, for example 0.1"
                )
        return f"data-dependent{where}: what it does there depends on the values of a tensor (if, float(), int(), .item(), a mask)"
    return f"{type(error).__name__}: {lines[0] if lines else ''}{where}"


def _user_line_of(error: Exception) -> str:
    """Return ` at model.py:12, "if x.sum() > 0:"`, the innermost line outside of torch and shardwise; empty without one."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        file = frame.f_code.co_filename
        if not file.startswith((*_LIBRARY_FOLDERS, "<")):
            source = linecache.getline(file, line).strip()
            return f" at {Path(file).name}:{line}" + (f', "{source}"' if source else "")
    return ""
