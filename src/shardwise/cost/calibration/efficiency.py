"""Calibrated efficiency constants by name, each with its source, from sections `protocol`, `library` and `stack` of
`cluster/catalogue.toml` and from `cluster/curves.toml`.

`Protocols` holds what a collective library reaches on its links, an efficiency set what a training framework reaches on a GPU: by default
`TORCH`, what shardwise itself runs. Constants are fitted once, by `scripts/validate --fit` and `bench.devices`, and then fixed. Not
modelled:
versions between the measured ones.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from importlib import resources
from typing import Any

from shardwise.cluster.catalogue import catalogue_section
from shardwise.cluster.cluster import Device, MeasuredTable
from shardwise.errors import ConfigError
from shardwise.plan.ir.precision import PRECISIONS
from shardwise.units import format_percent

TORCH = "torch"  # efficiency set of catalogue devices: torch kernels, NCCL, a fused optimizer, 16-bit weights and activations
EAGER = "eager"  # efficiency set of a locally measured GPU: the same under autocast, in eager mode unless compiled
SERIAL = "serial"  # as torch, without communication beside compute
SYMMETRIC = "torch-symmetric"  # as torch, with products and tensor collectives fused over symmetric memory
OWN = (TORCH, EAGER, SERIAL, SYMMETRIC)  # of what shardwise runs; the others are of other software


@dataclass(frozen=True, slots=True)
class ProtocolCost:
    """Cost of one algorithm and protocol: `start` and `hop` in latencies of the link, `rate` as a fraction of its bandwidth."""

    start: float
    hop: float
    rate: float

    def __post_init__(self) -> None:
        if self.start < 0 or self.hop < 0 or self.rate <= 0:
            raise ConfigError(f"a protocol with {self}: start and hop are not below zero, rate is above it")


@dataclass(frozen=True, slots=True)
class Protocols:
    """Algorithms of a collective library inside a node (rings) and between nodes (trees with LL, LL128 and Simple, and rings).

    `tree_saved`: 1 if a tree over N nodes moves 2(N-1)/N of the tensor through a node's port, as double binary trees do (Sanders
    et al. 2009), 0 if it was measured to take as long as moving all of it twice.
    """

    name: str
    node_ll: ProtocolCost
    node_simple: ProtocolCost
    net_ll: ProtocolCost
    net_ll128: ProtocolCost
    net_tree: ProtocolCost
    net_ring: ProtocolCost
    tree_saved: float = 0.0
    source: str = ""
    curves: tuple[MeasuredTable, ...] = ()  # measured inside a node; they override the protocol costs

    def curve(self, collective: str, ranks: int) -> MeasuredTable | None:
        """Return the measured curve of a collective for the number of ranks nearest to `ranks`; None if there is none."""
        curves = [curve for curve in self.curves if curve.collective == collective]
        return min(curves, key=lambda curve: max(curve.ranks, ranks) / min(curve.ranks, ranks), default=None)


@dataclass(frozen=True, slots=True)
class KernelLibrary:
    """Constants of a CPU kernel library. Convolutions: `block`, channels to which each group is padded if it has no depthwise kernel;
    `first`, largest number of channels that a first layer's kernel reads unpadded; `small`, channels times the first two sides of one
    sample up to which torch uses its own convolution, unless both last sides of the window exceed `wide`; `moved`, and for volumes
    `moved_3d`: bytes moved besides a product for each im2col byte, each way. Recurrences: `line`, bytes of a cache line, to which rows are
    padded; `together`, multiple of columns that conflict in a cache.
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
class EfficiencySet:
    """Efficiency of a training framework on a kind of GPU, in mixed precision: 16-bit weights, gradients and activations, or `autocast`
    over float32 weights, in eager mode unless a layout compiles the model.

    Matrix products: `matmul` is the fraction of peak FLOP/s that very large ones reach, `operands` the exposed fraction of operand traffic
    time, `product_s` the device time to start one, `unaligned` the remaining fraction of the rate if a side is no multiple of 8,
    `sustained` the remaining fraction in a training step, whose load lowers clocks, if products were measured alone. Bytes: `bandwidth` is
    the fraction of memory bandwidth that kernels reach, `traffic` and `loss_traffic` the ratio of bytes moved to the graph's own count
    (masks and casts add to it), `score_traffic` the same for attention scores. `attention` saves its "scores" or is "fused": forward at
    `attention_peak` of the peak on the scores that it forms, with heads of d over S positions 1/((1 + `attention_positions`/S)(1 +
    `attention_head`/d)) of that, backward at `attention_backward` of forward's rate; the fused softmax of saved scores needs a multiple of
    `softmax_batches` heads, other numbers use the slow kernel (0: no restriction). `launch_s`: host time of a kernel. `tensor`: time of
    tensor-parallel collectives relative to the library's own; `tensor_overlap`: fraction of the backward ones that overlaps with weight
    gradients. `microbatch_s`: host time of a microbatch on a stage. `gradient_bytes`: width of float16 gradients, `main_gradient_bytes` of
    those of bfloat16; `accumulate_bytes`: moved per parameter and microbatch to accumulate them; `optimizer_bytes`: moved per parameter
    and step. `overlap`: fraction of the last backward that gradient reduction overlaps with; overlapped communication takes `contention`
    of its own time from compute, since both share the device. `exposed_sends`: fraction of a stage's transfers that its rank waits for;
    `hides_chunk_sends`: none of them where ranks have several chunks, behind whose compute they run. `scatters_sends`: each tensor rank
    sends a shard, not all. `all_reduces`: ZeRO-1 sums whole gradients, in float32. `fused_share`: fraction that shows of a tensor
    collective that runs fused with a product (`world/fused_products`), 1 where none does. `step_s`: the rest of a step. `spread`: relative
    standard deviation of ranks' times (see `shardwise.cost.devices.gpus`). `moves`: in eager mode, and always without autocast, the
    fraction of memory bandwidth by kind of kernel; `convolution`: FLOP/s of convolutions by precision, all included; without it they run
    at the rate of products. `float8_products`: products of a float8-rows linear layer's three that are 8-bit: 2 if its weights' gradients
    are 16-bit, else 3 (as of float8); `float8_cast_bytes`: moved to cast an element from 16 to 8 bits. `copies_pieces`: what
    tensor ranks gather or scatter along positions is copied as a whole, since samples come first; `scatters_alone`: `tensor` is of
    collectives in products, and scatters of inputs' gradients, sums of several products' results, are not among them; `gathers_float8`:
    inputs of 8-bit products are cast before they are gathered; `gathers_keys`: over positions keys and values are repeated for all query
    heads, and gathered beside the attention to a rank's own; `defers_sums`: gradients that a pipeline scatters in the last microbatch only
    are reduced after it, behind no compute; `gathers_once`: ZeRO-3 gathers a layer's weights once for its recomputation and its backward.
    `saved_products` and `saved_float8_products` (of 8-bit ones), `stops_early`, `fuses_activations`, `fuses_layers`, `has_loss_in_place`,
    `has_float32_loss` and, of 8-bit products, `saves_float8`: what layers save and run again (`cost.devices.devices.LayerSaving`).
    """

    name: str
    device: str = ""  # the device on which the figures were measured
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
    main_gradient_bytes: float = 4.0
    accumulate_bytes: float = 6.0
    optimizer_bytes: float = 30.0
    overlap: float = 0.0
    zero_overlap: float = 0.7  # as in DeepSpeed; assumed
    contention: float = 0.0
    exposed_sends: float = 1.0
    scatters_sends: bool = True
    all_reduces: bool = False
    hides_chunk_sends: bool = False
    fused_share: float = 1.0
    step_s: float = 1e-3
    spread: float = 0.0
    float8_products: int = 2
    float8_cast_bytes: float = 5.0  # read for the maximum of each row, read and written
    copies_pieces: bool = False
    scatters_alone: bool = False
    gathers_float8: bool = False
    gathers_keys: bool = False
    defers_sums: bool = False
    gathers_once: bool = False
    saved_products: float = 1.0
    saved_float8_products: float = 1.0
    stops_early: bool = False
    fuses_activations: bool = False
    fuses_layers: bool = False
    saves_float8: bool = False
    has_loss_in_place: bool = False
    has_float32_loss: bool = False
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
        if self.float8_products not in (2, 3):
            raise ConfigError(f"stack {self.name}: float8_products = {self.float8_products}; it is 2, or 3 with the gradients of weights")
        for key in ("tensor_overlap", "overlap", "contention", "saved_products", "saved_float8_products"):
            if getattr(self, key) > 1:
                raise ConfigError(f"stack {self.name}: {key} = {getattr(self, key):g}; it is a part, at most 1")

    @property
    def is_own(self) -> bool:
        """Return whether the set is of what shardwise runs."""
        return self.name in OWN

    def bandwidth_fraction(self, kind: str) -> float:
        """Return the fraction of memory bandwidth that kernels of `kind` reach in eager mode."""
        moves = dict(self.moves)
        return moves.get(kind, moves.get("elementwise", self.bandwidth / self.traffic))

    def describe_source(self, device: Device, precision: str) -> str:
        """Describe the origin of the figures for readers of a plan."""
        if self.name not in (TORCH, EAGER, SYMMETRIC):
            return f"{self.name}: of another framework, not of what shardwise runs; they were asked for by name"
        reached = format_percent(self.matmul * self.sustained)
        origin = f"as measured on {self.device}" if self.device else f"assumed, since none was measured on {device.name}"
        text = f"{self.name}: what shardwise runs, torch's kernels with fused attention, NCCL and a fused optimizer; "
        text += f"large products at {reached} of the peak, {origin}"
        if PRECISIONS[precision].product_dtype:
            holds_narrow = bool(PRECISIONS[precision].held_dtype) or (precision != "bfloat16" and not self.autocast)
            text += f"; {'weights and activations in 16 bits, as FSDP has them' if holds_narrow else 'autocast over float32 weights'}"
        return text


