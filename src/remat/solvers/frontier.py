"""The 0-1 program of which values cross which moment: lower bounds, and a schedule to start from.

The first computations, in the graph's order, divide a schedule into stages. A *boundary* is the
first computation of some chosen nodes; stage k runs up to and includes boundary node b_k. For each
stage k and each value i that is older than the stage::

    S[k, i]   i is live when the stage begins (right after the computation of b_{k-1})
    R[k, i]   i is computed (again) during the stage

    minimise   sum of time_i R[k, i]
    R[k, v] <= R[k, u] + S[k, u]       for each operand u of v: it was kept, or computed again
    1       <= R[k, u] + S[k, u]       ... v is first computed in stage k
    S[k+1, i] <= S[k, i] + R[k, i]     only what exists survives (1 for what is new in stage k)
    bytes of b_k, of its operands and of every other i with S[k+1, i] <= budget

The last line holds because b_k's computation *ends* the stage: what survives the stage is live at
that moment together with b_k and its operands. Every schedule that computes the nodes in the
graph's order, however often and in whatever order it recomputes between boundaries, gives a
feasible point; so each bound of this program is proven for all of them. With every node a boundary
this is the frontier-advancing form of Checkmate (Jain et al., MLSys 2020) without its accounting
of the moments *inside* a stage, which cost most of its variables and rarely bind; `moments` adds a
(weaker, still valid) row for each recomputation at which a first answer was found to break the
budget::

    bytes of v and of its operands, times R[k, v],
        plus the bytes of every other i with K[k, i]  <= budget,
    K[k, i] >= S[k+1, i] - R[k, i]     i survives the stage and is not computed in it,
                                       so it is live throughout

`windows` adds rows that tighten the linear relaxation, which otherwise lets half of u in two stages
serve all of v. For stages j to m taken as one, with W[i] = 1 where i is computed again in any of them::

    W[i] <= R[j, i] + ... + R[m, i]
    W[v] <= W[u] + S[j, u]             for each operand u of v
    1    <= W[u] + S[j, u]             ... v is first computed in the window
    S[m+1, i] <= S[j, i] + W[i]

They hold for every schedule (`W` as defined), hence change no 0-1 solution.

The bound of `solve` is HiGHS's own dual bound, minus a margin for its tolerances; that of `relax`
is the Lagrangian bound of its dual values, valid for whatever values these are.

Known limits: 2 variables for each (stage, older value); the caller keeps that number small by
choosing few boundaries, which weakens the bound but never makes it wrong.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import scipy

from remat.solvers.liveness import Arrays, Floats, Ints

# Share of the total time subtracted from bounds: HiGHS accepts rows that are violated by 1e-6 of their
# scale (1 here) and reports its dual bound without a margin for rounding.
_MARGIN = 1e-6


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Frontier:
    """The program of one graph, one budget and chosen boundaries.

    `extra` is measured in shares of the graph's time, so that all of its numbers are near 1.
    """

    arrays: Arrays
    budget: int
    boundaries: tuple[int, ...]
    cost: Floats
    rows: scipy.sparse.csr_array
    upper: Floats
    #: Where the variables of each stage begin: S[k, i] at first[k] + i, then R[k, i].
    first: tuple[int, ...]
    #: Upper bounds of the variables: 0 for recomputing what must be computed once.
    most: Floats

    @property
    def total_time(self) -> float:
        return float(self.arrays.time.sum())


@dataclasses.dataclass(frozen=True, eq=False)
class FrontierAnswer:
    """The result of solving the program.

    Args:
      extra_lower_bound: proven bound on the time that any schedule spends on recomputation.
      recomputed: for each stage the places computed again, or None if none was found.
      is_infeasible: whether it was proven that no schedule fits.
      is_proven: whether `recomputed` is optimal for this program.
      n_fractional: variables of a relaxation that are neither 0 nor 1.
    """

    extra_lower_bound: float
    recomputed: tuple[tuple[int, ...], ...] | None = None
    is_infeasible: bool = False
    is_proven: bool = False
    n_fractional: int = 0


def n_variables(boundaries: Sequence[int]) -> int:
    """Return the number of variables of the program with these boundaries."""
    return 2 * sum(b + 1 for b in boundaries[:-1])


def frontier(
    arrays: Arrays,
    budget: int,
    boundaries: Sequence[int],
    moments: Sequence[tuple[int, int]] = (),
    *,
    at_most: float = math.inf,
    windows: bool = False,
) -> Frontier:
    """Return the program of a graph and a budget; the last boundary is always the last node.

    Args:
      arrays: the graph.
      budget: bytes.
      boundaries: places of the nodes that end a stage, increasing.
      moments: (stage, place) of recomputations whose live bytes are bounded as well.
      at_most: extra time of a known schedule; slower ones are excluded.
      windows: whether to add the rows of all windows of two stages or more.
    """
    builder = _Rows()
    n_bytes = arrays.bytes / max(budget, 1)
    first: list[int] = []
    n_columns = 0
    begins = [-1, *boundaries[:-1]]
    for before in begins:
        first.append(n_columns)
        n_columns += 2 * (before + 1)
    first.append(n_columns)
    for k, (before, end) in enumerate(zip(begins, boundaries)):
        n_old = before + 1
        later = first[k + 1] if k + 1 < len(boundaries) else None
        _add_stage(builder, arrays, n_old, end, first[k], first[k] + n_old, later)
        if later is None:
            continue
        needed = arrays.dep[arrays.start[end] : arrays.start[end + 1]]
        held = float(n_bytes[end] + n_bytes[needed].sum())
        other = np.setdiff1d(np.arange(end), needed)
        builder.add_one(later + other, n_bytes[other], 1.0 - held)
    n_kept = 0
    for k in sorted({k for k, _ in moments}):
        n_old, end = begins[k] + 1, boundaries[k]
        r, kept = first[k] + n_old, n_columns + n_kept
        old = np.arange(n_old)
        if k + 1 < len(boundaries):
            builder.add([(first[k + 1] + old, 1.0), (r + old, -1.0), (kept + old, -1.0)], 0.0)
        # Old operands of the boundary itself are live from the start to the end as well.
        needed = arrays.dep[arrays.start[end] : arrays.start[end + 1]]
        needed = needed[needed < n_old]
        builder.add([(r + needed, -1.0), (kept + needed, -1.0)], -1.0)
        for v in sorted({v for stage, v in moments if stage == k}):
            own = arrays.dep[arrays.start[v] : arrays.start[v + 1]]
            other = np.setdiff1d(old, np.append(own, v))
            builder.add_one(
                np.append(kept + other, r + v),
                np.append(n_bytes[other], n_bytes[v] + n_bytes[own].sum()),
                1.0,
            )
        n_kept += n_old
    n_all = n_columns + n_kept
    if windows:
        n_all = _add_windows(builder, arrays, boundaries, first, n_all)
    cost = np.zeros(n_all)
    total_time = max(float(arrays.time.sum()), 1e-300)
    share = arrays.time / total_time
    most = np.ones(n_all)
    for k, before in enumerate(begins):
        n_old = before + 1
        most[first[k] + n_old : first[k] + 2 * n_old][arrays.once[:n_old]] = 0.0
        cost[first[k] + n_old : first[k] + 2 * n_old] = share[:n_old]
    if math.isfinite(at_most):
        builder.add_one(np.flatnonzero(cost), cost[cost > 0], at_most / total_time + _MARGIN)
    rows, upper = builder.finish(n_all)
    return Frontier(arrays, budget, tuple(boundaries), cost, rows, upper, tuple(first), most)


def _add_stage(
    builder: _Rows, arrays: Arrays, n_old: int, end: int, kept: int, again: int, later: int | None
) -> None:
    """Add the rows that let a stage, or a window of several, compute its nodes.

    Args:
      builder: collects the rows.
      arrays: the graph.
      n_old: the number of nodes before it.
      end: the place of its last node.
      kept: the column of the first old node that is kept until then.
      again: the column of the first old node that is computed again in it.
      later: the column of the first old node that is kept until after it, if anything follows.
    """
    old = np.arange(n_old)
    # Operands of v that are older than the stage: kept or computed again.
    user = np.repeat(old, np.diff(arrays.start[: n_old + 1]))
    operand = arrays.dep[: int(arrays.start[n_old])]
    builder.add([(again + user, 1.0), (again + operand, -1.0), (kept + operand, -1.0)], 0.0)
    new = arrays.dep[int(arrays.start[n_old]) : int(arrays.start[end + 1])]
    required = np.unique(new[new < n_old])
    builder.add([(again + required, -1.0), (kept + required, -1.0)], -1.0)
    if later is not None:
        builder.add([(later + old, 1.0), (kept + old, -1.0), (again + old, -1.0)], 0.0)


def _add_windows(
    builder: _Rows, arrays: Arrays, boundaries: Sequence[int], first: Sequence[int], n_columns: int
) -> int:
    """Add the rows of all windows of two stages or more; return the number of columns with theirs."""
    n_stages = len(boundaries)
    for j in range(1, n_stages):
        n_old = boundaries[j - 1] + 1
        old = np.arange(n_old)
        for m in range(j + 1, n_stages):
            w = n_columns
            n_columns += n_old
            again = [
                (first[k] + (first[k + 1] - first[k]) // 2 + old, -1.0) for k in range(j, m + 1)
            ]
            builder.add([(w + old, 1.0), *again], 0.0)
            later = first[m + 1] if m + 1 < n_stages else None
            _add_stage(builder, arrays, n_old, boundaries[m], first[j], w, later)
    return n_columns


class _Rows:
    """Collects sparse rows `a·x <= b`, many of one shape at a time."""

    def __init__(self) -> None:
        self.rows: list[Ints] = []
        self.columns: list[Ints] = []
        self.entries: list[Floats] = []
        self.upper: list[Floats] = []
        self.n_rows = 0

    def add(self, terms: Sequence[tuple[Ints, float]], upper: float) -> None:
        """Add one row per element of the terms' columns, which all have the same length."""
        n_new = len(terms[0][0])
        for columns, entry in terms:
            self.rows.append(self.n_rows + np.arange(n_new))
            self.columns.append(columns)
            self.entries.append(np.full(n_new, entry))
        self.upper.append(np.full(n_new, upper))
        self.n_rows += n_new

    def add_one(self, columns: Ints, entries: Floats, upper: float) -> None:
        self.rows.append(np.full(len(columns), self.n_rows))
        self.columns.append(columns)
        self.entries.append(entries)
        self.upper.append(np.array([upper]))
        self.n_rows += 1

    def finish(self, n_columns: int) -> tuple[scipy.sparse.csr_array, Floats]:
        if not self.rows:
            return scipy.sparse.csr_array((0, n_columns)), np.zeros(0)
        matrix = scipy.sparse.csr_array(
            (
                np.concatenate(self.entries),
                (np.concatenate(self.rows), np.concatenate(self.columns)),
            ),
            shape=(self.n_rows, n_columns),
        )
        return matrix, np.concatenate(self.upper)


