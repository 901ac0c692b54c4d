"""Calibrated constants by name. In: sections `protocol`, `library` and `stack` of `cluster/catalogue.toml`, and `cluster/curves.toml`. Out:
frozen numbers with a source.

`Protocols`: what a library of collectives reaches on its links, a `Stack` what a training framework reaches on a GPU: by default `TORCH`,
what weft itself runs. Constants are fitted once, by `scripts/validate --fit` and `bench.devices`, and then stay as they are. Not modelled:
versions between those that were measured.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from importlib import resources
from typing import Any

from weft.cluster.catalogue import section
from weft.cluster.cluster import Device, Table
from weft.errors import ConfigError
from weft.plan.precision import PRECISIONS
from weft.units import format_percent

TORCH = "torch"  # the set of a catalogue's devices: torch's kernels, NCCL, a fused optimizer, 16-bit weights and activations
EAGER = "eager"  # that of a card that was measured here: the same, autocast, one operator after another unless they are compiled


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
    curves: tuple[Table, ...] = ()  # measured inside a node; they win over its lines

    def curve(self, collective: str, ranks: int) -> Table | None:
        """What was measured of a collective, among so many ranks or the number nearest to it."""
        curves = [one for one in self.curves if one.collective == collective]
        return min(curves, key=lambda one: max(one.ranks, ranks) / min(one.ranks, ranks), default=None)


@dataclass(frozen=True, slots=True)
class Library:
    """A library of kernels for processors. Of convolutions: `block`, channels of each group where it has no kernel for depthwise windows;
    `first`, channels that a first layer reads at most, whose kernels take them as they are; `small`, channels times the first two sides of
    one sample up to which torch makes its convolution itself, but where both of the last sides of the window are above `wide`; `moved`,
    and of volumes `moved_3d`: bytes that move besides a product for each byte of columns, each way. Of recurrences: `line`, bytes of a
    cache's line, to which rows are filled; `together`, columns a multiple of which fall together in a cache.
    """

    block: int
    first: int
    small: int
    wide: int
    moved: float
    moved_3d: float
    line: int
    together: int
    source: str = ""


@dataclass(frozen=True, slots=True)
class Stack:
    """How efficient a training framework is on a kind of GPU, in mixed precision: 16-bit weights, gradients and activations, or with
    `autocast` of operators over float32 weights, which run one by one unless a layout has them compiled.

    Products: `matmul` is the part of the peak that unboundedly large ones reach, `operands` the part of the time of moving their
    operands that is not hidden, `product_s` what the device takes to begin one, `unaligned` what is left of the rate where a side is no
    multiple of 8, `sustained` what is left of it in a training step, whose load lowers clocks, where products were measured alone. Bytes:
    `bandwidth` is the part of the memory's that kernels reach, `traffic` and `loss_traffic` what they move against the graph's own count
    (masks and casts are more), `score_traffic` the same for attention's scores. `attention` keeps its "scores" or is "fused": forward at
    `attention_peak` of the peak on the scores that it forms, with heads of d over S positions 1/((1 + `attention_positions`/S)(1 +
    `attention_head`/d)) of that, backward at `attention_backward` of forward's rate; the softmax of kept scores takes `softmax_batches`
    heads at a time, others take the slow way (0: all are taken). `launch_s`: host time of a kernel. `tensor`: time of collectives between
    products against the library's own; `tensor_overlap`: the part of those of backward that runs behind the products of the weights'
    gradients. `microbatch_s`: host time of a microbatch on a stage. `gradient_bytes`: width of float16's gradients; `accumulate_bytes`:
    moved a parameter and microbatch to add to those; `optimizer_bytes`: moved a parameter and step. `overlap`: part of the last backward
    that sums of gradients hide behind; what hides takes `contention` of its own time from the compute, since its kernels and its bytes
    share the device. `exposed_sends`: part of a stage's transfers that its rank waits for. `step_s`: the rest of a step. `spread`:
    relative standard deviation of ranks' times (see `weft.cost.devices.gpus.straggling`). `moves`: of kernels that run one by one, the part
    of the memory's bandwidth by kind; `convolution`: FLOP/s of convolutions by precision, with all that they do besides; elsewhere they
    reach what products do.
    """

    name: str
    device: str = ""  # whose own figures it has
    autocast: bool = False
    moves: tuple[tuple[str, float], ...] = ()
    convolution: tuple[tuple[str, float], ...] = ()
    matmul: float = 0.75
    operands: float = 0.5
    product_s: float = 0.0
    unaligned: float = 0.5
    sustained: float = 1.0
    bandwidth: float = 0.8
    traffic: float = 1.2
    loss_traffic: float = 2.0
    attention: str = "scores"
    attention_peak: float = 0.375
    attention_positions: float = 0.0
    attention_head: float = 0.0
    attention_backward: float = 1.0
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
    contention: float = 0.0
    exposed_sends: float = 1.0
    step_s: float = 1e-3
    spread: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        for key in ("matmul", "unaligned", "sustained", "bandwidth", "attention_peak", "attention_backward"):
            if not 0 < getattr(self, key) <= 1:
                raise ConfigError(f"stack {self.name}: {key} = {getattr(self, key):g}; it is a part, above 0 and at most 1")
        if self.attention not in ("scores", "fused"):
            raise ConfigError(f"stack {self.name}: attention = {self.attention!r}; use scores or fused")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and value < 0:
                raise ConfigError(f"stack {self.name}: {field.name} = {value:g}; it is not below zero")
        for key in ("tensor_overlap", "overlap", "contention"):
            if getattr(self, key) > 1:
                raise ConfigError(f"stack {self.name}: {key} = {getattr(self, key):g}; it is a part, at most 1")


    def moving(self, kind: str) -> float:
        """Part of the memory's bandwidth that kernels of `kind` reach one by one."""
        moves = dict(self.moves)
        return moves.get(kind, moves.get("elementwise", self.bandwidth / self.traffic))

    def words(self, device: Device, precision: str) -> str:
        """Whose figures they are, for who reads a plan."""
        if self.name not in (TORCH, EAGER):
            return f"{self.name}: of another framework, not of what weft runs; they were asked for by name"
        reached = format_percent(self.matmul * self.sustained)
        origin = f"as measured on {self.device}" if self.device else f"assumed, since none was measured on {device.name}"
        text = f"{self.name}: what weft runs, torch's kernels with fused attention, NCCL and a fused optimizer; "
        text += f"large products at {reached} of the peak, {origin}"
        if PRECISIONS[precision].products:
            narrow = "weights and activations in 16 bits as FSDP has them, of which autocast, as weft runs it, keeps up to a quarter more"
            text += "; autocast over float32 weights" if self.autocast else f"; {narrow}"
        return text


