"""Calibrated constants by name. In: the sections `protocol` and `stack` of `cluster/catalogue.toml`. Out: frozen numbers with a source.

`Protocols` are what a library of collectives reaches on its links. Constants are fitted once, by `scripts/validate --fit`, and then
stay as they are. Not modelled: versions of a library between those that were measured.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from typing import Any

from weft.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Line:
    """An algorithm with a protocol: `start` and `hop` in latencies of the link, `rate` as a part of its large-message bandwidth."""

    start: float
    hop: float
    rate: float

    def __post_init__(self) -> None:
        if self.start < 0 or self.hop < 0 or self.rate <= 0:
            raise ConfigError(f"a protocol with {self}: start and hop are not below zero, rate is above it")


@dataclass(frozen=True, slots=True)
class Protocols:
    """What a library offers inside a node (rings) and between nodes (trees with LL, LL128 and Simple, and rings).

    `tree_saved`: 1 where a tree over N nodes moves 2(N-1)/N of the tensor through a node's port, as double binary trees do (Sanders
    et al. 2009), 0 where it was measured to take as long as if it moved all of it twice.
    """

    name: str
    node_ll: Line
    node_simple: Line
    net_ll: Line
    net_ll128: Line
    net_tree: Line
    net_ring: Line
    tree_saved: float = 0.0
    source: str = ""


@cache
def _section(kind: str) -> Mapping[str, Any]:
    text = resources.files("weft.cluster").joinpath("catalogue.toml").read_text()
    found: Mapping[str, Any] = tomllib.loads(text)[kind]
    return found


@cache
def protocols(name: str) -> Protocols:
    """The rules of a library by name, as links give it in `protocol`.

    >>> protocols("nccl").net_ring.rate
    1.0

    Raises:
        ConfigError: a name or a key that is not known, or a key that is missing.
    """
    known = _section("protocol")
    if name not in known:
        raise ConfigError(f"protocol {name!r} is unknown; use one of {', '.join(known)}")
    return parse_protocols(name, known[name])


def parse_protocols(name: str, given: Mapping[str, Any]) -> Protocols:
    """`Protocols` from tables `{ start, hop, rate }` by field. Raises `ConfigError` naming what is missing or unknown."""
    wanted = [f.name for f in fields(Protocols) if f.name not in ("name", "tree_saved", "source")]
    for key in (*wanted, *given):
        if key not in given or key not in (*wanted, "tree_saved", "source"):
            raise ConfigError(f"protocol {name}: {key} is {'missing' if key in wanted else 'unknown'}; it has {', '.join(wanted)}")
    try:
        return Protocols(name, **{key: Line(**given[key]) for key in wanted}, **{k: given[k] for k in ("tree_saved", "source") if k in given})
    except TypeError as error:
        raise ConfigError(f"protocol {name}: each of its tables has start, hop and rate, and nothing else ({error})") from error
