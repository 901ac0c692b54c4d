"""What training costs: dollars and kilowatt-hours. In: a cluster, a layout, a graph, a prediction. Out: a `Bill` for a unit of work.

A unit is a billion tokens where the model reads tokens, else one epoch of ImageNet-1k. Whole machines are paid for, also where a plan
leaves some of their devices idle; machines that no rank is on are not. Power is the machines' highest, all of the time.
Not modelled: discounts, cooling beyond the machine, storage and network fees, and time lost to failures.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.cluster.cluster import Cluster
from weft.model.graph import Graph
from weft.plan.layout import Layout
from weft.plan.plan import Prediction

IMAGENET_SAMPLES = 1_281_167  # training images of ImageNet-1k (Russakovsky et al. 2015, table 2)
TOKENS = 1e9


@dataclass(frozen=True, slots=True)
class Unit:
    """Work that is paid for: `name` in words, `samples` of it. `tokens_per_sample` is 0 where a sample is no text."""

    name: str
    samples: float
    tokens_per_sample: int = 0


@dataclass(frozen=True, slots=True)
class Bill:
    """What one unit takes. Dollars or kWh are None where the cluster's price or power is not known."""

    seconds: float
    usd: float | None
    kwh: float | None


def tokens_per_sample(graph: Graph) -> int:
    """Tokens that the model reads of one sample: the length of its first input of whole numbers in two dimensions; 0 for images."""
    for v in graph.inputs:
        if v.batched and len(v.tensor.shape) == 2 and v.tensor.dtype.startswith("int"):
            return v.tensor.shape[1]
    return 0


def unit_of(graph: Graph) -> Unit:
    """A billion tokens, or an epoch."""
    tokens = tokens_per_sample(graph)
    if tokens:
        return Unit("billion tokens", TOKENS / tokens, tokens)
    return Unit(f"epoch of {IMAGENET_SAMPLES:,} samples", IMAGENET_SAMPLES)


def usd_per_hour(cluster: Cluster, layout: Layout) -> float:
    """List price of the machines that hold a rank; 0 where it is not known."""
    return cluster.price_per_hour * cluster.nodes_of(layout.num_ranks) / cluster.num_nodes


def power_w(cluster: Cluster, layout: Layout) -> float:
    """Power of the machines that hold a rank; 0 where it is not known."""
    return cluster.power_w * cluster.nodes_of(layout.num_ranks) / cluster.num_nodes


def bill(cluster: Cluster, layout: Layout, prediction: Prediction, batch_size: int, samples: float) -> Bill:
    """Time, money and energy of training on `samples` samples.

    >>> from weft.plan.plan import Memory
    >>> cluster = Cluster.parse("p3.16xlarge")
    >>> b = bill(cluster, Layout(data=8), Prediction(3.6, 0.5, 1e15, Memory()), batch_size=10, samples=10000)
    >>> b.seconds, round(b.usd, 2), round(b.kwh, 1)
    (3600.0, 24.48, 3.2)
    """
    seconds = prediction.step_time_s * samples / batch_size
    price, watts = usd_per_hour(cluster, layout), power_w(cluster, layout)
    return Bill(seconds, price * seconds / 3600 if price else None, watts * seconds / 3.6e6 if watts else None)


def format_usd(usd: float | None) -> str:
    """Dollars to three digits, in whole dollars from 100 on.

    >>> format_usd(None), format_usd(0.5), format_usd(1234567.8)
    ('', '$0.50', '$1,234,568')
    """
    if usd is None:
        return ""
    return f"${usd:,.0f}" if usd >= 99.995 else f"${usd:.2f}"


def format_kwh(kwh: float | None) -> str:
    """Kilowatt-hours to three digits, with thousands apart.

    >>> format_kwh(0.0123), format_kwh(12345.6)
    ('0.0123', '12,346')
    """
    if kwh is None:
        return ""
    return f"{kwh:,.0f}" if kwh >= 99.95 else f"{kwh:.3g}"
