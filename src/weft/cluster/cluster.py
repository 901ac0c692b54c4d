"""`Cluster`: what a model trains on. In: a name with a count, a TOML file, or `here`. Out: frozen numbers in SI units.

A cluster is one kind of device and a hierarchy of links, innermost first: 8 GPUs to a node over NVLink, 4 nodes over InfiniBand;
or several such parts, joined by one more link. On processors the device is one core, and a rank is as many cores as it has threads.

Not modelled: links of different speed on one level of a part, the routes inside a switch, and other people's traffic.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import log, prod

from weft.cluster.kind import KINDS, Kind
from weft.errors import ConfigError, Infeasible
from weft.plan.precision import PRECISIONS as LAYOUTS

START, WEIGHTS = "start.", "weights."  # with a kind behind them, keys of `Speed.rates`
SCORES = "scores."  # with a precision behind it
BESIDES = "besides."  # with a kind and a precision behind it
GROUPED = "grouped."  # with channels and a precision behind it
STEPPED = "stepped"
PRECISIONS = ("float64", "float32", "tf32", "float16", "bfloat16", "float8")


def positive(what: str, **values: float) -> None:
    """Raise `ConfigError` naming `what`, the field and its value for the first value that is not finite and above zero."""
    for key, value in values.items():
        if not 0 < value < float("inf"):
            raise ConfigError(f"{what}: {key} = {value:g}; it must be above zero")


def not_negative(what: str, **values: float) -> None:
    """Raise `ConfigError` naming `what`, the field and its value for the first value that is not finite, or below zero."""
    for key, value in values.items():
        if not 0 <= value < float("inf"):
            raise ConfigError(f"{what}: {key} = {value:g}; it is zero or more, and finite")


@dataclass(frozen=True, slots=True)
class Device:
    """One processor core, GPU or TPU chip.

    `peak_flops`: FLOP/s by precision. `memory_bytes`: for a core, its share of the machine's. `memory_bandwidth_bytes_per_s`: to that
    memory. `matmul_efficiency`: part of the peak that large matrix products reach in training. `launch_s`: host time of one operator.
    `scratch_bytes`: what a process holds before it has any tensor (context, libraries).
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
            positive(f"device {self.name}", **{f"peak_flops.{precision}": flops})
        positive(f"device {self.name}", memory_bytes=self.memory_bytes, memory_bandwidth_bytes_per_s=self.memory_bandwidth_bytes_per_s)
        positive(f"device {self.name}", matmul_efficiency=self.matmul_efficiency)
        if self.matmul_efficiency > 1:
            raise ConfigError(f"device {self.name}: matmul_efficiency = {self.matmul_efficiency:g}; it is a part of the peak, at most 1")
        not_negative(f"device {self.name}", launch_s=self.launch_s, scratch_bytes=self.scratch_bytes)
        if self.scratch_bytes >= self.memory_bytes and not KINDS[self.kind].shares_hosts:
            raise ConfigError(
                f"device {self.name}: scratch_bytes = {self.scratch_bytes:g} of memory_bytes = {self.memory_bytes:g}; what a process holds "
                "before it has any tensor leaves it none"
            )

    def peak(self, precision: str) -> float:
        """FLOP/s at `precision`; on a processor that was not measured in it those of what it computes in there.

        Raises:
            Infeasible: the device does not have it.
        """
        peaks = dict(self.peak_flops)
        elsewhere = KINDS[self.kind].computes_elsewhere and precision in LAYOUTS
        peak = peaks.get(precision, peaks.get(LAYOUTS[precision].elsewhere) if elsewhere else None)
        if peak is None:
            have = ", ".join(name for name, _ in self.peak_flops)
            raise Infeasible(f"precision={precision}: {self.name} has no {precision} matrix products; use one of {have}")
        return peak


