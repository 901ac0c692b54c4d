"""Time saved where pipeline ranks that wait lend their CPU cores to ranks that compute (`weft.plan.lending`).

A compute with idle neighbours is priced at the threads that it then gets, as measured for ranks that compute so. Not modelled: memory
bandwidth that a core no longer shares where nothing is lent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from weft.cluster.cluster import Cluster
from weft.cost.step import Pricer, StageCost
from weft.model.work import kind_of, stage_work
from weft.plan.layout import Layout
from weft.plan.lending import beside, threads_of
from weft.plan.program import Compute, Op, Program

# To launch an operator on threads that sleep: 240 ms of a step instead of 127 where 4,800 small ones gained nothing by them, 16 of these
# with threads that sleep at once. Twice that in a backward.
WAKE_S = 2.5e-5
LEAST_GAIN = 0.02  # fraction of a step below which nothing is lent: it would be noise


@dataclass(frozen=True)
class Host:
    """Hosts of a pipeline's ranks, by position in the pipeline, and what each host has for this pipeline alone."""

    hosts: tuple[int, ...]  # by pipeline rank
    rank_threads: int  # threads of a rank
    num_cores: int  # of one host, for one pipeline
    replicas: int  # pipelines of a host
    nodes: int

    @classmethod
    def of(cls, cluster: Cluster, layout: Layout) -> Host:
        ranks_per_host, width = cluster.ranks_per_node(layout.num_ranks), layout.stage_stride
        hosts = tuple(rank * width // ranks_per_host for rank in range(layout.pipeline))
        max_here = max(hosts.count(host) for host in hosts)
        replicas = max(1, ranks_per_host // max_here)
        return cls(hosts, cluster.threads_of(layout.num_ranks, layout.threads), cluster.node_size // replicas, replicas, cluster.num_nodes)

    @property
    def can_lend(self) -> bool:
        return self.threads(1) > self.rank_threads

    @property
    def together(self) -> int:
        """Number of ranks of the pipeline on its fullest host."""
        return max(self.hosts.count(host) for host in self.hosts)

    def threads(self, busy: int, positions: int = 0) -> int:
        """Threads of each of so many ranks that compute at once on a host with so many `positions` (0: the fullest host)."""
        return threads_of(busy, self.rank_threads, positions or self.together, self.num_cores)

    def pricer(self, pricer: Pricer, busy: int) -> Pricer:
        """Return a pricer for the time in which so many ranks of each pipeline compute on a host."""
        return pricer.while_busy(busy * self.replicas * self.nodes, self.threads(busy))


def may_lend(cluster: Cluster, layout: Layout) -> bool:
    """Return whether ranks of this layout could lend one another cores."""
    is_possible = cluster.kind.shares_hosts and not cluster.parts and layout.pipeline > 1 and layout.lend != "off" and not layout.inner
    return is_possible and Host.of(cluster, layout).can_lend


@dataclass(frozen=True)
class Lent:
    """Computes of one program that get more threads than their rank has, and their prices."""

    pricer: Pricer
    layout: Layout
    sites: tuple[str, ...]
    program: Program
    sizes: Mapping[int, float]  # samples of every microbatch

    @cached_property
    def host(self) -> Host:
        return Host.of(self.pricer.cluster, self.layout)

    @cached_property
    def busy(self) -> dict[Compute, int]:
        """Number of ranks that compute at once, by compute, of those that get more threads by it."""
        hosts, threads = self.host.hosts, dict[Compute, int]()
        work = stage_work(self.pricer.inventory.works, [stage.operators for stage in self.pricer.split(self.sites)])
        for rank, steps in enumerate(beside(self.program, work, self.sizes)):
            positions = hosts.count(hosts[rank])
            for step, concurrent in steps.items():
                number = 1 + sum(hosts[other] == hosts[rank] for other in concurrent)
                if self.host.threads(number, positions) > self.host.rank_threads:
                    action = self.program.actions[rank][step]
                    assert isinstance(action, Compute)
                    threads[action] = number
        return threads

    def costs(self, pricer: Pricer) -> dict[int, tuple[StageCost, ...]]:
        """Return [ranks that compute at once] -> the cost of every stage, for the microbatches of `pricer`."""
        return {number: self.host.pricer(pricer, number).stages(self.layout, self.sites) for number in set(self.busy.values())}

    @cached_property
    def woken(self) -> tuple[int, ...]:
        """Number of operators of a forward that threads must be woken for, by stage."""
        return tuple(sum(kind_of(op) != "view" for op in stage.operators) for stage in self.pricer.split(self.sites))


def compute_seconds(cost: StageCost, op: Op) -> float:
    """Seconds of one compute of a stage."""
    if op in (Op.F, Op.R):
        return cost.forward_s
    return cost.weight_s if op is Op.W else cost.backward_s - cost.weight_s * (op is Op.I)


def lent_seconds(lent: Lent, costs: Mapping[int, Sequence[StageCost]], action: Compute) -> float | None:
    """Seconds of a compute that is lent cores; None where it is not."""
    number = lent.busy.get(action)
    if number is None:
        return None
    num_passes = 2 if action.op is Op.B else 1
    return compute_seconds(costs[number][action.stage], action.op) + num_passes * WAKE_S * lent.woken[action.stage]
