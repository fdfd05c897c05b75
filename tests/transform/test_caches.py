"""One trace per function, signature and policy; caches keep nothing alive."""

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest

import remat


@pytest.mark.parametrize(
    "options", [{}, {"policy": remat.policies.dots_saveable}, {"static_argnums": 1}]
)
def test_fresh_checkpoints_of_one_function_trace_it_once(options):
    traces = []

    def f(x, n=2):
        traces.append(None)
        return jnp.sin(x) * n

    for _ in range(3):
        jax.grad(remat.checkpoint(f, **options))(
            1.0, *([2.0] if options.get("static_argnums") else [])
        )
    assert len(traces) == 1


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"policy": remat.policies.dots_saveable},
        {"policy": lambda *_, **__: True},
        {"static_argnums": 1},
    ],
    ids=["plain", "policy", "callable", "static"],
)
def test_functions_are_not_kept_alive(options):
    def f(x, n=1.0):
        return jnp.sin(x) * n

    g, reference = remat.checkpoint(f, **options), weakref.ref(f)
    jax.grad(g)(1.0, 2.0)
    jax.hessian(g)(1.0, 2.0)
    del f, g
    gc.collect()
    assert reference() is None


def test_a_static_argument_that_refers_to_the_function_does_not_keep_it_alive():
    class Model:
        pass

    def f(x, model):
        return jnp.sin(x)

    model = Model()
    model.f = f
    reference = weakref.ref(f)
    jax.grad(remat.checkpoint(f, static_argnums=1))(1.0, model)
    del f, model
    gc.collect()
    assert reference() is None


def test_no_tracers_leak():
    with jax.checking_leaks():
        jax.grad(remat.checkpoint(jnp.sin))(1.0)
        jax.jit(jax.hessian(remat.checkpoint(lambda x: jnp.sin(x) * jnp.cos(x))))(1.0)
