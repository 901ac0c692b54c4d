"""Lower bound of the time that ranks wait for point-to-point sends between pipeline stages.

Not counted: boundaries of chunks beyond one stage a rank, and what a stage reads from beyond the next place where one may begin.

"""

from __future__ import annotations

import numpy as np

from shardwise.cost.step import Pricer
from shardwise.cost.step_time.heterogeneous import HeterogeneousPricer
from shardwise.plan.layout import Layout


def send_lower_bound_s(pricer: Pricer, layout: Layout) -> float:
    """Seconds of one microbatch, forward and backward, added up over the pipeline, whatever the stages and the schedule.

    Every stage after the first receives what its first operators read. The boundaries with the fewest bytes are assumed, and of these the
    smallest between nodes: pipeline positions fill nodes one after another, so no order of them crosses fewer node boundaries.
    """
    exposed = exposed_send_fraction(pricer, layout)
    if not exposed or layout.pipeline == 1:
        return 0.0
    key = (layout.axes, layout.microbatches, layout.precision, layout.shares, exposed)
    if key not in pricer.send_bounds:
        _, remainder = pricer.remainder_pricer(layout)
        smallest, boundaries = remainder or pricer, range(layout.pipeline - 1)
        sizes = np.sort(smallest.received_bytes_lower_bound(layout))[: len(boundaries)].tolist()
        farthest = sorted(boundaries, key=lambda k: -smallest.rank_distance(layout, k, k + 1))
        sends = (smallest.transfer_s(layout, size, k, k + 1) for size, k in zip(sizes, farthest, strict=False))
        pricer.send_bounds[key] = 2 * exposed * sum(sends)
    return pricer.send_bounds[key]


def exposed_send_fraction(pricer: Pricer, layout: Layout) -> float:
    """Fraction of the sends between stages that ranks wait for, as far as bounds count it: nothing on a mixed cluster, nor of stages that
    each arrange their ranks in their own way."""
    if isinstance(pricer, HeterogeneousPricer) or layout.inner or layout.microbatches == 1:
        return 0.0
    return pricer.devices.exposed_send_fraction(layout)
