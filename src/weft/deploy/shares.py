"""Which of an operator's workers takes a request. In: shares of load. Out: one of them each time, so that the shares come out.

A plan's traffic is the least that its shares allow, so among those that are behind their share the one that costs least to reach is taken.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping


class Shares:
    """`weights`: by name, of any sum. The credit of each is what its share says minus what it got; they sum to zero."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        total = sum(weights.values())
        self._weights = {name: weight / total for name, weight in weights.items()}
        self._credits = dict.fromkeys(weights, 0.0)

    def take(self, price: Mapping[str, float], without: Collection[str] = ()) -> str:
        """The next one. `price`: of reaching each, infinite where there is no way; `without`: those that are down, unless all are.

        >>> shares = Shares({"edge": 3, "gpu": 1})
        >>> "".join(shares.take({})[0] for _ in range(8))
        'eegeeege'
        """
        up = [name for name in self._weights if name not in without] or list(self._weights)
        total = sum(self._weights[name] for name in up)
        for name in up:
            self._credits[name] += self._weights[name] / total
        reached = [name for name in up if price.get(name, 0.0) < float("inf")] or up
        behind = [name for name in reached if self._credits[name] > 1e-9] or reached
        chosen = min(behind, key=lambda name: (price.get(name, 0.0), -self._credits[name]))
        self._credits[chosen] -= 1
        return chosen
