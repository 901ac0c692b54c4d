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

from shardwise.capture.fakes import Fake
from shardwise.errors import UsageError
from shardwise.lower.redistribute import redistribute, scale_gradient
from shardwise.plan.ir.placement import D
from shardwise.run.loop.sharded_tensor import GlobalTensorSpec, ShardedTensor
from shardwise.run.rank_agreement import digest_tensors
from shardwise.world import private
from shardwise.world.world import World

TensorTables = list[tuple[dict[str, Any], dict[str, Any]]]  # tensor tables of modules, each with its original items


@dataclass(frozen=True)
class SubmoduleCallHooks:
    """Forward hooks of one submodule. `sharded_buffers`: by local name; sharded parameters carry their own spec."""

    world: World
    sharded_buffers: Mapping[str, GlobalTensorSpec]
    _saved_tables: list[TensorTables] = field(default_factory=list)

    def __deepcopy__(self, memo: object) -> Self:
        return type(self)(self.world, self.sharded_buffers)

    def gather_tensors(self, submodule: nn.Module, args: Any, kwargs: Any) -> None:
        """Replace the submodule's shards by full tensors.

        Raises:
            UsageError: a submodule in training mode would write a sharded buffer, or would compute batch norm statistics over samples
                that other ranks do not have.
        """
        if any(isinstance(m, private.BatchNorm) and m.training for m in submodule.modules()) and not _is_traced(submodule):
            self._check_inputs_equal(submodule, (args, kwargs))
        full: dict[int, Tensor] = {}
        with private.as_base_tensor():
            for name, buffer in submodule.named_buffers():
                if name in self.sharded_buffers and buffer.shape != self.sharded_buffers[name].global_shape:
                    if submodule.training:
                        raise UsageError(
                            f"{type(submodule).__name__} is called by itself and trains, and its {name} lies in pieces on several ranks, "
                            "where it would write the whole; call the model, part.eval() before, or use a layout that cuts no weights "
                            '(plan="data=N")'
                        )
                    full[id(buffer)] = _gather_tensor(buffer, self.sharded_buffers[name])
            full |= {id(p): _gather_tensor(p, p.spec) for p in submodule.parameters() if isinstance(p, ShardedTensor)}
        tables: TensorTables = (
            [(table, dict(table)) for module in submodule.modules() for table in private.tensor_tables(module)] if full else []
        )
        self._saved_tables.append(tables)
        for table, items in tables:
            table.update({key: full[id(x)] for key, x in items.items() if id(x) in full})

    def _check_inputs_equal(self, submodule: nn.Module, inputs: Any) -> None:
        """Raise UsageError if ranks call the submodule with different tensors."""
        local_digest = torch.tensor([int(digest_tensors(inputs), 16)], device=self.world.device)
        if len(set(self.world.world_group.all_gather(local_digest, 0).tolist())) > 1:
            raise UsageError(
                f"{type(submodule).__name__} is called by itself and trains, with other samples on other ranks, of which its batch norm "
                f"would "
                "take statistics apart; call the model, or part.eval() before, or let every rank load the whole batch"
            )

    def restore_shards(self, submodule: nn.Module, args: object, output: object) -> None:
        """Restore the shards."""
        for table, items in self._saved_tables.pop() if self._saved_tables else ():
            table.update(items)


def register_submodule_hooks(model: nn.Module, buffers: Mapping[str, GlobalTensorSpec], world: World) -> None:
    """Register hooks on every submodule of `model` that has sharded tensors or batch norm. `sharded_buffers`: the sharded buffers by
    name."""
    for path, part in model.named_modules() if world.num_ranks > 1 else ():
        sharded_buffers = {name.removeprefix(f"{path}."): spec for name, spec in buffers.items() if name.startswith(f"{path}.")}
        has_norm = any(isinstance(m, private.BatchNorm) for m in part.modules())
        if path and (sharded_buffers or has_norm or any(isinstance(p, ShardedTensor) for p in part.parameters())):
            hooks = SubmoduleCallHooks(world, sharded_buffers)
            part.register_forward_pre_hook(hooks.gather_tensors, with_kwargs=True)
            part.register_forward_hook(hooks.restore_shards, always_call=True)


def _is_traced(submodule: nn.Module) -> bool:
    return isinstance(next(chain(submodule.parameters(), submodule.buffers()), None), Fake)


def _gather_tensor(x: Tensor, spec: GlobalTensorSpec) -> Tensor:
    for placement, group in reversed(spec.placements):
        x = scale_gradient(redistribute(x, placement, D, group), 1.0 / group.size)
    return x
