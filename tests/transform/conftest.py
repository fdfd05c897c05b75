"""Strict promotion: no silent conversions between types or ranks, in the library either."""

import jax
import pytest


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield
