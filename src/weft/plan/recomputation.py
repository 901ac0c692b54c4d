"""Which layers of a stage are computed again in backward. In: the word of `recompute=`. Out: a `Recomputation`, which picks from layers.

A layer is a numbered block of the model (`h.3`, `encoder.layers.0`), by the path of its module. Of a stage the first are repeated: when
their backward comes the others' activations are gone already, so that what is there again for a moment costs the least.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from weft.errors import LayoutError

KINDS = ("none", "selective", "full")


@dataclass(frozen=True, slots=True)
class Recomputation:
    """`counts`: layers of each stage, the first ones, or one count for every stage. `names`: layers by name. With neither, all of them.

    >>> Recomputation.parse("full:2").chosen(0, ["h.0", "h.1", "h.2"]), Recomputation.parse("full:h.2+x.*").chosen(0, ["h.0", "h.2"])
    (('h.0', 'h.1'), ('h.2',))
    """

    kind: str = "none"
    counts: tuple[int, ...] = ()
    names: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Recomputation:
        """`none`, `selective`, `full`, `full:2` (two layers of each stage), `full:3/1` (of two stages), `full:h.0+h.5` (these layers).

        Raises:
            LayoutError: anything else.
        """
        kind, colon, which = text.partition(":")
        if not colon:
            return cls(kind)
        words = which.split("/")
        if kind != "full" or not which:
            raise LayoutError(f"recompute={text}: only full takes layers; for example recompute=full:2, full:3/1 or full:h.0+h.5")
        if all(word.isdecimal() and len(word) < 7 for word in words):
            counts = tuple(int(word) for word in words)
            if not any(counts):
                raise LayoutError(f"recompute={text} repeats no layer; use recompute=none")
            return cls(kind, counts)
        names = tuple(which.split("+"))
        if not all(names) or "/" in which:
            raise LayoutError(f"recompute={text}: layers are counts by stage (full:3/1) or names (full:h.0+h.5)")
        return cls(kind, (), names)

    def __str__(self) -> str:
        which = "/".join(map(str, self.counts)) or "+".join(self.names)
        return f"{self.kind}:{which}" if which else self.kind

    def chosen(self, stage: int, layers: Sequence[str]) -> tuple[str, ...]:
        """Those of a stage's layers, in their order, that are repeated."""
        if self.kind != "full":
            return ()
        if self.names:
            return tuple(layer for layer in layers if any(fnmatchcase(layer, name) for name in self.names))
        if self.counts:
            return tuple(layers[: self.counts[stage % len(self.counts)]])
        return tuple(layers)

    def check(self, layers: Iterable[str]) -> None:
        """Raise `LayoutError` for a name that none of the model's layers has."""
        known = list(dict.fromkeys(layer for layer in layers if layer))
        for name in self.names:
            if not any(fnmatchcase(layer, name) for layer in known):
                has = f"{', '.join(known[:4])}{' ...' if len(known) > 4 else ''}" if known else "none that is numbered"
                raise LayoutError(f"recompute=full:{name}: the model has no such layer; it has {has}")
