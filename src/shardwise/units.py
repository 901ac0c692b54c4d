"""Parsing and formatting of numbers with units: "25 GB/s" <-> 25e9. The only place that converts.

Numbers are in SI units (bytes, bytes a second, seconds, counts). kB, MB, GB are powers of 1000; KiB, MiB,
GiB of 1024; a lower-case b or "bit" is an eighth of a byte ("100 Gb/s" is 12.5e9), so "KB" is written kB or KiB.
"""

from __future__ import annotations

import math
import re

from shardwise.errors import UsageError, did_you_mean

_SI = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {f"{prefix}i": 1024.0**power for power, prefix in enumerate("KMGTPE", 1)}
_BYTES = {"B": 1.0, **{f"{p}B": n for p, n in {**_SI, **_BINARY}.items()}, "KB": 1e3}
_BITS = {f"{p}{bit}": n / 8 for p, n in {"": 1.0, **_SI, **_BINARY}.items() for bit in ("b", "bit")}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_COUNTS = {"": 1.0, **_SI, "K": 1e3, "m": 1e6, "B": 1e9, "b": 1e9}
_NUMBER = re.compile(r"\s*([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(.*?)\s*")


def parse_bytes(text: str | float) -> float:
    """Parse a size in bytes; a number without a unit is in bytes.

    >>> parse_bytes("2GiB"), parse_bytes("40 GB"), parse_bytes(512)
    (2147483648.0, 40000000000.0, 512.0)

    Raises:
        UsageError: not a number with a unit of bytes, or negative.
    """
    return _parse(text, {"": 1.0, **_BYTES}, "size", "2 GiB")


def parse_rate(text: str | float) -> float:
    """Parse a rate in bytes a second; bits are written with a lower-case b.

    >>> parse_rate("25 GB/s"), parse_rate("100 Gb/s"), parse_rate("200 Gbit/s")
    (25000000000.0, 12500000000.0, 25000000000.0)
    """
    return _parse(text, {"": 1.0, **{f"{unit}/s": n for unit, n in {**_BYTES, **_BITS}.items()}}, "rate", "25 GB/s")


def parse_seconds(text: str | float) -> float:
    """Parse a time in seconds.

    >>> parse_seconds("1.5 ms"), parse_seconds("2 h"), parse_seconds(3)
    (0.0015, 7200.0, 3.0)
    """
    return _parse(text, {"": 1.0, **_SECONDS}, "time", "1.5 ms")


def parse_count(text: str | float) -> float:
    """Parse a count of parameters, operations or tokens: k, M, G (or B), T.

    >>> parse_count("39.1B"), parse_count("10M")
    (39100000000.0, 10000000.0)
    """
    return _parse(text, _COUNTS, "count", "39.1B")


def format_bytes(size_bytes: float) -> str:
    """Format bytes to three digits in units of 1024, as memory is sold.

    >>> format_bytes(0), format_bytes(1536), format_bytes(80 * 2**30)
    ('0 B', '1.50 KiB', '80.0 GiB')
    """
    return _format(size_bytes, {"": 1.0, **_BINARY}, "B")


def format_rate(bytes_per_s: float) -> str:
    """Format bytes a second to three digits in units of 1000, as links are sold.

    >>> format_rate(25e9)
    '25.0 GB/s'
    """
    return _format(bytes_per_s, {"": 1.0, **_SI}, "B/s")


def format_count(count: float) -> str:
    """Format a count to three digits, with B for 1e9 as model sizes are given.

    >>> format_count(39.1e9), format_count(1024), format_count(7)
    ('39.1B', '1.02k', '7')
    """
    return _format(count, {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}, "").replace(" ", "")


def format_flops(flops: float) -> str:
    """Format floating-point operations, or their rate where the caller adds "/s".

    >>> format_flops(1.2e15)
    '1.20 PFLOP'
    """
    return _format(flops, {"": 1.0, **_SI}, "FLOP")


def format_seconds(seconds: float) -> str:
    """Format seconds to three digits up to a minute, then minutes, hours and days.

    >>> format_seconds(0.0123), format_seconds(3.5e-5), format_seconds(5), format_seconds(200), format_seconds(90000)
    ('12.3 ms', '35.0 us', '5.00 s', '3 min 20 s', '1 d 1 h')
    """
    if not math.isfinite(seconds):
        return f"{seconds} s"
    if abs(seconds) >= 59.995:
        sign, rest = ("-" if seconds < 0 else ""), round(abs(seconds))
        parts: list[tuple[int, str]] = []
        for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
            count, rest = divmod(rest, length)
            if count or parts:
                parts.append((count, unit))
        return sign + " ".join(f"{count} {unit}" for count, unit in parts[:2] if count)
    return _format(seconds, {"n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1.0}, "s")


def format_percent(share: float) -> str:
    """Format a share of 0 to 1 as per cent.

    >>> format_percent(0.6), format_percent(0.0044)
    ('60.0 %', '0.4 %')
    """
    return f"{100 * share:.1f} %"


def _parse(text: str | float, units: dict[str, float], what: str, example: str) -> float:
    if isinstance(text, int | float) and not isinstance(text, bool):
        number, unit = float(text), ""
    else:
        match = _NUMBER.fullmatch(text) if isinstance(text, str) else None
        if not match:
            raise UsageError(f"{what} {text!r} is not a number with a unit, for example {example}")
        number, unit = float(match[1]), match[2]
    if unit not in units:
        hint = did_you_mean(unit, [u for u in units if u], 0.3)
        raise UsageError(f"{what} {text!r} has the unknown unit {unit!r}{hint}; write for example {example}")
    if not math.isfinite(number) or number < 0:
        raise UsageError(f"{what} {text!r} must be finite and not negative, for example {example}")
    return number * units[unit]


def _format(number: float, prefixes: dict[str, float], unit: str) -> str:
    """Format to three significant digits with the largest prefix that leaves at least 1; whole numbers below 1000 stay whole."""
    if not math.isfinite(number):
        return f"{number} {unit}".rstrip()
    base = 1024 if "Ki" in prefixes else 1000
    if number == 0 or (float(number).is_integer() and abs(number) < base and unit != "s"):
        return f"{int(number)} {unit}".rstrip()
    fitting = [prefix for prefix, n in prefixes.items() if abs(number) >= n * (1 - 5e-4)] or [min(prefixes, key=lambda p: prefixes[p])]
    prefix = max(fitting, key=lambda p: prefixes[p])
    scaled = number / prefixes[prefix]
    digits = 2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0
    return f"{scaled:.{digits}f} {prefix}{unit}".rstrip()
