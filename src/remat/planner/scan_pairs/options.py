"""The pairs of scans in a program, with their options (`pair_options.py`), from the inside outwards.

Two conditionals of which the second reads what the first computes are a pair, too, and so are the two halves
of a differentiated `shard_map`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from remat import _jax
from remat.planner.host_memory import Transfer
from remat.planner.plan_decisions import ScanOption
from remat.planner.scan_pairs.branches import branch_matches, branches_of
from remat.planner.scan_pairs.inside import inner_programs, inside_of, prepared
from remat.planner.scan_pairs.joint import can_compute_constants, joint_of
from remat.planner.scan_pairs.matching import Match, matches
from remat.planner.scan_pairs.pair_options import FoundOptions, PairOptions, ScanPair
from remat.planner.scan_pairs.rewriting import branch_id, pair_id
from remat.planner.scan_pairs.scope import Costing, Scope, free_shards, joint_scope
from remat.planner.scan_pairs.shards import shard_matches, shards_of
from remat.planner.tradeoffs import undominated
from remat.program.from_jaxpr import PLAIN, Execution, joined
from remat.program.fusion import Price


def pairs(
    jaxpr: _jax.Jaxpr,
    price: Price,
    *,
    shards: Sequence[int] | None = None,
    execution: Execution = PLAIN,
    transfer: Transfer | None = None,
    seconds_per_flop: float = 0.0,
) -> tuple[ScanPair, ...]:
    """Return the pairs of scans in a program, in program order, with their options.

    Pairs between the two bodies of a pair are not listed: the outer pair's options choose for them.

    Args:
      jaxpr: the program, with plain calls inlined.
      price: the time of a kernel.
      shards: the shard count of each argument; 1 if not given.
      execution: how equations run on a device.
      transfer: the time of a copy to the host's memory or back; None if nothing may be offloaded.
      seconds_per_flop: of the whole step, as the least cost of recomputation per FLOP. In memory-bound
        loops the times of options hardly differ, so that FLOPs decide.
    """
    scope = Scope.of(jaxpr, Costing(price, execution, transfer, seconds_per_flop), shards)
    return tuple(_pairs_in(scope, "", "", 1))


# --------------------------------------------------------------------------------------------------
# Finding pairs


def _pairs_in(scope: Scope, prefix: str, path: str, times: int) -> list[ScanPair]:
    jaxpr = scope.jaxpr
    found: dict[int, list[ScanPair]] = {}
    paired: set[int] = set()
    for match in matches(jaxpr):
        joint = joint_of(jaxpr, match)
        if all(map(_jax.is_fixed, joint.jaxpr.eqns)):
            continue  # no part of it may be recomputed
        paired.update(match)
        key = pair_id(prefix, match)
        eqn = joint.forward
        name = joined(path, _jax.name_stack_of(eqn))
        inner = []
        if _has_loops_or_branches(joint.jaxpr):
            inner = _pairs_in(joint_scope(scope, joint, match.backward), f"{key}/", name, 1)
        computing = None
        if not inner and can_compute_constants(jaxpr, match):
            computing = joint_of(jaxpr, match, computes=True)
        of_pair = PairOptions(scope, joint, match.backward, key, inner, times, computing).found()
        found[match.forward] = [
            ScanPair(
                key,
                name,
                _jax.source_line_of(eqn),
                joint.length,
                times,
                tuple(of_pair.options),
                of_pair.as_written,
                of_pair.by_step,
                of_pair.by_product,
                of_pair.by_group,
                tuple(of_pair.between),
            )
        ]
    for match in branch_matches(jaxpr):
        paired.update(match)
        found[match.forward] = [_pair_of_branches(scope, match, prefix, path, times)]
    for match in shard_matches(jaxpr):
        shards = shards_of(jaxpr, match)
        key, name = pair_id(prefix, match), joined(path, _jax.name_stack_of(shards.forward))
        inside = Scope.of(
            shards.jaxpr,
            scope.costing.on_device,
            None,
            free_shards(scope, shards, match.backward),
            scope.known,
        )
        with inside_of(shards.forward):
            found[match.forward] = _pairs_in(inside, f"{key}/", name, times)
        if found[match.forward]:
            paired.update(match)
    for i, eqn in enumerate(jaxpr.eqns):
        if i in paired:
            continue
        name = joined(path, _jax.name_stack_of(eqn))
        whole = prepared(jaxpr, eqn) if any(map(_may_have_pairs, _bodies(eqn))) else eqn
        for k, (body, runs) in enumerate(inner_programs(whole)):
            if _may_have_pairs(body):
                inside = scope.inside(whole, _jax.open_jaxpr(body))
                with inside_of(whole):
                    within = _pairs_in(inside, f"{prefix}{i}.{k}/", name, times * runs)
                found.setdefault(i, []).extend(within)
    return [pair for i in sorted(found) for pair in found[i]]


def _pair_of_branches(scope: Scope, match: Match, prefix: str, path: str, times: int) -> ScanPair:
    """Return a pair of conditionals, whose options choose one for each of its branches."""
    key, eqn = pair_id(prefix, match), scope.jaxpr.eqns[match.forward]
    name = joined(path, _jax.name_stack_of(eqn))
    of_branch: dict[str, FoundOptions] = {}
    for k, joint in enumerate(branches_of(scope.jaxpr, match)):
        id = branch_id(key, k)
        inner = []
        if _has_loops_or_branches(joint.jaxpr):
            inner = _pairs_in(joint_scope(scope, joint, match.backward), f"{id}/", name, 1)
        of_branch[id] = PairOptions(scope, joint, match.backward, id, inner, times).found()
    # All branches get the same bytes; each takes its best option within them.
    limits = sorted({option.bytes for of in of_branch.values() for option in of.options})
    least = max(min(option.bytes for option in of.options) for of in of_branch.values())

    def chosen(choose: Callable[[FoundOptions], ScanOption]) -> ScanOption:
        return _of_branches([(id, choose(of)) for id, of in of_branch.items()])

    def within(limit: int) -> ScanOption:
        return chosen(
            lambda of: min((o for o in of.options if o.bytes <= limit), key=lambda o: o.seconds)
        )

    options = [within(limit) for limit in limits if limit >= least]
    return ScanPair(
        key,
        name,
        _jax.source_line_of(eqn),
        1,
        times,
        tuple(undominated(options)),
        chosen(lambda of: of.as_written),
        chosen(lambda of: of.by_step),
        (chosen(lambda of: of.by_product[0]), chosen(lambda of: of.by_product[1])),
        tuple(
            _of_branches([*zip(of_branch, options)])
            for options in zip(*(of.by_group for of in of_branch.values()), strict=True)
        ),
    )


def _of_branches(chosen: Sequence[tuple[str, ScanOption]]) -> ScanOption:
    """Return the option of two conditionals with these options of branches, only one of which runs."""
    return ScanOption(
        (),
        max(option.bytes for _, option in chosen),
        max(option.seconds for _, option in chosen),
        max(option.flops for _, option in chosen),
        inner=tuple(chosen),
    )


@_jax.weakref_lru_cache
def _has_loops_or_branches(jaxpr: _jax.Jaxpr) -> bool:
    return any(
        eqn.primitive.name in ("scan", "cond") or any(map(_may_have_pairs, _bodies(eqn)))
        for eqn in jaxpr.eqns
    )


def _bodies(eqn: _jax.JaxprEqn) -> list[object]:
    return [body for body, _ in inner_programs(eqn)]


def _may_have_pairs(body: object) -> bool:
    return bool(_has_loops_or_branches(_jax.open_jaxpr(body)))
