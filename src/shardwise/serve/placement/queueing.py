"""Queueing model of a worker: the latency percentile from batch time, batch size and utilisation.

Requests arrive as a Poisson process at a worker with its own queue, and are computed in full batches: a request waits until its batch is
full, then for the batches before it, then for its own. The wait for batches is a G/D/1 queue: its mean is Kingman's (1961, "The single
server queue in heavy traffic": (ca^2 + cs^2)/2 x u/(1-u) x S, with ca^2 = 1/b for batches of b Poisson arrivals and cs^2 = 0), and its
tail exponential with the probability u of waiting at all.

Not modelled: batches that start before they are full, and balancing between queues, which makes waits shorter.
"""

from __future__ import annotations

from math import log


def percentile_latency_s(batch: int, batch_s: float, busy: float, percentile: float) -> float:
    """Seconds within which `percentile` (0 to 1) of requests are answered by a worker that is `busy` (0 to 1) with batches of `batch_s`.

    >>> percentile_latency_s(1, 0.1, 0.0, 0.95)
    0.1
    >>> round(percentile_latency_s(1, 0.1, 0.8, 0.95), 3)  # M/D/1
    0.793
    """
    if busy <= 0:
        return batch_s
    filling = (batch - 1) * batch_s / (busy * batch)  # the first request of a batch waits for the others
    if busy >= 1:
        return float("inf")
    mean = batch_s * busy / (1 - busy) / (2 * batch)
    waiting = mean / busy * log(busy / (1 - percentile)) if busy > 1 - percentile else 0.0
    return filling + waiting + batch_s
