"""Dtypes that autocast gives an operator's outputs, as our records say and as torch does, over torch's own samples of arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bench.verify.rules import truth
from bench.verify.rules.truth import Call
from shardwise.model.strides.autocast_dtypes import apply_autocast
from tests.support import rule_cases as pieces

NARROW = torch.bfloat16


@dataclass(frozen=True)
class WrongDtype:
    """An operator with operands of which some, by position, are of 16 bits: dtypes of its outputs as told, and as torch makes them."""

    call: str
    narrow_operands: tuple[int, ...]
    told: tuple[str, ...]
    made: tuple[str, ...]

    @property
    def loses_bits(self) -> bool:
        """Whether an output is told narrower than it is."""
        return any(a == "bfloat16" and b == "float32" for a, b in zip(self.told, self.made, strict=True))


def wrong_dtypes(names: Sequence[str], most: int) -> Iterator[WrongDtype | None]:
    """Try up to `most` samples of each operator with float32, 16-bit and mixed operands; yield what is wrong, None for what is right."""
    seen: set[str] = set()
    for info in truth.operators():
        if names and info.name not in names:
            continue
        for call in truth.calls(info, most):
            if (words := truth.written(call)) not in seen and not truth.writes_operand(call):
                seen.add(words)
                yield from _compare(call)


def _compare(call: Call) -> Iterator[WrongDtype | None]:
    tensors = list({id(x): x for x in truth.tensors_of(call) if x.dtype == torch.float64}.values())
    everything = tuple(range(len(tensors)))
    for narrow in {(), everything, everything[:1], everything[1:]} if tensors else ():
        cast = {id(x): x.to(NARROW if i in narrow else torch.float32) for i, x in enumerate(tensors)}
        wide = {id(x): x.float() for x in tensors}
        target, args, kwargs = call
        kwargs = {k: torch.float32 if a is torch.float64 else a for k, a in kwargs.items()}
        try:
            with torch.autocast("cpu", NARROW), torch.no_grad():
                _, arguments, named = truth.with_tensors((target, args, kwargs), cast)
                out = truth.overload(target)(*arguments, **named)
            _, arguments, named = truth.with_tensors((target, args, kwargs), wide)
            case = pieces.case(target, *arguments, **named)
        except Exception:  # torch has no such kernel, or a graph holds no such arguments
            continue
        outs = [out] if isinstance(out, Tensor) else list(out) if isinstance(out, (list, tuple)) else []
        if not outs or not all(isinstance(y, Tensor) for y in outs):
            continue
        specs, names = dict(case.graph.tensors), {id(t): name for name, t in case.tensors.items()}
        for number in narrow:
            if name := names.get(id(wide[id(tensors[number])])):
                specs[name] = replace(specs[name], dtype="bfloat16")
        told = apply_autocast(replace(case.graph, tensors=specs)).tensors
        pairs = [(told[v].dtype, str(y.dtype).removeprefix("torch.")) for v, y in zip(case.op.outputs, outs, strict=True)]
        differs = any(a != b and b in ("float32", "bfloat16") for a, b in pairs)
        yield WrongDtype(truth.written(call), narrow, *(tuple(row) for row in zip(*pairs, strict=True))) if differs else None
