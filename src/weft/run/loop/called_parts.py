"""Hooks for calling a submodule of a sharded module directly: `model.decode(z)`, or an encoder before generation.

While the submodule runs, its sharded tensors are replaced by all-gathered full ones, so that its own code computes what it computes in one
process; every rank that stores a shard must call it. In backward each rank gets its shard of the mean of the ranks' gradients, both for one
batch shared by all ranks and for each rank's own samples, as `loss.backward()` of the model itself gives (`run/loop/shard_module`).

The hooks refer to no module, so that a copy of the model can share them. Where the model is traced, or runs on gathered weights, no tensor
is sharded and they do nothing.
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

Tables = list[tuple[dict[str, Any], dict[str, Any]]]  # tensor tables of modules, each with its original items


@dataclass(frozen=True)
class CalledPart:
    """Forward hooks of one submodule. `sharded_buffers`: by local name; sharded parameters carry their own spec."""

    world: World
    buffers: Mapping[str, FullTensor]
    _before: list[Tables] = field(default_factory=list)

    def __deepcopy__(self, memo: object) -> Self:
        return type(self)(self.world, self.buffers)

    def begin(self, part: nn.Module, args: Any, kwargs: Any) -> None:
        """Replace the submodule's shards by full tensors.

        Raises:
            UsageError: a submodule in training mode would write a sharded buffer, or would compute batch norm statistics over samples
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
        for table, items in tables:
            table.update({key: full[id(x)] for key, x in items.items() if id(x) in full})

    def _check_equal(self, part: nn.Module, called: Any) -> None:
        """Raise UsageError if ranks call the submodule with different tensors."""
        local_digest = torch.tensor([int(digest(called), 16)], device=self.world.device)
        if len(set(self.world.everyone.all_gather(local_digest, 0).tolist())) > 1:
            raise UsageError(
                f"{type(part).__name__} is called by itself and trains, with other samples on other ranks, of which its batch norm would "
                "take statistics apart; call the model, or part.eval() before, or let every rank load the whole batch"
            )

    def end(self, part: nn.Module, args: object, output: object) -> None:
        """Restore the shards."""
        for table, items in self._before.pop() if self._before else ():
            table.update(items)


def let_parts_be_called(model: nn.Module, buffers: Mapping[str, FullTensor], world: World) -> None:
    """Register hooks on every submodule of `model` that has sharded tensors or batch norm. `buffers`: the sharded buffers by name."""
    for path, part in model.named_modules() if world.num_ranks > 1 else ():
        sharded_buffers = {name.removeprefix(f"{path}."): spec for name, spec in buffers.items() if name.startswith(f"{path}.")}
        has_norm = any(isinstance(m, private.BatchNorm) for m in part.modules())
        if path and (sharded_buffers or has_norm or any(isinstance(p, Cut) for p in part.parameters())):
            hooks = CalledPart(world, sharded_buffers)
            part.register_forward_pre_hook(hooks.begin, with_kwargs=True)
            part.register_forward_hook(hooks.end, always_call=True)


def _is_traced(part: nn.Module) -> bool:
    return isinstance(next(chain(part.parameters(), part.buffers()), None), Fake)


def _gathered(x: Tensor, full: FullTensor) -> Tensor:
    for placement, group in reversed(full.cuts):
        x = counted(redistribute(x, placement, D, group), 1.0 / group.size)
    return x
