"""Regions that a `Splitter` cuts in place of their policy, shown with one that saves everything."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from remat import _jax
from remat.ir import split
from remat.ir.jaxprs import equations
from remat.transform import primitive
from remat.transform.cut import Cut, save_all
from remat.transform.splitter import Composed, Half, Halves, Splitter

X = jnp.linspace(0.1, 0.9, 5)
NAMED = dataclasses.make_dataclass("Named", ["name"], bases=(Half,), frozen=True)


@dataclasses.dataclass(frozen=True)
class SavesAll(Splitter):
    """Saves everything; its halves are equations of their own if `named`."""

    named: bool = False

    def cut(self, jaxpr: Any, ins_unknown: tuple[bool, ...]) -> Halves:
        halves = split.without_unused(split.split(jaxpr, ins_unknown, save_all))
        _, residuals = split.results_and_residuals(halves)
        linear = halves.staged
        last = primitive.linear_equation(linear, None)
        backward = _jax.jaxpr_of(linear.invars, last.outvars, [last], linear)
        c = Cut(
            halves.known,
            [True] * len(halves.known.invars),
            backward,
            [True] * len(ins_unknown),
            list(halves.outs_unknown),
            len(residuals),
        )
        return Halves(c, Direct(self.named), NAMED("forward") if self.named else None)


@dataclasses.dataclass(frozen=True)
class Direct(Half):
    """Composes a backward pass that is the transposed linear part."""

    named: bool

    def compose(self, known: Any, consts: Any, transposed: Any, nonlinear: Any) -> Composed:
        last = _jax.new_eqn(
            [*nonlinear, *(cotangents := transposed.invars[len(nonlinear) :])],
            [_jax.new_var(v.aval) for v in transposed.outvars],
            primitive.remat_p,
            primitive.parameters(transposed),
            None,
        )
        ins = [*known, *consts, *cotangents]
        jaxpr = _jax.jaxpr_of(ins, last.outvars, [last], transposed)
        return Composed(jaxpr, NAMED("backward") if self.named else None)


def region(splitter: Splitter) -> Any:
    jaxpr, consts, _ = _jax.trace_call(lambda args: [jnp.sin(jnp.sin(args[0])) * args[0]], [X])
    assert not consts

    def apply(x: Any) -> Any:
        (out,) = primitive.bind([x], jaxpr, split=splitter)
        return out

    return apply


def plain(x: Any) -> Any:
    return jnp.sin(jnp.sin(x)) * x


def splits_in(f: Any) -> list[Any]:
    found = equations(jax.make_jaxpr(f)(X).jaxpr)
    return [eqn.params["split"] for eqn in found if eqn.primitive is primitive.remat_p]


@pytest.mark.parametrize("splitter", [SavesAll(), SavesAll(named=True)], ids=["bare", "named"])
def test_a_region_with_a_splitter_has_the_same_derivatives(splitter: Splitter) -> None:
    f = region(splitter)
    for transform in (
        lambda g: jax.grad(lambda x: g(x).sum()),
        lambda g: jax.hessian(lambda x: g(x).sum()),
        lambda g: lambda x: jax.vmap(jax.grad(lambda x: g(x).sum()))(jnp.stack([x, 2 * x])),
        lambda g: jax.jit(lambda x: jax.jvp(g, [x], [x])[1]),
        lambda g: jax.grad(lambda x: jax.lax.scan(lambda c, _: (g(c), None), x, None, 3)[0].sum()),
    ):
        np.testing.assert_allclose(transform(f)(X), transform(plain)(X), rtol=1e-5)


def test_the_splitter_decides_and_the_policy_does_not() -> None:
    # The region's policy, None, would recompute; nothing is recomputed here.
    backward = jax.make_jaxpr(jax.grad(lambda x: region(SavesAll())(x).sum()))(X).jaxpr
    names = [eqn.primitive.name for eqn in equations(backward)]
    assert names.count("sin") == 2


def test_a_derivative_keeps_the_splitter() -> None:
    f = region(SavesAll())
    assert splits_in(lambda x: jax.jvp(f, [x], [x])) == [SavesAll()]


def test_halves_that_are_equations_carry_what_the_splitter_says() -> None:
    gradient = jax.grad(lambda x: region(SavesAll(named=True))(x).sum())
    assert splits_in(gradient) == [NAMED("forward"), NAMED("backward"), None]


def test_the_derivative_of_a_half_is_no_half() -> None:
    gradient = jax.grad(lambda x: region(SavesAll(named=True))(x).sum())
    found = splits_in(lambda x: jax.jvp(gradient, [x], [x]))
    assert found
    assert not any(found)
