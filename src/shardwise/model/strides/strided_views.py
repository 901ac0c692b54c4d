"""Decomposition of `as_strided` into reshape, unfold and permute, which do not depend on memory format.

The result must consist of entire dimensions of the source (or of adjacent merged ones), each once or in overlapping windows, as in
sliding-window attention. Anything else is not modeled; None is returned.
"""

from __future__ import annotations

from itertools import combinations

Steps = tuple[tuple[str, tuple[object, ...]], ...]  # (operator of aten, its arguments behind the tensor)
Dims = tuple[tuple[int, int], ...]  # (size, stride)


def as_strided_steps(source: Dims, wanted: Dims) -> Steps | None:
    """Return the operators that read `source` as `wanted`, both (size, stride) by dimension, from the same first element.

    >>> as_strided_steps(((2, 8), (8, 1)), ((2, 8), (3, 2), (4, 1)))
    (('unfold.default', (1, 4, 2)), ('permute.default', ((0, 1, 2),)))
    """
    pairs = [i for i in range(len(source) - 1) if source[i][1] == source[i + 1][0] * source[i + 1][1]]
    for number in range(len(pairs) + 1):
        for chosen in combinations(pairs, number):
            base: list[tuple[int, int]] = []
            for i, (size, stride) in enumerate(source):
                merges = i - 1 in chosen
                base[-1:] = [(base[-1][0] * size, stride)] if merges else [*base[-1:], (size, stride)]
            steps = _match_dims(tuple(base), wanted)
            if steps is not None:
                first = (("reshape.default", (tuple(size for size, _ in base),)),) if chosen else ()
                return (*first, *steps)
    return None


def _match_dims(base: Dims, wanted: Dims) -> Steps | None:
    """Return the same without merging dimensions: each is read with its own stride, and some by longer steps besides."""
    if any(size < 2 or not stride for size, stride in (*base, *wanted)) or len({stride for _, stride in base}) < len(base):
        return None
    inner = {d: p for p, (_, stride) in enumerate(wanted) for d, (_, stride_of) in enumerate(base) if stride_of == stride}
    if len({stride for _, stride in wanted}) < len(wanted):
        return None
    outer: dict[int, int] = {}
    for place, (size, stride) in enumerate(wanted):
        if place in inner.values():
            continue
        fits = [
            d
            for d, (extent, stride_of) in enumerate(base)
            if d in inner
            and d not in outer
            and stride % stride_of == 0
            and (size - 1) * (stride // stride_of) + wanted[inner[d]][0] <= extent
        ]
        if len(fits) != 1:
            return None
        outer[fits[0]] = place
    return _view_steps(base, wanted, inner, outer)


def _view_steps(base: Dims, wanted: Dims, inner: dict[int, int], outer: dict[int, int]) -> Steps | None:
    if len(inner) < len(base) or len(inner) + len(outer) < len(wanted):
        return None
    steps: list[tuple[str, tuple[object, ...]]] = []
    order = [outer.get(d, inner[d]) for d in range(len(base))]
    for d, (extent, stride_of) in enumerate(base):
        size = wanted[inner[d]][0]
        if d not in outer:
            if size != extent:
                return None
            continue
        step = wanted[outer[d]][1] // stride_of
        if (extent - size) // step + 1 != wanted[outer[d]][0]:
            return None
        steps.append(("unfold.default", (d, size, step)))
        order.append(inner[d])
    return (*steps, ("permute.default", (tuple(order.index(place) for place in range(len(wanted))),)))
