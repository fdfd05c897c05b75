"""Bytes, FLOPs and seconds: reading them from text and printing them for people.

Memory is counted in binary units (KiB, MiB, GiB: powers of 1024), as the compilers' memory
analyses do; ``"8GB"`` (powers of 1000) is understood and means what it says. Underscores may stand
between groups of three digits, as in ``"1_000KiB"``.
"""

from __future__ import annotations

import dataclasses
import decimal
import numbers
import operator
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import SupportsIndex

from remat.aliases import Size
from remat.errors import UnitsError
from remat.printing import shown

#: The types accepted as a size; NumPy's numbers satisfy the protocols.
Number = str | int | float | SupportsIndex

_BINARY = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_DECIMAL = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS = _BINARY | _DECIMAL
_NUMBER = re.compile(
    r"\s*((?:[0-9]+|[0-9]{1,3}(?:_[0-9]{3})+)(?:\.[0-9]*)?(?:e[+-]?[0-9]{1,6})?)\s*([a-z]*|%)\s*",
    re.IGNORECASE | re.ASCII,
)
_UNITS_IN_WORDS = "B, KiB, MiB, GiB, TiB, KB, MB, GB or TB"
_MOST_BYTES = 2**63 - 1  # the largest size of an array for NumPy and XLA
_MOST_BUDGET_BYTES = 2**53  # integers up to here are exact in every reader of a plan's JSON
_MOST_SHARE = 10  # of the peak without rematerialization; a larger one is taken for a typing error


def parse_bytes(value: Number, option: str = "") -> int:
    """Return a number of bytes, rounded down to a whole byte.

    >>> parse_bytes("8GiB"), parse_bytes("1.5 MB"), parse_bytes(4096)
    (8589934592, 1500000, 4096)

    Args:
      value: a number, or a text of a number and a unit.
      option: the prefix of the value in an error, such as "limit=".

    Raises:
      UnitsError: for anything that is not a finite number of bytes, at least 0 and less than 8 EiB.
    """
    advice = f"Write a number and a unit: {_UNITS_IN_WORDS}."
    number, unit = _read(value, option, advice)
    if unit == "%":
        raise UnitsError(
            f"{option}{shown(value)} is a share; a number of bytes is needed here. {advice}"
        )
    return _within(number * _UNITS[unit], _MOST_BYTES, value, option)


@dataclasses.dataclass(frozen=True)
class Budget:
    """A limit on a peak: a number of bytes, or a share of a peak that is not known yet."""

    amount: Fraction
    is_share: bool = False

    def bytes_of(self, peak_bytes: int) -> int:
        """Return the limit in bytes; a share is taken of this peak.

        >>> parse_budget("60%").bytes_of(1000), parse_budget("1KiB").bytes_of(1000)
        (600, 1024)
        """
        return int(self.amount * peak_bytes if self.is_share else self.amount)


def parse_budget(value: Number, option: str = "budget=") -> Budget:
    """Return a budget: bytes as for `parse_bytes`, or a share such as "60%".

    >>> parse_budget("8GiB").bytes_of(0)
    8589934592

    Args:
      value: the budget.
      option: the prefix of the value in an error, such as "--budget ".

    Raises:
      UnitsError: it is neither, or is below 1 byte, above 8 PiB or above 1000%.
    """
    advice = f"Write a number and a unit ({_UNITS_IN_WORDS}), or a share such as '60%'."
    number, unit = _read(value, option, advice)
    if unit == "%":
        if not 0 < number <= 100 * _MOST_SHARE:
            raise UnitsError(
                f"{option}{shown(value)} is not a share of the peak without rematerialization: it "
                f"must be above 0% and at most {100 * _MOST_SHARE}%."
            )
        return Budget(number / 100, is_share=True)
    if not unit and (0 < number < 1 or (number == 1 and "." in str(value))):
        raise UnitsError(
            f"{option}{shown(value)} is not a budget: a number without % is bytes, and a budget is at "
            f"least 1 byte; did you mean '{float(100 * number):g}%'?"
        )
    n_bytes = _within(number * _UNITS[unit], _MOST_BUDGET_BYTES, value, option)
    if n_bytes < 1:
        raise UnitsError(f"{option}{shown(value)} is not a budget: it must be at least 1 byte.")
    return Budget(Fraction(n_bytes))


