"""`static_argnums` and `static_argnames`."""

import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat


def f(x, n, *, mode="sin"):
    y = jnp.sin(x) if mode == "sin" else jnp.cos(x)
    return y * 2 if n > 1 else y


@pytest.mark.parametrize(
    "options", [{"static_argnums": 1}, {"static_argnames": "n"}, {"static_argnums": -1}]
)
@pytest.mark.parametrize("call", [lambda g: g(1.0, 2), lambda g: g(1.0, n=2)])
def test_they_are_found_by_position_and_by_name(options, call):
    def g(x, n):
        return f(x, n)

    np.testing.assert_allclose(call(remat.checkpoint(g, **options)), 2 * np.sin(1.0), rtol=1e-6)


@pytest.mark.parametrize("static", [(1,), (1.0,), (True,)])
def test_equal_values_of_other_types_inside_a_tuple_are_other_static_arguments(static):
    g = remat.checkpoint(lambda x, s: x * s[0], static_argnums=1)
    g(jnp.int32(2), (1,))
    with jax.numpy_dtype_promotion("standard"):
        assert g(jnp.int32(2), static).dtype == (jnp.int32(2) * static[0]).dtype


@pytest.mark.parametrize("number", [2, -3])
def test_a_number_out_of_range_is_an_error(number):
    with pytest.raises(remat.StaticArgumentError, match=str(number)):
        remat.checkpoint(lambda x, n: x, static_argnums=number)


def test_an_unknown_name_is_an_error_with_the_closest():
    with pytest.raises(remat.StaticArgumentError, match="did you mean 'mode'"):
        remat.checkpoint(f, static_argnames="mod")


def test_unhashable_values_are_closed_over():
    g = remat.checkpoint(lambda x, s: x * len(s), static_argnums=1)
    assert jax.grad(g)(1.0, [1, 2]) == 2.0
    assert jax.grad(g)(1.0, [1, 2, 3]) == 3.0


def _in_threads(n, run):
    """Run a function in several threads that switch as often as possible; raise the errors that it raises."""
    errors = []

    def guarded(k):
        try:
            run(k)
        except BaseException as e:
            errors.append(e)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=guarded, args=(k,)) for k in range(n)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    if errors:
        raise errors[0]


def test_several_threads_may_use_the_cache_of_static_arguments_at_once():
    traces = []

    def scaled(x, n):
        traces.append(n)
        return x

    g = remat.checkpoint(scaled, static_argnums=1)
    for n in range(200):
        g(1.0, ("before", n))
    traces.clear()
    _in_threads(4, lambda k: [g(1.0, (i % 2 * k, i)) for i in range(50)])
    assert len(traces) == len(set(traces)) == 25 + 4 * 25  # each value once
