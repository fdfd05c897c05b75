"""Checks of the integers that a user passes to a loop. They run before tracing."""

from __future__ import annotations

import contextlib
import operator
from typing import Any

import numpy as np

from remat.errors import ScheduleError


def whole_number(value: Any, name: str, least: int) -> int:
    """Return an integer argument as a Python int.

    Integers of NumPy and of JAX are accepted; bools, floats and strings are not.

    >>> import numpy as np
    >>> whole_number(np.int64(2), "checkpoints", 1)
    2

    Raises:
      ScheduleError: the value is not an integer or is below `least`.
    """
    number = None
    if not isinstance(value, (bool, np.bool_)):
        with contextlib.suppress(TypeError):
            number = operator.index(value)
    if number is None:
        raise ScheduleError(f"{name} must be an integer, not {value!r}.")
    if number < least:
        raise ScheduleError(f"{name} must be at least {least}, not {number}.")
    return number


def unroll_factor(unroll: object) -> int | bool:
    """Return `unroll=` in the form that `jax.lax.scan` takes: a bool or a positive int.

    Raises:
      ScheduleError: it is neither.
    """
    return unroll if isinstance(unroll, bool) else whole_number(unroll, "unroll", 1)
