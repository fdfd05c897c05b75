"""Residuals as data and in JAX's format."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat
from remat import policies


def model(params, x, scale=2.0):
    with jax.named_scope("mlp"):
        h = remat.checkpoint_name(jnp.sin(x @ params["w"]), "hidden")
    return jnp.sum(jnp.tanh(h) * scale)


PARAMS, X = {"w": jnp.ones((4, 3))}, jnp.ones((5, 4))


def test_arguments_have_the_names_that_the_function_gives_them():
    found = remat.residuals(remat.checkpoint(model), PARAMS, X)
    assert [r.argument for r in found] == ["params['w']", "x"]
    assert {r.kind for r in found} == {"argument"}
    assert found.total_bytes == found.argument_bytes == 4 * (12 + 20)
    assert found.saved_bytes == 0


def test_keyword_arguments_have_names():
    found = remat.residuals(model, PARAMS, x=X, scale=jnp.float32(3.0))
    assert "scale" in {r.argument for r in found}


def test_a_residual_says_where_it_comes_from():
    (found,) = (
        r
        for r in remat.residuals(remat.checkpoint(model, policy=policies.save("hidden")), PARAMS, X)
        if r.kind == "computed"
    )
    assert (found.shape, found.dtype, found.n_bytes) == ((5, 3), "float32", 60)
    assert (found.primitive, found.names, found.name_stack) == ("sin", ("hidden",), "mlp")
    assert "test_residuals.py" in found.source_line and "model" in found.source_line
    assert found.origin.startswith("named 'hidden' from") and not found.offloaded
    assert str(found).startswith("f32[5,3] named 'hidden' from")


def test_values_of_a_loop_are_described_by_what_computes_them_inside():
    def f(x):
        def body(c, _):
            with jax.named_scope("cell"):
                return jnp.sin(remat.checkpoint_name(jnp.cos(c), "state")), None

        return jax.lax.scan(body, x, length=7)[0].sum()

    policy = policies.save("state")
    (found,) = (r for r in remat.residuals(remat.checkpoint(f, policy=policy), X) if r.names)
    assert (found.shape, found.primitive, found.names) == ((7, 5, 4), "cos", ("state",))
    assert found.name_stack.endswith("cell")


@pytest.mark.parametrize(
    ("x", "n_bytes"),
    [
        (jnp.ones((3, 2), jnp.bfloat16), 12),
        (jnp.ones((3, 2), jnp.complex64), 48),
        (jax.ShapeDtypeStruct((100,), jnp.float32), 400),
        (np.float32(1), 4),
    ],
)
def test_sizes_are_in_bytes_of_the_dtype(x, n_bytes):
    def f(x):
        return jnp.sum(jnp.abs(x * x).astype(jnp.float32))

    assert remat.residuals(remat.checkpoint(f), x).total_bytes == n_bytes


def test_prng_keys_have_a_size():
    def f(key, x):
        return jnp.sum(jax.random.normal(key, x.shape) * jnp.sin(x))

    found = remat.residuals(lambda x: remat.checkpoint(f)(jax.random.key(0), x), X)
    key = next(r for r in found if r.dtype.startswith("key"))
    assert key.n_bytes == 8


def test_nothing_is_run_and_nothing_allocated():
    huge = jax.ShapeDtypeStruct((1 << 20, 1 << 12), jnp.float32)
    assert remat.residuals(lambda x: jnp.sum(jnp.sin(x)), huge).saved_bytes == 1 << 34


@pytest.mark.parametrize("policy", [None, policies.dots_saveable, policies.everything_saveable])
def test_data_and_text_agree(policy, capsys):
    f = remat.checkpoint(model, policy=policy)
    pairs = remat.saved_residuals(f, PARAMS, X)
    remat.print_saved_residuals(f, PARAMS, X)
    printed = capsys.readouterr().out.splitlines()
    found = remat.residuals(f, PARAMS, X)
    assert len(pairs) == len(printed) == len(found)
    for (aval, origin), line, residual in zip(pairs, printed, found):
        assert line == f"{aval.str_short(short_dtypes=True)} {origin}"
        assert residual.shape == aval.shape and residual.origin == origin
    assert f"{len(found)}" and "in all" in str(found)


def test_totals_are_sums_of_their_parts():
    policy = policies.offload("hidden") | policies.save(primitive="dot_general")
    found = remat.residuals(remat.checkpoint(model, policy=policy), PARAMS, X)
    assert found.total_bytes == sum(r.n_bytes for r in found)
    parts = found.saved_bytes + found.offloaded_bytes + found.argument_bytes
    assert parts <= found.total_bytes
    assert found.offloaded_bytes == 60
    assert found[0] == next(iter(found))


def test_what_is_repeated_anyway_and_derived_for_a_residual_is_written_once():
    def f(x, w):
        h = remat.checkpoint_name(jnp.sin(x), "a")
        return jnp.einsum("ij,ij->i", w * h[None], jnp.cos(w)), jnp.exp(-h * h)

    def second(f):
        first = jax.grad(lambda x, w: sum(jnp.sum(y * (1 + y)) for y in f(x, w)), (0, 1))
        return jax.grad(lambda x, w: sum(jnp.sum(jnp.sin(y)) for y in first(x, w)), (0, 1))

    args = jnp.array([0.3, 0.5, 0.7]), jnp.arange(9.0).reshape(3, 3) / 9
    policy = remat.policies.everything_saveable
    found, expected = second(remat.checkpoint(f, policy=policy))(*args), second(f)(*args)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected
    )