@dataclass(frozen=True, slots=True)
class Link:
    """What joins the units of one level: each unit's port, one direction.

    `latency_s`: one message of no size. `bandwidth_bytes_per_s`: of one unit's port, datasheet. `ports`: equal ports that make
    it up; one message uses one. `efficiency`: part of the bandwidth that large collectives reach. `protocol`: whose rules collectives
    follow, by the catalogue's name.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    ports: int = 1
    efficiency: float = 1.0
    protocol: str = "nccl"
    source: str = ""

    def __post_init__(self) -> None:
        positive("link", bandwidth_bytes_per_s=self.bandwidth_bytes_per_s, ports=self.ports, efficiency=self.efficiency)
        not_negative("link", latency_s=self.latency_s)
        if self.efficiency > 1:
            raise ConfigError(f"link: efficiency = {self.efficiency:g}; it is a part of the bandwidth, at most 1")


@dataclass(frozen=True, slots=True)
class Level:
    """`size` units of the level below (devices, at the innermost) joined by `link`."""

    name: str
    size: int
    link: Link

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"level {self.name}: size = {self.size}; it joins at least 1 unit")


@dataclass(frozen=True, slots=True)
class Speed:
    """What one rank gets while `ranks` ranks of a node, of `threads` threads each, work at once (threads 0: a GPU).

    `flops`: FLOP/s of large matrix products by precision. `memory_bandwidth_bytes_per_s`: of elementwise operators.
    `launch_s`: host time of one operator. `rates`: what other kinds of operator reach, by kind ("norm", "attention.bfloat16"):
    bytes/s, or FLOP/s for "attention", "convolution" and "recurrent"; a kind that is not there runs at the roofline of the rest. With the
    kind's name behind them, `START`: calls/s of next to nothing, forward and two of backward alike, and `WEIGHTS`: bytes/s at which a
    product packs its weights. `SCORES` with a precision: scores/s of attention beside their FLOPs, which are at "attention" then; `BESIDES`
    with kind and precision: bytes/s of what a product reads and writes besides weights, beside its FLOPs. `GROUPED` with
    channels and precision: FLOP/s of convolutions in groups of so many; `STEPPED`: steps/s of a small GRU, forward
    and two of backward alike. `waits`: by what part longer the ranks compute where they meet
    inside layers.
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
            raise ConfigError(
                f"speed: ranks = {self.ranks}, threads = {self.threads}; it is of 1 rank or more, of 0 threads (GPUs) or more"
            )
        not_negative("speed", waits=self.waits, launch_s=self.launch_s)
        positive("speed", **{f"flops.{p}": v for p, v in self.flops}, memory_bandwidth_bytes_per_s=self.memory_bandwidth_bytes_per_s)
        positive("speed", **{f"rates.{kind}": v for kind, v in self.rates})

    def scaled(self, ranks: int, threads: int, by: float, launch_s: float) -> Speed:
        """The same with every rate times `by`."""
        return Speed(
            ranks,
            threads,
            tuple((p, v * by) for p, v in self.flops),
            self.memory_bandwidth_bytes_per_s * by,
            launch_s,
            tuple((kind, v * by) for kind, v in self.rates),
            self.waits,
        )


