"""A lowered stage split into one child module per layer, so that layers can be recomputed, gathered or offloaded individually.

A child contains a run of consecutive operators of one layer, identified by the number that lowering has written on each node; operators
between two layers form a run too, which is not a layer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from torch import fx
from torch.fx.passes.split_module import split_module

from shardwise.lower.local import LocalStage, snapshot_buffer
from shardwise.lower.redistribute import redistribute, scale_gradient
from shardwise.world import private


@dataclass(frozen=True)
class LayeredStage:
    """A stage whose module has the children `names[number]`; those in `layer_numbers` are layers, called `layers[number]`."""

    local: LocalStage
    names: Mapping[int, str]
    layers: Mapping[int, str]
    layer_numbers: frozenset[int]
    reads_written_buffers: frozenset[int]  # runs that read a buffer written while the model runs
    in_regions: frozenset[int]  # runs in parallel branches, where ranks run different operators

    def numbers_of_layers(self, layers: Collection[str]) -> frozenset[int]:
        """Return the run numbers of these layers."""
        return frozenset(number for number in self.layer_numbers if self.layers[number] in layers)

    def child(self, number: int) -> fx.GraphModule:
        """Return the child module of one run."""
        module = getattr(self.local.module, self.names[number])
        assert isinstance(module, fx.GraphModule)
        return module


def number_operators(module: fx.GraphModule) -> dict[fx.Node, tuple[int, bool]]:
    """Return (run number, whether it is a layer) of every operator; a stage without layers is one layer."""
    numbers: dict[fx.Node, tuple[int, bool]] = {n: n.meta["part"] for n in module.graph.nodes if n.op in ("call_function", "call_module")}
    if not any(repeated for _, repeated in numbers.values()):
        return dict.fromkeys(numbers, (0, True))
    return numbers


def layers_reading(stages: Mapping[int, LocalStage]) -> dict[str, tuple[tuple[int, int], ...]]:
    """Return by variable the (stage, run number) of all operators that read it, in order."""
    layers: dict[str, set[tuple[int, int]]] = {}
    for stage, local in stages.items():
        if not isinstance(local.module, fx.GraphModule):
            continue
        numbers = number_operators(local.module)
        inputs = [node for node in local.module.graph.nodes if node.op == "placeholder"]
        for value, node in zip(local.variables, inputs, strict=False):
            layers.setdefault(value, set()).update((stage, numbers[reader][0]) for reader in _transitive_readers(node) if reader in numbers)
    return {value: tuple(sorted(units)) for value, units in layers.items()}


def _transitive_readers(node: fx.Node) -> set[fx.Node]:
    """Return all nodes that read the memory of a node's result: its users, and those of possible views of it."""
    readers: set[fx.Node] = set()
    pending = list(node.users)
    while pending:
        reader = pending.pop()
        if reader not in readers:
            readers.add(reader)
            pending += reader.users if _may_be_view(reader) else ()
    return readers


def _may_be_view(node: fx.Node) -> bool:
    """Return whether a result may alias its input: a redistribution without communication does, and operators that make views."""
    if getattr(node.target, "__name__", "") in (redistribute.__name__, scale_gradient.__name__):
        return True
    return private.makes_view(node.target)


def reads_written_buffer(local: LocalStage) -> bool:
    """Return whether a stage reads a buffer that is written while the model runs, other than batch norm statistics."""
    modules = (m for m in local.module.modules() if isinstance(m, fx.GraphModule))
    return any(node.target is snapshot_buffer for m in modules for node in m.graph.nodes)


def split_by_layer(local: LocalStage, merged: Mapping[int, int] | None = None) -> LayeredStage:
    """Split a stage into one child module per run, in order. `merged`: for runs merged into one child, the number of the first of them."""
    assert isinstance(local.module, fx.GraphModule)  # only a captured model is lowered
    numbers = {node: ((merged or {}).get(number, number), layer) for node, (number, layer) in number_operators(local.module).items()}
    split = split_module(local.module, local.module, lambda node: numbers[node][0], keep_original_order=True)
    names = {int(name.removeprefix("submod_")): name for name, _ in split.named_children() if name.startswith("submod_")}
    layers = {number: str(node.meta.get("layer", "")) for node, (number, _) in numbers.items()}
    reading = frozenset(number for node, (number, _) in numbers.items() if node.target is snapshot_buffer)
    in_regions = frozenset(number for node, (number, _) in numbers.items() if node.meta["in_region"])
    layer_numbers = frozenset(number for number, layer in numbers.values() if layer)
    return LayeredStage(replace(local, module=split), names, layers, layer_numbers, reading, in_regions)