def stack_of(device: Device, name: str = "") -> EfficiencySet:
    """Return the efficiency set `name`, by default that of shardwise itself, with its figures for this device if it has some.

    A set without figures for products and launches gets the device's own `matmul_efficiency` and `launch_s`.

    >>> from shardwise.cluster.cluster import Cluster
    >>> stack_of(Cluster.parse("dgx-a100-80").device).name
    'torch'

    Raises:
        ConfigError: an unknown name.
    """
    stacks, name = catalogue_section("stack"), name or TORCH
    if name not in stacks:
        raise ConfigError(f"stack {name!r} is unknown; use one of {', '.join(stacks)}")
    table = _resolve_like(stacks, name)
    devices = table.pop("on", {})
    device_defaults = {"matmul": device.matmul_efficiency, "launch_s": device.launch_s}
    of_device = devices.get(chip_of(device.name, devices), {})
    sources = "; ".join(filter(None, (of_device.get("source"), table.get("source"))))
    return parse_stack(name, {**device_defaults, **table, **of_device, "device": device.name if of_device else "", "source": sources})


def _resolve_like(entries: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the table `name` with missing keys taken from the table that its key `like` names, of each device too.

    >>> _resolve_like({"a": {"x": 1, "on": {"T4": {"y": 2}}}, "b": {"like": "a", "on": {"T4": {"z": 3}}}}, "b")
    {'x': 1, 'on': {'T4': {'y': 2, 'z': 3}}}
    """
    own, base = entries[name], entries.get(entries[name].get("like", ""), {})
    table = {key: value for key, value in {**base, **own}.items() if key != "like"}
    if "on" in own:
        table["on"] = {**base.get("on", {}), **{device: {**base.get("on", {}).get(device, {}), **of} for device, of in own["on"].items()}}
    return table


def chip_of(name: str, devices: Iterable[str]) -> str:
    """Return the one of `devices` that a driver's device name denotes, "" for none.

    >>> [chip_of(f"NVIDIA {name}", ["A100-40", "A100-80", "H200", "GH200-96"]) for name in ("A100-SXM4-80GB", "H200", "GH200 480GB", "T4")]
    ['A100-80', 'H200', 'GH200-96', '']
    """
    words = set(re.split(r"\W+", name))
    fitting = [key for key in devices if key == name or key.partition("-")[0] in words]
    return max(fitting, key=lambda key: sum(not words.isdisjoint((part, f"{part}GB")) for part in key.split("-")), default="")


def parse_stack(name: str, table: Mapping[str, Any]) -> EfficiencySet:
    """Build an efficiency set from a table; missing keys get their defaults. Raises `ConfigError` naming an unknown key."""
    defaults = {f.name: f.default for f in fields(EfficiencySet) if f.default is not MISSING}
    for key in table:
        if key not in defaults:
            raise ConfigError(f"stack {name}: {key} is unknown; it has {', '.join(defaults)}")
    values: dict[str, Any] = {key: tuple(value.items()) if isinstance(value, Mapping) else value for key, value in table.items()}
    return EfficiencySet(name, **values)


@cache
def onednn_library() -> KernelLibrary:
    """Return the constants of oneDNN, the kernel library of CPUs."""
    return KernelLibrary(**catalogue_section("library")["onednn"])


@cache
def protocols_named(name: str) -> Protocols:
    """Return the protocols of a collective library by the name in a link's `protocol`.

    >>> protocols_named("nccl").net_ring.rate
    1.0

    Raises:
        ConfigError: an unknown name, or an unknown or missing key.
    """
    entries = catalogue_section("protocol")
    if name not in entries:
        raise ConfigError(f"protocol {name!r} is unknown; use one of {', '.join(entries)}")
    return parse_protocols(name, _resolve_like(entries, name), _load_curves().get(name, ()))


@cache
def _load_curves() -> Mapping[str, tuple[MeasuredTable, ...]]:
    """Load measured curves of collectives inside a node, by protocol; the file has microseconds."""
    text = resources.files("shardwise.cluster").joinpath("curves.toml").read_text()
    curves: dict[str, tuple[MeasuredTable, ...]] = {}
    for name, by_collective in tomllib.loads(text)["curve"].items():
        curves[name] = tuple(
            MeasuredTable(collective, int(ranks), tuple((float(size), 1e-6 * us) for size, us in points))
            for collective, by_ranks in by_collective.items() if isinstance(by_ranks, dict)
            for ranks, points in by_ranks.items()
        )  # fmt: skip
    return curves


def parse_protocols(name: str, table: Mapping[str, Any], curves: tuple[MeasuredTable, ...] = ()) -> Protocols:
    """Build `Protocols` from tables `{ start, hop, rate }` by field, and measured `curves`.

    Raises `ConfigError` naming the missing or unknown key.
    """
    wanted = [f.name for f in fields(Protocols) if f.name not in ("name", "tree_saved", "source", "curves")]
    for key in (*wanted, *table):
        if key not in table or key not in (*wanted, "tree_saved", "source"):
            raise ConfigError(f"protocol {name}: {key} is {'missing' if key in wanted else 'unknown'}; it has {', '.join(wanted)}")
    optional: dict[str, Any] = {key: table[key] for key in ("tree_saved", "source") if key in table}
    try:
        lines: dict[str, Any] = {key: ProtocolCost(**table[key]) for key in wanted}
        return Protocols(name, **lines, **optional, curves=curves)
    except TypeError as error:
        raise ConfigError(f"protocol {name}: each of its tables has start, hop and rate, and nothing else ({error})") from error
