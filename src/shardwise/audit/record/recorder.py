"""The record of one process: its pages, and what each event of the script adds to them.

A page ends at the first forward pass after an optimizer's step, not at the step: DeepSpeed writes weights back later, and scripts have
several optimizers. Not recorded: compiled code, evaluation, recomputation in backward, and steps after the last one asked for.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .page import Page
from .placement import local_tensor, take_shard
from .private import is_in_backward, tree_leaves
from .samples import describe_input, digest_of, sum_of_hashes, to_array
from .wrappers import clean_name, held_parameters, is_uninitialized, perturb_weights

_WAIT_FOR_RANKS_S = 120.0  # until all ranks have written their last page


@dataclass(frozen=True)
class RecorderOptions:
    """Choices of the audit. `noise`: seed of the perturbation of the weights, 0 for none; `unit`: the dtype that it is a rounding of."""

    folder: str
    num_steps: int = 3
    noise: int = 0
    unit: str = "float32"
    applies_dropout: bool = False
    stops: bool = True

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> RecorderOptions:
        """Read the variables that `shardwise audit` sets."""
        get = environment.get
        return cls(
            environment["SHARDWISE_AUDIT_FOLDER"], int(get("SHARDWISE_AUDIT_STEPS", "3")), int(get("SHARDWISE_AUDIT_NOISE", "0")),
            get("SHARDWISE_AUDIT_UNIT", "float32"), get("SHARDWISE_AUDIT_DROPOUT") == "keep", get("SHARDWISE_AUDIT_STOP") != "no",
        )  # fmt: skip


class Recorder:
    """Pages of this process, filled by hooks."""

    def __init__(self, options: RecorderOptions) -> None:
        self.options, self.number, self.page = options, 0, Page()
        self._roots: dict[int, nn.Module] = {}
        self._prefixes: dict[int, str] = {}  # of a root module whose names another one has, too
        self._names: dict[int, str] = {}  # of parameters
        self._modules: dict[int, str] = {}
        self._depth, self._has_stepped, self._is_lazy = 0, False, False
        self._stepping: list[Tensor] = []

    # ------------------------------------------------------------------------------------------- where the script is
    def is_idle(self) -> bool:
        """Return whether this moment is none of training in its first steps."""
        return torch.compiler.is_compiling() or self.number > self.options.num_steps or not torch.is_grad_enabled() or is_in_backward()

    def is_after_last(self) -> bool:
        """Return whether all steps have been recorded, so that only the weights after the last are missing."""
        return self.number >= self.options.num_steps

    def rank_and_size(self) -> tuple[int, int]:
        """Return this process's rank and the number of ranks."""
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            return distributed.get_rank(), distributed.get_world_size()
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

    # ------------------------------------------------------------------------------------------- modules
    def begin_forward(self, module: nn.Module) -> None:
        """Note that a module is called; the first call after a step begins a page."""
        if self.is_idle():
            return
        self._depth += 1
        if self._depth > 1 or next(module.parameters(), None) is None:
            return
        if any(type(p).__name__ == "FakeTensor" or p.device.type == "meta" for p in module.parameters()):
            return
        if self._has_stepped:
            self._turn_page()
            if self.number > self.options.num_steps:
                return
        self._add_root(module)
        first = next(clean_name(n) for n, _ in module.named_parameters())
        if self._prefixes[id(module)] + first not in self.page.weights:
            self._record_weights(module)
        if self.is_after_last():
            self._write()
            self._stop_script()

    def _add_root(self, module: nn.Module) -> None:
        if id(module) in self._roots:
            return
        names = {clean_name(n) for n, _ in module.named_parameters()}
        taken = {clean_name(n) for root in self._roots.values() for n, p in root.named_parameters() if id(p) in self._names}
        prefix = f"model{len(self._roots) + 1}." if names & taken and not self._shares_parameters(module) else ""
        self._roots[id(module)], self._prefixes[id(module)] = module, prefix
        self._modules.update({id(m): prefix + clean_name(n) or "(root)" for n, m in module.named_modules()})
        if self.options.noise:
            perturb_weights(module, self.options.noise + 1000 * (len(self._roots) - 1), self.options.unit)

    def _shares_parameters(self, module: nn.Module) -> bool:
        return any(id(p) in self._names for p in module.parameters())

    def end_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Record what a module put out, and what a root module was given."""
        if self.is_idle():
            return
        self._depth = max(0, self._depth - 1)
        name = self._modules.get(id(module))
        if name is None or self.is_after_last():
            return
        if self._depth == 0:
            leaves = tree_leaves((args, kwargs))
            tensors = [t for t in leaves if isinstance(t, Tensor) and not t.requires_grad]  # others are activations
            self.record_inputs(tensors)
            if self._is_lazy:  # modules that are initialised lazily have their weights only now
                self._is_lazy = False
                self._record_weights(module)
        found = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
        if found and found[0].device.type != "meta":
            self._record_output(name, type(module).__name__, found[0])

    def _record_output(self, name: str, kind: str, t: Tensor) -> None:
        is_partial = any(p.is_partial() for p in getattr(t, "placements", ()))
        local = local_tensor(t)
        by_unit = [self.page.coarsest, str(local.dtype).removeprefix("torch.")]
        self.page.coarsest = max(by_unit, key=lambda d: torch.finfo(getattr(torch, d)).eps)
        local = local.double()
        old = self.page.outputs.setdefault(name, [0, 0.0, 0.0, False])
        old[:] = [old[0] + local.numel(), old[1] + float(local.sum()), old[2] + float((local * local).sum()), old[3] or is_partial]
        self.page.kinds.setdefault(name, kind)

    def record_inputs(self, tensors: list[Tensor]) -> None:
        """Record one call's inputs by the digests of their rows."""
        self.page.inputs.append([row for row in map(describe_input, tensors) if row is not None])

    def _record_weights(self, root: nn.Module) -> None:
        rank, prefix = self.rank_and_size()[0], self._prefixes[id(root)]
        by_key: dict[object, list[str]] = {}
        for held in held_parameters(root, (), rank):
            name = prefix + held.name
            self._is_lazy = self._is_lazy or is_uninitialized(held.parameter)
            self._names[id(held.parameter)] = name
            by_key.setdefault(held.key, []).append(name)
            self.page.weights[name] = held.weight
        self.page.aliases.update({name: names for names in by_key.values() for name in names})
        for name, buffer in root.named_buffers():
            self.page.add_buffer(prefix + clean_name(name), take_shard(buffer) if buffer.dtype != torch.bool else None)

    # ------------------------------------------------------------------------------------------- optimizers
    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the gradients that an optimizer is about to use, and its settings."""
        self._depth = 0
        if self.is_after_last() or not self._roots:
            return
        own = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        known = own.keys() & self._names.keys()
        for root in self._roots.values():
            for held in held_parameters(root, list(own.values()), self.rank_and_size()[0]):
                if not known or id(held.parameter) in own:
                    self.page.gradients[self._prefixes[id(root)] + held.name] = held.gradient
        plain = (int, float, bool, str, tuple, list)
        settings = [{k: v for k, v in group.items() if isinstance(v, plain) and k != "params"} for group in optimizer.param_groups]
        for group, shown in zip(optimizer.param_groups, settings, strict=True):
            shown.update({k: float(v) for k, v in group.items() if isinstance(v, Tensor) and v.numel() == 1})
        self.page.optimizers.append(
            {"kind": type(optimizer).__name__, "held": len(own), "known": len(known), "settings": json_safe(settings)}
        )

    def end_step(self) -> None:
        """Note that an optimizer has stepped, so that the next forward pass begins a page."""
        self._has_stepped = bool(self._roots)

    # ------------------------------------------------------------------------------------------- functions
    def record_losses(self, tensors: Any) -> None:
        """Record the scalars that a backward pass begins at."""
        for t in [tensors] if isinstance(tensors, Tensor) else tensors or ():
            if isinstance(t, Tensor) and t.numel() == 1 and not self.is_after_last() and not torch.compiler.is_compiling():
                self.page.losses.append(float(local_tensor(t)))

    def record_targets(self, target: Any, reduction: str, ignored: int | None) -> None:
        """Record how many targets a loss function has, and their fingerprint."""
        if not isinstance(target, Tensor) or target.device.type == "meta" or self.is_idle() or self.is_after_last():
            return
        local = local_tensor(target)
        counted = local.numel() if ignored is None or local.is_floating_point() else int((local != ignored).sum())
        fingerprint = str(sum_of_hashes(to_array(local)))
        self.page.targets.append({"counted": counted, "elements": local.numel(), "reduction": reduction, "sum": fingerprint})

    def record_norm(self, norm: Any) -> None:
        """Record the norm that clipping measured, where that is one number on every rank."""
        if isinstance(norm, Tensor) and not hasattr(norm, "placements") and norm.numel() == 1 and not self.is_after_last():
            self.page.norms.append(float(local_tensor(norm)))

    def record_mask(self, inputs: Tensor, outputs: Tensor) -> None:
        """Record a dropout mask by the digests of the mask and of what it is applied to."""
        if not self.is_idle() and not self.is_after_last() and inputs.device.type != "meta":
            given = to_array(inputs)
            mask = digest_of((to_array(outputs) == 0) & (given != 0))
            self.page.masks.append({"mask": mask, "input": digest_of(given), "elements": int(given.size)})

    # ------------------------------------------------------------------------------------------- pages
    def _turn_page(self) -> None:
        self._has_stepped = False
        self._write()
        self.number += 1
        self.page = Page()

    def _write(self) -> None:
        rank, size = self.rank_and_size()
        self.page.write(os.path.join(self.options.folder, f"rank{rank}"), self.number, rank, size)

    def add_page(self, page: Page) -> None:
        """Write a page that was made as a whole, and begin the next."""
        self.page = page
        if self.number <= self.options.num_steps:
            self._write()
        self.number += 1
        if self.number > self.options.num_steps:
            self._stop_script()

    def _stop_script(self) -> None:
        """End the process once all ranks have written their last page; other hosts' ranks may not be seen, and the script then goes on."""
        if not self.options.stops:
            return
        deadline, (_, size) = time.monotonic() + _WAIT_FOR_RANKS_S, self.rank_and_size()
        last = [os.path.join(self.options.folder, f"rank{r}", f"{self.options.num_steps}.json") for r in range(size)]
        while time.monotonic() < deadline:
            if all(map(os.path.exists, last)):
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)
            time.sleep(0.02)

    def finish(self) -> None:
        """Write the weights after the last step that the script made, at its end."""
        if self._roots and self.number < self.options.num_steps:
            if self._has_stepped:
                self._turn_page()
                for root in self._roots.values():
                    self._record_weights(root)
            self._write()


def json_safe(value: Any) -> Any:
    """Return nested settings with only JSON types."""
    if isinstance(value, dict):
        return {str(k): json_safe(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(v) for v in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
