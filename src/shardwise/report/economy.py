"""Cost of training in dollars and kilowatt-hours, by a cluster's price and power and a predicted step time.

A unit of work is a billion tokens where the model reads tokens, else one epoch of ImageNet-1k. Whole hosts are paid for, even where a plan
leaves some of their devices idle; hosts without a rank are not. Power is the hosts' maximum, all of the time.
Not modelled: discounts, cooling beyond the machine, storage and network fees, and time lost to failures.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.cluster.cluster import Cluster
from shardwise.model.graph import Graph
from shardwise.plan.layout import Layout
from shardwise.plan.plan import Prediction

IMAGENET_SAMPLES = 1_281_167  # training images of ImageNet-1k (Russakovsky et al. 2015, table 2)
TOKENS = 1e9


@dataclass(frozen=True, slots=True)
class WorkUnit:
    """A unit of work: its `name`, and its `samples`. `tokens_per_sample` is 0 where a sample is no text."""

    name: str
    samples: float
    tokens_per_sample: int = 0


@dataclass(frozen=True, slots=True)
class Bill:
    """Time, money and energy of some work. Dollars or kWh are None where the cluster's price or power is not known."""

    time_s: float
    usd: float | None
    kwh: float | None


def tokens_per_sample(graph: Graph) -> int:
    """Number of tokens of a sample: the length of the model's first two-dimensional integer input; 0 for images."""
    for v in graph.inputs:
        if v.batched and len(v.tensor.shape) == 2 and v.tensor.dtype.startswith("int"):
            return v.tensor.shape[1]
    return 0


def work_unit(graph: Graph) -> WorkUnit:
    """Return a billion tokens, or an epoch for models that read none."""
    tokens = tokens_per_sample(graph)
    if tokens:
        return WorkUnit("billion tokens", TOKENS / tokens, tokens)
    return WorkUnit(f"epoch of {IMAGENET_SAMPLES:,} samples", IMAGENET_SAMPLES)


def usd_per_hour(cluster: Cluster, layout: Layout) -> float:
    """List price of the machines that hold a rank; 0 where it is not known."""
    return cluster.price_per_hour * cluster.nodes_of(layout.num_ranks) / cluster.num_nodes


def power_w(cluster: Cluster, layout: Layout) -> float:
    """Power of the machines that hold a rank; 0 where it is not known."""
    return cluster.power_w * cluster.nodes_of(layout.num_ranks) / cluster.num_nodes


def training_bill(cluster: Cluster, layout: Layout, prediction: Prediction, batch_size: int, samples: float) -> Bill:
    """Time, money and energy of training on `samples` samples.

    >>> from shardwise.plan.plan import MemoryBreakdown
    >>> cluster = Cluster.parse("p3.16xlarge")
    >>> b = training_bill(cluster, Layout(data=8), Prediction(3.6, 0.5, 1e15, MemoryBreakdown()), batch_size=10, samples=10000)
    >>> b.time_s, round(b.usd, 2), round(b.kwh, 1)
    (3600.0, 24.48, 3.2)
    """
    seconds = prediction.step_time_s * samples / batch_size
    price, watts = usd_per_hour(cluster, layout), power_w(cluster, layout)
    return Bill(seconds, price * seconds / 3600 if price else None, watts * seconds / 3.6e6 if watts else None)


def format_usd(usd: float | None) -> str:
    """Format dollars to three digits, in whole dollars from 100 on.

    >>> format_usd(None), format_usd(0.5), format_usd(1234567.8)
    ('', '$0.50', '$1,234,568')
    """
    if usd is None:
        return ""
    return f"${usd:,.0f}" if usd >= 99.995 else f"${usd:.2f}"


def format_kwh(kwh: float | None) -> str:
    """Format kilowatt-hours to three digits, with thousands separators.

    >>> format_kwh(0.0123), format_kwh(12345.6)
    ('0.0123', '12,346')
    """
    if kwh is None:
        return ""
    return f"{kwh:,.0f}" if kwh >= 99.95 else f"{kwh:.3g}"