def solve(program: Frontier, *, max_nodes: int) -> FrontierAnswer:
    """Solve the 0-1 program by HiGHS's branch and bound, with at most `max_nodes` nodes."""
    if not program.cost.size:
        is_infeasible = bool((program.upper < 0).any())
        n_stages = len(program.boundaries)
        return FrontierAnswer(
            0.0, None if is_infeasible else ((),) * n_stages, is_infeasible, is_proven=True
        )
    result = scipy.optimize.milp(
        program.cost,
        constraints=scipy.optimize.LinearConstraint(program.rows, -np.inf, program.upper),
        bounds=scipy.optimize.Bounds(0.0, program.most),
        integrality=np.ones(len(program.cost)),
        options={"node_limit": max_nodes, "mip_rel_gap": 1e-4},
    )
    if result.status == 2:
        return FrontierAnswer(0.0, is_infeasible=True)
    bound = 0.0
    if result.mip_dual_bound is not None and np.isfinite(result.mip_dual_bound):
        bound = max(0.0, float(result.mip_dual_bound) - _MARGIN) * program.total_time
    if result.x is None:
        return FrontierAnswer(bound)
    return FrontierAnswer(bound, _recomputed(program, result.x), is_proven=result.status == 0)


def relax(program: Frontier) -> FrontierAnswer:
    """Solve the linear relaxation by an interior point method; what it recomputes is rounded."""
    if not program.cost.size:
        return solve(program, max_nodes=0)
    result = scipy.optimize.linprog(
        program.cost,
        A_ub=program.rows,
        b_ub=program.upper,
        bounds=np.stack([np.zeros(len(program.cost)), program.most], axis=1),
        method="highs-ipm",
    )
    if result.status == 2:
        return FrontierAnswer(0.0, is_infeasible=True)
    if result.x is None or result.ineqlin.marginals is None:
        return FrontierAnswer(0.0)
    price = np.maximum(0.0, -result.ineqlin.marginals)
    reduced = program.cost + program.rows.T @ price
    bound = float(np.minimum(reduced, 0.0) @ program.most - price @ program.upper)
    return FrontierAnswer(
        max(0.0, bound - _MARGIN) * program.total_time,
        _recomputed(program, result.x),
        n_fractional=int((np.abs(result.x - np.round(result.x)) > 1e-4).sum()),
    )


def _recomputed(program: Frontier, point: Floats) -> tuple[tuple[int, ...], ...]:
    """Return for each stage the places that a point recomputes, rounded."""
    chosen = point > 0.5
    return tuple(
        tuple(int(i) for i in np.flatnonzero(chosen[(begin + end) // 2 : end]))
        for begin, end in zip(program.first, program.first[1:])
    )