@dataclass(frozen=True, slots=True)
class Table:
    """Measured seconds of one collective (or `send`) between `ranks` ranks of a node, by bytes of the whole tensor, ascending."""

    collective: str
    ranks: int
    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not sizes or sizes != sorted(set(sizes)) or not all(0 < number < float("inf") for point in self.points for number in point):
            raise ConfigError(f"table {self.collective} of {self.ranks} ranks: sizes must ascend, and sizes and seconds be above zero")

    def seconds(self, size_bytes: float) -> float:
        """Interpolated in log size and log time between points, at constant latency below them, at constant bandwidth above."""
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
    """`device`s joined by `levels`, innermost first. Prices in dollars, power in watts, both of the whole cluster; 0 is unknown.

    `speeds` and `tables` are measured (`weft probe`) and win over what follows from `device` and `levels`.

    >>> Cluster.parse("8xp3.16xlarge").num_devices
    64
    """

    name: str
    device: Device
    levels: tuple[Level, ...]
    price_per_hour: float = 0.0
    power_w: float = 0.0
    speeds: tuple[Speed, ...] = ()
    tables: tuple[Table, ...] = ()
    fingerprint: str = ""  # of the measured machine and software
    stack: str = ""  # the efficiency set that GPUs are priced with, by the catalogue's name; by default the device's own
    parts: tuple[Cluster, ...] = ()  # of a mixed cluster (`weft.cluster.mixed`), in the order of its ranks; each of one kind
    between: Link | None = None  # joins the nodes of different parts
    part_of: int = 0  # of a part of processors: the devices of the whole, over which a job's ranks are spread evenly
    memory_limit_bytes: float = 0.0  # what a rank may use at most, where that is less than it has; 0: all
    priced: str = ""  # whose price it is, and of when
    # How `parse` finds it again, where its name does not say: a file, a part of one, or its parts in another order.
    origin: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not self.levels:
            raise ConfigError(f"cluster {self.name} has no links; give at least one level with a size, a latency and a bandwidth")
        if self.parts and (self.between is None or sum(part.num_devices for part in self.parts) != self.num_devices):
            raise ConfigError(f"cluster {self.name}: its parts do not make it up; build it with weft.cluster.mixed")
        not_negative(f"cluster {self.name}", price_per_hour=self.price_per_hour, power_w=self.power_w)

    @property
    def found_by(self) -> str:
        """What `parse` makes this cluster from, where something does."""
        return self.origin or self.name

    @property
    def num_devices(self) -> int:
        return prod(level.size for level in self.levels)

    @property
    def node_size(self) -> int:
        """Devices of one innermost unit."""
        return self.levels[0].size

    @property
    def num_nodes(self) -> int:
        return self.num_devices // self.node_size

    @property
    def kind(self) -> Kind:
        """What follows from the kind of its devices."""
        return KINDS[self.device.kind]

    def threads_of(self, num_ranks: int, threads: int = 0) -> int:
        """Threads of each of `num_ranks` ranks: as asked for, or an equal share of its node's cores (at least 1); 0 on GPUs."""
        if not self.kind.shares_hosts:
            return 0
        return threads or max(1, self.node_size // self.ranks_per_node(max(1, num_ranks)))

    def memory_of(self, num_ranks: int) -> float:
        """Bytes that one of `num_ranks` ranks may use: the device's, or its node's shared equally by the ranks on it."""
        have = self.device.memory_bytes
        if self.kind.shares_hosts:
            have *= self.node_size / min(self.node_size, self.ranks_per_node(num_ranks))
        return min(have, self.memory_limit_bytes or have)

    def limited(self, size_bytes: float) -> Cluster:
        """The same machines where a rank's tensors may take `size_bytes`; what its process holds before it has any comes on top."""
        if size_bytes <= 0:
            return self
        parts = tuple(part.limited(size_bytes) for part in self.parts)
        return replace(self, memory_limit_bytes=size_bytes + self.device.scratch_bytes, parts=parts)

    def ranks_per_node(self, num_ranks: int) -> int:
        """Ranks that share one node when `num_ranks` fill nodes in order (processors: spread evenly over them)."""
        if not self.kind.shares_hosts:
            return min(num_ranks, self.node_size)
        return -(-self._ranks_here(num_ranks) // self.nodes_of(num_ranks))

    def _ranks_here(self, num_ranks: int) -> int:
        """Those of a job's ranks that this cluster has: all, or its share of the whole that it is a part of."""
        return max(1, -(-num_ranks * self.num_devices // self.part_of)) if self.part_of else num_ranks

    def nodes_of(self, num_ranks: int) -> int:
        """Nodes that hold one of `num_ranks` ranks."""
        return min(self.num_nodes, self._ranks_here(num_ranks) if self.kind.shares_hosts else -(-num_ranks // self.node_size))

    def speed(self, num_ranks: int, threads: int = 0) -> Speed:
        """What one rank gets when `num_ranks` work at once; measured where it was measured, else scaled from what was.

        Cores that do not exist are shared: 4 ranks on 2 cores get half a core each.
        """
        here = self.ranks_per_node(num_ranks)
        threads = self.threads_of(num_ranks, threads)
        for speed in self.speeds:
            if (speed.ranks, speed.threads) == (here, threads):
                return speed
        if self.speeds:
            # The nearest measurement with as many busy cores, scaled by the cores that a rank really gets.
            per_rank = min(threads, self.node_size / here)
            busy = min(here * threads, self.node_size)
            near = min(self.speeds, key=lambda s: (abs(log(s.ranks * s.threads / busy)), abs(log(s.threads / threads))))
            by = per_rank / min(near.threads, self.node_size / near.ranks)
            return near.scaled(here, threads, by, near.launch_s * max(1.0, here * threads / self.node_size))
        per_rank = 1.0 if not self.kind.shares_hosts else min(threads, self.node_size / here)
        device = self.device
        return Speed(
            here,
            threads,
            tuple((p, v * device.matmul_efficiency * per_rank) for p, v in device.peak_flops),
            device.memory_bandwidth_bytes_per_s * per_rank,
            device.launch_s,
        )

    def table(self, collective: str, ranks: int) -> Table | None:
        """The measured table of `collective` between exactly `ranks` ranks of a node."""
        for table in self.tables:
            if (table.collective, table.ranks) == (collective, ranks):
                return table
        return None

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """`8xp3.16xlarge`, `dgx-h100`, `path/cluster.toml`; `here` is measured by `weft.cluster.probe`, which needs torch.

        `4 devices of ...` is a part of any of them, `path/cluster.toml:b+a` a mixed one with its parts in this order.

        Raises:
            UsageError: an unknown name (names the nearest), a count below 1, parts that do not mix, a file that cannot be read.
        """
        from weft.cluster.catalogue import find

        return find(text)

    def to_toml(self) -> str:
        """The cluster as text that `Cluster.parse` reads back from a file."""
        from weft.cluster.catalogue import dump

        return dump(self)