def _read(value: object, option: str, advice: str) -> tuple[Fraction, str]:
    """Return a number, and its unit in lower case: "" for a number without."""
    number, unit, what = None, "", "number of bytes"
    if isinstance(value, str):
        what = "share" if value.strip().endswith("%") else what
        match = _NUMBER.fullmatch(value)
        if match is not None and (match[2] == "%" or match[2].lower() in _UNITS):
            number, unit = _exact(match[1].replace("_", "")), match[2].lower()
    elif not isinstance(value, bool):
        number = _of_number(value)
    if number is None:
        raise UnitsError(f"{option}{shown(value)} is not a {what}. {advice}")
    return number, unit


def _exact(text: str) -> Fraction:
    """Return the exact value of a number in decimal digits, however many there are."""
    number = decimal.Decimal(text)
    if number.adjusted() > 30:
        return Fraction(10) ** 30  # exceeds every limit; computing 10**999999 would take long
    return Fraction(number) if number.adjusted() > -30 else Fraction(0)


def _of_number(value: object) -> Fraction | None:
    """Return a finite Python or NumPy number as a fraction; None for anything else."""
    try:
        if isinstance(value, numbers.Rational):
            return Fraction(int(value.numerator), int(value.denominator))
        if isinstance(value, numbers.Real):
            return Fraction(float(value))
        return Fraction(operator.index(value))  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None


def _within(n_bytes: Fraction, most: int, value: object, option: str) -> int:
    if n_bytes < 0:
        raise UnitsError(f"{option}{shown(value)} is negative; a number of bytes is at least 0.")
    if n_bytes > most:
        raise UnitsError(
            f"{option}{shown(value)} is more than {most} bytes ({most / 2**50:.0f} PiB), the most that "
            "is possible here."
        )
    return int(n_bytes)


def counted(n: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun, in the singular or plural.

    >>> counted(1, "group"), counted(5198, "value"), counted(2, "body", "bodies")
    ('1 group', '5,198 values', '2 bodies')
    """
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {plural or noun + 's'}"


def format_bytes(n_bytes: Size) -> str:
    """Format a number of bytes in the largest binary unit in which it is at least 1.

    The bytes of an array with symbolic dimensions are an expression, and formatted as such.

    >>> format_bytes(0), format_bytes(1536), format_bytes(-3 * 2**30)
    ('0 B', '1.5 KiB', '-3.0 GiB')
    """
    if not isinstance(n_bytes, numbers.Real):
        return f"{n_bytes} B"
    sign, value = ("-", -float(n_bytes)) if n_bytes < 0 else ("", float(n_bytes))
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{sign}{value:.0f} {unit}" if unit == "B" else f"{sign}{value:.1f} {unit}"
        value /= 1024
    return f"{sign}{value:.1f} TiB"


def format_flops(flops: int | float) -> str:
    """Format a count of floating-point operations.

    >>> format_flops(950), format_flops(2.5e12)
    ('950 FLOP', '2.50 TFLOP')
    """
    return _format_decimal(flops, "FLOP")


def format_seconds(time_s: float) -> str:
    """Format a duration.

    >>> format_seconds(0.0000125), format_seconds(0.25), format_seconds(75)
    ('12.5 µs', '250.0 ms', '75.0 s')
    """
    if time_s == 0:
        return "0 s"
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if abs(time_s) * factor >= 1:
            return f"{time_s * factor:.1f} {unit}"
    return f"{time_s * 1e9:.1f} ns"


_FACTORS = {
    **{unit: 1024.0**i for i, unit in enumerate(("B", "KiB", "MiB", "GiB", "TiB"))},
    **{f"{prefix}FLOP": 1000.0**i for i, prefix in enumerate(("", "k", "M", "G", "T", "P"))},
    **{unit: 1000.0**-i for i, unit in enumerate(("s", "ms", "µs", "ns"))},
}


def in_one_unit(
    numbers: Sequence[float], show: Callable[[float], str], *, signed: bool = False
) -> tuple[str, ...]:
    """Format numbers for comparison in one unit: that of the smallest number other than 0.

    >>> in_one_unit((1354760000, 249660000), format_bytes)
    ('1,292.0 MiB', '238.1 MiB')
    """
    known = [abs(number) for number in numbers if number]
    unit = show(min(known)).split()[-1] if known else ""
    if unit not in _FACTORS or max(known) / _FACTORS[unit] >= 1e5:
        return tuple(("+" if signed and n > 0 else "") + show(n) for n in numbers)
    sign = "+" if signed else ""
    digits = 0 if unit in ("B", "FLOP") else 1
    return tuple(f"{n / _FACTORS[unit]:{sign if n else ''},.{digits}f} {unit}" for n in numbers)


def _format_decimal(value: int | float, unit: str) -> str:
    for prefix, factor in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= factor:
            return f"{value / factor:.2f} {prefix}{unit}"
    return f"{value:.0f} {unit}"
