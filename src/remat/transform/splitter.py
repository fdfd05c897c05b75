"""Splitting a region by a decision about all of it.

A policy judges one operation at a time. Whoever decides about a whole program at once gives a region's
equation a `Splitter`, in the parameter `split`, and is asked twice:

* when the region is cut, `Splitter.cut` returns both halves;
* when the backward half is transposed, `Half.compose` says how recomputation and the transposed linear
  part are interleaved. This cannot be said earlier: the operations of the transposed part do not exist
  before.

So the parameter is a `Splitter` on a region, and a `Half` on the equations that the region was split
into. A region's derivative is split by the same `Splitter`. A transformation that turns a half into
another program, such as its derivative, drops the `Half`; what remains is a region with a policy.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from remat import _jax
from remat.transform.cut import Cut


class _Split:
    def tracing_context(self) -> contextlib.AbstractContextManager:
        """Return the context in which the region's derivative and transpose are traced.

        JAX's caches find a trace again in an equal context only, so it holds nothing that the trace
        does not depend on.
        """
        return contextlib.nullcontext()


class Half(_Split):
    """The value of `split` on one half of a split region; hashable.

    On the backward half it composes the backward pass. On an equation that is a plain call (the
    forward half, the composed backward pass) it only tells readers of the jaxpr what the call is.
    """

    def compose(
        self,
        known: Sequence[_jax.Var],
        consts: Sequence[_jax.Var],
        transposed: _jax.Jaxpr,
        nonlinear: Sequence[Any],
    ) -> Composed | None:
        """Return the backward pass, or None if the variables are not those of the half that `cut` returned.

        Args:
          known: the backward half's variables for residuals and inputs.
          consts: new variables for arrays that the transposed part closes over.
          transposed: the linear part, transposed: (nonlinear operands, cotangents) -> cotangents.
          nonlinear: a variable for each nonlinear operand: one of `known`, of `consts`, or of the values
            that the region computes.
        """
        return None


class Composed(NamedTuple):
    """A backward pass: `known`, `consts` and the cotangents to the transposed part's results.

    With a `half` it becomes one equation, a plain call with this in `split`.
    """

    jaxpr: _jax.Jaxpr
    half: Half | None = None


class Halves(NamedTuple):
    """A region in two halves, and what their equations have in `split`.

    The backward half ends with the linear part (`primitive.linear_equation`). The forward half needs
    an equation, a plain call, only if it has a `Half`.
    """

    cut: Cut
    backward: Half
    forward: Half | None = None


class Splitter(_Split, abc.ABC):
    """The value of `split` on a region that is to be split; hashable, equal if it splits alike."""

    @abc.abstractmethod
    def cut(self, jaxpr: _jax.Jaxpr, ins_unknown: tuple[bool, ...]) -> Halves:
        """Return the halves of a differentiated region.

        Args:
          jaxpr: the region after differentiation.
          ins_unknown: which inputs are not known in the forward pass. They are all available later.
        """


def tracing_context(split: Splitter | Half | None) -> contextlib.AbstractContextManager:
    """Return the context in which to trace a region's derivative or transpose."""
    return contextlib.nullcontext() if split is None else split.tracing_context()
