"""Fingerprints of programs are equal in every process, and differ between programs."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np

from remat import _jax
from remat.ir.fingerprint import fingerprint

X = jnp.ones((8, 8))

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from remat import _jax
from remat.ir.fingerprint import fingerprint
mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), ("data", "model", "pipe"))
def f(x):
    local = lambda x: jax.lax.psum(jnp.sin(x), ("model", "data"))
    y = jax.shard_map(local, mesh=mesh, in_specs=P(("data", "pipe"), "model"), out_specs=P("pipe"))(x)
    y = jax.lax.with_sharding_constraint(y, NamedSharding(mesh, P("data")))
    return y.sum() + jax.random.normal(jax.random.key(0), ()), {1, 2}.pop()
jaxpr, _ = _jax.detach_consts(jax.make_jaxpr(f)(jnp.ones((8, 8))))
print(fingerprint(jaxpr, {"a": frozenset(mesh.axis_names), "b": f.__name__}, mesh.axis_names))
"""


def of(f, *args, **options):
    return fingerprint(_jax.detach_consts(jax.make_jaxpr(f)(*args))[0], **options)


def test_a_fingerprint_is_the_same_in_processes_whose_sets_have_other_orders():
    found = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in (1, 2, 3)
    }  # fmt: skip
    assert len(found) == 1


def test_operations_types_numbers_and_parameters_make_another_program():
    programs = [
        lambda x: x + 1.0,
        lambda x: x + 2.0,
        lambda x: x - 1.0,
        lambda x: x[:4] + 1.0,
        lambda x: x**2,
        lambda x: x**3,
        lambda x: jax.lax.scan(lambda c, _: (c + 1.0, None), x, length=3)[0],
        lambda x: jax.lax.scan(lambda c, _: (c + 1.0, None), x, length=4)[0],
        lambda x: jax.lax.scan(lambda c, _: (c + 2.0, None), x, length=4)[0],
    ]
    assert len({of(f, X) for f in programs}) == len(programs)
    assert of(programs[0], X) == of(lambda y: y + 1.0, X)
    assert of(programs[0], X) != of(programs[0], X.astype(jnp.float16))


def test_numbers_may_be_left_out_at_every_depth():
    def scaled(rate, power):
        return lambda x: jax.jit(lambda x: x * rate)(x) ** power

    def one(rate, power):
        return of(scaled(rate, power), X, literals=False)

    assert one(0.1, 2) == one(0.2, 2) != one(0.1, 3)


def test_names_of_calls_and_the_mesh_around_make_no_difference():
    def f(x):
        return jax.jit(jnp.sin)(x)

    def g(x):
        return jax.jit(lambda y: jnp.sin(y), inline=False)(x)

    plainly = of(f, X)
    assert of(g, X) == plainly
    mesh = jax.make_mesh((1,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh):
        assert of(f, np.ones((8, 8), np.float32)) == plainly
