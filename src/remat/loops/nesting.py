"""The division of n equal layers into nested loops: pure arithmetic, without JAX.

A loop of n layers saves the residuals of every layer. Divided into n₁ groups of n₂ layers, with each
group a region, it saves the carry at the start of each group and the residuals of one group at a time.
The groups can be divided in the same way. With c bytes of carry and r bytes of residuals per layer,
d loops of lengths n₁ … n_d hold

    c·(n₁ + … + n_{d-1}) + r·n_d        bytes,   and   d - 1        extra forward passes

recompute the rest. At the best lengths all loops hold the same number of bytes: n₁ = … = n_{d-1} =
(r/c)·n_d, so the sum grows as n^{1/d}.

The compiled peak is larger by the working memory: the innermost loop holds the residuals of one more
layer, and inside of nested loops it gets a copy of its layers' parameters (p bytes per layer, and p for
a gradient). So r·n_d is (r + p)·(n_d + 1) for n_d > 1 and r + p for n_d = 1, plus p and two carries.
On CPU this is within a few per cent of `temp_size_in_bytes`.

A total is seldom a product of good lengths. The layers after n₁ whole groups form another nest, the
rest. Its backward pass runs first and ends before that of the groups begins, so the two share memory:
c·n₁ + max(group, rest). One rest is enough to be near the optimum for every total, including primes,
and the body is compiled only twice for any n.

Reference: Griewank & Walther, Evaluating Derivatives, 2nd ed., 2008, section 12.2 (multilevel
checkpointing).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from remat import units
from remat.errors import BudgetError, ScheduleError

# Share of the least bytes that a nest may hold in excess; a larger share chooses fewer levels. Each
# level costs a forward pass.
_WORTH_A_LEVEL = 0.02
_TRY_ALL_GROUPS = 2048  # layers; for more, only group sizes with the smallest rests are tried


@dataclass(frozen=True)
class Nest:
    """The lengths of nested loops, the outermost first, and the nest of the remaining layers.

    >>> Nest((9, 10), rest=Nest((7,))).n_layers
    97
    """

    lengths: tuple[int, ...]
    rest: Nest | None = None

    @property
    def n_layers(self) -> int:
        return math.prod(self.lengths) + (self.rest.n_layers if self.rest else 0)

    @property
    def extra_sweeps(self) -> int:
        """Return how often the forward pass of most layers is recomputed."""
        return len(self.lengths) - 1

    def __str__(self) -> str:
        product = "×".join(str(n) for n in self.lengths)
        return product if self.rest is None else f"{product} + {self.rest}"


@dataclass(frozen=True)
class LayerBytes:
    """The bytes of one layer: its carry, its residuals and its parameters."""

    carry_bytes: int
    residual_bytes: int
    params_bytes: int = 0

    @property
    def fixed_bytes(self) -> int:
        """Return the bytes that every division needs: a gradient, the carry and its cotangent."""
        return self.params_bytes + 2 * self.carry_bytes

    def of_innermost(self, n: int) -> int:
        """Return the bytes that the innermost of several loops holds with `n` layers."""
        return (self.residual_bytes + self.params_bytes) * (n + 1 if n > 1 else n)


def peak_bytes(nest: Nest, layer: LayerBytes) -> int:
    """Return the bytes that a nest holds at the peak of its backward pass.

    >>> peak_bytes(Nest((8, 8)), LayerBytes(carry_bytes=10, residual_bytes=30))
    370
    """
    if len(nest.lengths) == 1 and nest.rest is None:
        # One loop over everything needs no copies.
        return layer.residual_bytes * nest.n_layers + layer.fixed_bytes
    return _held_bytes(nest, layer) + layer.fixed_bytes


def _held_bytes(nest: Nest, layer: LayerBytes) -> int:
    *outer, n = nest.lengths
    rest = _held_bytes(nest.rest, layer) if nest.rest else 0
    if not outer:
        return layer.of_innermost(n) + rest
    inside = layer.carry_bytes * sum(outer[1:]) + layer.of_innermost(n)
    return layer.carry_bytes * outer[0] + max(inside, rest)


def best_nest(
    n_layers: int,
    layer: LayerBytes,
    *,
    levels: int | None = None,
    budget_bytes: int | None = None,
    compiled_bytes: Callable[[Nest], int | None] = lambda nest: None,
) -> Nest:
    """Return the best nest for a number of layers.

    >>> str(best_nest(97, LayerBytes(carry_bytes=10, residual_bytes=10), levels=2))
    '10×9 + 7'

    Args:
      n_layers: the total number of layers.
      layer: the bytes of one layer.
      levels: the number of nested loops; None for any number.
      budget_bytes: the most bytes that the nest may hold. The one that recomputes least within it is
        chosen. Without a budget, the nest that holds the fewest bytes is chosen.
      compiled_bytes: the compiled bytes of a nest, with which a budget is compared; None if they are
        unknown, and `peak_bytes` counts.

    Raises:
      BudgetError: no nest fits; the message has the smallest.
      ScheduleError: `n_layers` or `levels` is not positive.
    """
    if n_layers < 1:
        raise ScheduleError(f"a loop needs at least 1 layer, not {n_layers}.")
    if levels is not None and levels < 1:
        raise ScheduleError(f"levels must be at least 1, not {levels}.")
    found = [
        (peak_bytes(nest, layer), nest)
        for nest in _best_of_each_depth(n_layers, layer, levels)
        if levels is None or len(nest.lengths) == levels
    ]
    if budget_bytes is None:
        least = min(peak for peak, _ in found)
        return next(nest for peak, nest in found if peak <= (1 + _WORTH_A_LEVEL) * least)
    compiled: list[tuple[int, Nest]] = []
    for peak, nest in found:
        needed = compiled_bytes(nest)
        compiled.append((peak if needed is None else needed, nest))
        if compiled[-1][0] <= budget_bytes:
            return nest
    needed, smallest = min(compiled, key=lambda pair: pair[0])
    added = needed - peak_bytes(smallest, layer)
    at_levels = "" if levels is None else f" with levels={levels}"
    compiler = f", and {units.format_bytes(added)} that the compiler needs" if added > 0 else ""
    raise BudgetError(
        f"no nesting of {n_layers} layers{at_levels} fits {units.format_bytes(budget_bytes)}; the "
        f"smallest, {smallest}, holds {units.format_bytes(needed)} ({needed} bytes: "
        f"{units.format_bytes(layer.carry_bytes)} of carry and "
        f"{units.format_bytes(layer.residual_bytes)} of residuals a layer{compiler}). Raise budget="
        f"{'' if levels is None else ', leave out levels='} or checkpoint parts of the layer."
    )


def _best_of_each_depth(n_layers: int, layer: LayerBytes, levels: int | None) -> Iterator[Nest]:
    """Yield for each number of loops the nest that holds the fewest bytes, while deeper ones hold less."""
    factorized = _Factorizations(n_layers, layer)
    yield Nest((n_layers,))
    least: int | None = None
    deepest = levels if levels is not None else n_layers.bit_length() + 1
    for depth in range(2, deepest + 1):
        best: tuple[int, int, Nest] | None = None
        for group in _group_sizes(n_layers):
            n_groups, left = divmod(n_layers, group)
            inner, inner_lengths = factorized.best(group, depth - 1)
            rest, rest_lengths = factorized.best_up_to(left, depth) if left else (0, ())
            held = layer.carry_bytes * n_groups + max(inner, rest)
            # Among nests that hold the same bytes, prefer one without a rest.
            if best is None or (held, left) < best[:2]:
                nest = Nest((n_groups, *inner_lengths), Nest(rest_lengths) if left else None)
                best = (held, left, nest)
        assert best is not None
        yield best[2]
        if levels is None and least is not None and best[0] > least:
            return
        least = best[0]


def _group_sizes(n_layers: int) -> list[int]:
    """Return the group sizes to try: all, or for many layers those that leave the smallest rests."""
    if n_layers <= _TRY_ALL_GROUPS:
        return list(range(1, n_layers + 1))
    return sorted({n_layers // n_groups for n_groups in range(1, n_layers + 1)})


class _Factorizations:
    """The best lengths with an exact product, for all totals up to a limit."""

    def __init__(self, limit: int, layer: LayerBytes):
        self.layer = layer
        self.limit = limit
        self.divisors: list[list[int]] = [[] for _ in range(limit + 1)]
        for divisor in range(1, limit + 1):
            for multiple in range(divisor, limit + 1, divisor):
                self.divisors[multiple].append(divisor)
        self.by_depth: list[list[tuple[int, tuple[int, ...]]]] = [
            [(layer.of_innermost(n), (n,)) for n in range(limit + 1)]
        ]

    def best(self, n: int, depth: int) -> tuple[int, tuple[int, ...]]:
        while len(self.by_depth) < depth:
            inner = self.by_depth[-1]
            c = self.layer.carry_bytes
            deeper: list[tuple[int, tuple[int, ...]]] = [(0, ())]
            for total in range(1, self.limit + 1):
                held, first = min((c * k + inner[total // k][0], k) for k in self.divisors[total])
                deeper.append((held, (first, *inner[total // first][1])))
            self.by_depth.append(deeper)
        return self.by_depth[depth - 1][n]

    def best_up_to(self, n: int, depth: int) -> tuple[int, tuple[int, ...]]:
        return min((self.best(n, d) for d in range(1, depth + 1)), key=lambda pair: pair[0])
