"""Splitting a program into halves: together they compute the results of the program."""

from __future__ import annotations

import gc
import itertools
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from remat import _jax, checkpoint
from remat.ir.split import SAVE, Split, split

X, Y = jnp.array([0.3, -0.5, 0.7]), jnp.array([0.2, 0.4, 0.6])
W = jnp.array([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.7, 0.8, 0.9]])


@jax.custom_jvp
def own_rule(x):
    return jnp.sin(x)


own_rule.defjvp(lambda primals, tangents: (own_rule(*primals), tangents[0] * 2))


def scanned(x, y):
    def step(carry, row):
        c, d = carry
        e = jnp.tanh(y) * c + row
        return (jnp.sin(e), d * 2.0), (jnp.cos(c), d)

    return lax.scan(step, (x, jnp.ones(3)), W)


def scanned_jit(x, y):
    f = jax.jit(lambda c, k, row: (jnp.sin(c * jnp.exp(k)) + row, jnp.cos(k)))
    return lax.scan(lambda c, row: f(c, y, row), x, W)


def branches(x, y):
    return lax.switch(
        1,
        [
            lambda x, y: (x, jnp.sin(y)),
            lambda x, y: (jnp.sin(jnp.cos(x)) * y, jnp.exp(jnp.tanh(y))),
            lambda x, y: (jnp.exp(x) * jnp.cos(x), y),
        ],
        x,
        y,
    )


def loops(x, y):
    return lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(c[1] * y), c[2] + y), (0, x, y)
    )


def regions(x, y):
    inner = checkpoint(lambda x, y: jnp.sin(jnp.cos(y)) * x, prevent_cse=(False, True))
    theirs = jax.checkpoint(lambda x, y: (jnp.exp(jnp.tanh(y)), jnp.sin(x)))
    return inner(x, y), theirs(y, x)


PROGRAMS = {
    "operations": lambda x, y: (jnp.sin(x) * jnp.cos(y), jnp.exp(y), x, 3.0),
    "jit": lambda x, y: jax.jit(lambda x, y: (jnp.sin(y), jnp.sin(y) * x, y))(x, y),
    "two calls": lambda x, y: [jax.jit(jnp.logaddexp)(a, b) for a, b in ((x, y), (y, x))],
    "scan": scanned,
    "scan with a call": scanned_jit,
    "reversed scan": lambda x, y: lax.scan(lambda c, r: (c * y, c + r), x, W, reverse=True),
    "empty scan": lambda x, y: lax.scan(lambda c, r: (jnp.sin(c * y), c), x, W[:0]),
    "scan in a scan": lambda x, y: lax.scan(lambda c, r: (scanned(c, r)[0][0], y), x, W),
    "branches": branches,
    "branch on a value": lambda x, y: lax.cond(y[0] > 0, jnp.sin, jnp.cos, x * y),
    "while": loops,
    "regions": regions,
    "own rule": lambda x, y: (own_rule(y), own_rule(x) * y),
    "names": lambda x, y: (jax.ad_checkpoint.checkpoint_name(jnp.sin(y), "a") * x, jnp.cos(y)),
    "debug": lambda x, y: (jax.debug.callback(lambda _: None, y), x * jnp.sin(y))[1],
}


def nothing(*_, **__):
    return False


def everything(*_, **__):
    return True


def sines(prim, *_, **__):
    return prim.name == "sin"


POLICIES = {"nothing": nothing, "everything": everything, "sines": sines, "no policy": SAVE}


def program(f, *args):
    jaxpr, consts, _ = _jax.trace_call(f, *args)
    return jaxpr, [*consts, *args]


def run(halves: Split, args):
    """Return the program's results, computed by its halves; None for results that neither half returns."""
    known_args = [x for x, u in zip(args, halves.ins_unknown) if not u]
    known = _jax.call_jaxpr(halves.known, known_args)
    results = iter(known[: len(known) - halves.n_residuals])
    residuals = known[len(known) - halves.n_residuals :]
    staged = iter(_jax.call_jaxpr(halves.staged, [*residuals, *args]))
    out = []
    for unknown, repeated in zip(halves.outs_unknown, halves.outs_staged):
        first = None if unknown else next(results)
        again = next(staged) if repeated else None
        if not unknown and repeated:
            np.testing.assert_allclose(first, again, rtol=1e-6)
        out.append(again if unknown else first)
    return out


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("f", PROGRAMS.values(), ids=PROGRAMS)
def test_the_halves_compute_what_the_program_computes(f, policy):
    jaxpr, args = program(f, X, Y)
    expected = _jax.call_jaxpr(jaxpr, args)
    n_consts = len(args) - 2
    for unknown in itertools.product([False, True], repeat=2):
        halves = split(jaxpr, [False] * n_consts + list(unknown), policy)
        _jax.check_jaxpr(halves.known)
        _jax.check_jaxpr(halves.staged)
        for a, b in zip(run(halves, args), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)


def test_the_halves_of_a_call_are_let_go_with_the_program():
    jaxpr, _ = program(lambda x, y: jax.jit(lambda a, b: (jnp.sin(a) * b, jnp.cos(a)))(x, y), X, Y)
    halves = split(jaxpr, [False, True], SAVE)
    bodies = [_jax.open_jaxpr(j) for e in halves.known.eqns for j in _jax.jaxprs_of(e)]
    references = [weakref.ref(body) for body in bodies]
    del jaxpr, halves, bodies
    gc.collect()
    assert [reference() for reference in references] == [None]
