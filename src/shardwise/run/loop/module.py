"""The sharded module that the user sees: how calling, copying, pickling, saving and loading it work.

The module computes by a replica object: from captured graphs (`run/loop/forward`), or by its own code on this rank's samples
(`run/uncaptured/replicated`). Not modelled: training a copy, whose gradients would not be reduced.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import UsageError
from shardwise.plan.plan import Plan
from shardwise.run.checkpoint import StateShard, full_shard
from shardwise.run.loop.forward import GraphReplica
from shardwise.run.loop.replica_values import note_batch
from shardwise.run.uncaptured.replicated import EagerReplica
from shardwise.world import private
from shardwise.world.world import World

OVERRIDDEN_ATTRIBUTES = ("forward", "__deepcopy__", "__reduce_ex__")  # attributes that a sharded module overrides on the object


@dataclass(frozen=True)
class ShardedModule:
    """A sharded module, or a copy of one. `frozen_parameters`: those that did not require gradients when it was sharded."""

    model: nn.Module
    plan: Plan
    world: World
    replica: GraphReplica | EagerReplica
    is_copy: bool = False
    frozen_parameters: list[tuple[str, nn.Parameter]] = field(default_factory=list)

    def install(self) -> None:
        """Install the sharded forward, copy and pickling on the module object."""
        self.frozen_parameters.extend((name, p) for name, p in self.model.named_parameters() if not p.requires_grad)
        # torch.compile cannot trace collectives and skips it.
        forward = torch.compiler.disable(self.forward)  # type: ignore[no-untyped-call]
        # Libraries inspect the signature for what they may pass: masks of padded prompts, columns of a data set.
        forward.__signature__ = inspect.signature(self.model.forward)
        self.model.forward = forward
        # copy and pickle look these up on the object.
        self.model.__deepcopy__ = self.copy  # type: ignore[assignment]
        self.model.__reduce_ex__ = self.refuse_pickling  # type: ignore[method-assign]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output for this rank's samples."""
        self.replica.check()
        if self.world.num_ranks > 1:
            self._check_gradients_reduced()
            note_batch((args, kwargs) if args else kwargs)
        return self.replica.compute(args, kwargs)

    def expect_full_batches(self) -> None:
        """Declare that from now on every rank calls the module with the same global batch."""
        self.replica.call_convention.is_global_batch = True

    def draw_state(self) -> dict[str, int]:
        """Return the seed and step of the module's random draws, for a checkpoint."""
        return {"seed": self.replica.draw.seed, "step": self.replica.draw.step}

    def load_draw_state(self, state: Mapping[str, int]) -> None:
        """Resume random draws from a `draw_state`."""
        self.replica.draw.seed, self.replica.draw.step = state["seed"], state["step"]

    def _check_gradients_reduced(self) -> None:
        """Raise UsageError if a parameter requires a gradient that would not be reduced."""
        for name, p in self.frozen_parameters:
            if p.requires_grad:
                raise UsageError(
                    f"{name} was frozen when the model was divided, and trains now, so that its gradient would not be summed over ranks: "
                    "freeze it after the block of shardwise.auto_parallelize, then it can train again"
                )
        if self.is_copy and torch.is_grad_enabled() and any(p.requires_grad for p in self.model.parameters()):
            raise UsageError(
                "a copy of a divided model has weights of its own, whose gradients nobody sums over ranks; call it under "
                "torch.no_grad(), or after copy.requires_grad_(False)"
            )

    def copy(self, memo: dict[int, Any]) -> nn.Module:
        """Return what copy.deepcopy gives: the module with copies of its weights, for averages of them (EMA)."""
        model = self.model
        copied: nn.Module = model.__new__(type(model))
        memo[id(model)] = copied
        copied.__dict__.update(copy.deepcopy({k: v for k, v in model.__dict__.items() if k not in OVERRIDDEN_ATTRIBUTES}, memo))
        replace(self, model=copied, replica=self.replica.for_copy(copied, memo), is_copy=True, frozen_parameters=[]).install()
        return copied

    def refuse_pickling(self, protocol: object) -> Any:
        """Raise UsageError: the module itself cannot be pickled."""
        raise UsageError(
            f"{type(self.model).__name__} is divided, and what it computes with cannot be saved: save shardwise.full_state_dict(net), "
            f"which "
            "every rank calls, and load it into a new one with load_state_dict"
        )


def sharded_module_of(model: nn.Module) -> ShardedModule | None:
    """Return the `ShardedModule` of a module; None if it is not sharded."""
    owner = getattr(inspect.unwrap(model.forward), "__self__", None)
    return owner if isinstance(owner, ShardedModule) else None


def sharded_modules_of(model: nn.Module) -> list[tuple[str, ShardedModule]]:
    """Return the sharded modules that a module is or contains, each with its name prefix: `backbone.`, empty for the module itself."""
    modules = ((name, sharded_module_of(module)) for name, module in model.named_modules())
    return [(f"{name}." if name else "", sharded) for name, sharded in modules if sharded is not None]


def unsharded_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict entries of a module that belong to none of its sharded submodules, by name."""
    prefixes = tuple(prefix for prefix, _ in sharded_modules_of(model))
    tensors: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        path = f"{name}." if name else ""
        if not any(path.startswith(prefix) for prefix in prefixes):
            tensors.update((path + key, x) for key, x in private.direct_state(module).items())
    return tensors


def state_shards(model: nn.Module) -> list[StateShard]:
    """Return this rank's shards of the state dict of a model that is sharded or contains sharded modules."""
    modules, trained = sharded_modules_of(model), {name for name, _ in model.named_parameters()}
    pieces = [replace(piece, name=prefix + piece.name) for prefix, sharded in modules for piece in sharded.replica.state_shards()]
    for name, x in unsharded_tensors(model).items():
        owner = modules[0][1].world.rank == 0
        pieces.append(full_shard(name, "parameter" if name in trained else "buffer", x.detach(), is_owner=owner))
    return pieces


def accumulate(model: nn.Module, last: bool = False) -> AbstractContextManager[Any]:
    """Accumulate gradients locally within a block; the first backward after it reduces them all over ranks, at once (`no_sync` of DDP).

    Without it every `backward()` reduces its own gradients, with the same result. With weights sharded by ZeRO (`zero=`) each backward
    reduces its gradients in any case. It has no effect on a model that is not sharded.

    Args:
        last: whether this is the last backward before the optimizer's step, which reduces over ranks.

    >>> import torch, shardwise
    >>> net = shardwise.auto_parallelize(torch.nn.Linear(2, 2), (torch.ones(4, 2),), plan="data=1")
    >>> for number in (1, 2):
    ...     with shardwise.accumulate(net, last=number == 2):
    ...         (net(torch.ones(4, 2)).mean() / 2).backward()
    """
    blocks = ExitStack()
    for _, sharded in [] if last else sharded_modules_of(model):
        if sharded.replica.gradient_reducer is not None:
            blocks.enter_context(sharded.replica.gradient_reducer.accumulate_locally())
    return blocks
