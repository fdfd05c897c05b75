"""Programs that read and write refs, as programs on the values of the refs.

JAX differentiates straight-line code that writes a ref, but not a region or a loop body that does:
its writes are lost, or repeated by the recomputation. So the value of a ref is read before a region or a
loop, becomes an input and a result of it, and is written after it. Dependence on a ref is then handled like
any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from remat import _jax
from remat.aliases import Array, Arrays

_jax.exclude_from_tracebacks(__file__)


def with_values(
    jaxpr: _jax.Jaxpr, args: Sequence[Array], run: Callable[[_jax.Jaxpr, Arrays, int], Arrays]
) -> Arrays:
    """Apply a jaxpr through `run(jaxpr, args, n_added)`, which need not support refs.

    The jaxpr that is passed to `run` takes the values of refs, after `n_added` constants. A jaxpr that
    uses no refs, or that cannot be rewritten, is passed unchanged.
    """
    pure = _jax.without_refs(jaxpr)
    if pure is None:
        return run(jaxpr, list(args), 0)
    values = [x[...] if is_ref else x for x, is_ref in zip(args, pure.is_ref, strict=True)]
    outs = run(pure.jaxpr, [*pure.constants, *values], len(pure.constants))
    n_outs = len(jaxpr.outvars)
    written = [ref for ref, is_written in zip(args, pure.is_written) if is_written]
    for ref, value in zip(written, outs[n_outs:], strict=True):
        ref[...] = value
    return outs[:n_outs]
