"""Policies: which values of a region are saved, recomputed or offloaded.

A policy is a frozen value: two that say the same are equal, so nothing is traced again. The blocks
are `save`, `recompute` and `offload`, each with selectors (a value is selected if all given ones
hold), and they combine:

    a | b      saved if either saves it
    a & b      saved if both do
    ~a         saved if `a` does not, and recomputed if it does
    a >> b     what `a` says of the values it speaks of, and what `b` says of the others

What no part of a policy speaks of is recomputed. All that `jax.checkpoint` takes as a policy is
taken here and combines with these, and what is made here can be given to `jax.checkpoint`, unless it
speaks of more than one equation shows (paths; names together with other properties): it says so.

A policy speaks of *values*. A value has the names that `checkpoint_name` gave it, all of them, and
the primitive that made it: `recompute("scores") >> everything_saveable` recomputes the value named
`scores`, although an unnamed `dot_general` made it.

Below the blocks stands every name of `jax.checkpoint_policies`, with that meaning, except where JAX's
own does not do what its name says (`save_anything_except_these_names` saves everything there,
`save_from_both_policies` refuses offloading ones). Names that no value of the region has are an
error here, also beside derivative and batching rules (see `hidden`); `strict=False` allows them.
"""

from __future__ import annotations

from typing import Any

from remat.errors import closest
from remat.globs import path_matches as path_matches
from remat.transform.policies.algebra import (
    Policy as Policy,
    as_policy as as_policy,
    offload as offload,
    public_names,
    recompute as recompute,
    save as save,
)
from remat.transform.policies.check import check_names as check_names, check_policy as check_policy
from remat.transform.policies.jax_names import (
    checkpoint_dots as checkpoint_dots,
    checkpoint_dots_with_no_batch_dims as checkpoint_dots_with_no_batch_dims,
    dots_saveable as dots_saveable,
    dots_with_no_batch_dims_saveable as dots_with_no_batch_dims_saveable,
    everything_saveable as everything_saveable,
    nothing_saveable as nothing_saveable,
    offload_dot_with_no_batch_dims as offload_dot_with_no_batch_dims,
    save_and_offload_only_these_names as save_and_offload_only_these_names,
    save_any_names_but_these as save_any_names_but_these,
    save_anything_except_these_names as save_anything_except_these_names,
    save_from_both_policies as save_from_both_policies,
    save_only_these_names as save_only_these_names,
)
from remat.transform.policies.resolve import (
    names_of_values as names_of_values,
    resolve as resolve,
    values_of as values_of,
)


def __getattr__(name: str) -> Any:
    known = public_names()
    raise AttributeError(
        f"module 'remat.policies' has no attribute {name!r}: {closest(name, known)}"
    )


def __dir__() -> list[str]:
    return sorted(public_names())
