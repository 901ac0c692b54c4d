"""Where in the user's code a trace came to an end. In: the exception. Out: words for it, with the line of code that is not torch's."""

from __future__ import annotations

import linecache
import traceback
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

import weft
from weft.capture.fakes import DATA_DEPENDENT

_NOT_THE_USERS = tuple(str(Path(package.__file__).parent) for package in (torch, weft) if package.__file__)

_COUNTING = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def why_not(error: Exception) -> str:
    """What stopped the trace, in one line; for branches on values instead of torch's symbols."""
    said = str(error).strip().splitlines()
    where = _place(error)
    if any(isinstance(held, PackedSequence) for frame, _ in traceback.walk_tb(error.__traceback__) for held in frame.f_locals.values()):
        return (
            f"packed sequences{where}: their shapes follow the values of the lengths; give the layer the padded batch, and mask what it "
            "makes of the padding"
        )
    if isinstance(error, DATA_DEPENDENT):
        for frame, _ in traceback.walk_tb(error.__traceback__):
            module = frame.f_locals.get("self")
            if isinstance(module, _COUNTING) and module.momentum is None:
                return (
                    f"{type(module).__name__} with momentum=None{where} weighs its statistics by the value of a counter, which a graph "
                    "that is the same in every step does not hold; give it a momentum, for example 0.1"
                )
        return f"data-dependent{where}: what it does there depends on the values of a tensor (if, float(), int(), .item(), a mask)"
    return f"{type(error).__name__}: {said[0] if said else ''}{where}"


def _place(error: Exception) -> str:
    """` at model.py:12, "if x.sum() > 0:"`: the innermost line that is neither torch's nor weft's; empty where there is none."""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        file = frame.f_code.co_filename
        if not file.startswith((*_NOT_THE_USERS, "<")):
            source = linecache.getline(file, line).strip()
            return f" at {Path(file).name}:{line}" + (f', "{source}"' if source else "")
    return ""
