"""Matrix products whose results are transposed, as products with their operands swapped.

JAX computes a weight's gradient as a product of cotangents and inputs, and transposes it. Compilers swap the
operands instead. They cannot do so if a plan separates the two equations: the transposed matrix would be
copied, and the product, with its operands in another order, could differ in the last digits from that of the
step as it is written.

Only products of two matrices are changed. If an operand has more dimensions, compilers first copy the first
one into another order; swapping would decide which operand that is.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from remat import _jax
from remat.ir.rewriting import Rewriting


def with_swapped_products(jaxpr: _jax.Jaxpr) -> _jax.Jaxpr:
    """Return a program in which products of matrices are not transposed, at any depth.

    >>> import jax, jax.numpy as jnp
    >>> loss = lambda w, x: (x @ w).sum()
    >>> jaxpr = jax.make_jaxpr(jax.grad(loss))(jnp.ones((4, 2)), jnp.ones((8, 4))).jaxpr
    >>> [eqn.primitive.name for eqn in jaxpr.eqns if len(eqn.outvars[0].aval.shape) == 2][-2:]
    ['dot_general', 'transpose']
    >>> [eqn.primitive.name for eqn in with_swapped_products(jaxpr).eqns][-1:]
    ['dot_general']
    """
    return _Swapping().program(jaxpr)


class _Swapping(Rewriting):
    def equations(self, jaxpr: _jax.Jaxpr) -> list[_jax.JaxprEqn]:
        n_reads = collections.Counter(
            v
            for vs in (*(eqn.invars for eqn in jaxpr.eqns), jaxpr.outvars)
            for v in vs
            if _jax.is_var(v)
        )
        transposed = {
            eqn.invars[0]: eqn.outvars
            for eqn in jaxpr.eqns
            if _swaps_dimensions(eqn) and n_reads[eqn.invars[0]] == 1
        }
        swapped = {
            eqn.outvars[0]: _swapped(eqn, transposed[eqn.outvars[0]])
            for eqn in jaxpr.eqns
            if eqn.outvars and eqn.outvars[0] in transposed and _is_product_of_matrices(eqn)
        }
        return [
            swapped[eqn.outvars[0]]
            if eqn.outvars and eqn.outvars[0] in swapped
            else self.within(eqn)
            for eqn in jaxpr.eqns
            if not (_swaps_dimensions(eqn) and eqn.invars[0] in swapped)
        ]


def _swaps_dimensions(eqn: _jax.JaxprEqn) -> bool:
    """Return whether an equation transposes a matrix."""
    is_transpose = eqn.primitive.name == "transpose" and _jax.is_var(eqn.invars[0])
    return is_transpose and tuple(eqn.params["permutation"]) == (1, 0)


def _is_product_of_matrices(eqn: _jax.JaxprEqn) -> bool:
    """Return whether an equation multiplies two matrices, along one dimension of each."""
    if eqn.primitive.name != "dot_general":
        return False
    return all(len(v.aval.shape) == 2 for v in (*eqn.invars, *eqn.outvars))


def _swapped(product: _jax.JaxprEqn, outvars: Sequence[_jax.Var]) -> _jax.JaxprEqn:
    params = dict(product.params)
    (lhs, rhs), batch = params["dimension_numbers"]
    params["dimension_numbers"] = (rhs, lhs), batch
    if isinstance(params["precision"], tuple):
        params["precision"] = params["precision"][::-1]
    if params.get("out_sharding") is not None:  # in meshes with explicit or manual axes
        params["out_sharding"] = outvars[0].aval.sharding
    return product.replace(invars=product.invars[::-1], outvars=list(outvars), params=params)
