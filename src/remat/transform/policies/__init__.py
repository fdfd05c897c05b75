"""Policies: which values of a region are saved, recomputed or offloaded.

A policy is a frozen value: two with the same content are equal, so nothing is traced again. The
elementary policies are `save`, `recompute` and `offload`, each with selectors (a value is selected if
it meets all of them). They combine:

    a | b      saved if either saves it
    a & b      saved if both do
    ~a         saved if `a` does not save it, and recomputed if it does
    a >> b     as `a` decides; as `b` decides for values that `a` does not decide about

A value that no part of a policy decides about is recomputed. Every policy that `jax.checkpoint` accepts
is accepted here and combines with these. `jax.checkpoint` accepts the policies made here, too, unless
they need more than one equation to decide (paths; names together with other properties): then a
`PolicyError` says so.

A policy decides about *values*. A value has the names that `checkpoint_name` gave it, all of them, and
the primitive that made it: `recompute("scores") >> everything_saveable` recomputes the value named
`scores`, although an unnamed `dot_general` made it.

Every name of `jax.checkpoint_policies` is here, too, with the same meaning, except where JAX's own does
not do what its name says (`save_anything_except_these_names` saves everything there, and
`save_from_both_policies` does not accept offloading policies). A name that no value of the region has is an
error; names in derivative and batching rules count (see `derivative_rules`). `strict=False` allows it.

In the order in which data flows:

    selector   which values a part of a policy decides about
    algebra    `save`, `recompute`, `offload`, and how policies combine
    jax_names  every name of `jax.checkpoint_policies`
    check      errors about invalid policies, and about selected names that a region does not have
    resolve    which values of a region a policy saves
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
