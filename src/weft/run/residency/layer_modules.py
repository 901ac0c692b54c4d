"""A lowered stage cut into its layers, so that each can be run again, gathered or moved by itself.

In: a lowered stage. Out: the same stage whose module calls one child for each run of operators of one layer. Layers are told apart by
the number of the run that lowering wrote on each node; what stands between two layers is a run too, but no layer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from torch import fx
from torch.fx.passes.split_module import split_module

from weft.lower.local import LocalStage, snapshot
from weft.lower.redistribute import counted, redistribute
from weft.world import private


@dataclass(frozen=True)
class Layered:
    """`local.module` has the children `names[number]`; `repeated` are the numbers of those that are layers, called `layers[number]`."""

    local: LocalStage
    names: Mapping[int, str]
    layers: Mapping[int, str]
    repeated: frozenset[int]
    reads_written: frozenset[int]  # those that read a buffer which is written while the model runs
    in_regions: frozenset[int]  # those among parallel branches, where ranks run different operators

    def numbers_of(self, layers: Collection[str]) -> frozenset[int]:
        """The runs of these layers."""
        return frozenset(number for number in self.repeated if self.layers[number] in layers)

    def child(self, number: int) -> fx.GraphModule:
        """The operators of one run."""
        module = getattr(self.local.module, self.names[number])
        assert isinstance(module, fx.GraphModule)
        return module


def numbers_of(module: fx.GraphModule) -> dict[fx.Node, tuple[int, bool]]:
    """The run of every operator, and whether it is a layer; in a stage without layers everything is one."""
    numbers: dict[fx.Node, tuple[int, bool]] = {n: n.meta["part"] for n in module.graph.nodes if n.op in ("call_function", "call_module")}
    if not any(repeated for _, repeated in numbers.values()):
        return dict.fromkeys(numbers, (0, True))
    return numbers


def layers_of(stages: Mapping[int, LocalStage]) -> dict[str, tuple[tuple[int, int], ...]]:
    """By variable: (stage, number of the run) of all operators that read it, in order."""
    layers: dict[str, set[tuple[int, int]]] = {}
    for stage, local in stages.items():
        if not isinstance(local.module, fx.GraphModule):
            continue
        numbers = numbers_of(local.module)
        inputs = [node for node in local.module.graph.nodes if node.op == "placeholder"]
        for value, node in zip(local.variables, inputs, strict=False):
            layers.setdefault(value, set()).update((stage, numbers[reader][0]) for reader in _readers(node) if reader in numbers)
    return {value: tuple(sorted(units)) for value, units in layers.items()}


def _readers(node: fx.Node) -> set[fx.Node]:
    """All that read the memory of a node's result: its users, and those of results that may be views of it."""
    readers: set[fx.Node] = set()
    open_ = list(node.users)
    while open_:
        reader = open_.pop()
        if reader not in readers:
            readers.add(reader)
            open_ += reader.users if _may_be_view(reader) else ()
    return readers


def _may_be_view(node: fx.Node) -> bool:
    """A redistribution that moves nothing hands on what it got; operators say it of themselves."""
    if getattr(node.target, "__name__", "") in (redistribute.__name__, counted.__name__):
        return True
    return private.makes_view(node.target)


def reads_written(local: LocalStage) -> bool:
    """Whether a stage reads a buffer that is written while the model runs, in another way than batch norm does."""
    modules = (m for m in local.module.modules() if isinstance(m, fx.GraphModule))
    return any(node.target is snapshot for m in modules for node in m.graph.nodes)


def by_layer(local: LocalStage, first: Mapping[int, int] | None = None) -> Layered:
    """Cut a stage into runs. The children of the new module are made from the old one's nodes, in their order.

    `first`: of runs that are one child together, the number of the first, which is then that of all.
    """
    assert isinstance(local.module, fx.GraphModule)  # only a captured model is lowered
    numbers = {node: ((first or {}).get(number, number), layer) for node, (number, layer) in numbers_of(local.module).items()}
    split = split_module(local.module, local.module, lambda node: numbers[node][0], keep_original_order=True)
    names = {int(name.removeprefix("submod_")): name for name, _ in split.named_children() if name.startswith("submod_")}
    layers = {number: str(node.meta.get("layer", "")) for node, (number, _) in numbers.items()}
    read = frozenset(number for node, (number, _) in numbers.items() if node.target is snapshot)
    regions = frozenset(number for node, (number, _) in numbers.items() if node.meta["in_region"])
    repeated = frozenset(number for number, layer in numbers.values() if layer)
    return Layered(replace(local, module=split), names, layers, repeated, read, regions)
