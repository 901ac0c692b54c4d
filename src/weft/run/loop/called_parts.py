"""A part of a divided module that is called by itself: `model.decode(z)`, an encoder before generation.

In: a part, and which of its tensors are parts of larger ones. Out: while it runs it holds whole tensors, so that its own code computes what
it does on one process. Every rank that has a part of them calls it, since each gathers what the others have. In backward each rank gets its
part of the mean of what ranks make of a weight: of one batch that all ranks have as of each rank's samples what `loss.backward()` of the
model itself gives (`run/loop/divide`).

The hooks know no module, so that a copy of the model may have them. Where the model is traced, or runs on gathered weights, nothing is cut
and they do nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor, nn

from weft.capture.fakes import Fake
from weft.errors import UsageError
from weft.lower.redistribute import counted, redistribute
from weft.plan.placement import D
from weft.run.loop.cut import Cut, FullTensor
from weft.run.rank_agreement import digest
from weft.world import private
from weft.world.world import World

Tables = list[tuple[dict[str, Any], dict[str, Any]]]  # tables of modules' tensors, and what was in them


@dataclass(frozen=True)
class CalledPart:
    """Hooks of one part. `buffers`: those that are cut, by their names in it; cut parameters know it."""

    world: World
    buffers: Mapping[str, FullTensor]
    _before: list[Tables] = field(default_factory=list)

    def __deepcopy__(self, memo: object) -> Self:
        return type(self)(self.world, self.buffers)

    def begin(self, part: nn.Module, args: Any, kwargs: Any) -> None:
        """Let it hold whole tensors.

        Raises:
            UsageError: a part that trains has a buffer of which ranks have pieces, and would write the whole; or has statistics of samples
                that other ranks do not have.
        """
        if any(isinstance(m, private.BatchNorm) and m.training for m in part.modules()) and not _is_traced(part):
            self._check_equal(part, (args, kwargs))
        full: dict[int, Tensor] = {}
        with private.as_base_tensor():
            for name, buffer in part.named_buffers():
                if name in self.buffers and buffer.shape != self.buffers[name].shape:
                    if part.training:
                        raise UsageError(
                            f"{type(part).__name__} is called by itself and trains, and its {name} lies in pieces on several ranks, "
                            "where it would write the whole; call the model, part.eval() before, or use a layout that cuts no weights "
                            '(plan="data=N")'
                        )
                    full[id(buffer)] = _gathered(buffer, self.buffers[name])
            full |= {id(p): _gathered(p, p.full) for p in part.parameters() if isinstance(p, Cut)}
        tables: Tables = [(table, dict(table)) for module in part.modules() for table in private.tensors_of(module)] if full else []
        self._before.append(tables)
        for table, held in tables:
            table.update({key: full[id(x)] for key, x in held.items() if id(x) in full})

    def _check_equal(self, part: nn.Module, called: Any) -> None:
        """Raise UsageError where ranks call the part with different tensors."""
        mine = torch.tensor([int(digest(called), 16)], device=self.world.device)
        if len(set(self.world.everyone.all_gather(mine, 0).tolist())) > 1:
            raise UsageError(
                f"{type(part).__name__} is called by itself and trains, with other samples on other ranks, of which its batch norm would "
                "take statistics apart; call the model, or part.eval() before, or let every rank load the whole batch"
            )

    def end(self, part: nn.Module, args: object, output: object) -> None:
        """Let it hold what it held."""
        for table, held in self._before.pop() if self._before else ():
            table.update(held)


def let_parts_be_called(model: nn.Module, buffers: Mapping[str, FullTensor], world: World) -> None:
    """Register hooks on every part of `model` that has tensors of which this rank has pieces, or batch norm. `buffers`: which of these are
    buffers."""
    for path, part in model.named_modules() if world.num_ranks > 1 else ():
        cut = {name.removeprefix(f"{path}."): one for name, one in buffers.items() if name.startswith(f"{path}.")}
        has_norm = any(isinstance(m, private.BatchNorm) for m in part.modules())
        if path and (cut or has_norm or any(isinstance(p, Cut) for p in part.parameters())):
            called = CalledPart(world, cut)
            part.register_forward_pre_hook(called.begin, with_kwargs=True)
            part.register_forward_hook(called.end, always_call=True)


def _is_traced(part: nn.Module) -> bool:
    return isinstance(next(chain(part.parameters(), part.buffers()), None), Fake)


def _gathered(x: Tensor, full: FullTensor) -> Tensor:
    for form, group in reversed(full.cuts):
        x = counted(redistribute(x, form, D, group), 1.0 / group.size)
    return x
