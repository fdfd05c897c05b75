"""Bytes, FLOPs and seconds: reading them from text and printing them for people.

Memory is counted in binary units (KiB, MiB, GiB: powers of 1024), as the compilers' memory
analyses do; ``"8GB"`` (powers of 1000) is understood and means what it says.
"""

from __future__ import annotations

import math
import re

from remat.errors import UnitsError

_BINARY = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_DECIMAL = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS = _BINARY | _DECIMAL
_NUMBER = re.compile(
    r"\s*([0-9][0-9_]*(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE
)


def parse_bytes(text: str | int | float) -> int:
    """Read a number of bytes, rounded down to a whole byte.

    >>> parse_bytes("8GiB"), parse_bytes("1.5 MB"), parse_bytes(4096)
    (8589934592, 1500000, 4096)

    Raises:
      UnitsError: for anything that is not a non-negative, finite number of bytes.
    """
    if isinstance(text, bool) or not isinstance(text, (str, int, float)):
        raise UnitsError(f"a number of bytes is an int or a text such as '8GiB', not {text!r}.")
    if isinstance(text, (int, float)):
        if not math.isfinite(text) or text < 0:
            raise UnitsError(f"{text!r} is no number of bytes: it must be finite and at least 0.")
        return int(text)
    match = _NUMBER.fullmatch(text)
    factor = _UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        units = ", ".join(("B", "KiB", "MiB", "GiB", "TiB", "KB", "MB", "GB", "TB"))
        raise UnitsError(f"{text!r} is no number of bytes. Write a number and one of {units}.")
    return int(float(match[1].replace("_", "")) * factor)


def format_bytes(n_bytes: int | float) -> str:
    """Print a number of bytes in the largest binary unit that leaves at least 1.

    >>> format_bytes(0), format_bytes(1536), format_bytes(-3 * 2**30)
    ('0 B', '1.5 KiB', '-3.0 GiB')
    """
    sign, value = ("-", -n_bytes) if n_bytes < 0 else ("", n_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{sign}{value:.0f} {unit}" if unit == "B" else f"{sign}{value:.1f} {unit}"
        value /= 1024
    return f"{sign}{value:.1f} TiB"


def format_flops(flops: int | float) -> str:
    """Print a count of floating-point operations.

    >>> format_flops(950), format_flops(2.5e12)
    ('950 FLOP', '2.50 TFLOP')
    """
    return _format_decimal(flops, "FLOP")


def format_seconds(time_s: float) -> str:
    """Print a duration.

    >>> format_seconds(0.0000125), format_seconds(0.25), format_seconds(75)
    ('12.5 µs', '250.0 ms', '75.0 s')
    """
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if abs(time_s) * factor >= 1 or time_s == 0:
            return f"{time_s * factor:.1f} {unit}"
    return f"{time_s * 1e9:.1f} ns"


def _format_decimal(value: int | float, unit: str) -> str:
    for prefix, factor in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= factor:
            return f"{value / factor:.2f} {prefix}{unit}"
    return f"{value:.0f} {unit}"
