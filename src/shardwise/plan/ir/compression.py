"""Gradient compression between ranks: the layout's word (`compress=int8`) as `Compression`, and the bytes of its messages.

Lossy: a run that compresses differs from the serial one. What a rank does not send it adds to its next gradients (error feedback: Seide et
al. 2014; Karimireddy et al. 2019; for top-k Stich et al. 2018), so that nothing is lost, only late; bfloat16 has no error feedback, like
rounding in mixed-precision training. Not modelled: entropy coding, low rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from shardwise.errors import LayoutError, did_you_mean
from shardwise.plan.ir.precision import PRECISIONS

KINDS = ("none", "bfloat16", "int8", "topk")
BLOCK = 512  # elements that share one scale of int8: 0.8 % more bytes, and one large element spoils few others
FRACTION = 0.01  # of a bucket that top-k sends by default, as Aji and Heafield (2017)
_SCALE_BYTES = 4
_INDEX_BYTES = 4


@dataclass(frozen=True, slots=True)
class Compression:
    """One method of compression. `fraction`: fraction of the elements that `topk` sends; 0 for the others."""

    kind: str = "none"
    fraction: float = 0.0

    @staticmethod
    @cache
    def parse(word: str) -> Compression:
        """Parse `none`, `bfloat16`, `int8`, `topk` (a hundredth) or `topk:0.05`.

        Raises:
            LayoutError: another word (names the nearest), or a fraction that is none.

        >>> str(Compression.parse("topk")), Compression.parse("int8").has_error_feedback
        ('topk:0.01', True)
        """
        kind, colon, number = word.partition(":")
        if kind not in KINDS or (colon and kind != "topk"):
            raise LayoutError(
                f"compress={word} is unknown{did_you_mean(kind, KINDS)}; use one of none, bfloat16, int8, topk, topk:FRACTION"
            )
        if kind != "topk":
            return Compression(kind)
        try:
            fraction = float(number) if colon else FRACTION
        except ValueError:
            fraction = math.nan
        if not 0 < fraction <= 1:
            raise LayoutError(f"compress={word}: {number or 'nothing'} is no fraction above 0 and at most 1; use compress=topk:{FRACTION}")
        return Compression(kind, fraction)

    def __str__(self) -> str:
        return f"{self.kind}:{self.fraction:.12g}" if self.kind == "topk" else self.kind

    @property
    def has_error_feedback(self) -> bool:
        """Return whether what is not sent is added in the next step (error feedback)."""
        return self.kind in ("int8", "topk")

    def num_sent(self, num_elements: int) -> int:
        """Number of elements, of `num_elements`, that a message holds.

        >>> Compression.parse("topk:0.1").num_sent(25), Compression.parse("int8").num_sent(25)
        (3, 25)
        """
        return max(1, math.ceil(self.fraction * num_elements)) if self.kind == "topk" and num_elements else num_elements

    def message_bytes(self, num_elements: int, width: int = 4) -> int:
        """Bytes of a message of `num_elements`, of `width` bytes each uncompressed.

        bfloat16: 2 an element. int8: 1, and a scale of 4 for each block. topk: the chosen elements as they are, and 4 for where each is.

        >>> [Compression.parse(word).message_bytes(1000) for word in ("none", "bfloat16", "int8", "topk")]
        [4000, 2000, 1008, 80]
        """
        match self.kind:
            case "bfloat16":
                return 2 * num_elements
            case "int8":
                return num_elements + _SCALE_BYTES * -(-num_elements // BLOCK)
            case "topk":
                return self.num_sent(num_elements) * (width + _INDEX_BYTES)
        return width * num_elements


def refuse_compression(compress: str, data: int, zero: int, all_reduce: str = "auto") -> str:
    """Return why gradients cannot be compressed in such a layout; empty where they can.

    >>> refuse_compression("int8", 2, 1)
    ''
    """
    if compress == "none":
        return ""
    if data < 2:
        return f"compress={compress} is for gradients between replicas, and data={data} has none; use data=2 or more, or compress=none"
    if all_reduce not in ("auto", "native"):
        return (
            f"all_reduce={all_reduce} compress={compress}: compressed gradients are exchanged in shards and gathered, not reduced on their "
            "way; use all_reduce=auto, or compress=none"
        )
    if zero >= 2:
        return (
            f"compress={compress} with zero={zero}: it compresses whole gradients, which zero={zero} is there to avoid; use zero=1, or "
            "compress=none"
        )
    return ""


def refuse_scaled_compression(compress: str, precision: str) -> str:
    """Return why gradients cannot be compressed in a precision; empty where they can. Error feedback would be added to gradients of another
    loss scale, and values that are not finite would never leave it.

    >>> refuse_scaled_compression("bfloat16", "float16"), refuse_scaled_compression("int8", "bfloat16")
    ('', '')
    """
    if PRECISIONS[precision].scales_loss and Compression.parse(compress).has_error_feedback:
        return (
            f"compress={compress} precision={precision}: what is kept back would be of gradients of another scale; use precision=bfloat16, "
            "or compress=bfloat16"
        )
    return ""
