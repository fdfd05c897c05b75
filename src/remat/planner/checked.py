"""Dataclasses that check on construction that their fields fit their annotations.

An invalid edit of a plan's file is thus detected when the file is read, and the reader adds the line.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any

from remat.errors import PlanError
from remat.printing import shown

# The largest integer in a file. Doubles, as which many tools read JSON numbers, are exact up to here.
_MOST = 2**53
# The largest float in a file: larger than any program's costs, and small enough that sums and products
# of such numbers are finite.
_MOST_FLOAT = 1e30


def field_error(why: str, field: str = "", item: int | None = None) -> PlanError:
    """Return the error for an invalid field. The reader of a file adds its line."""
    error = PlanError(why)
    error.field, error.item = field, item
    return error


class Checked:
    """A dataclass that checks on construction that its fields fit their annotations."""

    __slots__ = ()

    def __post_init__(self) -> None:
        cls: Any = type(self)
        for name, hint in hints_of(cls).items():
            object.__setattr__(self, name, fitting(hint, getattr(self, name), name))
        self._check()

    def _check(self) -> None:
        """Raise `field_error` where fields contradict each other."""


# One entry for each dataclass.
@functools.cache
def hints_of(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def fitting(hint: Any, value: Any, field: str, item: int | None = None) -> Any:
    """Return a value converted to its annotation (lists to tuples, ints to floats), or raise."""
    parts = typing.get_args(hint)
    if isinstance(hint, types.UnionType):  # X | None is the only one
        return None if value is None else fitting(parts[0], value, field)
    if typing.get_origin(hint) is tuple and parts[-1] is ...:
        if type(value) in (tuple, list):
            return tuple(fitting(parts[0], part, field, i) for i, part in enumerate(value))
        needed = "a list"
    elif typing.get_origin(hint) is tuple:
        if type(value) in (tuple, list) and len(value) == len(parts):
            return tuple(fitting(kind, part, field, item) for kind, part in zip(parts, value))
        needed = f"a list of {len(parts)}"
    elif hint is int:
        if type(value) is int and 0 <= value <= _MOST:
            return value
        needed = f"a whole number between 0 and {_MOST}"
    elif hint is float:
        is_number = isinstance(value, int | float) and type(value) is not bool
        if is_number and 0 <= value <= _MOST_FLOAT:
            return float(value) + 0.0  # no -0.0
        needed = f"a number between 0 and {_MOST_FLOAT:.0e}"
    else:
        if type(value) is hint:
            return value
        needed = {str: "a string", bool: "true or false"}.get(hint) or f"a {hint.__name__}"
    place = field if item is None else f"each item in {field}"
    raise field_error(f"{place} must be {needed}, not {shown(value)}.", field, item)


def check_once(items: Iterable[Any], field: str, problem: Callable[[Any], str]) -> None:
    known = set()
    for i, item in enumerate(items):
        if item in known:
            raise field_error(f"{problem(item)}; remove one of the two.", field, i)
        known.add(item)
