"""Integer arguments of loops."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from remat.errors import ScheduleError
from remat.loops.arguments import unroll_factor, whole_number


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3), jnp.int32(3)])
def test_integers_of_any_library_are_python_integers(value: Any) -> None:
    found = whole_number(value, "checkpoints", 1)
    assert (found, type(found)) == (3, int)


@pytest.mark.parametrize("value", [True, np.True_, 3.0, np.float32(3), "3", None, jnp.ones(2)])
def test_another_type_is_refused_by_the_name_of_the_argument(value: Any) -> None:
    with pytest.raises(ScheduleError, match="checkpoints must be an integer, not "):
        whole_number(value, "checkpoints", 1)


def test_a_number_that_is_too_small_is_refused_with_the_least() -> None:
    with pytest.raises(ScheduleError, match="max_steps must be at least 0, not -1"):
        whole_number(-1, "max_steps", 0)


def test_an_unroll_factor_is_a_bool_or_positive() -> None:
    assert unroll_factor(True) is True and unroll_factor(False) is False
    assert unroll_factor(np.int32(4)) == 4
    with pytest.raises(ScheduleError, match="unroll must be at least 1"):
        unroll_factor(0)
