"""A divided module as its user has it: what calling, copying, saving and loading it mean, however it computes.

In: the module, and the way in which it computes: by the graphs that were captured of it (`run/loop/forward`), or by its own code on this
rank's samples (`run/uncaptured/replicated`). Out: its forward, its copies, its whole state. Not modelled: training a copy, whose gradients
nobody would sum.
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

from weft.errors import UsageError
from weft.plan.plan import Plan
from weft.run.loop.forward import ByGraphs
from weft.run.state.checkpoint import Piece, full_piece
from weft.run.uncaptured.replicated import ByItself
from weft.world import private
from weft.world.world import World

REPLACED = ("forward", "__deepcopy__", "__reduce_ex__")  # what a divided module has of its own


@dataclass(frozen=True)
class ShardedModule:
    """A divided module, or a copy of one. `frozen`: what did not train when it was divided."""

    model: nn.Module
    plan: Plan
    world: World
    way: ByGraphs | ByItself
    copied: bool = False
    frozen: list[tuple[str, nn.Parameter]] = field(default_factory=list)

    def bind(self) -> None:
        """Let the module compute so."""
        self.frozen.extend((name, p) for name, p in self.model.named_parameters() if not p.requires_grad)
        # torch.compile cannot see through collectives, and leaves it out.
        forward = torch.compiler.disable(self.forward)  # type: ignore[no-untyped-call]
        # Libraries ask it what they may hand it: masks of padded prompts, columns of a data set.
        forward.__signature__ = inspect.signature(self.model.forward)
        self.model.forward = forward
        # Copying and pickling ask the object, not its class.
        self.model.__deepcopy__ = self.copy  # type: ignore[assignment]
        self.model.__reduce_ex__ = self.unsaved  # type: ignore[method-assign]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns, of this rank's samples."""
        self.way.check()
        if self.world.num_ranks > 1:
            self._check_summed()
        return self.way.compute(args, kwargs)

    def expect_full_batches(self) -> None:
        """From here on every rank calls the module with the whole batch, and what they call it with is the same."""
        self.way.expects.global_batch = True

    def draw_state(self) -> dict[str, int]:
        """Where the module's own random numbers are, for a checkpoint."""
        return {"seed": self.way.draw.seed, "step": self.way.draw.step}

    def load_draw_state(self, state: Mapping[str, int]) -> None:
        """Go on from what `draw_state` told."""
        self.way.draw.seed, self.way.draw.step = state["seed"], state["step"]

    def _check_summed(self) -> None:
        """Raise where a parameter trains whose gradient nobody sums."""
        for name, p in self.frozen:
            if p.requires_grad:
                raise UsageError(
                    f"{name} was frozen when the model was divided, and trains now, so that its gradient would not be summed over ranks: "
                    "freeze it after the block of weft.auto_parallelize, then it can train again"
                )
        if self.copied and torch.is_grad_enabled() and any(p.requires_grad for p in self.model.parameters()):
            raise UsageError(
                "a copy of a divided model has weights of its own, whose gradients nobody sums over ranks; call it under "
                "torch.no_grad(), or after copy.requires_grad_(False)"
            )

    def copy(self, memo: dict[int, Any]) -> nn.Module:
        """The module with copies of its weights, for averages of them: what copy.deepcopy gives."""
        model = self.model
        copied: nn.Module = model.__new__(type(model))
        memo[id(model)] = copied
        copied.__dict__.update(copy.deepcopy({k: v for k, v in model.__dict__.items() if k not in REPLACED}, memo))
        replace(self, model=copied, way=self.way.of_copy(copied, memo), copied=True, frozen=[]).bind()
        return copied

    def unsaved(self, protocol: object) -> Any:
        """What torch.save of the module itself is told."""
        raise UsageError(
            f"{type(self.model).__name__} is divided, and what it computes with cannot be saved: save weft.full_state_dict(net), which "
            "every rank calls, and load it into a new one with load_state_dict"
        )


def sharded_module_of(model: nn.Module) -> ShardedModule | None:
    """How a module was divided; None for one that was not."""
    owner = getattr(inspect.unwrap(model.forward), "__self__", None)
    return owner if isinstance(owner, ShardedModule) else None


def sharded_modules_of(model: nn.Module) -> list[tuple[str, ShardedModule]]:
    """The divided modules that a module is or has, with the prefix of their names in it: `backbone.`, empty for itself."""
    modules = ((name, sharded_module_of(module)) for name, module in model.named_modules())
    return [(f"{name}." if name else "", one) for name, one in modules if one is not None]


def tensors_outside(model: nn.Module) -> dict[str, Tensor]:
    """What a state dict has of a module that its divided parts have not, by name."""
    prefixes = tuple(prefix for prefix, _ in sharded_modules_of(model))
    tensors: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        path = f"{name}." if name else ""
        if not any(path.startswith(prefix) for prefix in prefixes):
            tensors.update((path + key, x) for key, x in private.direct_state(module).items())
    return tensors


def state_pieces(model: nn.Module) -> list[Piece]:
    """This rank's pieces of what a state dict has of a model that is divided, or has divided modules inside."""
    modules, trained = sharded_modules_of(model), {name for name, _ in model.named_parameters()}
    pieces = [replace(piece, name=prefix + piece.name) for prefix, one in modules for piece in one.way.pieces()]
    for name, x in tensors_outside(model).items():
        owner = modules[0][1].world.rank == 0
        pieces.append(full_piece(name, "parameter" if name in trained else "buffer", x.detach(), owner=owner))
    return pieces


def accumulate(model: nn.Module, last: bool = False) -> AbstractContextManager[Any]:
    """A block whose backwards add gradients up on this rank; the first backward behind it sums all of them over ranks, in one exchange.

    Without it every `backward()` sums its own, and gradients add up just the same. Where weights lie in pieces (`zero=`) each backward sums
    its gradients into the pieces in any case. Of a model that is not divided it changes nothing.

    Args:
        last: whether this is the last backward before the optimizer's step, which sums over ranks.

    >>> import torch, weft
    >>> net = weft.auto_parallelize(torch.nn.Linear(2, 2), (torch.ones(4, 2),), plan="data=1")
    >>> for number in (1, 2):
    ...     with weft.accumulate(net, last=number == 2):
    ...         (net(torch.ones(4, 2)).mean() / 2).backward()
    """
    blocks = ExitStack()
    for _, one in [] if last else sharded_modules_of(model):
        if one.way.exchange is not None:
            blocks.enter_context(one.way.exchange.holding())
    return blocks
