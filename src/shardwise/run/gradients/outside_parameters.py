"""Gradients of parameters outside of divided modules: layers in front of, between or beside them, and parameters that the loop holds.

Every rank computes what is outside by itself. With each rank's shard of the samples, the gradient of an outside parameter is this rank's
alone; with the whole batch it is complete on every rank, up to rounding. Both are averaged over ranks when backward ends, so that all
ranks update alike. A backward finds the outside parameters by the autograd graph between the loss, the outputs of divided modules and
their inputs, whose insides it does not visit.

Not modelled: `torch.autograd.grad` by outside parameters, with shards of the samples, through a reference that no module has by a name of
its own (a `functools.partial` of it that was made before the first division): it gives this rank's gradient.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, wraps
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.capture.nesting import BatchLeaves, tensors_in
from shardwise.errors import UsageError
from shardwise.world import private
from shardwise.world.world import World

_METADATA_KEY = "shardwise call"  # of an autograd node that computes an output of a divided module


@dataclass(frozen=True)
class ModuleCall:
    """One call of a divided module on this rank. `num_local_samples`: 0 if every rank has the whole batch. `relative_share`: this rank's
    samples over an equal share. `own_parameters`: ids of the module's parameters, whose gradients are reduced."""

    world: World
    own_parameters: frozenset[int]
    num_local_samples: int = 0
    relative_share: float = 1.0
    inputs: list[Tensor] = field(default_factory=list)

    def record(self, arguments: Any, outputs: Any) -> None:
        """Record the call at the autograd nodes of its outputs."""
        if self.world.num_ranks == 1:
            return
        if not torch.is_grad_enabled():
            patch_autograd().note_unreduced(self)
            return
        self.inputs.extend([x for x in BatchLeaves(arguments).tensors.values() if x.requires_grad])
        with private.as_base_tensor():
            for x in (outputs,) if isinstance(outputs, Tensor) else BatchLeaves(outputs).tensors.values():
                if x.grad_fn is not None:
                    x.grad_fn.metadata[_METADATA_KEY] = self  # type: ignore[index]  # torch's stub takes the property for a method


@dataclass
class AutogradPatch:
    """State of the patch of `torch.autograd`. `unreduced_call`: the first call without gradients, with a shard of the samples, since the
    last reduced backward."""

    unreduced_call: ModuleCall | None = None
    root: Any = None  # the node that the running backward starts from with a gradient of one, if it is a single one

    def note_unreduced(self, call: ModuleCall) -> None:
        """Note a call without gradients."""
        if self.unreduced_call is None and call.num_local_samples:
            self.unreduced_call = call

    def warn_unreduced(self, parameters: Sequence[Tensor]) -> None:
        """Warn once that parameters train on this rank's samples alone, since no divided module is in their graph."""
        if self.unreduced_call is None or not parameters:
            return
        samples, self.unreduced_call = self.unreduced_call.num_local_samples, None
        warnings.warn(
            f"a loss trains {len(parameters)} parameters (the first is {list(parameters[0].shape)}) outside of divided modules, after a "
            f"divided module computed without gradients on this rank's {samples} samples: their gradients are not averaged over ranks. "
            "Divide the module that holds them, call the divided module with gradients, or give every rank the whole batch",
            stacklevel=4,
        )


