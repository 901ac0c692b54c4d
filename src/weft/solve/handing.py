"""The least that ranks wait for what they hand on between stages. In: a pricer, a layout. Out: seconds of one microbatch over all borders.

Not counted: all borders of chunks but as many as one stage a rank has, and what a stage reads behind the next place where one may begin.
"""

from __future__ import annotations

import numpy as np

from weft.cost.step import Pricer
from weft.plan.layout import Layout
from weft.solve.mixed import MixedPricer


def least_handed_s(pricer: Pricer, layout: Layout) -> float:
    """Seconds of one microbatch, forward and back, added up over the pipeline, whatever the stages and the schedule.

    Every stage behind the first receives what its first operators read. The places where that is least are taken, and of these the least
    between nodes: places of a pipeline lie on nodes one after another, so no order of them crosses fewer ends of nodes.
    """
    exposed = waited_part(pricer, layout)
    if not exposed or layout.pipeline == 1:
        return 0.0
    key = (layout.axes, layout.microbatches, layout.precision, layout.shares)
    if key not in pricer.handed:
        _, lesser = pricer.smaller(layout)
        one, borders = lesser or pricer, range(layout.pipeline - 1)
        sizes = np.sort(one.least_received(layout))[: len(borders)].tolist()
        farthest = sorted(borders, key=lambda k: -one.apart(layout, k, k + 1))
        each = (one.transfer_s(layout, size, k, k + 1) for size, k in zip(sizes, farthest, strict=False))
        pricer.handed[key] = 2 * exposed * sum(each)
    return pricer.handed[key]


def waited_part(pricer: Pricer, layout: Layout) -> float:
    """Part of what stages hand on that their ranks wait for, as far as bounds count it: nothing on a mixed cluster, nor of stages that each
    arrange their ranks in their own way."""
    if isinstance(pricer, MixedPricer) or layout.inner or layout.microbatches == 1:
        return 0.0
    return pricer.devices.exposed_sends
