"""Time saved where pipeline ranks that wait lend their CPU cores to ranks that compute (`shardwise.plan.ir.lending`).

A compute with idle neighbours is priced at the threads that it then gets, as measured for ranks that compute so. Not modelled: memory
bandwidth that a core no longer shares where nothing is lent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwise.cluster.cluster import Cluster
from shardwise.cost.step import Pricer, StageCost
from shardwise.model.work import kind_of, stage_work
from shardwise.plan.ir.lending import concurrent_ranks, threads_per_rank
from shardwise.plan.ir.program import Compute, ComputeOp, Program
from shardwise.plan.layout import Layout

# To launch an operator on threads that sleep: 240 ms of a step instead of 127 where 4,800 small ones gained nothing by them, 16 of these
# with threads that sleep at once. Twice that in a backward.
THREAD_WAKE_S = 2.5e-5
MIN_GAIN = 0.02  # fraction of a step below which nothing is lent: it would be noise


@dataclass(frozen=True)
class PipelineHosts:
    """Hosts of a pipeline's ranks, by position in the pipeline, and what each host has for this pipeline alone."""

    host_of_rank: tuple[int, ...]  # by pipeline rank
    rank_threads: int  # threads of a rank
    num_cores: int  # of one host, for one pipeline
    pipelines_per_host: int  # pipelines of a host
    num_nodes: int

    @classmethod
    def from_layout(cls, cluster: Cluster, layout: Layout) -> PipelineHosts:
        ranks_per_host, width = cluster.ranks_per_node(layout.num_ranks), layout.stage_stride
        hosts = tuple(rank * width // ranks_per_host for rank in range(layout.pipeline))
        max_here = max(hosts.count(host) for host in hosts)
        replicas = max(1, ranks_per_host // max_here)
        return cls(hosts, cluster.threads_of(layout.num_ranks, layout.threads), cluster.node_size // replicas, replicas, cluster.num_nodes)

    @property
    def can_lend(self) -> bool:
        return self.threads_per_rank(1) > self.rank_threads

    @property
    def max_ranks_per_host(self) -> int:
        """Number of ranks of the pipeline on its fullest host."""
        return max(self.host_of_rank.count(host) for host in self.host_of_rank)

    def threads_per_rank(self, busy: int, positions: int = 0) -> int:
        """Threads of each of so many ranks that compute at once on a host with so many `positions` (0: the fullest host)."""
        return threads_per_rank(busy, self.rank_threads, positions or self.max_ranks_per_host, self.num_cores)

    def pricer_under_load(self, pricer: Pricer, busy: int) -> Pricer:
        """Return a pricer for the time in which so many ranks of each pipeline compute on a host."""
        return pricer.under_load(busy * self.pipelines_per_host * self.num_nodes, self.threads_per_rank(busy))


def may_lend(cluster: Cluster, layout: Layout) -> bool:
    """Return whether ranks of this layout could lend one another cores."""
    is_possible = cluster.kind.shares_hosts and not cluster.parts and layout.pipeline > 1 and layout.lend != "off" and not layout.inner
    return is_possible and PipelineHosts.from_layout(cluster, layout).can_lend


@dataclass(frozen=True)
class CoreLending:
    """Computes of one program that get more threads than their rank has, and their prices."""

    pricer: Pricer
    layout: Layout
    sites: tuple[str, ...]
    program: Program
    microbatch_samples: Mapping[int, float]  # samples of every microbatch

    @cached_property
    def hosts(self) -> PipelineHosts:
        return PipelineHosts.from_layout(self.pricer.cluster, self.layout)

    @cached_property
    def num_computing(self) -> dict[Compute, int]:
        """Number of ranks that compute at once, by compute, of those that get more threads by it."""
        hosts, threads = self.hosts.host_of_rank, dict[Compute, int]()
        work = stage_work(self.pricer.inventory.works, [stage.operators for stage in self.pricer.stages_at(self.sites)])
        for rank, steps in enumerate(concurrent_ranks(self.program, work, self.microbatch_samples)):
            positions = hosts.count(hosts[rank])
            for step, concurrent in steps.items():
                number = 1 + sum(hosts[other] == hosts[rank] for other in concurrent)
                if self.hosts.threads_per_rank(number, positions) > self.hosts.rank_threads:
                    action = self.program.actions[rank][step]
                    assert isinstance(action, Compute)
                    threads[action] = number
        return threads

    def stage_costs(self, pricer: Pricer) -> dict[int, tuple[StageCost, ...]]:
        """Return [ranks that compute at once] -> the cost of every stage, for the microbatches of `pricer_under_load`."""
        return {
            number: self.hosts.pricer_under_load(pricer, number).stages(self.layout, self.sites)
            for number in set(self.num_computing.values())
        }

    @cached_property
    def num_woken_operators(self) -> tuple[int, ...]:
        """Number of operators of a forward that threads must be woken for, by stage."""
        return tuple(sum(kind_of(op) != "view" for op in stage.operators) for stage in self.pricer.stages_at(self.sites))


def compute_seconds(cost: StageCost, op: ComputeOp) -> float:
    """Seconds of one compute of a stage."""
    if op in (ComputeOp.F, ComputeOp.R):
        return cost.forward_s
    return cost.weight_s if op is ComputeOp.W else cost.backward_s - cost.weight_s * (op is ComputeOp.I)


def lent_compute_s(lent: CoreLending, costs: Mapping[int, Sequence[StageCost]], action: Compute) -> float | None:
    """Seconds of a compute that is lent cores; None where it is not."""
    number = lent.num_computing.get(action)
    if number is None:
        return None
    num_passes = 2 if action.op is ComputeOp.B else 1
    return compute_seconds(costs[number][action.stage], action.op) + num_passes * THREAD_WAKE_S * lent.num_woken_operators[action.stage]
