"""The search for a plan: propose, compile, correct. The model and the compiler are arguments.

The model answers "which decisions recompute least if temporaries take at most n bytes?", in one variant
or several, each with its own assumptions about the compiler. The compiler answers with the bytes that
the compiled program takes. For each variant the search estimates the *aim*: the n at which the compiled
program should just fill the budget. It compiles the proposal that costs least, and corrects the estimates
by the compiler's answer. It ends when no variant proposes anything better than the best that fits.

The search knows neither JAX nor what a proposal's decisions are. It keeps nothing from one call to the
next, so the same question has the same answer.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from remat.errors import BudgetError
from remat.units import format_bytes, format_seconds


@dataclasses.dataclass(frozen=True)
class Proposal:
    """Decisions, and their costs according to a model.

    Args:
      variant: the variant of the model.
      model_bytes: temporaries.
      extra_seconds: time of recomputation.
      lower_bound_seconds: proven lower bound of `extra_seconds` within the model's budget.
      decisions: comparable by `==`.
      cost: the quantity to minimize, in seconds, comparable between variants; `extra_seconds` by default.
      price: the quantity that the variant's schedules minimize, of which lower bounds are known, in seconds;
        `extra_seconds` by default.
    """

    variant: str
    model_bytes: int
    extra_seconds: float
    lower_bound_seconds: float
    decisions: Any
    cost: float = math.nan
    price: float = math.nan

    def __repr__(self) -> str:
        extra = format_seconds(self.extra_seconds)
        return (
            f"Proposal({self.variant}: {format_bytes(self.model_bytes)}, {extra} of recomputation)"
        )

    def __post_init__(self) -> None:
        for name in ("cost", "price"):
            if math.isnan(getattr(self, name)):
                object.__setattr__(self, name, self.extra_seconds)


class Model(Protocol):
    """The interface through which the search obtains proposals."""

    @property
    def variants(self) -> Sequence[str]:
        """Return the names of the variants, the most accurate first."""

    @property
    def exact_variants(self) -> Sequence[str]:
        """Return the names of variants whose programs the model predicts better, but which cost more.

        They are used once a program of another variant took far more bytes than the model predicted.
        """

    @property
    def smaller_variants(self) -> Sequence[str]:
        """Return the names of variants whose programs may need less than all others, but may cost more.

        They are used once no other proposal fits, or the best one costs much. The last one differs most from
        the others.
        """

    def within(self, variant: str, n_bytes: int) -> Proposal:
        """Return the proposal that recomputes least within these bytes of temporaries.

        More bytes never give more recomputation.

        Raises:
          BudgetError: no proposal within these bytes was found.
        """

    def costs_more(self, variant: str, n_bytes: int, cost: float) -> bool:
        """Return whether the proposal within these bytes, if any, is known to cost more.

        A model that would have to compute the proposal to know answers False.
        """

    def may_gain(self, variant: str, n_bytes: int, than: Proposal, *, is_full: bool) -> bool:
        """Return whether the variant's proposal within these bytes may be much better than another one.

        A model that would have to compute the proposal to know answers True.

        Args:
          variant: the variant.
          n_bytes: what its proposal may take.
          than: the other proposal.
          is_full: whether the other one fills its budget. If not, more than its schedule may be improved.
        """

    def smallest(self, variant: str) -> Proposal:
        """Return the proposal with the fewest bytes."""

    @property
    def by_hand(self) -> Sequence[Proposal]:
        """Return what people would write by hand, the one that needs least memory first.

        That one is compiled before the search gives up, since the model may misjudge what the compiler needs
        for all other proposals.
        """


#: `compiler(proposal, expected bytes)`: the bytes of temporaries of the compiled program.
Compiler = Callable[[Proposal, int], int]


@dataclasses.dataclass(frozen=True)
class CompiledProposal:
    """A proposal that was compiled.

    Args:
      proposal: what was compiled.
      expected_bytes: temporaries, as the search expected them.
      compiled_bytes: temporaries, as the compiler reported them.
    """

    proposal: Proposal
    expected_bytes: int
    compiled_bytes: int


@dataclasses.dataclass(frozen=True)
class CompileLimits:
    """When a search ends.

    Args:
      max_compiles: programs to compile; more may find a plan that recomputes less.
      max_more: further programs to compile while each is expected to recompute much less than the best.
      nearly_full: share of the budget. A plan that fills more of it is improved only if much can be gained.
      negligible_seconds: a plan that costs less is not improved, and smaller improvements are not tried.
      much_seconds: a plan that costs more is compared with those of `Model.smaller_variants`.
      max_if_none_fits: further programs to compile if none fits.
      max_improvements: further programs to compile once one of the `max_if_none_fits` fits.
    """

    max_compiles: int = 4
    max_more: int = 4
    nearly_full: float = 0.97
    negligible_seconds: float = 0.0
    much_seconds: float = math.inf
    max_if_none_fits: int = 5
    max_improvements: int = 3


def search(
    model: Model,
    compiler: Compiler,
    budget: int,
    limits: CompileLimits | None = None,
    known: Sequence[CompiledProposal] = (),
    as_written: Sequence[CompiledProposal] = (),
) -> tuple[CompiledProposal | None, tuple[CompiledProposal, ...]]:
    """Return the best proposal whose compiled temporaries are within the budget, and all compiled ones.

    >>> class Halves:  # every byte below 100 costs a second; the compiler takes 10 bytes more
    ...     variants, exact_variants, smaller_variants = ("only",), (), ()
    ...     def within(self, variant, n_bytes):
    ...         return Proposal(variant, n_bytes, max(0, 100 - n_bytes), 0.0, n_bytes)
    ...     def costs_more(self, variant, n_bytes, cost):
    ...         return 100 - n_bytes > cost
    ...     def may_gain(self, variant, n_bytes, than, *, is_full):
    ...         return True
    ...     def smallest(self, variant):
    ...         return self.within(variant, 1)
    ...     by_hand = ()
    >>> best, compiled = search(Halves(), lambda proposal, _: proposal.decisions + 10, 60)
    >>> best.compiled_bytes, len(compiled)
    (60, 2)

    Args:
      model: makes the proposals.
      compiler: reports the bytes of their temporaries.
      budget: bytes of temporaries.
      limits: when the search ends.
      known: proposals compiled earlier that exceed the budget. Estimates start from them.
      as_written: the program as it is written, compiled earlier. It is never proposed, whether it fits or
        not, and estimates for variants that misjudge it start from it.

    Returns:
      The best compiled proposal that fits, or None; and all that were compiled, in order.
    """
    found = _Search(model, compiler, budget, limits or CompileLimits(), tuple(known))
    found.misjudged = [
        c for c in as_written if c.compiled_bytes > _MISJUDGED * c.proposal.model_bytes
    ]
    found.excluded += [c.proposal.decisions for c in as_written]
    return found.run()


# A *ratio* is compiled bytes / modelled bytes; a *slope* is the change of compiled bytes per modelled byte.

# The line through two compiled proposals is used for estimates if its slope is within these limits; wider
# limits trust more of the lines.
_MIN_SLOPE, _MAX_SLOPE = 0.3, 4.0
# Assumed ratio for aims before anything was compiled. A larger ratio makes the first proposal more likely to
# fit, and makes it recompute more. Predictions are without it.
_FIRST_RATIO = 1.03
# Variants are ordered by accuracy. The ratio of one that was not tried is assumed to be larger by this factor
# than that of the variant before it. A larger factor prefers variants that were tried.
_RATIO_OF_NEXT = 1.03
# Share of the aim by which it is lowered after a proposal that exceeds the budget; doubled after each
# further one. A larger share finds a proposal that fits sooner, and one that recomputes more.
_MARGIN = 0.01
# Shares of the best proposal's cost; the second applies if the best one fills the budget. A proposal that
# reduces the cost by less is not compiled, so larger shares end the search earlier.
_GAIN, _GAIN_OF_FULL = 0.03, 0.08
# Share of the budget. If the best proposal fills less, its variant misses what fits, and others may not: they
# are tried more readily. A larger share tries them more often.
_FILLED = 0.9
# As `_GAIN`, once `max_compiles` programs were compiled.
_GAIN_OF_MORE = 0.15
# Estimates can be off by `_OVER`, a share of the budget. So once per search a proposal of the first variant
# that is expected to exceed the budget by at most that is compiled all the same, if it would reduce the
# best cost by a share of `_GAIN_OF_OVER` (`_GAIN_OF_OVER_IF_FULL` if the best one fills the budget,
# `_GAIN_OF_MORE` if it needs less than `_UNFILLED`). A larger `_OVER` finds more plans that the model wrongly
# excludes; smaller gains try that more often.
_OVER, _GAIN_OF_OVER, _GAIN_OF_OVER_IF_FULL = 0.06, 0.5, 0.7
# It must also reduce the cost by this multiple of `negligible_seconds`.
_LEAST_GAIN_OF_OVER = 5
# The ratio of the program as it is written above which a variant misjudges it, and its other proposals are
# expected to have the same ratio. A smaller one says little about programs that recompute.
_MISJUDGED = 1.5
# Number of proposals that are compiled because the model alone says that they fit, once none fits, and once
# the best costs much more. More find more plans and prolong searches.
_MOST_TRUSTED = 2
# Multiple of the budget. If all smallest proposals that were compiled need more, few others are. On 22
# programs the smallest of different variants were at most 1.2 times apart; a larger multiple searches longer.
_HOPELESS = 1.5
# Multiples of the budget. What people write by hand is compiled if it costs much less than the best, even if
# the model says that it needs the first, and earlier programs that it needs the second. Larger ones allow for
# more errors of the model.
_BY_HAND, _BY_HAND_EXPECTED = 1.25, 1.5
# Shares of the budget. If the best proposal costs much and needs less than `_UNFILLED`, or others may cost
# less by a share of `_GAIN_OF_OVER`, those within `_SHARES_TO_FILL` by the model are compiled, at most
# `_MOST_FILLING` of them. The last share allows for proposals of which the model says too much. More find
# more plans that estimates miss, and prolong searches. Those that cost less than `_HARDLY_LESS` of one that
# is smaller by the model and needed too much are left out; a larger share leaves out more.
_UNFILLED, _MOST_FILLING = 0.85, 2
_SHARES_TO_FILL = (*(1 - k / 25 for k in range(11)), 1 + 1 / 25)
_HARDLY_LESS = 0.95
# Multiple of `much_seconds` above which the best is so costly that twice as many are compiled, and the share
# of its cost by which these must reduce it. Smaller ones compile more of them.
_DEAR, _GAIN_OF_DEAR = 10, 0.3
# Multiple of `much_seconds`. If the best proposal needs more than `_UNFILLED`, those that cost half as much
# are compiled only if that half is more than this. A smaller one compiles more of them.
_VERY_MUCH = 3
# Share by which others reduce the cost of such a proposal if they are compiled whenever that costs much. A
# smaller one compiles more of them.
_GAIN_OF_ALMOST_ALL = 0.9
# The quotient of two samples' ratios above which they say nothing about other variants. A larger one trusts
# more of them.
_DISAGREEING = 2.0
# The ratio above which `exact_variants` are used; a larger one uses them less.
_MISPREDICTED = 1.08

# If no proposal fits and the nearest one needs at most `_NEARLY` times the budget: the aims to try, as
# multiples of the current or the first aim, whichever is larger.
_NEARLY, _ABOVE = 1.2, (1.1, 1.25, 1.5)
# Before those, if the nearest one needs far more than the model predicts: the aims to try in its variant, as
# multiples of its bytes.
_SLIGHTLY_ABOVE = (1.03, 1.1)
# If it needs more than that: the aims to try, as multiples of the smallest proposal's bytes.
_ABOVE_SMALLEST = (1.15, 1.35, 1.6)


class _Search:
    def __init__(
        self,
        model: Model,
        compiler: Compiler,
        budget: int,
        limits: CompileLimits,
        known: tuple[CompiledProposal, ...] = (),
    ) -> None:
        self.known = known
        self.model = model
        self.compiler = compiler
        self.budget = budget
        self.limits = limits
        self.compiled: list[CompiledProposal] = []
        #: Programs as written that need far more than the model says. A program that recomputes is fused
        #: differently, so these samples are used only until such a program was compiled.
        self.misjudged: list[CompiledProposal] = []
        #: Whether no proposal of the other variants fits, so that those of smaller ones are tried.
        self.none_fits = False
        #: Decisions that are never proposed.
        self.excluded: list[Any] = []
        #: Decisions that were proposed although they are expected to exceed the budget a little.
        self.over: list[Any] = []

    def run(self) -> tuple[CompiledProposal | None, tuple[CompiledProposal, ...]]:
        while len(self.compiled) < self._max_compiles() and not self._is_done():
            if self._is_hopeless():
                break
            proposals = self._improvements()
            if not proposals:
                break
            # Among equal proposals, prefer one of a variant that was not tried, then the first.
            tried = {c.proposal.variant for c in self.compiled}
            self._compile(min(proposals, key=lambda p: (p.cost, p.variant in tried)))
        if self._best() is None:
            self._search_smaller()
            self._improve()
        self._compile_by_hand()
        self._try_others()
        self._fill()
        return self._best(), tuple(self.compiled)

    def _fill(self) -> None:
        """Compile proposals between the best and those that need too much.

        Where the compiler's answers contradict each other, estimates from them may miss what lies between.
        That is likely if the best leaves much unused. If it does not, proposals that cost much less are worth
        trying if they are smaller than those that need too much.
        """
        best = self._best()
        is_dear = best is not None and best.proposal.cost > _DEAR * self.limits.much_seconds
        n_left = _MOST_FILLING * (1 + is_dear)
        least = 0.0
        for share in _SHARES_TO_FILL:
            best = self._best()
            if best is None:
                return
            is_filled = best.compiled_bytes > _UNFILLED * self.budget
            most = self._most_to_fill(best.proposal.cost, is_filled=is_filled, is_dear=is_dear)
            if most is None or not n_left:
                return
            if share <= least:
                continue
            variant, aim = self.model.variants[0], int(share * self.budget)
            if self._costs_more(variant, aim, most):
                continue
            proposal = self._within(variant, aim)
            if proposal is None or proposal.cost >= most:
                least = share  # what is smaller costs more
                continue
            if self._is_known(proposal):
                continue
            n_bytes = proposal.model_bytes
            smaller = [c for c in self.compiled if c.proposal.model_bytes <= n_bytes]
            too_large = [c for c in smaller if c.compiled_bytes > self.budget]
            # What needs a little too much may be of another kind, which the model misjudges.
            if is_filled and any(
                c.proposal.variant == variant and c.compiled_bytes > (1 + _OVER) * self.budget
                for c in too_large
            ):
                continue
            costs = (c.proposal.cost for c in too_large if c.proposal.cost < most)
            if proposal.cost > _HARDLY_LESS * max(costs, default=0.0):
                n_left -= 1
                self._compile(proposal)

    def _most_to_fill(self, cost: float, *, is_filled: bool, is_dear: bool) -> float | None:
        """Return what others must cost at most to be tried in `_fill`; None if no cost is low enough."""
        much = self.limits.much_seconds
        if not is_filled:
            most = (1 - _GAIN_OF_MORE) * cost
            return most if most > much else None
        most = (1 - (_GAIN_OF_DEAR if is_dear else _GAIN_OF_OVER)) * cost
        if most > _VERY_MUCH * much:
            return most
        return (1 - _GAIN_OF_ALMOST_ALL) * cost if cost > much else None

    def _compile_by_hand(self) -> None:
        """Compile what people would write by hand if it costs much less than the best and may fit."""
        if self._best() is None or self._is_done():
            return
        for proposal in sorted(self.model.by_hand, key=lambda p: p.cost):
            best = self._best()
            if best is None or self._is_known(proposal):
                continue
            gain = best.proposal.cost - proposal.cost
            least = max(_GAIN_OF_MORE * best.proposal.cost, self.limits.negligible_seconds)
            may_fit = (
                proposal.model_bytes <= _BY_HAND * self.budget
                and self._expected(proposal) <= _BY_HAND_EXPECTED * self.budget
            )
            if gain > least and may_fit:
                self._compile(proposal)

    def _try_others(self) -> None:
        """Compile what the model says just fits in smaller variants, if the best costs much more.

        They were not tried if the model misjudges others: estimates for them start from those. If these
        estimates are about as the model says, they were compared.
        """
        n_left = _MOST_TRUSTED
        tried = {c.proposal.variant for c in self.compiled}
        for variant in self.model.smaller_variants:
            best = self._best()
            if best is None or best.proposal.cost <= self.limits.much_seconds or not n_left:
                return
            most, aim = (1 - _GAIN_OF_OVER) * best.proposal.cost, int(self.budget / _FIRST_RATIO)
            was_compared = self._aim(variant) >= (1 - _OVER) * aim
            if variant in tried or was_compared or self._costs_more(variant, aim, most):
                continue
            proposal = self._within(variant, aim)
            if proposal is not None and proposal.cost < most and not self._is_known(proposal):
                self._compile(proposal)
                n_left -= 1

    def _variants(self) -> Sequence[str]:
        """Return the variants to choose from: at first the most accurate one."""
        if not self.compiled:
            return self.model.variants[:1]
        if self._is_hopeless():
            return self.model.smaller_variants[-1:]
        is_far = any(
            c.compiled_bytes > _MISPREDICTED * c.proposal.model_bytes for c in self.compiled
        )
        exact = self.model.exact_variants if is_far else ()
        best = self._best()
        is_costly = best is not None and best.proposal.cost > self.limits.much_seconds
        smaller = self.model.smaller_variants if self.none_fits or is_costly else ()
        return [*self.model.variants, *exact, *smaller]

    def _max_compiles(self) -> int:
        """Return how many programs may be compiled; more if one of them fits than if none does."""
        more = 0 if self._best() is None else self.limits.max_more
        return self.limits.max_compiles + more

    def _best(self) -> CompiledProposal | None:
        fitting = [c for c in self.compiled if c.compiled_bytes <= self.budget]
        return min(fitting, key=lambda c: (c.proposal.cost, c.compiled_bytes), default=None)

    def _nearest(self) -> CompiledProposal:
        """Return the compiled proposal of the fewest bytes."""
        return min(self.compiled, key=lambda c: c.compiled_bytes)

    def _is_done(self) -> bool:
        best = self._best()
        return best is not None and best.proposal.cost <= self.limits.negligible_seconds

    def _improvements(self) -> list[Proposal]:
        """Return proposals to compile next: the one that recomputes least, and maybe others."""
        found: list[Proposal] = []
        best = self._best()
        for variant in self._variants():
            cheapest = min(found, key=lambda p: p.cost, default=None)
            if not self._may_gain(variant, cheapest if best is None else best.proposal):
                continue
            least = math.inf if cheapest is None else cheapest.cost
            proposal = self._improvement_of(variant, least)
            found += [] if proposal is None else [proposal]
        return found

    def _may_gain(self, variant: str, than: Proposal | None) -> bool:
        """Return whether a variant may be much better than a proposal; always, if it was tried."""
        if than is None or any(c.proposal.variant == variant for c in self.compiled):
            return True
        best = self._best()
        is_full = best is None or best.compiled_bytes >= _FILLED * self.budget
        return self.model.may_gain(variant, max(0, int(self._aim(variant))), than, is_full=is_full)

    def _improvement_of(self, variant: str, at_most_cost: float) -> Proposal | None:
        """Return a proposal to compile next; None if the variant has none that would be better.

        It may also be None if the proposal costs more than `at_most_cost`.
        """
        best = self._best()
        if best is None:
            return self._uncompiled_within(variant, at_most_cost=at_most_cost)
        is_full = best.compiled_bytes >= self.limits.nearly_full * self.budget
        gain_within = _GAIN_OF_FULL if is_full else _GAIN
        if len(self.compiled) >= self.limits.max_compiles:
            gain_within = _GAIN_OF_MORE
        gain_over = _GAIN_OF_OVER_IF_FULL if is_full else _GAIN_OF_OVER
        if best.compiled_bytes < _UNFILLED * self.budget:
            gain_over = _GAIN_OF_MORE
        cost, negligible = best.proposal.cost, self.limits.negligible_seconds
        for over, gain, least in (
            (0.0, gain_within, negligible),
            (_OVER, gain_over, _LEAST_GAIN_OF_OVER * negligible),
        ):
            was_tried = any(c.proposal.decisions in self.over for c in self.compiled)
            if over and (was_tried or variant != self.model.variants[0]):
                continue
            aim = int((1 + over) * self._aim(variant))
            most = min((1 - gain) * cost, cost - least)
            if self._costs_more(variant, aim, most):
                continue
            proposal = self._best_within(variant, aim)
            if proposal.cost < most and not self._is_known(proposal):
                self.over += [proposal.decisions] if over else []
                return proposal
        most = min((1 - _GAIN_OF_MORE) * cost, cost - negligible)
        aim = int(self._aim(variant))
        if self._costs_more(variant, aim, min(most, at_most_cost)):
            return None
        if not self._is_known(self._best_within(variant, aim)):
            return None
        # The proposal that was expected to fit exceeded the budget. A smaller one may still be much better
        # than the best.
        smaller = self._uncompiled_within(variant, at_most_cost=min(most, at_most_cost))
        return smaller if smaller is not None and smaller.cost < most else None

    def _costs_more(self, variant: str, aim: int, cost: float) -> bool:
        return math.isfinite(cost) and self.model.costs_more(variant, max(aim, 0), cost)

    def _uncompiled_within(
        self, variant: str, margin: float | None = None, *, at_most_cost: float = math.inf
    ) -> Proposal | None:
        """Return a proposal that was not compiled and is expected to fit; None if there is none.

        It may also be None if the proposal costs more than `at_most_cost`.

        Unless `margin` is given, the aim is lowered by a margin that grows with each program compiled so far.
        If a compiled proposal is near the aim, the margin is at most the distance between the two, or
        `_MARGIN` if that is larger; unless the compiler needs the same for several that are too large.
        """
        by_count = _MARGIN * (2 ** len(self.compiled) - 1)
        margin = by_count if margin is None else margin
        aim = self._aim(variant)
        samples = self._samples(variant)
        if len(samples) > 1 and self.compiled and not _is_flat_above(samples, self.budget):
            away = min(abs(model - aim) for model, _ in samples) / max(1.0, aim)
            margin = min(margin, max(_MARGIN, away))
        while True:
            # Finding the smallest proposal takes long, so it is asked for only if nothing is within the aim.
            lower = int(aim * max(0.0, 1 - margin))
            if self._costs_more(variant, lower, at_most_cost):
                return None
            proposal, is_smallest = self._best_or_smallest_within(variant, lower)
            if proposal.cost > at_most_cost:
                return None
            if is_smallest and (near := self._slightly_smaller(variant)) is not None:
                proposal = min(near, proposal, key=lambda p: p.cost)
            if not self._is_known(proposal):
                return proposal
            if margin >= 1 or is_smallest:
                return None
            margin = 2 * margin + _MARGIN
            if proposal.model_bytes <= (1 - margin) * aim:  # it is the best within that, too
                margin = 1 - (1 - _MARGIN) * proposal.model_bytes / aim

    def _slightly_smaller(self, variant: str) -> Proposal | None:
        """Return a proposal slightly smaller than a compiled one that nearly fits, if there is one."""
        near = [
            c.proposal.model_bytes
            for c in self.compiled
            if c.proposal.variant == variant
            and self.budget < c.compiled_bytes <= (1 + _OVER) * self.budget
        ]
        found = self._within(variant, int((1 - _MARGIN) * min(near))) if near else None
        return None if found is None or self._is_known(found) else found

    def _best_within(self, variant: str, aim: int) -> Proposal:
        """Return the variant's proposal within these bytes; its smallest if there is none."""
        return self._best_or_smallest_within(variant, aim)[0]

    def _best_or_smallest_within(self, variant: str, aim: int) -> tuple[Proposal, bool]:
        """Return that proposal, and whether it is the smallest because none is within the aim."""
        found = self._within(variant, max(aim, 0))
        return (self.model.smallest(variant), True) if found is None else (found, False)

    def _within(self, variant: str, n_bytes: int) -> Proposal | None:
        """Return the variant's proposal within these bytes; None if there is none."""
        try:
            return self.model.within(variant, n_bytes)
        except BudgetError:
            return None

    def _is_known(self, proposal: Proposal) -> bool:
        compiled = (c.proposal.decisions for c in self.compiled)
        return any(known == proposal.decisions for known in (*self.excluded, *compiled))

    def _compile(self, proposal: Proposal) -> None:
        expected = self._expected(proposal)
        compiled = self.compiler(proposal, expected)
        self.compiled.append(CompiledProposal(proposal, expected, compiled))

    def _search_smaller(self) -> None:
        """Lower the aim until a proposal fits or none is smaller."""
        self.none_fits = True
        for _ in range(self.limits.max_if_none_fits):
            found = (self._uncompiled_within(variant) for variant in self._variants())
            proposals = [proposal for proposal in found if proposal is not None]
            proposals += [p for p in self._by_hand_to_try() if not self._is_known(p)]
            if not proposals:
                break
            # Among those that probably fit, take the one that recomputes least; else the smallest.
            nearly = int((1 + _OVER) * self.budget)
            self._compile(min(proposals, key=lambda p: (max(self._expected(p), nearly), p.cost)))
            if self._best() is not None:
                return
        if self._is_hopeless():
            return
        variants = (*self.model.variants, *self.model.smaller_variants)
        smallest = map(self.model.smallest, variants)
        for proposal in itertools.chain(self.model.by_hand[:1], smallest):
            if self._best() is not None or not self.limits.max_if_none_fits:
                break
            if not self._is_known(proposal):
                self._compile(proposal)
        self._trust_the_model()
        self._search_larger()

    def _is_hopeless(self) -> bool:
        """Return whether the smallest proposals need far too much, as the model predicts.

        Then only what people would write by hand is compiled, and the variant that needs least if any does.
        """
        if not self.compiled:
            return False
        nearest = self._nearest()
        needed, predicted = nearest.compiled_bytes, nearest.proposal.model_bytes
        if needed < _HOPELESS * self.budget or needed > _MISJUDGED * predicted:
            return False
        smallest = self.model.smallest(self.model.variants[0])
        return smallest.model_bytes > self.budget and self._is_known(smallest)

    def _by_hand_to_try(self) -> list[Proposal]:
        """Return what people would write by hand if it may fit, and in any case that with least memory."""
        most = _BY_HAND * self.budget
        others = (p for p in self.model.by_hand[1:] if self._expected(p) <= most)
        return [*self.model.by_hand[:1], *others]

    def _trust_the_model(self) -> None:
        """Compile what the model says just fits, whatever the compiler said about smaller proposals.

        Those recompute as much as they can, and compilers may need far more for them than the model predicts.
        """
        n_left = min(_MOST_TRUSTED, self.limits.max_if_none_fits)
        for variant in (*self.model.variants, *self.model.smaller_variants):
            if self._best() is not None or not n_left:
                return
            proposal = self._within(variant, int(self.budget / _FIRST_RATIO))
            if proposal is not None and not self._is_known(proposal):
                self._compile(proposal)
                n_left -= 1

    def _improve(self) -> None:
        """Compile proposals that recompute much less than the one found by `_search_smaller`, if any."""
        for _ in range(self.limits.max_improvements):
            if self._best() is None or self._is_done():
                return
            proposals = self._improvements()
            if not proposals:
                return
            self._compile(min(proposals, key=lambda p: p.cost))

    def _search_larger(self) -> None:
        """Compile larger proposals if those so far nearly fit.

        The model may misjudge which of two proposals is larger, so one that recomputes less may fit.
        """
        if self._best() is not None or not self.compiled:
            return
        if self._nearest().compiled_bytes > _NEARLY * self.budget:
            self._search_smallest()
            return
        self._search_above_nearest()
        if self._best() is not None:
            return
        for factor in _ABOVE[: self.limits.max_if_none_fits]:
            for variant in self._variants():
                aim = factor * max(self._aim(variant), self.budget / _FIRST_RATIO)
                proposal = self._best_within(variant, int(aim))
                if not self._is_known(proposal):
                    self._compile(proposal)
                    break
            if self._best() is not None or self.compiled[-1].compiled_bytes > _NEARLY * self.budget:
                return

    def _search_above_nearest(self) -> None:
        """Compile proposals slightly larger than the nearest one if it needs more than the model predicts.

        Recomputing as much as possible may cost memory that the model misses.
        """
        nearest = self._nearest()
        variant, n_bytes = nearest.proposal.variant, nearest.proposal.model_bytes
        if nearest.compiled_bytes <= _MISPREDICTED * n_bytes:
            return
        for factor in _SLIGHTLY_ABOVE[: self.limits.max_if_none_fits]:
            proposal = self._best_within(variant, int(factor * n_bytes))
            if not self._is_known(proposal):
                self._compile(proposal)
            if self._best() is not None:
                return

    def _search_smallest(self) -> None:
        """Compile larger proposals than the smallest while their compiled bytes decrease.

        If the smallest proposal compiles to far more bytes than the model predicts, a larger one may compile
        to fewer. The fewest compiled bytes appear in the error, as the budget to ask for.
        """
        nearest = self._nearest()
        variant = nearest.proposal.variant
        least = self.model.smallest(variant).model_bytes
        for factor in _ABOVE_SMALLEST[: self.limits.max_if_none_fits]:
            if nearest.compiled_bytes <= _MISPREDICTED * nearest.proposal.model_bytes:
                return
            proposal = self._best_within(variant, int(factor * least))
            if self._is_known(proposal):
                continue
            self._compile(proposal)
            if self.compiled[-1].compiled_bytes > nearest.compiled_bytes:
                return
            nearest = self.compiled[-1]
            if nearest.compiled_bytes <= _NEARLY * self.budget:
                self._search_near()
                return

    def _search_near(self) -> None:
        """Compile proposals slightly smaller than one that nearly fits."""
        for _ in range(self.limits.max_improvements):
            near = (self._uncompiled_within(variant, _MARGIN) for variant in self._variants())
            proposals = [proposal for proposal in near if proposal is not None]
            if self._best() is not None or not proposals:
                return
            self._compile(min(proposals, key=lambda p: (self._expected(p), p.cost)))

    # Estimates of compiled bytes

    def _samples(self, variant: str) -> list[tuple[int, int]]:
        """Return modelled and compiled bytes of a variant's proposals, or of another's if it was not tried.

        A proposal is left out if another that is larger in the model compiles to fewer bytes: the model
        misjudges it, so it says nothing about others.
        """
        similar = self._similar(variant)
        first = () if self.compiled else self.misjudged
        samples = [
            (c.proposal.model_bytes, c.compiled_bytes)
            for c in (*self.known, *first, *self.compiled)
            if c.proposal.variant == similar
        ]
        if similar != variant and _disagree(samples):
            return []  # what they say about their own variant is unclear; about another one it is nothing
        return [
            (model, needed)
            for model, needed in samples
            if not any(larger > model and less < needed for larger, less in samples)
        ]

    def _similar(self, variant: str) -> str:
        """Return the variant whose proposals say most about a variant's: itself if it was tried.

        Otherwise it is the last one before it that was tried.
        """
        tried = {c.proposal.variant for c in (*self.known, *self.compiled)}
        if variant in tried or variant in self.model.exact_variants:
            return variant
        before = itertools.takewhile(lambda v: v != variant, self.model.variants)
        return next((v for v in reversed([*before]) if v in tried), variant)

    def _ratio_to_similar(self, variant: str) -> float:
        """Return the factor by which a variant is assumed to need more memory than its similar variant."""
        similar = self._similar(variant)
        if similar == variant:
            return 1.0
        order = [*self.model.variants, *self.model.smaller_variants]
        return float(_RATIO_OF_NEXT ** (order.index(variant) - order.index(similar)))

    def _aim(self, variant: str) -> float:
        """Return the model's bytes for which the compiler is expected to need the budget."""
        budget = self.budget / self._ratio_to_similar(variant)
        samples = sorted(self._samples(variant), key=lambda s: (abs(s[1] - budget), s))
        between = _aim_between(samples, budget)
        if between is not None:
            return between
        line = _slope(samples)
        if line is not None:
            (model, compiled), slope = samples[0], line
            return model + (budget - compiled) / slope
        if samples:
            ratio = samples[0][1] / max(1, samples[0][0])
            # If the compiler needs less than one variant predicts, that says nothing about other variants.
            is_own = any(c.proposal.variant == variant for c in self.compiled)
            return budget / max(ratio if is_own else max(ratio, _FIRST_RATIO), 1e-9)
        return budget / _FIRST_RATIO

    def _expected(self, proposal: Proposal) -> int:
        """Return the bytes that the compiler is expected to need for a proposal."""
        wanted = proposal.model_bytes
        samples = sorted(self._samples(proposal.variant), key=lambda s: (abs(s[0] - wanted), s))
        more = self._ratio_to_similar(proposal.variant)
        line = _slope(samples)
        if line is not None:
            (model, compiled), slope = samples[0], line
            return max(0, int(more * (compiled + (wanted - model) * slope)))
        if samples:
            return int(more * wanted * samples[0][1] / max(1, samples[0][0]))
        return wanted


