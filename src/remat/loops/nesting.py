"""How n equal layers are divided over nested loops: pure arithmetic, without JAX.

A loop of n layers stores one residual set per layer. Cut into n₁ groups of n₂ layers, with each
group a region, it stores the carry at the start of each group and one group's residuals at a time;
the groups can be divided in the same way. With c bytes of carry and r bytes of residuals a layer,
d loops of lengths n₁ … n_d hold

    c·(n₁ + … + n_{d-1}) + r·n_d        bytes,   and   d - 1        extra forward passes

recompute what is not held. At the best lengths each loop holds the same: n₁ = … = n_{d-1} =
(r/c)·n_d, so the sum grows as n^{1/d}.

The compiler's figures add what is at work: the innermost loop has the residuals of one layer more
in hand, and within nested loops the layers it runs through also have their parameters copied to it
(p bytes a layer, and once more for a gradient). So r·n_d is (r + p)·(n_d + 1) for n_d > 1 and
r + p for n_d = 1, plus p and two carries. On CPU this is within a few per cent of
`temp_size_in_bytes`.

Totals are seldom products of the lengths one wants. What is left after n₁ whole groups is a nest of
its own behind them. Its backward pass comes first and is over when that of the groups begins, so it
shares the memory that a group needs: c·n₁ + max(group, rest). One rest is enough to be near the
best for every total, primes too, and leaves two copies of the body to compile, whatever n.

Reference: Griewank & Walther, Evaluating Derivatives, 2nd ed., 2008, section 12.2 (multilevel
checkpointing).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from remat import units
from remat.errors import BudgetError, ScheduleError

# Deeper nesting is chosen only where it saves more than this. It costs a forward pass per level.
_WORTH_A_LEVEL = 0.02
_TRY_ALL_GROUPS = 2048


@dataclass(frozen=True)
class Nest:
    """Loops in one another, the outermost first, and what comes behind them.

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
        """How often, beyond once, the forward pass of most layers is computed."""
        return len(self.lengths) - 1

    def __str__(self) -> str:
        product = "×".join(str(n) for n in self.lengths)
        return product if self.rest is None else f"{product} + {self.rest}"


@dataclass(frozen=True)
class LayerBytes:
    """What one layer costs: its carry, the residuals of one pass, and its parameters."""

    carry_bytes: int
    residual_bytes: int
    params_bytes: int = 0

    @property
    def fixed_bytes(self) -> int:
        """What is there however the layers are divided: a gradient, the carry and its cotangent."""
        return self.params_bytes + 2 * self.carry_bytes

    def of_innermost(self, n: int) -> int:
        """What the innermost of several loops holds."""
        return (self.residual_bytes + self.params_bytes) * (n + 1 if n > 1 else n)


def peak_bytes(nest: Nest, layer: LayerBytes) -> int:
    """The bytes that a nest holds at the peak of its backward pass.

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
) -> Nest:
    """The nest for a total.

    >>> str(best_nest(97, LayerBytes(carry_bytes=10, residual_bytes=10), levels=2))
    '10×9 + 7'

    Args:
      n_layers: the total number of layers.
      layer: what one layer costs.
      levels: the number of nested loops; None leaves it open.
      budget_bytes: what may be held at most. The nest that recomputes least within it is chosen;
        without a budget it is the one that holds least.

    Raises:
      BudgetError: if no nest fits, with the smallest.
      ScheduleError: for totals or levels that are not positive.
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
    least, smallest = min(found, key=lambda pair: pair[0])
    if budget_bytes is None:
        return next(nest for peak, nest in found if peak <= (1 + _WORTH_A_LEVEL) * least)
    for peak, nest in found:
        if peak <= budget_bytes:
            return nest
    at_levels = "" if levels is None else f" with levels={levels}"
    raise BudgetError(
        f"no nesting of {n_layers} layers{at_levels} fits {units.format_bytes(budget_bytes)}; the "
        f"smallest, {smallest}, holds {units.format_bytes(least)} ({least} bytes: "
        f"{units.format_bytes(layer.carry_bytes)} of carry and "
        f"{units.format_bytes(layer.residual_bytes)} of residuals a layer). Raise budget="
        f"{'' if levels is None else ', leave levels= open'} or checkpoint parts of the layer."
    )


def _best_of_each_depth(n_layers: int, layer: LayerBytes, levels: int | None) -> Iterator[Nest]:
    """For each number of loops, the nest that holds least; deeper ones while they hold less."""
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
            # Of two that hold the same, the one without a rest.
            if best is None or (held, left) < best[:2]:
                nest = Nest((n_groups, *inner_lengths), Nest(rest_lengths) if left else None)
                best = (held, left, nest)
        assert best is not None
        yield best[2]
        if levels is None and least is not None and best[0] > least:
            return
        least = best[0]


def _group_sizes(n_layers: int) -> list[int]:
    """Sizes of groups to try: all, or for many layers those that leave the smallest rests."""
    if n_layers <= _TRY_ALL_GROUPS:
        return list(range(1, n_layers + 1))
    return sorted({n_layers // n_groups for n_groups in range(1, n_layers + 1)})


class _Factorizations:
    """For all totals up to a limit, the best exact product of a number of lengths."""

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
