"""Patterns of parameter names with `*` for layer numbers: shorten a plan's sharded parameters to patterns, and expand them again.

A plan of 48 equal layers has each shard once: `layers.*.mlp.up.weight = 0`. A pattern stands for every name of the model that it matches,
so it is only used where all of these are sharded; layers that are sharded otherwise are named after it, and the later entry wins. Not
modelled: ranges of layers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from shardwise.errors import LayoutError

DimByParameter = tuple[tuple[str, int], ...]
WILDCARD = "*"
MAX_STAGES = 100_000
_NUMBER = re.compile(r"(?<![^.])(?:0|[1-9][0-9]{0,8})(?=\.)")
_RANGE = re.compile(r"\{([0-9]{1,9})\.\.([0-9]{1,9})(?:\.\.([0-9]{1,9}))?\}")


def pattern_of(name: str) -> str:
    """Return the name with `*` for every part that is a number.

    >>> pattern_of("layers.3.mlp.up.weight"), pattern_of("layers.3.attention/linear")
    ('layers.*.mlp.up.weight', 'layers.*.attention/linear')
    """
    head, slash, tail = name.partition("/")
    return ".".join(WILDCARD if part.isdigit() else part for part in head.split(".")) + slash + tail


def matches_pattern(pattern: str, name: str) -> bool:
    """Return whether a pattern stands for a name: part by part, `*` for any number."""
    want, have = pattern.split("."), name.split(".")
    return len(want) == len(have) and all(w == h or (w == WILDCARD and h.isdigit()) for w, h in zip(want, have, strict=True))


def expand_patterns(cuts: DimByParameter, names: Iterable[str]) -> DimByParameter:
    """Expand patterns for the names that the model has; other entries as they are, the later of two winning.

    >>> expand_patterns((("h.*.up", 0), ("head", 1)), ["h.0.up", "h.1.up", "h.1.down", "head"])
    (('h.0.up', 0), ('h.1.up', 0), ('head', 1))
    """
    names = list(names)
    by_name: dict[str, int] = {}
    for entry, dim in cuts:
        if WILDCARD in entry.split("."):
            by_name.update((name, dim) for name in names if matches_pattern(entry, name))
        else:
            by_name[entry] = dim
    return tuple(by_name.items())


def expand_shards(shards: Iterable[tuple[str, DimByParameter]], names: Iterable[str]) -> dict[str, DimByParameter]:
    """Expand a plan's shards by axis, with patterns written out for the names that the model has."""
    names = list(names)
    return {axis: expand_patterns(cuts, names) for axis, cuts in shards}


def shorten_patterns(cuts: DimByParameter, names: Iterable[str]) -> DimByParameter:
    """Shorten shards to as few entries as patterns allow; `names`: all parameters and buffers of the model.

    >>> shorten_patterns((("h.0.up", 0), ("h.1.up", 0), ("head", 1)), ["h.0.up", "h.1.up", "h.1.down", "head"])
    (('h.*.up', 0), ('head', 1))
    """
    names = list(names)
    dims = dict(expand_patterns(cuts, names))
    members: dict[str, list[str]] = {}
    for name in names:
        for pattern in _candidate_patterns(name):
            members.setdefault(pattern, []).append(name)
    patterns: dict[str, int] = {}
    exceptions: dict[str, int] = {}
    covered: set[str] = set()
    for name in dims:
        if name in covered:
            continue
        best, dim = _widest_pattern(name, dims, members)
        patterns[best] = dim
        matched = members[best] if best != name else [name]
        exceptions.update((n, dims[n]) for n in matched if dims[n] != dim)
        covered.update(matched)
    return (*patterns.items(), *exceptions.items())


def _widest_pattern(name: str, dims: dict[str, int], members: dict[str, list[str]]) -> tuple[str, int]:
    """Return the pattern that covers most: all that it matches are sharded, most of them along the dimension that is returned with it."""
    for pattern in _candidate_patterns(name):
        matched_dims = [dims.get(n) for n in members.get(pattern, ())]
        if len(matched_dims) > 1 and None not in matched_dims:
            dim, count = Counter(d for d in matched_dims if d is not None).most_common(1)[0]
            if 1 + len(matched_dims) - count <= max(1, len(matched_dims) // 2):
                return pattern, dim
    return name, dims[name]


def _candidate_patterns(name: str) -> list[str]:
    """Return patterns for a name, the widest first: every number, then the first alone (layers of which each has numbered parts)."""
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    sets = [numbers, *([numbers[:1]] if len(numbers) > 1 else [])]
    return [".".join(WILDCARD if i in chosen else part for i, part in enumerate(parts)) for chosen in sets if chosen]


def shorten_sites(sites: Sequence[str]) -> tuple[str, ...]:
    """Shorten runs of sites whose first number grows evenly to `{from..to}` or `{from..to..step}`; sites that contain braces stay.

    >>> shorten_sites(["layers.2.norm", "layers.4.norm", "layers.6.norm", "head"])
    ('layers.{2..6..2}.norm', 'head')
    """
    if any("{" in site for site in sites):
        return tuple(sites)
    patterns: list[str] = []
    at = 0
    while at < len(sites):
        head, number, tail = _split_at_number(sites[at])
        length = 1
        step = 0
        while at + length < len(sites):
            other = _split_at_number(sites[at + length])
            if number is None or other[1] is None or (other[0], other[2]) != (head, tail):
                break
            step = step or other[1] - number
            if step < 1 or other[1] != number + length * step:
                break
            length += 1
        if number is None or length < 3:
            patterns.append(sites[at])
            at += 1
            continue
        last = number + (length - 1) * step
        patterns.append(f"{head}{{{number}..{last}{f'..{step}' if step > 1 else ''}}}{tail}")
        at += length
    return tuple(patterns)


def expand_sites(texts: Sequence[str]) -> tuple[str, ...]:
    """Expand sites with ranges.

    >>> expand_sites(["layers.{2..6..2}.norm", "head"])
    ('layers.2.norm', 'layers.4.norm', 'layers.6.norm', 'head')

    Raises:
        LayoutError: a range of more stages than any plan has.
    """
    sites: list[str] = []
    for text in texts:
        match = _RANGE.search(text)
        if match is None:
            sites.append(text)
            continue
        numbers = range(int(match[1]), int(match[2]) + 1, int(match[3] or 1) or 1)
        if len(numbers) > MAX_STAGES:
            raise LayoutError(f"stages: {text} stands for {len(numbers)} stages; a plan has at most {MAX_STAGES}")
        sites += [f"{text[: match.start()]}{n}{text[match.end() :]}" for n in numbers]
    return tuple(sites)


def _split_at_number(site: str) -> tuple[str, int | None, str]:
    """Split a site around its first part that is a number."""
    match = _NUMBER.search(site)
    return (site, None, "") if match is None else (site[: match.start()], int(match[0]), site[match.end() :])
