"""Every name of `jax.checkpoint_policies`, with the same meaning.

The exceptions are those that do not do in JAX what their names say: `save_anything_except_these_names`
saves everything there, and `save_from_both_policies` does not accept policies that offload.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from remat import _jax
from remat.aliases import Decision, PolicyLike
from remat.errors import PolicyError
from remat.ir.equations import is_product
from remat.transform.policies.algebra import (
    EVERYTHING,
    NOTHING,
    Policy,
    as_policy,
    maker,
    offload,
    public,
    recompute,
    save,
)
from remat.transform.policies.selector import RegionValue, check_strings

_jax.exclude_from_tracebacks(__file__)


@dataclasses.dataclass(frozen=True)
class Dots(Policy):
    """Saves matrix products and convolutions, which are expensive to recompute."""

    batched: bool  # those with batch dimensions as well
    case: Decision

    def opinion(self, value: RegionValue) -> Decision:
        return self.case if is_product(value.eqn, batched=self.batched) else None

    def __repr__(self) -> str:
        if isinstance(self.case, _jax.Offloadable):
            return f"offload_dot_with_no_batch_dims({self.case.src!r}, {self.case.dst!r})"
        return "dots_saveable" if self.batched else "dots_with_no_batch_dims_saveable"


everything_saveable = public("everything_saveable", EVERYTHING)
nothing_saveable = public("nothing_saveable", NOTHING)
dots_saveable = public("dots_saveable", Dots(batched=True, case=_jax.Saveable))
checkpoint_dots = public("checkpoint_dots", dots_saveable)
dots_with_no_batch_dims_saveable = public(
    "dots_with_no_batch_dims_saveable", Dots(batched=False, case=_jax.Saveable)
)
checkpoint_dots_with_no_batch_dims = public(
    "checkpoint_dots_with_no_batch_dims", dots_with_no_batch_dims_saveable
)


@maker
def offload_dot_with_no_batch_dims(offload_src: str, offload_dst: str) -> Policy:
    """Offload the matrix products that `dots_with_no_batch_dims_saveable` saves."""
    check_strings((offload_src, offload_dst), "kinds of memory")
    return Dots(batched=False, case=_jax.Offloadable(offload_src, offload_dst))


@maker
def save_anything_except_these_names(*names_not_to_save: str, strict: bool = True) -> Policy:
    """Save every value, named or not, other than those with one of these names."""
    if not names_not_to_save:
        return everything_saveable
    return recompute(*names_not_to_save, strict=strict) >> everything_saveable


@maker
def save_any_names_but_these(*names_not_to_save: str, strict: bool = True) -> Policy:
    """Save the values that have a name, other than those with one of these names."""
    if not names_not_to_save:
        return save("*", strict=False)
    return recompute(*names_not_to_save, strict=strict) >> save("*", strict=False)


@maker
def save_only_these_names(*names_which_can_be_saved: str, strict: bool = True) -> Policy:
    """Save the values with one of these names."""
    if not names_which_can_be_saved:
        return nothing_saveable
    return save(*names_which_can_be_saved, strict=strict)


@maker
def save_from_both_policies(policy_1: PolicyLike, policy_2: PolicyLike) -> Policy:
    """Save what either policy saves; offload what one offloads and the other does not save."""
    return as_policy(policy_1) | as_policy(policy_2)


@maker
def save_and_offload_only_these_names(
    *,
    names_which_can_be_saved: Iterable[str],
    names_which_can_be_offloaded: Iterable[str],
    offload_src: str,
    offload_dst: str,
    strict: bool = True,
) -> Policy:
    """Save the values with some names, offload those with others.

    Raises:
      PolicyError: if a name is in both.
    """
    for names in (names_which_can_be_saved, names_which_can_be_offloaded):
        if isinstance(names, str):
            raise PolicyError(f"the names to be saved or offloaded are a list: write [{names!r}].")
    saved, offloaded = tuple(names_which_can_be_saved), tuple(names_which_can_be_offloaded)
    both = sorted(set(saved) & set(offloaded))
    if both:
        raise PolicyError(
            "The names should be exclusive and should not intersect in `names_which_can_be_saved` "
            f"and `names_which_can_be_offloaded`. Got {saved} and {offloaded}, "
            f"whose intersection is {both}. Leave each name in one of them."
        )
    policy = save_only_these_names(*saved, strict=strict)
    if offloaded:
        policy = policy | offload(*offloaded, strict=strict, src=offload_src, dst=offload_dst)
    return policy
