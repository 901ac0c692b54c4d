"""`Cluster`: hardware description of devices and links, from a name with a count, a TOML file, or `here`; frozen numbers in SI units.

A cluster is one kind of device and a hierarchy of links, innermost first: 8 GPUs to a node over NVLink, 4 nodes over InfiniBand;
or several such parts, joined by one more link. On CPUs the device is one core, and a rank has as many cores as threads.

Not modelled: links of different speed on one level of a part, routes inside a switch, and other users' traffic.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import log, prod

from shardwise.errors import ConfigError, Infeasible
from shardwise.plan.ir.precision import PRECISIONS as LAYOUTS

LAUNCH_RATE, WEIGHT_RATE = "start.", "weights."  # prefixes of keys in `Speed.rates`, followed by a kind
SCORE_RATE = "scores."  # followed by a precision
TRAFFIC_RATE = "besides."  # followed by a kind and a precision
GROUPED_RATE = "grouped."  # followed by channels and a precision
STEP_RATE = "stepped"
PRECISIONS = ("float64", "float32", "tf32", "float16", "bfloat16", "float8")


def check_positive(what: str, **values: float) -> None:
    """Raise `ConfigError` with `what`, the field and its value for the first value that is not finite and above zero."""
    for key, value in values.items():
        if not 0 < value < float("inf"):
            raise ConfigError(f"{what}: {key} = {value:g}; it must be above zero")


def check_not_negative(what: str, **values: float) -> None:
    """Raise `ConfigError` with `what`, the field and its value for the first value that is not finite, or below zero."""
    for key, value in values.items():
        if not 0 <= value < float("inf"):
            raise ConfigError(f"{what}: {key} = {value:g}; it is zero or more, and finite")


@dataclass(frozen=True, slots=True)
class Device:
    """One processor core, GPU or TPU chip.

    `peak_flops`: FLOP/s by precision. `memory_bytes`: for a core, its share of the machine's. `memory_bandwidth_bytes_per_s`: to that
    memory. `matmul_efficiency`: fraction of the peak that large matrix products reach in training. `launch_s`: host time of one operator.
    `scratch_bytes`: memory of a process without tensors (context, libraries).
    """

    name: str
    kind: str
    peak_flops: tuple[tuple[str, float], ...]
    memory_bytes: float
    memory_bandwidth_bytes_per_s: float
    matmul_efficiency: float = 1.0
    launch_s: float = 5e-6
    scratch_bytes: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"device {self.name}: kind {self.kind!r} is unknown; use one of {', '.join(KINDS)}")
        if not self.peak_flops:
            raise ConfigError(f"device {self.name} has no peak_flops; give at least float32")
        for precision, flops in self.peak_flops:
            if precision not in PRECISIONS:
                raise ConfigError(f"device {self.name}: precision {precision!r} is unknown; use one of {', '.join(PRECISIONS)}")
            check_positive(f"device {self.name}", **{f"peak_flops.{precision}": flops})
        check_positive(
            f"device {self.name}", memory_bytes=self.memory_bytes, memory_bandwidth_bytes_per_s=self.memory_bandwidth_bytes_per_s
        )
        check_positive(f"device {self.name}", matmul_efficiency=self.matmul_efficiency)
        if self.matmul_efficiency > 1:
            raise ConfigError(f"device {self.name}: matmul_efficiency = {self.matmul_efficiency:g}; it is a part of the peak, at most 1")
        check_not_negative(f"device {self.name}", launch_s=self.launch_s, scratch_bytes=self.scratch_bytes)
        if self.scratch_bytes >= self.memory_bytes and not KINDS[self.kind].shares_hosts:
            raise ConfigError(
                f"device {self.name}: scratch_bytes = {self.scratch_bytes:g} of memory_bytes = {self.memory_bytes:g}; the memory of "
                "a process without tensors leaves none for them"
            )

    def peak(self, precision: str) -> float:
        """Return FLOP/s at `precision`; for an unmeasured precision on a CPU those of its substitute.

        Raises:
            Infeasible: the device does not have it.
        """
        peaks = dict(self.peak_flops)
        precision = LAYOUTS[precision].device_precision if precision in LAYOUTS else precision
        elsewhere = KINDS[self.kind].substitutes_precisions and precision in LAYOUTS
        peak = peaks.get(precision, peaks.get(LAYOUTS[precision].substitute) if elsewhere else None)
        if peak is None:
            have = ", ".join(name for name, _ in self.peak_flops)
            raise Infeasible(f"precision={precision}: {self.name} has no {precision} matrix products; use one of {have}")
        return peak


@dataclass(frozen=True, slots=True)
class NetworkLink:
    """Link between the units of one level: each unit's port, one direction.

    `latency_s`: of an empty message. `bandwidth_bytes_per_s`: of one unit's port, datasheet. `ports`: number of equal ports that share
    it; one message uses one. `efficiency`: fraction of the bandwidth that large collectives reach. `protocol`: catalogue name of the
    collective library's protocols.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    ports: int = 1
    efficiency: float = 1.0
    protocol: str = "nccl"
    source: str = ""

    def __post_init__(self) -> None:
        check_positive("link", bandwidth_bytes_per_s=self.bandwidth_bytes_per_s, ports=self.ports, efficiency=self.efficiency)
        check_not_negative("link", latency_s=self.latency_s)
        if self.efficiency > 1:
            raise ConfigError(f"link: efficiency = {self.efficiency:g}; it is a part of the bandwidth, at most 1")