@dataclass(frozen=True)
class OutsideGraph:
    """The autograd graph of some tensors outside of divided modules: the calls of these that it reaches, and its leaves."""

    calls: list[ModuleCall]
    leaves: list[Tensor]

    @property
    def parameters(self) -> list[Tensor]:
        """Parameters that no divided module reduces."""
        if not self.leaves:
            return []
        reduced = frozenset[int]().union(*(call.own_parameters for call in self.calls))
        return [x for x in self.leaves if _is_whole_parameter(x) and id(x) not in reduced]

    def relative_share(self) -> float:
        """Return the share by which this rank's gradients count. Raises UsageError if calls have different ones."""
        local = [call for call in self.calls if call.num_local_samples]
        shares = {call.relative_share for call in local}
        if len(shares) > 1:
            raise UsageError(
                f"one loss is made of calls of divided modules with {', '.join(str(c.num_local_samples) for c in local)} samples on this "
                "rank, which count differently for parameters outside of them; draw both batches with the same number of samples "
                "(drop_last=True), or put the outside parameters into the module that is divided"
            )
        return shares.pop() if shares else 1.0

    def check_leaves(self) -> None:
        """Raise UsageError if a leaf requires a gradient of which it is unknown whether it is of all samples or of this rank's."""
        local = [call for call in self.calls if call.num_local_samples] if self.leaves else []
        for x in self.leaves if local else ():
            if not isinstance(x, nn.Parameter) and not any(x.shape[:1] == (call.num_local_samples,) for call in local):
                raise UsageError(
                    f"a tensor {list(x.shape)} outside of the divided module requires a gradient, and is neither an nn.Parameter nor as "
                    f"long as this rank's {local[0].num_local_samples} samples: make it an nn.Parameter, whose gradient is that of all "
                    "ranks' samples, or give every rank the whole batch (leave shardwise.shard out)"
                )


def _is_whole_parameter(x: Tensor) -> bool:
    return isinstance(x, nn.Parameter) and getattr(x, "spec", None) is None  # shards of divided modules have a spec


def trace_outside_graph(tensors: Iterable[Tensor], nodes: Iterable[Any] = ()) -> OutsideGraph:
    """Return the graph of `tensors` and autograd `nodes` up to its leaves, without the insides of divided modules."""
    calls: dict[int, ModuleCall] = {}
    leaves: dict[int, Tensor] = {}
    visited: set[Any] = set()
    pending: list[Any] = list(nodes)

    def add(x: Tensor) -> None:
        if x.grad_fn is not None:
            pending.append(x.grad_fn)
        elif x.requires_grad:
            leaves.setdefault(id(x), x)

    for x in tensors:
        add(x)
    while pending:
        node = pending.pop()
        if node in visited:
            continue
        visited.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            leaves.setdefault(id(leaf), leaf)
        elif (call := node.metadata.get(_METADATA_KEY)) is None:
            pending.extend(child for child, _ in node.next_functions if child is not None)
        elif id(call) not in calls:
            calls[id(call)] = call
            for x in call.inputs:
                add(x)
    return OutsideGraph(list(calls.values()), list(leaves.values()))


