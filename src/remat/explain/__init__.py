"""`remat.explain`: what a step saves, recomputes and holds, and why.

In the order in which data flows:

    step           a function as a traced training step on a target
    unrolled       loops that JAX unrolls completely
    phases         its program, with the forward, recomputed, backward and update phases told apart
    replaced       arguments whose new values are results of the step
    roles          gradients, and the arguments that they belong to
    sources        the lines of the user's program that equations come from
    calls          the calls of the user's functions
    runs           the operations that loops and branches run
    loops          loops and branches on the timeline of the step around them
    labels         names of operations and regions
    recomputation  recomputed FLOPs, and the bytes that the backward pass reads
    segments       the recomputed parts, and the bytes that each saves
    lifetimes      when each value is live
    origins        kind, origin and cost of a value
    account        the values that are written, their lifetimes and kinds, the timeline
    hlo            the arrays that the compiled program holds at its peak
    description    what the step computes, in a sentence
    decisions      the values that a plan recomputes, offloads and keeps
    planned_loops  the loops of a step as a plan runs them
    difference     why the prediction and the compiler differ
    regions        facts about the effects of policies and regions
    findings       conclusions for the user, each with the next step
    stages         all of these in order

`remat.report` renders the explanation. The stages are loaded at the first call, so that `import remat`
stays cheap.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from remat import _jax
from remat.aliases import PyTree

if TYPE_CHECKING:
    from remat.program.targets import Target
    from remat.report.explanation import Explanation

_jax.exclude_from_tracebacks(__file__)


def explain(
    f: Callable[..., PyTree],
    *args: PyTree,
    target: str | Target | None = None,
    compile: bool = True,
    **kwargs: PyTree,
) -> Explanation:
    """Explain what a function or training step saves, recomputes and holds, when, and why.

    >>> import jax, jax.numpy as jnp, remat
    >>> def loss(w, x):
    ...     for _ in range(4):
    ...         x = jnp.tanh(x @ w)
    ...     return x.sum()
    >>> w, x = jnp.eye(64), jnp.ones((1000, 64))
    >>> explanation = remat.explain(loss, w, x)
    >>> [str(group) for group in explanation.groups() if group.kind == "saved"]
    ['4 × loss: tanh  f32[1000,64]  1000.0 KiB']
    >>> explanation.findings[0].code
    'no_regions'
    >>> less = remat.explain(remat.checkpoint(loss), w, x)
    >>> less.totals.residual_bytes, explanation.totals.residual_bytes > 0
    (0, True)

    Args:
      f: a training step, or a function to differentiate with respect to its first argument: the explanation
        is then that of `jax.value_and_grad(f)` (with a cotangent of ones, if its result is not one number).
        It may be jitted, or fitted by `remat.fit`.
      *args, **kwargs: its arguments, or `jax.ShapeDtypeStruct`s in their place.
      target: the device to explain it for, at hand or ahead of time: `"gpu:h100"`, `"tpu:v5e:2x2"`.
      compile: also ask the compiler for its figures.

    Returns:
      An explanation: print it, or `.to_html()`, `.to_json()`, `.save(path)`, `.diff(other)`.

    Raises:
      PlanError: the target is not known.
      TypeError: as JAX does, for arguments that do not fit.
    """
    stages = importlib.import_module("remat.explain.stages")
    explained: Explanation = stages.explanation_of(f, args, kwargs, target, compile)
    return explained