def stack_of(device: Device, name: str = "") -> Stack:
    """The efficiency set `name`, by default that of what weft runs, with its figures for this device where it has some.

    A set that says nothing of products has them at the device's own `matmul_efficiency`, and launches as the device's host does.

    >>> from weft.cluster.cluster import Cluster
    >>> stack_of(Cluster.parse("dgx-a100-80").device).name
    'torch'

    Raises:
        ConfigError: a name that is not known.
    """
    stacks, name = section("stack"), name or TORCH
    if name not in stacks:
        raise ConfigError(f"stack {name!r} is unknown; use one of {', '.join(stacks)}")
    table = _with_likes(stacks, name)
    devices = table.pop("on", {})
    here = {"matmul": device.matmul_efficiency, "launch_s": device.launch_s}
    mine = devices.get(chip_of(device.name, devices), {})
    sources = "; ".join(filter(None, (mine.get("source"), table.get("source"))))
    return parse_stack(name, {**here, **table, **mine, "device": device.name if mine else "", "source": sources})


def _with_likes(entries: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What stands under `name`, with what it does not say itself taken from the one that it is `like`.

    >>> _with_likes({"a": {"x": 1, "y": 2}, "b": {"like": "a", "y": 3}}, "b")
    {'x': 1, 'y': 3}
    """
    table = {**entries.get(entries[name].get("like", ""), {}), **entries[name]}
    return {key: value for key, value in table.items() if key != "like"}


def chip_of(name: str, devices: Iterable[str]) -> str:
    """The one of `devices` that a driver's name means, "" for none.

    >>> [chip_of(f"NVIDIA {name}", ["A100-40", "A100-80", "H200", "GH200-96"]) for name in ("A100-SXM4-80GB", "H200", "GH200 480GB", "T4")]
    ['A100-80', 'H200', 'GH200-96', '']
    """
    words = set(re.split(r"\W+", name))
    fitting = [key for key in devices if key == name or key.partition("-")[0] in words]
    return max(fitting, key=lambda key: sum(not words.isdisjoint((part, f"{part}GB")) for part in key.split("-")), default="")


def parse_stack(name: str, table: Mapping[str, Any]) -> Stack:
    """A `Stack` from a table; keys that are not there are the defaults. Raises `ConfigError` naming an unknown key."""
    defaults = {f.name: f.default for f in fields(Stack) if f.default is not MISSING}
    for key in table:
        if key not in defaults:
            raise ConfigError(f"stack {name}: {key} is unknown; it has {', '.join(defaults)}")
    values: dict[str, Any] = {key: tuple(value.items()) if isinstance(value, Mapping) else value for key, value in table.items()}
    return Stack(name, **values)


@cache
def onednn() -> Library:
    """The library that computes on processors."""
    return Library(**section("library")["onednn"])


@cache
def protocols(name: str) -> Protocols:
    """The rules of a library by name, as links give it in `protocol`.

    >>> protocols("nccl").net_ring.rate
    1.0

    Raises:
        ConfigError: a name or a key that is not known, or a key that is missing.
    """
    entries = section("protocol")
    if name not in entries:
        raise ConfigError(f"protocol {name!r} is unknown; use one of {', '.join(entries)}")
    return parse_protocols(name, _with_likes(entries, name), _curves().get(name, ()))


@cache
def _curves() -> Mapping[str, tuple[Table, ...]]:
    """Measured curves of collectives inside a node, by protocol; times are stored in microseconds."""
    text = resources.files("weft.cluster").joinpath("curves.toml").read_text()
    curves: dict[str, tuple[Table, ...]] = {}
    for name, by_collective in tomllib.loads(text)["curve"].items():
        curves[name] = tuple(
            Table(collective, int(ranks), tuple((float(size), 1e-6 * us) for size, us in points))
            for collective, by_ranks in by_collective.items() if isinstance(by_ranks, dict)
            for ranks, points in by_ranks.items()
        )  # fmt: skip
    return curves


def parse_protocols(name: str, table: Mapping[str, Any], curves: tuple[Table, ...] = ()) -> Protocols:
    """`Protocols` from tables `{ start, hop, rate }` by field, and measured `curves`.

    Raises `ConfigError` naming what is missing or unknown.
    """
    wanted = [f.name for f in fields(Protocols) if f.name not in ("name", "tree_saved", "source", "curves")]
    for key in (*wanted, *table):
        if key not in table or key not in (*wanted, "tree_saved", "source"):
            raise ConfigError(f"protocol {name}: {key} is {'missing' if key in wanted else 'unknown'}; it has {', '.join(wanted)}")
    others: dict[str, Any] = {key: table[key] for key in ("tree_saved", "source") if key in table}
    try:
        lines: dict[str, Any] = {key: Line(**table[key]) for key in wanted}
        return Protocols(name, **lines, **others, curves=curves)
    except TypeError as error:
        raise ConfigError(f"protocol {name}: each of its tables has start, hop and rate, and nothing else ({error})") from error