@dataclass(frozen=True, slots=True)
class ClusterLevel:
    """`size` units of the level below (devices, at the innermost) joined by `link`."""

    name: str
    size: int
    link: NetworkLink

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"level {self.name}: size = {self.size}; it joins at least 1 unit")


@dataclass(frozen=True, slots=True)
class Speed:
    """Measured speed of one rank while `ranks` ranks of a node, of `threads` threads each, work concurrently (threads 0: a GPU).

    `flops`: FLOP/s of large matrix products by precision. `memory_bandwidth_bytes_per_s`: of elementwise operators.
    `launch_s`: host time of one operator. `rates`: of other kinds of operators, by kind ("norm", "attention.bfloat16"):
    bytes/s, or FLOP/s for "attention", "convolution" and "recurrent"; a missing kind runs at the roofline of the rest. Prefixed keys:
    `LAUNCH_RATE` with a kind: nearly empty calls/s, one forward and two backward; `WEIGHT_RATE` with a kind: bytes/s at which a product
    packs its weights; `SCORE_RATE` with a precision: scores/s of attention besides its FLOPs, which then run at "attention";
    `TRAFFIC_RATE` with kind and precision: bytes/s of a product's operands other than weights, besides its FLOPs; `GROUPED_RATE` with
    channels and precision: FLOP/s of convolutions in groups of that many; `STEP_RATE`: steps/s of a small GRU, one forward
    and two backward. `waits`: fraction by which compute grows if ranks synchronise inside layers.
    """

    ranks: int
    threads: int
    flops: tuple[tuple[str, float], ...]
    memory_bandwidth_bytes_per_s: float
    launch_s: float
    rates: tuple[tuple[str, float], ...] = ()
    waits: float = 0.0

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.threads < 0:
            raise ConfigError(f"speed: ranks = {self.ranks}, threads = {self.threads}; use 1 rank or more, and 0 threads (GPUs) or more")
        check_not_negative("speed", waits=self.waits, launch_s=self.launch_s)
        check_positive("speed", **{f"flops.{p}": v for p, v in self.flops}, memory_bandwidth_bytes_per_s=self.memory_bandwidth_bytes_per_s)
        check_positive("speed", **{f"rates.{kind}": v for kind, v in self.rates})

    def scaled(self, ranks: int, threads: int, factor: float, launch_s: float) -> Speed:
        """Return the speed with every rate times `factor`."""
        return Speed(
            ranks,
            threads,
            tuple((p, v * factor) for p, v in self.flops),
            self.memory_bandwidth_bytes_per_s * factor,
            launch_s,
            tuple((kind, v * factor) for kind, v in self.rates),
            self.waits,
        )


