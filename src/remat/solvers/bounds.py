"""Proven lower bounds on the time of recomputation within a budget, and orders found on the way.

`cut_bound` asks what must cross one moment, by minimum cuts; it is fast at any size. `prove` solves
the 0-1 program of `frontier`, which knows several moments, and chooses them as it goes: it begins
with the step of the highest peak, builds the order of the program's solution, and adds the steps at
which that order exceeds the budget. Few boundaries suffice, and with few the program is small and
its linear relaxation tight: with many short stages a fraction of a value serves several fractions
of a user, one in each stage. When the order fits, it is optimal.

Work is counted in branch-and-bound nodes and variables, so that no answer depends on a clock.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from remat.errors import BudgetError
from remat.solvers import frontier
from remat.solvers.effort import Effort
from remat.solvers.liveness import Arrays, Liveness, liveness
from remat.solvers.mincut import CutProblem, RecentNetworks, at_budget
from remat.solvers.order_search import replay_order
from remat.solvers.relief import Relief, keep, relieve


def cut_bound(
    arrays: Arrays, moment: int, budget: int, recent: RecentNetworks | None = None
) -> float:
    """Return a bound on extra time from what can cross the first computation of one node.

    Bounds at the same moment share work if they share `recent`.

    Raises:
      BudgetError: no set of values within the budget can cross it.
    """
    held = [moment, *arrays.operands[moment]]
    n_bytes = arrays.bytes[:moment].copy()
    n_bytes[held[1:]] = 0
    needed = np.zeros(moment, np.bool_)
    later = arrays.dep[arrays.start[moment + 1] :]
    needed[later[later < moment]] = True
    needed[held[1:]] = False
    once = arrays.once[:moment]
    cut_problem = CutProblem(
        tuple(n_bytes.tolist()),
        tuple(np.where(once, math.inf, arrays.time[:moment]).tolist()),
        tuple(() if fixed else us for fixed, us in zip(once.tolist(), arrays.operands)),
        tuple(np.flatnonzero(needed).tolist()),
    )
    return at_budget(cut_problem, budget - int(arrays.bytes[held].sum()), recent=recent)[1]


def peak_bound(plain: Liveness, budget: int, recent: RecentNetworks | None = None) -> float:
    """Return the cut bound at the peak of the order without recomputation; 0 if that bounds nothing.

    Bounds of several budgets share work if they share `recent`.
    """
    if plain.peak_bytes <= budget:
        return 0.0
    try:
        moment = int(np.argmax(plain.live_bytes))
        return max(0.0, cut_bound(plain.arrays, moment, budget, recent))
    except BudgetError:
        return 0.0  # infeasible only up to rounding, which proves nothing


@dataclasses.dataclass(frozen=True)
class Proof:
    """The result of `prove`.

    Args:
      best: the best order within the budget, if any was found or given.
      extra_lower_bound: no schedule within the budget recomputes for less time.
      is_infeasible: whether it was proven that no schedule fits.
    """

    best: Liveness | None
    extra_lower_bound: float
    is_infeasible: bool = False


@dataclasses.dataclass(frozen=True)
class ProofEffort:
    """The work that `prove` may spend.

    Args:
      max_variables: of one 0-1 program; boundaries that would exceed it are not added.
      exact_variables: of a program, up to which branch and bound takes seconds at most; a larger number
        proves more and may take minutes.
      max_nodes: of branch and bound, for one program.
      max_programs: how many programs are solved.
    """

    max_variables: int = 12_000
    exact_variables: int = 2_500
    max_nodes: int = 500
    max_programs: int = 30


# Fractional variables of a program's relaxation, above which branch and bound gains nothing in minutes.
_MOST_FRACTIONAL = 300
# Share of the best order's extra time. From relaxations with lower bounds than that, branch and bound did not
# come close to the best order in minutes.
_CLOSABLE = 0.9
# Share of the difference between the best order and the bound by which a relaxation must raise the bound. The
# ones after it are larger and raise it by still less.
_LEAST_RAISE = 0.1
_SPREAD = 0.02  # share of the nodes; of violated moments closer than this only one joins a program
_MOST_NEW = 4  # boundaries that one solution may add; more need fewer but larger programs


def prove(
    plain: Liveness,
    budget: int,
    best: Liveness | None,
    proven: float,
    effort: ProofEffort,
    search_effort: Effort,
    *,
    close: float,
) -> Proof:
    """Raise the lower bound on extra time and improve the best order until they meet; return both.

    Args:
      plain: the order without recomputation.
      budget: bytes.
      best: an order within the budget, if one is known.
      proven: a known bound on the extra time.
      effort: ends the proof.
      search_effort: ends the repair of orders that exceed the budget.
      close: difference between order and bound at which they count as equal.
    """
    arrays = plain.arrays
    boundaries = _first_boundaries(plain)
    moments: set[tuple[int, int]] = set()
    for _ in range(effort.max_programs):
        if best is not None and best.extra_time <= proven + close:
            break
        stages = sorted(boundaries)
        if frontier.n_variables(stages) > effort.max_variables:
            break
        at_most = math.inf if best is None else best.extra_time
        inner = sorted((stages.index(end), v) for end, v in moments)
        program = frontier.frontier(arrays, budget, stages, inner, at_most=at_most)
        is_large = frontier.n_variables(stages) > effort.exact_variables
        is_hard = is_large and _is_too_hard(program, best)
        if is_hard:
            answer = frontier.relax(
                frontier.frontier(arrays, budget, stages, inner, at_most=at_most, windows=True)
            )
        else:
            answer = frontier.solve(program, max_nodes=effort.max_nodes)
        if answer.is_infeasible:
            # Proven: no schedule is faster than the best order (or none fits, if no order is known).
            return Proof(best, at_most if best is not None else 0.0, best is None)
        # After a program that proves little, the next ones are larger and take longer still.
        least = _LEAST_RAISE * (at_most - proven) if is_hard and best is not None else 0.0
        proves_little = not answer.is_proven and answer.extra_lower_bound <= proven + least
        proven = max(proven, min(answer.extra_lower_bound, at_most))
        if answer.recomputed is None or proves_little:
            break
        meant = _meant(arrays, stages, answer.recomputed)
        mended = relieve(meant, budget, Relief(), search_effort)
        if mended.peak_bytes <= budget:
            mended = keep(mended, budget, search_effort)
            if best is None or mended.extra_time < best.extra_time:
                best = mended
        if not _add_violated(meant, budget, boundaries, moments):
            break
    return Proof(best, proven)


def _is_too_hard(program: frontier.Frontier, best: Liveness | None) -> bool:
    """Return whether branch and bound on a program is expected to prove little in minutes."""
    relaxed = frontier.relax(program)
    if relaxed.n_fractional > _MOST_FRACTIONAL:
        return True
    return best is not None and relaxed.extra_lower_bound < _CLOSABLE * best.extra_time


def rounded(
    plain: Liveness, budget: int, best: Liveness, max_variables: int, search_effort: Effort
) -> Liveness | None:
    """Return an order within the budget near the solution of a linear relaxation, if one is found.

    The relaxation sees all values at a few moments at once, where searches go from one value to the next. So
    its rounded solution is a good start for them, on graphs that are too large for an exact solution.

    Args:
      plain: the order without recomputation.
      budget: bytes.
      best: the best order that is known; slower ones are not of interest.
      max_variables: of the relaxation; moments that would exceed it are not added.
      search_effort: ends the repair of the rounded solution, which may exceed the budget.
    """
    arrays = plain.arrays
    boundaries = _first_boundaries(plain)
    found: Liveness | None = None
    for windows in (False, True):
        stages = sorted(boundaries)
        if frontier.n_variables(stages) > max_variables:
            break
        answer = frontier.relax(
            frontier.frontier(arrays, budget, stages, [], at_most=best.extra_time, windows=windows)
        )
        if answer.recomputed is None:
            break
        found = _meant(arrays, stages, answer.recomputed)
        if windows or not _add_violated(found, budget, boundaries, set()):
            break
    if found is None:
        return None
    repaired = relieve(found, budget, Relief(), search_effort)
    return repaired if repaired.peak_bytes <= budget else None


def _first_boundaries(plain: Liveness) -> set[int]:
    """Return the boundaries to begin with: the peak and the end."""
    return {int(np.argmax(plain.live_bytes)), len(plain.arrays) - 1}


def _meant(arrays: Arrays, stages: Sequence[int], recomputed: Sequence[Sequence[int]]) -> Liveness:
    """Return the order of a solution: each recomputation before its first use in its stage."""
    order: list[int] = []
    begin = 0
    for end, again in zip(stages, recomputed):
        missing = set(again)
        replay_order(arrays.operands, range(begin, end), missing, order)
        # The boundary's own operands, and what later stages use.
        order += [*sorted(missing), end]
        begin = end + 1
    return liveness(arrays, order).tidy()


def _add_violated(
    meant: Liveness, budget: int, boundaries: set[int], moments: set[tuple[int, int]]
) -> bool:
    """Add the steps at which an order exceeds the budget most; return whether there were any.

    A first computation becomes a boundary. For a repeated one the neighbouring nodes become
    boundaries; if they are already, the moment itself joins the program.
    """
    over = np.flatnonzero(meant.live_bytes > budget)
    stage = np.cumsum(meant.is_first)  # the number of first computations so far
    distance = max(1, int(_SPREAD * len(meant.arrays)))
    added: list[int] = []
    for step in over[np.argsort(-meant.live_bytes[over], kind="stable")].tolist():
        place = int(stage[step]) - 1 if meant.is_first[step] else int(stage[step])
        if any(abs(place - other) < distance for other in added):
            continue
        if meant.is_first[step]:
            if place in boundaries:
                continue
            boundaries.add(place)
        elif {place - 1, place} <= boundaries or place == 0:
            if (place, int(meant.order[step])) in moments:
                continue
            moments.add((place, int(meant.order[step])))
        else:
            boundaries |= {place - 1, place}
        added.append(place)
        if len(added) == _MOST_NEW:
            break
    return bool(added)