@cache
def patch_autograd() -> AutogradPatch:
    """Patch `torch.autograd.backward` and `torch.autograd.grad`, which `Tensor.backward` and penalties call, to average over ranks."""
    patch, backward, grad = AutogradPatch(), torch.autograd.backward, torch.autograd.grad

    @wraps(backward)
    def backward_and_average(tensors: Any, *args: Any, **kwargs: Any) -> None:
        outside = trace_outside_graph(tensors_in(tensors))
        if not outside.calls:
            patch.warn_unreduced(outside.parameters)
            return backward(tensors, *args, **kwargs)
        root = _find_root(tensors, args, kwargs)
        run_and_average(outside, root, lambda: backward(tensors, *args, **kwargs), kwargs.get("inputs"))

    @wraps(grad)
    def grad_and_average(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        gradients = grad(outputs, inputs, *args, **kwargs)
        wanted = list(tensors_in(inputs))
        if not any(map(_is_whole_parameter, wanted)):
            return gradients
        outside = trace_outside_graph(tensors_in(outputs))
        ids = {id(p) for p in outside.parameters}
        positions = [i for i, x in enumerate(wanted) if id(x) in ids and gradients[i] is not None]
        if not positions or not any(call.num_local_samples for call in outside.calls):
            return gradients
        if gradients[positions[0]].requires_grad:
            raise UsageError(
                f"create_graph=True by a parameter {list(wanted[positions[0]].shape)} outside of the divided module is this rank's "
                "gradient alone: give every rank the whole batch (leave shardwise.shard out)"
            )
        averaged = list(gradients)
        _average_tensors([averaged[i] for i in positions], outside.relative_share(), outside.calls[0].world)
        return tuple(averaged)

    if backward is private.TORCH_BACKWARD:
        private.TRANSPARENT_BACKWARDS.add(backward_and_average)
    torch.autograd.backward = backward_and_average
    torch.autograd.grad = grad_and_average
    _replace_imported_names({backward: backward_and_average, grad: grad_and_average})
    return patch


def run_and_average(outside: OutsideGraph, root: Any, run: Callable[[], None], inputs: Any = None) -> None:
    """Run a backward that reaches calls of divided modules, and average the gradients of what is outside of them. `root`: the node that it
    starts from with a gradient of one, if it is a single one. `inputs`: the tensors that it differentiates by, if not all."""
    patch, parameters = patch_autograd(), outside.parameters
    patch.unreduced_call = None
    outside.check_leaves()
    if inputs is not None:
        wanted = {id(x) for x in tensors_in(inputs)}
        parameters = [p for p in parameters if id(p) in wanted]
    share = outside.relative_share() if parameters else 1.0
    earlier, patch.root = patch.root, root
    try:
        run()
    finally:
        patch.root = earlier
    if parameters:
        _average_gradients(parameters, share, outside.calls[0].world)


_BACKWARD_NAMES = (
    "grad_tensors",
    "retain_graph",
    "create_graph",
    "grad_variables",
    "inputs",
)  # of `torch.autograd.backward`, after tensors


def _find_root(tensors: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the node of a backward's single tensor if its gradient is one: nobody gives another, and no hook changes it."""
    given = {**dict(zip(_BACKWARD_NAMES, args, strict=False)), **kwargs}
    has_gradient = given.get("grad_tensors") is not None or given.get("grad_variables") is not None
    if not isinstance(tensors, Tensor) or has_gradient or given.get("create_graph"):
        return None
    return None if private.has_gradient_hooks(tensors) else tensors.grad_fn


def is_backward_root(node: Any) -> bool:
    """Return whether the running backward starts from this node alone, with a gradient of one: as on every rank."""
    return patch_autograd().root is node


def _replace_imported_names(replaced: Mapping[Callable[..., Any], Callable[..., Any]]) -> None:
    """Replace functions in modules that imported them by name (`from torch.autograd import grad`), other than torch's and ours."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("torch", "shardwise"):
            continue
        for key, value in list(getattr(module, "__dict__", {}).items()):
            if type(value) is FunctionType and value in replaced:
                setattr(module, key, replaced[value])


def _average_gradients(parameters: Sequence[Tensor], share: float, world: World) -> None:
    """Average the gradients of parameters over ranks, each times its share."""
    sparse = next((p for p in parameters if p.grad is not None and p.grad.is_sparse), None)
    if sparse is not None:
        raise UsageError(
            f"a parameter {list(sparse.shape)} outside of the divided module has a sparse gradient, which ranks do not average: make its "
            "layer with sparse=False, or divide the model that holds it"
        )
    with torch.no_grad():
        _average_tensors([p.grad for p in parameters if p.grad is not None], share, world)


def _average_tensors(tensors: Sequence[Tensor], share: float, world: World) -> None:
    """Average tensors over all ranks in place, each rank's times `share`.

    Raises:
        UsageError: on all ranks, if they have different ones.
    """
    group, sizes = world.world_group, [x.numel() for x in tensors]
    local = torch.tensor([[len(sizes), sum(sizes)]], dtype=torch.int64, device=world.device)
    counts = group.all_gather(local, 0).tolist()
    if any(count != counts[0] for count in counts):
        listing = "; ".join(f"rank {rank}: {count} with {size} elements" for rank, (count, size) in enumerate(counts))
        raise UsageError(
            f"ranks train different parameters outside of the divided module in one backward ({listing}), whose gradients cannot be "
            "averaged: divide the whole model, or use the same on all ranks (add 0 * parameter.sum() to the loss)"
        )
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for x in tensors:
        by_dtype.setdefault(x.dtype, []).append(x)
    for same in by_dtype.values():
        reals = [torch.view_as_real(x) if x.is_complex() else x for x in same]
        flat = torch.cat([x.reshape(-1) for x in reals]).to(world.device).mul_(share / world.num_ranks)
        group.all_reduce(flat)
        for x, average in zip(reals, torch.split(flat, [x.numel() for x in reals]), strict=True):
            x.copy_(average.view(x.shape))