def _disagree(samples: Sequence[tuple[int, int]]) -> bool:
    """Return whether the ratios of samples differ so much that the model misjudges some of them."""
    ratios = [compiled / max(1, model) for model, compiled in samples]
    return bool(ratios) and max(ratios) > _DISAGREEING * min(ratios)


def _aim_between(samples: Sequence[tuple[int, int]], budget: float) -> float | None:
    """Return the model's bytes for a budget that lies between two samples; None if it does not.

    Between two samples a line is accurate whatever its slope, unless the compiler needs about the same for
    more than one that is too large. Then the middle is tried.
    """
    below = max((s for s in samples if s[1] <= budget), default=None)
    above = min((s for s in samples if s[1] > budget), default=None)
    if below is None or above is None or below[0] >= above[0]:
        return None
    (few, less), (many, more) = below, above
    aim = few + (budget - less) * (many - few) / (more - less)
    return min(aim, (few + many) / 2) if _is_flat_above(samples, budget) else aim


def _is_flat_above(samples: Sequence[tuple[int, int]], budget: float) -> bool:
    """Return whether the compiler needs about the same for the two smallest samples above a budget."""
    above = sorted(s for s in samples if s[1] > budget)[:2]
    if len(above) < 2:
        return False
    (few, less), (many, more) = above
    return more - less < _MIN_SLOPE * (many - few)


def _slope(samples: Sequence[tuple[int, int]]) -> float | None:
    """Return the slope of the line through the first sample and the next one with a plausible slope.

    The compiler needs some memory whatever is recomputed, so a ratio alone converges slowly.
    """
    for other in samples[1:]:
        (m0, t0), (m1, t1) = samples[0], other
        slope = (t1 - t0) / (m1 - m0) if m1 != m0 else 0.0
        if _MIN_SLOPE <= slope <= _MAX_SLOPE:
            return slope
    return None
