"""Constants of jaxprs in equations become inputs of the program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from remat import _jax
from remat.ir.jaxprs import equations

FACTORS = np.arange(1.0, 5.0, dtype=np.float32)
X = jnp.linspace(0.1, 0.4, 4)


@jax.custom_vjp
def sine(x):
    """Return the sine; its backward rule closes over an array."""
    return jnp.sin(x)


sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x) * FACTORS,))


def repeated(fun):
    return lambda x: jax.lax.scan(lambda c, _: (fun(c), None), x, None, 3)[0]


def chosen(first, second):
    return lambda x: jax.lax.cond(x[0] > 0, first, second, x)


def cosine_and_sine(x):
    return jnp.cos(sine(x)) * sine(2 * x)


def sharded(fun):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    rows = PartitionSpec("data")
    return lambda x: jax.shard_map(
        lambda xs: jax.vmap(fun)(xs), mesh=mesh, in_specs=rows, out_specs=rows
    )(jnp.stack([x, 2 * x]))


PROGRAMS = {
    "a loop": repeated(sine),
    "nested loops": repeated(repeated(sine)),
    "a branch": chosen(sine, jnp.cos),
    "two branches": chosen(lambda x: jnp.cos(x), cosine_and_sine),
    "both branches": chosen(sine, cosine_and_sine),
    "branches in a loop": repeated(chosen(sine, cosine_and_sine)),
    "a loop in a branch": chosen(jnp.cos, repeated(sine)),
    "a loop in a checkpoint": jax.checkpoint(repeated(sine)),
    "a jitted function in a loop": repeated(jax.jit(sine)),
    "a loop in a shard_map": sharded(repeated(sine)),
    "a loop over rows": lambda x: jax.vmap(repeated(sine))(jnp.stack([x, 2 * x])),
}


def descended(x):
    """Return a while loop whose condition and body run transposed loops."""
    slope = jax.grad(lambda x: repeated(sine)(x).sum())
    return jax.lax.while_loop(
        lambda c: (c[1] < 2) & (slope(c[0]).sum() > -100),
        lambda c: (c[0] - 0.1 * slope(c[0]), c[1] + 1),
        (x, 0),
    )[0]


def n_constants(jaxpr):
    inner = (body for eqn in equations(jaxpr) for body in _jax.jaxprs_of(eqn))
    return sum(len(getattr(body, "consts", ())) for body in inner)


@pytest.mark.parametrize("name", [*PROGRAMS, "a while loop"])
def test_constants_in_equations_become_inputs(name):
    of = PROGRAMS.get(name)
    gradient = jax.grad(lambda x: of(x).sum()) if of else descended
    jaxpr, constants = _jax.detach_consts(jax.make_jaxpr(gradient)(X))
    assert n_constants(jaxpr) > 0
    hoisted, more = _jax.hoist_constants(jaxpr)
    assert n_constants(hoisted) == 0
    assert len(hoisted.invars) == len(jaxpr.invars) + len(more)
    (found,) = jax.jit(lambda *args: _jax.eval_jaxpr(hoisted, (), *args))(*more, *constants, X)
    np.testing.assert_array_equal(found, jax.jit(gradient)(X))


def test_a_program_without_such_constants_stays_the_same():
    jaxpr, _ = _jax.detach_consts(jax.make_jaxpr(jax.grad(lambda x: repeated(jnp.sin)(x).sum()))(X))
    assert _jax.hoist_constants(jaxpr) == (jaxpr, [])
