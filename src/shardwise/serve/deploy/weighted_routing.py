"""Weighted routing: distributes requests over an operator's deployments by their shares of the load.

A plan's traffic is the minimum that its shares allow, so among deployments below their share the cheapest to reach is chosen.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping


class WeightedRouter:
    """`weights`: by name, with any sum. A credit is the share of requests due to a deployment minus those it got; credits sum to zero."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        total = sum(weights.values())
        self._weights = {name: weight / total for name, weight in weights.items()}
        self._credits = dict.fromkeys(weights, 0.0)

    def choose(self, price: Mapping[str, float], unavailable: Collection[str] = ()) -> str:
        """Choose the next deployment. `price`: of reaching each, infinite without a link; `unavailable`: down, ignored if all are.

        >>> shares = WeightedRouter({"edge": 3, "gpu": 1})
        >>> "".join(shares.choose({})[0] for _ in range(8))
        'eegeeege'
        """
        up = [name for name in self._weights if name not in unavailable] or list(self._weights)
        total = sum(self._weights[name] for name in up)
        for name in up:
            self._credits[name] += self._weights[name] / total
        reachable = [name for name in up if price.get(name, 0.0) < float("inf")] or up
        below_share = [name for name in reachable if self._credits[name] > 1e-9] or reachable
        chosen = min(below_share, key=lambda name: (price.get(name, 0.0), -self._credits[name]))
        self._credits[chosen] -= 1
        return chosen
