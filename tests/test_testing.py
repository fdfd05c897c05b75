"""The assertions for users' tests: they pass what is the same and below, and say what is not."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import remat
from remat.testing import assert_peak_below, assert_same_gradients, peak_bytes

X = jnp.linspace(0.1, 1.0, 12).reshape(3, 4)
MIB = 2**20


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize(
    ("f", "args"),
    [
        (lambda x: jnp.sin(x), (X,)),
        (lambda x: {"a": jnp.sum(x**3), "b": (x, 2)}, (X,)),
        (lambda x, i: x[i] * 2, (X, jnp.int32(1))),
        (lambda x: jnp.abs(x) ** 2, (X + 1j * X,)),
        (lambda x: x * 2, (X.astype(jnp.bfloat16),)),
        (lambda p: p["w"] @ p["w"].T, ({"w": X, "n": None},)),
        (lambda x: jnp.argmax(x), (X,)),
        (lambda k, x: x * jax.random.uniform(k, x.shape), (jax.random.key(3), X)),
    ],
)
def test_a_function_has_the_gradients_of_its_checkpointed_self(f, args, order):
    assert_same_gradients(f, remat.checkpoint(f), *args, order=order)


@pytest.mark.parametrize(
    ("g", "what"),
    [
        (lambda x: jnp.sin(x) + 1e-3, "^value"),
        (lambda x: jnp.sin(x) + 1e-3 * (x - jax.lax.stop_gradient(x)), "^gradient"),
        (lambda x: jnp.sin(x).astype(jnp.bfloat16), "bfloat16"),
        (lambda x: jnp.sin(x)[:1], r"\[1, 4\]"),
        (lambda x: (jnp.sin(x), x), "structure"),
    ],
)
def test_a_difference_is_named(g, what):
    with pytest.raises(remat.GradientMismatchError, match=what):
        assert_same_gradients(jnp.sin, g, X)


def test_a_difference_of_second_order_is_found_at_second_order():
    @jax.custom_jvp
    def odd(x):
        return jnp.sin(x)

    odd.defjvp(lambda p, t: (jnp.sin(p[0]), jax.lax.stop_gradient(jnp.cos(p[0])) * t[0]))
    assert_same_gradients(jnp.sin, odd, X)
    with pytest.raises(remat.GradientMismatchError, match="second derivative"):
        assert_same_gradients(jnp.sin, odd, X, order=2)


def test_different_nans_are_a_difference_and_equal_ones_are_not():
    def f(x):
        return jnp.sqrt(x - 0.5)

    assert_same_gradients(f, lambda x: f(x), X)
    with pytest.raises(remat.GradientMismatchError):
        assert_same_gradients(f, lambda x: jnp.nan_to_num(f(x)), X)


def test_other_orders_are_refused():
    with pytest.raises(ValueError, match="1 or 2"):
        assert_same_gradients(jnp.sin, jnp.sin, X, order=3)


def chain(x, w):
    for _ in range(6):
        x = jnp.tanh(x @ w)
    return x


def step(layer):
    def loss(x, w):
        for _ in range(6):
            x = layer(x, w)
        return jnp.sum(x)

    return jax.grad(loss)


ARGS = jnp.ones((8192, 64)), jnp.eye(64)


def test_the_peak_is_arguments_results_and_temporaries():
    args = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in ARGS]
    jitted = jax.jit(step(chain))
    compiled = jitted.lower(*args).compile()
    analysis = compiled.memory_analysis()
    expected = (
        analysis.temp_size_in_bytes
        + analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
    )
    assert peak_bytes(step(chain), *args) == expected
    assert peak_bytes(jitted, *args) == peak_bytes(compiled) == expected


def test_aliased_memory_is_counted_once():
    donating = jax.jit(lambda x: x + 1, donate_argnums=0)
    assert peak_bytes(donating, ARGS[0]) < 1.1 * ARGS[0].nbytes


def test_checkpointing_lowers_the_peak_in_the_analysis_and_in_the_process():
    plain, checkpointed = step(chain), step(remat.checkpoint(chain))
    fall = peak_bytes(plain, *ARGS) - peak_bytes(checkpointed, *ARGS)
    assert fall > 20 * MIB
    real_fall = peak_bytes(plain, *ARGS, real=True) - peak_bytes(checkpointed, *ARGS, real=True)
    assert real_fall > 0.5 * fall


def test_a_peak_above_the_limit_is_an_error_with_the_numbers():
    assert_peak_below(step(chain), *ARGS, limit="1GiB")
    with pytest.raises(
        remat.PeakMemoryError, match=r"MiB \(\d+ bytes\).*above the limit of 1.0 MiB"
    ):
        assert_peak_below(step(chain), *ARGS, limit="1MiB")
    with pytest.raises(remat.UnitsError):
        assert_peak_below(step(chain), *ARGS, limit="lots")


class _Device:
    """A device whose allocator reports these peaks, one after another."""

    def __init__(self, *peaks):
        self.peaks = list(peaks)

    def memory_stats(self):
        return {"bytes_in_use": 100, "peak_bytes_in_use": self.peaks.pop(0)} if self.peaks else None


def test_a_devices_peak_is_its_allocators_growth():
    assert remat.testing.device_growth_bytes(_Device(150, 400), lambda x: x, (1,)) == 300


def test_a_device_that_has_used_more_before_cannot_tell():
    with pytest.raises(remat.RematError, match="Measure the step first"):
        remat.testing.device_growth_bytes(_Device(500, 500), lambda x: x, (1,))
    with pytest.raises(remat.RematError, match="no statistics"):
        remat.testing.device_growth_bytes(_Device(), lambda x: x, (1,))
