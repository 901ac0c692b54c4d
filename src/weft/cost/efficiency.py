"""Calibrated constants by name. In: the sections `protocol` and `stack` of `cluster/catalogue.toml`. Out: frozen numbers with a source.

`Protocols` are what a library of collectives reaches on its links, a `Stack` what a training framework reaches on a GPU. Constants are
fitted once, by `scripts/validate --fit`, and then stay as they are. Not modelled: versions between those that were measured.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from importlib import resources
from typing import Any

from weft.cluster.cluster import Device
from weft.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Line:
    """An algorithm with a protocol: `start` and `hop` in latencies of the link, `rate` as a part of its large-message bandwidth."""

    start: float
    hop: float
    rate: float

    def __post_init__(self) -> None:
        if self.start < 0 or self.hop < 0 or self.rate <= 0:
            raise ConfigError(f"a protocol with {self}: start and hop are not below zero, rate is above it")


@dataclass(frozen=True, slots=True)
class Protocols:
    """What a library offers inside a node (rings) and between nodes (trees with LL, LL128 and Simple, and rings).

    `tree_saved`: 1 where a tree over N nodes moves 2(N-1)/N of the tensor through a node's port, as double binary trees do (Sanders
    et al. 2009), 0 where it was measured to take as long as if it moved all of it twice.
    """

    name: str
    node_ll: Line
    node_simple: Line
    net_ll: Line
    net_ll128: Line
    net_tree: Line
    net_ring: Line
    tree_saved: float = 0.0
    source: str = ""


@dataclass(frozen=True, slots=True)
class Stack:
    """How efficient a training framework is on a kind of GPU, in mixed precision as Megatron-LM has it.

    Products: `matmul` is the part of the peak that unboundedly large ones reach, `operands` the part of the time of moving their
    operands that is not hidden, `unaligned` what is left of the rate where a side is no multiple of 8. Bytes: `bandwidth` is the part
    of the memory's that kernels reach, `traffic` and `loss_traffic` what they move against the graph's own count (masks and casts
    are more), `score_traffic` the same for attention's scores. `attention` keeps its "scores" or is "fused", at `attention_matmul` of
    the rate of products (above 1 where it skips what a causal mask hides); the fused softmax takes `softmax_batches` heads at a
    time, others take the slow way (0: all are taken). `launch_s`: host time of a kernel. `tensor`: time of collectives between
    products against the library's own; `tensor_overlap`: the part of those of backward that runs behind the products of the
    weights' gradients. `microbatch_s`: host time of a microbatch on a stage. `gradient_bytes`: width of float16's gradients;
    `accumulate_bytes`: moved a parameter and microbatch to add to those; `optimizer_bytes`: moved a parameter and step. `overlap`: part
    of the last backward that sums of gradients hide behind. `exposed_sends`: part of a stage's transfers that its rank waits for.
    `step_s`: the rest of a step. `spread`: relative standard deviation of ranks' times (see `weft.cost.step.straggling`).
    """

    name: str
    devices: tuple[str, ...] = ()  # that have it by default
    matmul: float = 0.75
    operands: float = 0.5
    unaligned: float = 0.5
    bandwidth: float = 0.8
    traffic: float = 1.2
    loss_traffic: float = 2.0
    attention: str = "scores"
    attention_matmul: float = 0.7
    score_traffic: float = 1.0
    softmax_batches: int = 0
    launch_s: float = 0.0
    tensor: float = 1.0
    tensor_overlap: float = 0.0
    microbatch_s: float = 0.0
    gradient_bytes: float = 2.0
    accumulate_bytes: float = 6.0
    optimizer_bytes: float = 30.0
    overlap: float = 0.0
    exposed_sends: float = 1.0
    step_s: float = 1e-3
    spread: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        for key in ("matmul", "unaligned", "bandwidth"):
            if not 0 < getattr(self, key) <= 1:
                raise ConfigError(f"stack {self.name}: {key} = {getattr(self, key):g}; it is a part, above 0 and at most 1")
        if self.attention not in ("scores", "fused"):
            raise ConfigError(f"stack {self.name}: attention = {self.attention!r}; use scores or fused")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and value < 0:
                raise ConfigError(f"stack {self.name}: {field.name} = {value:g}; it is not below zero")
        if self.tensor_overlap > 1 or self.overlap > 1:
            raise ConfigError(
                f"stack {self.name}: tensor_overlap = {self.tensor_overlap:g}, overlap = {self.overlap:g}; parts are at most 1"
            )


def stack_of(device: Device, name: str = "") -> Stack:
    """The efficiency set `name`, or the one that a device has by default; else the generic one at the device's own efficiency.

    >>> from weft.cluster.cluster import Cluster
    >>> stack_of(Cluster.parse("dgx-a100-80").device).name
    'a100-megatron'

    Raises:
        ConfigError: a name that is not known.
    """
    known = _section("stack")
    if name and name not in known:
        raise ConfigError(f"stack {name!r} is unknown; use one of {', '.join(known)}")
    for key, given in known.items():
        if key == name or (not name and device.name in given.get("devices", ())):
            return parse_stack(key, given)
    return parse_stack("generic", {**known["generic"], "matmul": device.matmul_efficiency, "launch_s": device.launch_s})


def parse_stack(name: str, given: Mapping[str, Any]) -> Stack:
    """A `Stack` from a table; keys that are not there are the defaults. Raises `ConfigError` naming an unknown key."""
    known = {f.name: f.default for f in fields(Stack) if f.default is not MISSING}
    for key in given:
        if key not in known:
            raise ConfigError(f"stack {name}: {key} is unknown; it has {', '.join(known)}")
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    return Stack(name, **values)


@cache
def _section(kind: str) -> Mapping[str, Any]:
    text = resources.files("weft.cluster").joinpath("catalogue.toml").read_text()
    found: Mapping[str, Any] = tomllib.loads(text)[kind]
    return found


@cache
def protocols(name: str) -> Protocols:
    """The rules of a library by name, as links give it in `protocol`.

    >>> protocols("nccl").net_ring.rate
    1.0

    Raises:
        ConfigError: a name or a key that is not known, or a key that is missing.
    """
    known = _section("protocol")
    if name not in known:
        raise ConfigError(f"protocol {name!r} is unknown; use one of {', '.join(known)}")
    return parse_protocols(name, known[name])


def parse_protocols(name: str, given: Mapping[str, Any]) -> Protocols:
    """`Protocols` from tables `{ start, hop, rate }` by field. Raises `ConfigError` naming what is missing or unknown."""
    wanted = [f.name for f in fields(Protocols) if f.name not in ("name", "tree_saved", "source")]
    for key in (*wanted, *given):
        if key not in given or key not in (*wanted, "tree_saved", "source"):
            raise ConfigError(f"protocol {name}: {key} is {'missing' if key in wanted else 'unknown'}; it has {', '.join(wanted)}")
    others: dict[str, Any] = {key: given[key] for key in ("tree_saved", "source") if key in given}
    try:
        lines: dict[str, Any] = {key: Line(**given[key]) for key in wanted}
        return Protocols(name, **lines, **others)
    except TypeError as error:
        raise ConfigError(f"protocol {name}: each of its tables has start, hop and rate, and nothing else ({error})") from error
