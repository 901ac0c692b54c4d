"""Lower bound of the time that ranks wait for point-to-point sends between pipeline stages.

Not counted: boundaries of chunks beyond one stage a rank, and what a stage reads from beyond the next place where one may begin.

"""

from __future__ import annotations

import numpy as np

from weft.cost.step import Pricer
from weft.plan.layout import Layout
from weft.solve.mixed import MixedPricer


def least_handed_s(pricer: Pricer, layout: Layout) -> float:
    """Seconds of one microbatch, forward and backward, added up over the pipeline, whatever the stages and the schedule.

    Every stage after the first receives what its first operators read. The boundaries with the fewest bytes are assumed, and of these the
    smallest between nodes: pipeline positions fill nodes one after another, so no order of them crosses fewer node boundaries.
    """
    exposed = waited_part(pricer, layout)
    if not exposed or layout.pipeline == 1:
        return 0.0
    key = (layout.axes, layout.microbatches, layout.precision, layout.shares)
    if key not in pricer.handed:
        _, remainder = pricer.smaller(layout)
        smallest, boundaries = remainder or pricer, range(layout.pipeline - 1)
        sizes = np.sort(smallest.least_received(layout))[: len(boundaries)].tolist()
        farthest = sorted(boundaries, key=lambda k: -smallest.apart(layout, k, k + 1))
        sends = (smallest.transfer_s(layout, size, k, k + 1) for size, k in zip(sizes, farthest, strict=False))
        pricer.handed[key] = 2 * exposed * sum(sends)
    return pricer.handed[key]


def waited_part(pricer: Pricer, layout: Layout) -> float:
    """Fraction of the sends between stages that ranks wait for, as far as bounds count it: nothing on a mixed cluster, nor of stages that
    each arrange their ranks in their own way."""
    if isinstance(pricer, MixedPricer) or layout.inner or layout.microbatches == 1:
        return 0.0
    return pricer.devices.exposed_sends
