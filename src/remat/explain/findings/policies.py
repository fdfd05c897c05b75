"""The findings on policies that save nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from remat import _jax
from remat.aliases import PolicyLike
from remat.errors import closest
from remat.explain import regions
from remat.explain.findings.facts import Facts
from remat.report.model import Finding
from remat.transform import policies


def matched_nothing(facts: Facts, found: list[regions.Found]) -> Iterator[Finding]:
    seen: list[object] = []
    for one in found:
        policy = one.policy
        if not regions.is_meant_to_save(policy) or any(policy is p for p in seen):
            continue
        seen.append(policy)
        given = facts.step.undifferentiated
        bodies = list(regions.regions_with(policy, given)) if given is not None else []
        theirs = one.eqn.primitive.name != "remat"
        if bodies:
            looked_at = [
                regions.live_body(eqn) if theirs else _jax.open_jaxpr(eqn.params["jaxpr"])
                for eqn in bodies
            ]
        else:
            looked_at = [facts.step.jaxpr]
        if any(map(regions.hides_names, looked_at)):
            # The forward rule of a custom derivative is traced only when it is differentiated.
            looked_at.append(facts.step.jaxpr)
        if any(True for body in looked_at for _ in regions.region_matches(policy, body)):
            yield from _names_unknown(facts, policy)
            continue
        known = regions.names_in(facts.step.jaxpr)
        known.update(regions.names_in(given) if given is not None else {})
        yield _nothing_like(policy, known, theirs)


def _names_unknown(facts: Facts, policy: PolicyLike) -> Iterator[Finding]:
    """Return the finding on names that a JAX policy saves and the step does not have.

    The policies of this library raise for unknown names unless `strict=False`.
    """
    if isinstance(policy, policies.Policy):
        return
    known = regions.names_in(facts.step.jaxpr)
    if facts.step.undifferentiated is not None:
        known.update(regions.names_in(facts.step.undifferentiated))
    wanted = regions.names_wanted(policy)
    absent = [name for name in wanted if name not in known]
    if known and absent and len(absent) < len(wanted):
        yield Finding(
            "policy_name_unknown",
            "info",
            f"The policy {_called(policy)} names {', '.join(map(repr, absent))}, but no value of the step "
            "has such a name.",
            f"Correct the name or leave it out. {_known_names(absent[0], known)}",
        )


def _known_names(unknown: str, known: Iterable[str]) -> str:
    """Return the sentences that list the known names, the closest first."""
    said = closest(unknown, known)
    return said[0].upper() + said[1:]


# Classes of policies → the name in `jax.checkpoint_policies` of their instances or of the function that
# makes them.
_NAMES_OF_CLASSES = {
    "SaveOnlyTheseNames": "save_only_these_names",
    "SaveAnyNamesButThese": "save_any_names_but_these",
}


def _called(policy: object) -> str:
    """Return the name under which a policy is known."""
    called = getattr(policy, "__qualname__", "") or _NAMES_OF_CLASSES.get(type(policy).__name__)
    return (called or repr(policy)).split(".<locals>")[0]


def _nothing_like(policy: PolicyLike, known: dict[str, str], theirs: bool) -> Finding:
    """Return the finding on a policy that saves nothing, with the reason."""
    called = _called(policy)
    wanted, excluded = regions.names_wanted(policy), regions.names_excluded(policy)
    others = [name for name in known if name not in excluded] if excluded else []
    names = ", ".join(map(repr, [*wanted, *others]))
    discarded = [name for name in (*wanted, *others) if name in known]
    if discarded and theirs:
        where = ", ".join(f"{name!r} at {known[name]}" for name in discarded)
        said = (
            f"saves {names}, but the result of checkpoint_name is not used ({where}): only a copy that is "
            "never read has the name, so nothing is saved."
        )
        step = "Write x = checkpoint_name(x, name) and use that x; remat.checkpoint names x itself."
    elif excluded:
        said = (
            f"saves values of all names but {', '.join(map(repr, excluded))}, and the region that it is "
            "given to has no other names: everything is recomputed."
        )
        step = "Name what is to be saved: x = remat.checkpoint_name(x, name)."
    elif wanted:
        said = f"saves {names}, which no value of the region has: nothing is saved by it."
        step = (
            f"Write a name that checkpoint_name gives. {_known_names(wanted[0], known)}"
            if known
            else f"Name what is to be saved: x = remat.checkpoint_name(x, {wanted[0]!r})."
        )
    else:
        said = "saves no value of the region that it is given to: everything is recomputed."
        step = (
            "remat.print_saved_residuals shows what is saved; under vmap, matrix products have batch "
            "dimensions."
        )
    return Finding("policy_matched_nothing", "error", f"The policy {called} {said}", step)