@dataclass(frozen=True, slots=True)
class MeasuredTable:
    """Measured seconds of one collective (or `send`) between `ranks` ranks of a node, by bytes of the whole tensor, ascending."""

    collective: str
    ranks: int
    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not sizes or sizes != sorted(set(sizes)) or not all(0 < number < float("inf") for point in self.points for number in point):
            raise ConfigError(f"table {self.collective} of {self.ranks} ranks: sizes must ascend, and sizes and seconds be above zero")

    def seconds(self, size_bytes: float) -> float:
        """Return seconds interpolated in log size and log time between points, constant below them, at constant bandwidth above."""
        (first, least), (last, most) = self.points[0], self.points[-1]
        if size_bytes <= first:
            return least
        if size_bytes >= last:
            return most * size_bytes / last
        for (a, ta), (b, tb) in zip(self.points, self.points[1:], strict=False):
            if size_bytes <= b:
                part = log(size_bytes / a) / log(b / a)
                return float(ta ** (1 - part) * tb**part)
        return most


@dataclass(frozen=True)
class Cluster:
    """Devices joined by `levels`, innermost first. Prices in dollars, power in watts, both of the whole cluster; 0 is unknown.

    `speeds` and `tables` are measured (`shardwise probe`) and take precedence over the figures of `device` and `levels`.

    >>> Cluster.parse("8xp3.16xlarge").num_devices
    64
    """

    name: str
    device: Device
    levels: tuple[ClusterLevel, ...]
    price_per_hour: float = 0.0
    power_w: float = 0.0
    speeds: tuple[Speed, ...] = ()
    tables: tuple[MeasuredTable, ...] = ()
    fingerprint: str = ""  # of the measured machine and software
    stack: str = ""  # catalogue name of the GPUs' efficiency set; by default the device's own
    parts: tuple[
        Cluster, ...
    ] = ()  # of a heterogeneous cluster (`shardwise.cluster.heterogeneous`), in the order of its ranks; each of one kind
    between: NetworkLink | None = None  # between the nodes of different parts
    part_of: int = 0  # of a CPU part: the devices of the whole cluster, over which a job's ranks are spread evenly
    memory_limit_bytes: float = 0.0  # a rank's memory limit, if less than its memory; 0: none
    priced: str = ""  # source and date of the price
    # The text from which `parse` finds it, if not its name: a file, a part of one, or its parts in another order.
    origin: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not self.levels:
            raise ConfigError(f"cluster {self.name} has no links; give at least one level with a size, a latency and a bandwidth")
        if self.parts and (self.between is None or sum(part.num_devices for part in self.parts) != self.num_devices):
            raise ConfigError(f"cluster {self.name}: its parts do not make it up; build it with shardwise.cluster.heterogeneous")
        check_not_negative(f"cluster {self.name}", price_per_hour=self.price_per_hour, power_w=self.power_w)

    @property
    def source_text(self) -> str:
        """The text that `parse` turns into this cluster, if there is one."""
        return self.origin or self.name

    @property
    def num_devices(self) -> int:
        return prod(level.size for level in self.levels)

    @property
    def node_size(self) -> int:
        """Number of devices of one innermost unit."""
        return self.levels[0].size

    @property
    def num_nodes(self) -> int:
        return self.num_devices // self.node_size

    @property
    def kind(self) -> DeviceKind:
        """Properties of its kind of devices."""
        return KINDS[self.device.kind]

    def threads_of(self, num_ranks: int, threads: int = 0) -> int:
        """Return the threads of each of `num_ranks` ranks: `threads`, or an equal share of its node's cores (at least 1); 0 on GPUs."""
        if not self.kind.shares_hosts:
            return 0
        return threads or max(1, self.node_size // self.ranks_per_node(max(1, num_ranks)))

    def memory_of(self, num_ranks: int) -> float:
        """Return the bytes that one of `num_ranks` ranks may use: the device's, or an equal share of its node's."""
        have = self.device.memory_bytes
        if self.kind.shares_hosts:
            have *= self.node_size / min(self.node_size, self.ranks_per_node(num_ranks))
        return min(have, self.memory_limit_bytes or have)

    def with_memory_limit(self, size_bytes: float) -> Cluster:
        """Return the cluster with a limit of `size_bytes` for a rank's tensors; its process's own memory comes on top."""
        if size_bytes <= 0:
            return self
        parts = tuple(part.with_memory_limit(size_bytes) for part in self.parts)
        return replace(self, memory_limit_bytes=size_bytes + self.device.scratch_bytes, parts=parts)

    def ranks_per_node(self, num_ranks: int) -> int:
        """Return the number of ranks on one node if `num_ranks` fill nodes in order (CPUs: are spread evenly over them)."""
        if not self.kind.shares_hosts:
            return min(num_ranks, self.node_size)
        return -(-self._num_local_ranks(num_ranks) // self.nodes_of(num_ranks))

    def _num_local_ranks(self, num_ranks: int) -> int:
        """Return the number of a job's ranks on this cluster: all, or its share if it is a part."""
        return max(1, -(-num_ranks * self.num_devices // self.part_of)) if self.part_of else num_ranks

    def nodes_of(self, num_ranks: int) -> int:
        """Return the number of nodes that `num_ranks` ranks occupy."""
        return min(self.num_nodes, self._num_local_ranks(num_ranks) if self.kind.shares_hosts else -(-num_ranks // self.node_size))

    def speed(self, num_ranks: int, threads: int = 0) -> Speed:
        """Return the speed of one rank when `num_ranks` work concurrently: as measured, or scaled from the nearest measurement.

        Cores that do not exist are shared: 4 ranks on 2 cores get half a core each.
        """
        ranks_on_node = self.ranks_per_node(num_ranks)
        threads = self.threads_of(num_ranks, threads)
        for speed in self.speeds:
            if (speed.ranks, speed.threads) == (ranks_on_node, threads):
                return speed
        if self.speeds:
            # The nearest measurement with as many busy cores, scaled by the cores that a rank gets.
            per_rank = min(threads, self.node_size / ranks_on_node)
            busy = min(ranks_on_node * threads, self.node_size)
            nearest = min(self.speeds, key=lambda s: (abs(log(s.ranks * s.threads / busy)), abs(log(s.threads / threads))))
            factor = per_rank / min(nearest.threads, self.node_size / nearest.ranks)
            return nearest.scaled(ranks_on_node, threads, factor, nearest.launch_s * max(1.0, ranks_on_node * threads / self.node_size))
        per_rank = 1.0 if not self.kind.shares_hosts else min(threads, self.node_size / ranks_on_node)
        device = self.device
        return Speed(
            ranks_on_node,
            threads,
            tuple((p, v * device.matmul_efficiency * per_rank) for p, v in device.peak_flops),
            device.memory_bandwidth_bytes_per_s * per_rank,
            device.launch_s,
        )

    def table(self, collective: str, ranks: int) -> MeasuredTable | None:
        """Return the measured table of `collective` between exactly `ranks` ranks of a node; None if there is none."""
        for table in self.tables:
            if (table.collective, table.ranks) == (collective, ranks):
                return table
        return None

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """Parse `8xp3.16xlarge`, `dgx-h100`, `path/cluster.toml`; `here` is measured by `shardwise.cluster.probe`, which needs torch.

        `4 devices of ...` is a part of any of them, `path/cluster.toml:b+a` a heterogeneous one with its parts in this order.

        Raises:
            UsageError: an unknown name (with the nearest), a count below 1, incompatible parts, an unreadable file.
        """
        from shardwise.cluster.find import find_cluster  # here: a circle, for the sake of the public name; see DESIGN.md

        return find_cluster(text)


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """Properties of a kind of device. `noun`: plural of its unit. `torch`: device type in torch. `library`: collective library, overriding
    the links'.

    `shares_hosts`: ranks are spread evenly over hosts and share their cores (as threads) and memory; there may be more ranks than
    cores. On other kinds every rank has a device, and ranks fill hosts in order.
    `prices_programs`: the cost of messages of shardwise's own programs is known, so that they compete with the library's collectives.
    `substitutes_precisions`: an unmeasured precision costs as much as its substitute (`plan/ir/precision`). `splits_backward`:
    splitting backward into input and weight gradients costs less than the bubble that it fills.
    """

    noun: str
    torch: str
    library: str = ""
    shares_hosts: bool = False
    prices_programs: bool = False
    substitutes_precisions: bool = False
    splits_backward: bool = False


_PROCESSORS = DeviceKind("cores", "cpu", "gloo", shares_hosts=True, prices_programs=True, substitutes_precisions=True)
_ACCELERATORS = DeviceKind("devices", "cuda", splits_backward=True)

KINDS = {"cpu": _PROCESSORS, "gpu": _ACCELERATORS, "tpu": _ACCELERATORS}
