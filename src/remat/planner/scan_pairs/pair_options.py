"""The options of one pair of scans: minimum cuts between the two bodies, with and without groups of steps.

F is the forward scan of the pair, B the backward one.

Every kept value occupies its bytes once for each step; every recomputed value costs its time once for
each step. The best sets to keep are minimum cuts of the known values of the joint program (`mincut`).
Keeping costs no bytes for F's constants and slices that are live until B runs in any case, and for values
whose stacks have other readers. F's carry can be kept but not recomputed. Recomputing costs no time for an
equation that F computes only for B: B computes it in F's place.

The cost of a cut is then computed exactly, from the equations that run in both scans.

If loops inside the bodies form pairs, too, their options are chosen first, at about the same price per byte;
for each of a few such choices the cuts of the outer pair are found. A stack of an inner pair is one
value for the outer pair: it is kept at every outer step, or recomputed one step at a time.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from remat import _jax
from remat.aliases import Atom
from remat.ir.equations import is_product, is_repeatable
from remat.planner.host_memory import MIN_OFFLOAD_BYTES, Copies, cuts_with_copies
from remat.planner.plan_decisions import ScanOption
from remat.planner.scan_pairs.emission import Emitted
from remat.planner.scan_pairs.joint import Joint
from remat.planner.scan_pairs.rewriting import with_inner
from remat.planner.scan_pairs.scope import Scope, joint_scope
from remat.planner.tradeoffs import (
    at_price,
    group_sizes,
    lower_hull,
    partial_group_counts,
    prices,
    settings_of,
    thinned,
    undominated,
    uniform_group_sizes,
)
from remat.program.from_jaxpr import work_of_bodies
from remat.solvers.mincut import CutProblem, MinimumCut, between, hull

# Ratio of bytes of neighbours on the hull. Between neighbours with a smaller ratio further options are
# searched; a larger limit finds more.
_GAP_RATIO = 0.9
# Share of a step's forward time. Neighbours on the hull that differ by less in recomputation have no
# options between them; a larger share leaves fewer options.
_NEGLIGIBLE = 0.002
# Number of steps. In a shorter loop either all steps are in groups or none; a larger bound gives fewer
# options.
_MIN_SPLIT_LENGTH = 16
# Number of steps. A shorter loop is never split into two; a larger bound gives fewer options.
_MIN_MIXED_LENGTH = 4
# The difference between neighbouring mixtures of two options, as a share of the loop's largest option; and
# the least number of mixtures between two options. A larger share gives fewer options.
_MIXTURE_STEP, _MIN_SPLITS = 0.025, 4
# The same difference for the options between others, and the ratio of their bytes to those of the next larger
# ones. Smaller steps and a larger ratio leave less of a budget unused.
_SMALL_STEP, _CLOSE_RATIO = 0.01, 0.985
# Share of the bytes that the program as it is written keeps. Steps compute constants only if these take more.
# A larger one leaves more of them outside.
_LEAST_HELD = 0.1
# Share of the bytes that a step keeps. Groups of steps keep values of all steps only if the carry takes more.
# A larger one leaves out more of these options.
_LEAST_CARRY = 0.05
# Numbers of choices for inner pairs that are combined with the cuts of the outer pair: at one price for all
# pairs, and others in the widest gaps between these. More find more options and take longer.
_MAX_INNER_CHOICES, _MAX_OTHER_CHOICES = 8, 16


@dataclasses.dataclass(frozen=True, eq=False)
class ScanPair:
    """A forward scan and a backward scan that reads its stacked results.

    Args:
      id: the id by which choices refer to the pair.
      name: the name scopes of the forward scan.
      source: the source line of the forward scan.
      length: the number of steps.
      times: how often the pair runs, which depends on the loops around it.
      options: the Pareto-optimal options in bytes and seconds, by ascending bytes.
      as_written: the option that describes the program as it is written.
      by_step: the option with the fewest bytes that computes each step again as a whole, as
        `jax.checkpoint` around the body does. Where the compiler needs less for it than for groups of
        steps, it is better than options that the model prefers to it.
      by_product: those that keep what matrix products compute, without and with products that have batch
        dimensions, as JAX's policies around the body do.
      by_group: those that keep as little as `by_step`, in groups of two, of four and of about as many steps
        as there are groups, as `jax.checkpoint` around a scan over such groups does; `by_step` where that
        is impossible. Loops can need less for it than the bytes of options say, since what a group keeps
        while it is reversed is counted by half.
      between: further options, each between two of the others.
    """

    id: str
    name: str
    source: str
    length: int
    times: int
    options: tuple[ScanOption, ...]
    as_written: ScanOption
    by_step: ScanOption
    by_product: tuple[ScanOption, ScanOption]
    by_group: tuple[ScanOption, ...]
    between: tuple[ScanOption, ...] = ()

    @property
    def by_hand(self) -> tuple[ScanOption, ...]:
        """Return what people write, of every pair in the same order."""
        return (self.by_step, *self.by_product, *self.by_group)


#: Options of the pairs inside, by their ids.
_Choice: TypeAlias = tuple[tuple[str, ScanOption], ...]


class _Cost(NamedTuple):
    seconds: float
    flops: float


class _Nodes(NamedTuple):
    """A cut problem, and the variables at each of its places."""

    problem: CutProblem
    variables: list[list[_jax.Var]]


class FoundOptions(NamedTuple):
    """The options of one pair, as in `ScanPair`."""

    options: list[ScanOption]
    as_written: ScanOption
    by_step: ScanOption
    by_product: tuple[ScanOption, ScanOption]
    by_group: tuple[ScanOption, ...]
    between: Sequence[ScanOption]


class PairOptions:
    """The options of one pair.

    Args:
      scope: the program around.
      joint: the pair.
      place: of the backward scan in the program.
      key: the pair's id.
      inner: the pairs inside.
      times: how often the pair runs.
      computing: the pair with steps that compute constants of theirs, if they can and no pairs are inside.
    """

    def __init__(
        self,
        scope: Scope,
        joint: Joint,
        place: int,
        key: str,
        inner: Sequence[ScanPair],
        times: int,
        computing: Joint | None = None,
    ) -> None:
        self.scope = scope
        self.joint = joint
        self.place = place
        self.key = key
        self.inner = inner
        self.times = times
        self.held_bytes = 0 if computing is None else self._held_bytes(computing)
        self.computing = computing if self.held_bytes else None

    def _held_bytes(self, computing: Joint) -> int:
        """Return the bytes of the values that are held for B as constants, unless its steps compute them."""
        n_consts, _ = _jax.scan_arity(self.joint.backward)
        constants = set(filter(_jax.is_var, self.joint.backward.invars[:n_consts]))
        held, left = (set(filter(_jax.is_var, j.outside.values())) for j in (self.joint, computing))
        ends = [v for v in constants & held - left if self.scope.last_use(v) <= self.place]
        return sum(map(self.scope.bytes_of, ends))

    def found(self) -> FoundOptions:
        """Return the options of the pair."""
        unchanged = _OptionsOfCuts(self, self.joint, ())
        written = unchanged.as_written()
        given = [unchanged]
        if self.computing is not None and self.held_bytes >= _LEAST_HELD * written.bytes:
            given.append(_OptionsOfCuts(self, self.computing, ()))
        for inner in self._choices_inside():
            chosen = with_inner(self.joint, inner, f"{self.key}/")
            given.append(_OptionsOfCuts(self, chosen, inner))
        found = [(option, cuts) for cuts in given for option in cuts.options()]
        best = _best(found, written)
        on_device = [(option, cuts) for option, cuts in found if not option.host_bytes]
        if any(option.host_bytes for option in best):
            # Host memory may be limited, and the compiler may fail on offloading.
            best = list(dict.fromkeys((*best, *_best(on_device, written))))
        of_steps = [option for option, cuts in on_device if cuts is unchanged and option.group == 1]
        by_step = min(of_steps, key=lambda o: (o.bytes, o.seconds), default=written)
        between = () if len(best) < 2 else _between(on_device, best)
        by_product = (
            unchanged.keeping_products(batched=False),
            unchanged.keeping_products(batched=True),
        )
        by_group = unchanged.in_groups_as(by_step)
        return FoundOptions(best, written, by_step, by_product, by_group, between)

    def _choices_inside(self) -> list[_Choice]:
        """Return choices for the pairs inside: at one price for all of them, and some between these."""
        options = {pair.id: pair.options for pair in self.inner}
        values = sorted({p for of in options.values() for p in prices(of)})
        found = dict.fromkeys(
            tuple((id, at_price(of, value)) for id, of in options.items())
            for value in _thinned_evenly(values, _MAX_INNER_CHOICES)
        )
        others = [
            choice
            for chosen in settings_of(options)
            if (choice := tuple(chosen.items())) not in found
        ]
        return [*found, *_in_gaps(list(found), others)]


def _in_gaps(found: Sequence[_Choice], others: Sequence[_Choice]) -> list[_Choice]:
    """Return some of the other choices, each in the widest gap between the bytes of those found."""
    sizes = [sum(option.bytes for _, option in choice) for choice in found]
    left = [(sum(option.bytes for _, option in choice), choice) for choice in others]
    chosen: list[_Choice] = []
    while len(chosen) < _MAX_OTHER_CHOICES:
        gaps = [
            (few / max(1, many), few, many)
            for few, many in itertools.pairwise(sorted(sizes))
            if few < _GAP_RATIO * many and any(few < size < many for size, _ in left)
        ]
        if not gaps:
            break
        _, few, many = min(gaps)
        middle = math.sqrt(max(1, few) * many)
        between = [(size, choice) for size, choice in left if few < size < many]
        size, choice = min(between, key=lambda b: abs(math.log(b[0] / middle)))
        sizes.append(size)
        chosen.append(choice)
    return chosen


def _thinned_evenly(items: Sequence[Any], n: int) -> Sequence[Any]:
    """Return at most `n` of the items at equal distances, the first and the last among them."""
    if len(items) <= n:
        return items
    return [items[round(k * (len(items) - 1) / max(1, n - 1))] for k in range(n)]


class _OptionsOfCuts:
    """The options of one pair, given the choices for the pairs inside.

    An option names the values that each step of the forward scan keeps: a minimum cut of the joint program.
    """

    def __init__(
        self, outer: PairOptions, joint: Joint, inner: tuple[tuple[str, ScanOption], ...]
    ) -> None:
        self.joint = joint
        self.inner = inner
        chosen = dict(inner)
        self.inner_options = [chosen.get(pair.id, pair.as_written) for pair in outer.inner]
        self.times = outer.times
        self.held_bytes = 0 if joint.computes_constants else outer.held_bytes
        self.within_step = outer.scope.is_step
        self.transfer = outer.scope.costing.transfer
        self.scope = joint_scope(outer.scope, joint, outer.place)
        self.number = joint.number
        place = {id(eqn): i for i, eqn in enumerate(joint.jaxpr.eqns)}
        # Equations of branches that share a body are nevertheless different objects.
        self.cost = {i: self._cost_at(i) for i in place.values()}
        self.place = place
        everything, _ = joint.closure(joint.results, frozenset())
        self.always = set(map(id, everything))
        self.once = {id(eqn) for eqn in joint.known if not is_repeatable(eqn)}
        #: Of the constants that each step computes.
        self.of_constants = self.cost_of(joint.constant if joint.computes_constants else ())

    def _cost_at(self, i: int) -> _Cost:
        flops = self.scope.writer.ops[i].flops
        least = flops * self.scope.costing.seconds_per_flop
        return _Cost(max(self.scope.seconds[i], least), flops)

    def cost_of(self, eqns: Iterable[_jax.JaxprEqn]) -> _Cost:
        costs = [self.cost[self.place[id(eqn)]] for eqn in eqns]
        return _Cost(sum(c.seconds for c in costs), sum(c.flops for c in costs))

    def as_written(self) -> ScanOption:
        """Return the option that keeps what the program keeps."""
        numbers = self._as_written()
        emitted = Emitted.of(self.joint, numbers)
        return self._in_steps(numbers, emitted, self.cost_of(self._twice(emitted)))

    def keeping_products(self, *, batched: bool) -> ScanOption:
        """Return the option that keeps what matrix products compute, and what must not be computed again.

        Args:
          batched: whether to keep products with batch dimensions, and convolutions.
        """
        joint = self.joint
        computed = (
            v
            for eqn in joint.known
            if id(eqn) in self.once or is_product(eqn, batched=batched)
            for v in eqn.outvars
        )
        emitted = Emitted.of(joint, [self.number[v] for v in (*joint.carry, *computed)])
        kept = tuple(sorted(self.number[v] for v in emitted.kept))
        return self._in_steps(kept, emitted, self.cost_of(self._twice(emitted)))

    def in_groups_as(self, by_step: ScanOption) -> tuple[ScanOption, ...]:
        """Return options in groups of steps that keep what one does that recomputes step by step."""
        emitted = Emitted.of(self.joint, by_step.saved)
        twice = self.cost_of(self._twice(emitted))
        sizes = uniform_group_sizes(self.joint.length)
        found = self._in_groups(by_step.saved, emitted, twice, sizes)
        whole = {option.group: option for option in found if not option.groups}
        return tuple(whole.get(size, by_step) for size in sizes)

    def options(self) -> list[ScanOption]:
        problem, variables = self._nodes()
        vertices = hull(problem).cuts
        cuts: list[MinimumCut] = list(vertices)
        forward_s = self.cost_of(e for e in self.joint.known if id(e) in self.always).seconds
        for few, many in itertools.pairwise(vertices):
            if few.bytes < _GAP_RATIO * many.bytes and few.time - many.time > (
                _NEGLIGIBLE * forward_s
            ):
                cuts += between(problem, few, many)
        found: dict[tuple[int, ...], None] = {}
        for cut in cuts:
            found[self._numbers(cut.saved, variables)] = None
        options = [option for saved in found for option in self._of_cut(saved)]
        of_hull = [self._numbers(cut.saved, variables) for cut in vertices]
        options += self._with_lasting(of_hull)
        return [*options, *self._with_copies(problem, variables, forward_s)]

    def _numbers(
        self, places: Iterable[int], variables: Sequence[Sequence[_jax.Var]]
    ) -> tuple[int, ...]:
        return tuple(sorted(self.number[v] for p in places for v in variables[p]))

    def _with_copies(
        self, problem: CutProblem, variables: Sequence[Sequence[_jax.Var]], forward_s: float
    ) -> Iterator[ScanOption]:
        """Yield the options that keep values in the host's memory."""
        if self.transfer is None or self.joint.length < 2:
            return
        given = {*self.joint.consts, *self.joint.xs, *self.joint.stacked}
        movable = [
            len(of) == 1
            and of[0] not in given
            and size >= MIN_OFFLOAD_BYTES
            and _jax.can_be_on_host(of[0].aval)
            for of, size in zip(variables, problem.bytes)
        ]
        backward_s = self.cost_of(self.joint.late).seconds
        copies = Copies(self.scope.costing.price, self.transfer, forward_s, backward_s)
        for cut in cuts_with_copies(problem, movable, copies):
            offloaded = self._numbers(cut.offloaded, variables)
            saved = self._numbers((*cut.saved, *cut.offloaded), variables)
            emitted = Emitted.of(self.joint, saved, offloaded)
            sizes = list(map(self.scope.bytes_of, emitted.copies))
            if not sizes:
                continue
            steps = self.joint.length * self.times
            transfer_s = steps * copies.seconds(sizes)
            option = self._in_steps(saved, emitted, self.cost_of(self._twice(emitted)))
            yield dataclasses.replace(
                option,
                seconds=option.seconds + transfer_s,
                offloaded=tuple(sorted(self.number[v] for v in emitted.copies)),
                host_bytes=self.joint.length * sum(sizes),
                transfer_seconds=transfer_s,
            )

    def _of_cut(self, saved: tuple[int, ...]) -> list[ScanOption]:
        emitted = Emitted.of(self.joint, saved)
        twice = self.cost_of(self._twice(emitted))
        return [
            self._in_steps(saved, emitted, twice),
            *self._in_groups(saved, emitted, twice),
        ]

    def _in_steps(self, saved: tuple[int, ...], emitted: Emitted, cost: _Cost) -> ScanOption:
        steps = self.joint.length * self.times
        fixed = self.fixed_bytes(emitted)
        kept = self.joint.length * self.kept_bytes(emitted) + fixed
        return ScanOption(
            saved,
            kept,
            *_times(self._plus_inner(cost), steps),
            inner=self.inner,
            computes_constants=self.joint.computes_constants,
        )

    def _in_groups(
        self,
        saved: tuple[int, ...],
        emitted: Emitted,
        twice: _Cost,
        sizes: Sequence[int] | None = None,
    ) -> list[ScanOption]:
        """Return options in groups of these numbers of steps; by default of those that need least."""
        joint, length = self.joint, self.joint.length
        carry = sum(self.scope.bytes_of(v) for v in joint.carry)
        again, read_again = emitted.again()
        # Values that must not be computed twice would have to be kept for all steps.
        if not self.once.isdisjoint(map(id, again)):
            return []
        per_step, fixed = self.kept_bytes(emitted), self.fixed_bytes(emitted, read_again)
        repeated = self.cost_of(again)
        each = self._plus_inner(twice)
        # The bytes that a group keeps while it is reversed are not live between the two scans, where the peak
        # may be instead. They are at the peak of a pair inside of another one's step.
        share = 1 if self.within_step else 2
        found = []
        sizes = group_sizes(length, carry, max(1, per_step)) if sizes is None else sizes
        for group in sizes:
            n_most = length // group
            counts = [
                n_most,
                *(partial_group_counts(n_most) if length >= _MIN_SPLIT_LENGTH else ()),
            ]
            for n_groups in counts:
                # Compilers inline a loop over one group, and could start its recomputation too early.
                if n_groups < 2:
                    continue
                n_grouped = n_groups * group
                cost = _Cost(
                    n_grouped * repeated.seconds + length * each.seconds,
                    n_grouped * repeated.flops + length * each.flops,
                )
                stacked = max(length - n_grouped, group // share) * per_step
                most = n_groups * carry + stacked + fixed
                groups = 0 if n_groups == n_most else n_groups
                found.append(
                    ScanOption(
                        saved,
                        most,
                        *_times(cost, self.times),
                        group,
                        groups,
                        inner=self.inner,
                        computes_constants=self.joint.computes_constants,
                    )
                )
        return found

    def _with_lasting(self, cuts: Iterable[tuple[int, ...]]) -> Iterator[ScanOption]:
        """Yield the options in groups of steps that keep some values of all steps.

        Args:
          cuts: what the steps of a group may keep while it is reversed, besides what the program keeps.
        """
        joint, length, scope = self.joint, self.joint.length, self.scope
        carry = sum(map(scope.bytes_of, joint.carry))
        per_step = self.kept_bytes(Emitted.of(joint, self._as_written()))
        is_worth_it = carry >= _LEAST_CARRY * per_step and length >= _MIN_MIXED_LENGTH
        if not is_worth_it:
            return
        carried = [self.number[v] for v in joint.carry]
        needed = [self.number[v] for v in joint.needed]
        given = {self._as_written(), tuple(needed), *cuts}

        @functools.cache
        def step_of(saved: tuple[int, ...]) -> tuple[Emitted, _Cost]:
            emitted = Emitted.of(joint, saved)
            # Loops inside may read more of the carry than as they are written.
            if missing := emitted.missing_carry:
                emitted = Emitted.of(joint, (*saved, *sorted(self.number[v] for v in missing)))
            return emitted, self._plus_inner(self.cost_of(self._twice(emitted)))

        for lasting in self._lasting():
            values = [joint.variables[n] for n in lasting]
            n_lasting = sum(map(scope.bytes_of, values))
            for emitted, each in map(step_of, sorted({*given, (*carried, *lasting)})):
                again, read_again = emitted.again(values)
                if not self.once.isdisjoint(map(id, again)):
                    continue
                repeated = self.cost_of(eqn for eqn in again if id(eqn) in self.always)
                cost = _Cost(repeated.seconds + each.seconds, repeated.flops + each.flops)
                of_group = sum(map(scope.bytes_of, set(emitted.kept).difference(values)))
                fixed = self.fixed_bytes(emitted, read_again)
                for group in group_sizes(length, carry, max(1, of_group)):
                    if length % group:
                        continue
                    # While a group is reversed, a copy of what lasts of it and what it keeps are live, too.
                    most = length // group * carry + length * n_lasting
                    most += group * (n_lasting + of_group)
                    yield ScanOption(
                        tuple(sorted(self.number[v] for v in emitted.kept)),
                        most + fixed,
                        *_times(cost, length * self.times),
                        group,
                        inner=self.inner,
                        computes_constants=joint.computes_constants,
                        lasting=lasting,
                    )

    def _lasting(self) -> list[tuple[int, ...]]:
        """Return which values all steps may keep, so that running a group again computes little more.

        They are minimum cuts, too: of the values that the carry needs and those that B needs, where the carry
        itself takes no bytes, since running the group computes it.
        """
        joint = self.joint
        problem, variables = self._nodes(joint.carry_results_again)
        carry = set(joint.carry)
        sizes = tuple(
            0 if carry.issuperset(of) else size for of, size in zip(variables, problem.bytes)
        )
        computed = joint.computed.difference(joint.stacked)
        found: dict[tuple[int, ...], None] = {}
        for cut in hull(dataclasses.replace(problem, bytes=sizes)).cuts:
            saved = (v for at in cut.saved for v in variables[at] if v in computed)
            found[tuple(sorted(map(self.number.__getitem__, saved)))] = None
        return [lasting for lasting in found if lasting]

    def _as_written(self) -> tuple[int, ...]:
        """Return the values that the program keeps."""
        saved = (v for v, _ in self.joint.linked if _jax.is_var(v) and v in self.number)
        return tuple(sorted({self.number[v] for v in saved}))

    def _plus_inner(self, cost: _Cost) -> _Cost:
        """Return the cost of a step, that of the pairs inside included, and of constants that it computes."""
        return _Cost(
            cost.seconds + self.of_constants.seconds + sum(o.seconds for o in self.inner_options),
            cost.flops + self.of_constants.flops + sum(o.flops for o in self.inner_options),
        )

    def _twice(self, emitted: Emitted) -> list[_jax.JaxprEqn]:
        """Return the equations that both scans compute."""
        needed, _ = self.joint.closure([*self.joint.results, *emitted.kept], frozenset())
        in_forward = set(map(id, needed))
        return [eqn for eqn in emitted.recomputed if id(eqn) in in_forward]

    def kept_bytes(self, emitted: Emitted) -> int:
        """Return the bytes that one step keeps for B on the device."""
        return sum(self.scope.bytes_of(v) for v in emitted.kept if v not in emitted.copies)

    def fixed_bytes(self, emitted: Emitted, read_again: Iterable[_jax.Var] = ()) -> int:
        """Return the bytes that do not grow with the steps: operands that are held for B, inner stacks.

        Args:
          emitted: the steps of the pair.
          read_again: the inputs that F's run over a group of steps reads, if steps are in groups.
        """
        read = emitted.read.union(read_again)
        borrowed = [v for v in read if v in self.joint.outside and v not in self.scope.free]
        n_bytes_lent = sum(self.joint.length * self._borrowed_bytes(v) for v in borrowed)
        return n_bytes_lent + self.held_bytes + self._transient_bytes(emitted)

    def _borrowed_bytes(self, v: _jax.Var) -> int:
        """Return the bytes, per step, of an operand of F that lives longer if B reads it."""
        return -(-self.scope.bytes_of(v) // self.scope.runs.get(v, 1))

    def _transient_bytes(self, emitted: Emitted) -> int:
        """Return the bytes that inner scans and conditionals take only during one step of B.

        They are stacks that one of them writes and another reads, and the workspace of the one that needs
        most, such as the stacks of loops inside of it.
        """
        repeated = {id(eqn) for eqn in emitted.recomputed}
        eqns = self.joint.jaxpr.eqns
        stacks = [eqn for eqn in eqns if eqn.primitive.name in ("scan", "cond")]
        forward = {v for eqn in stacks for v in _kept_by(eqn)}
        kept = set(emitted.kept)
        late = set(map(id, self.joint.late))
        read_late = {v for eqn in stacks if id(eqn) in late for v in eqn.invars if _jax.is_var(v)}
        n_between = sum(
            self.scope.bytes_of(v)
            for eqn in stacks
            if id(eqn) in repeated or id(eqn) in late
            for v in eqn.outvars
            if v in forward and v in read_late and v not in kept
        )
        of_bodies = (
            work_of_bodies(
                eqn,
                [self.scope.shards_of(v) for v in eqn.invars],
                partition=self.scope.costing.execution.partition,
            ).peak_bytes
            for eqn in stacks
            if id(eqn) in late or id(eqn) in repeated
        )
        return n_between + max(of_bodies, default=0)

    def _nodes(self, also: Iterable[Atom] = ()) -> _Nodes:
        """Return the cut problem: which known values to keep for B, and for other values `also`."""
        joint, scope = self.joint, self.scope
        sizes: list[int] = []
        times: list[float] = []
        deps: list[tuple[int, ...]] = []
        variables: list[list[_jax.Var]] = []
        place: dict[_jax.Var, int] = {}

        def add(of: list[_jax.Var], size: int, time: float, operands: tuple[int, ...]) -> int:
            sizes.append(size)
            times.append(time)
            deps.append(operands)
            variables.append(of)
            return len(sizes) - 1

        def size_of(v: _jax.Var) -> int:
            return 0 if v in joint.stacked else scope.bytes_of(v)

        for v in (*joint.consts, *joint.xs):
            if v not in scope.free:
                place[v] = add([v], self._borrowed_bytes(v), math.inf, ())
        for v in joint.carry:
            place[v] = add([v], size_of(v), math.inf, ())
        constant = set(map(id, joint.constant))
        read = {v for eqn in joint.jaxpr.eqns for v in eqn.invars if _jax.is_var(v)}
        also = [v for v in also if _jax.is_var(v)]
        read.update((*joint.needed, *also))
        for eqn in joint.known:
            used = [v for v in eqn.outvars if v in read]
            operands = {place[v] for v in eqn.invars if _jax.is_var(v) and v in place}
            # Values that F computes for B alone cost the same in either scan. A stack of a loop-invariant
            # value is never worth its bytes.
            is_once = id(eqn) in self.always and id(eqn) not in constant
            time = self.cost_of([eqn]).seconds if is_once else 0.0
            whole = add(
                used,
                sum(map(size_of, used)),
                math.inf if id(eqn) in self.once else time,
                tuple(sorted(operands)),
            )
            place.update(dict.fromkeys(used, whole))
            if len(used) > 1:
                place.update((v, add([v], size_of(v), 0.0, (whole,))) for v in used)
        needed = tuple(sorted({place[v] for v in (*joint.needed, *also) if v in place}))
        return _Nodes(
            CutProblem(tuple(sizes), tuple(times), tuple(deps), needed),
            variables,
        )


def _best(
    found: Sequence[tuple[ScanOption, _OptionsOfCuts]], written: ScanOption
) -> list[ScanOption]:
    """Return the options that are worth offering, with mixtures and the program as it is written."""
    options = (option for option, _ in found)
    return thinned(undominated([*options, *_mixtures(found), written]))


def _between(
    found: Sequence[tuple[ScanOption, _OptionsOfCuts]], best: Sequence[ScanOption]
) -> list[ScanOption]:
    """Return options between the best ones."""
    options = (option for option, _ in found)
    more = undominated([*best, *options, *_mixtures(found, _SMALL_STEP)])
    known = set(best)
    return [option for option in thinned(more, _CLOSE_RATIO) if option not in known]


def _mixtures(
    found: Sequence[tuple[ScanOption, _OptionsOfCuts]], step: float = _MIXTURE_STEP
) -> Iterator[ScanOption]:
    """Yield options whose first steps follow one vertex of the hull, and the other steps the next.

    The first steps keep less: when they are reversed, the values kept by the others are already freed.

    Args:
      found: options, each with those of its cut.
      step: the difference between neighbours, as a share of the largest option.
    """
    found = [(o, cuts) for o, cuts in found if not (o.computes_constants or o.lasting)]
    of = {id(option): cuts for option, cuts in found}
    joint = found[0][1].joint if found else None
    if joint is None or joint.length < _MIN_MIXED_LENGTH:
        return
    uniform = [option for option, _ in found if not option.groups]
    most_bytes = max((option.bytes for option in uniform), default=0)
    for few, many in itertools.pairwise(lower_hull(uniform)):
        if many.group > 1 or few.bytes >= _GAP_RATIO * many.bytes:
            continue
        cuts = [of[id(option)] for option in (few, many)]
        both = few, many
        emitted = [Emitted.of(c.joint, o.saved, o.offloaded) for c, o in zip(cuts, both)]
        kept = [c.kept_bytes(e) for c, e in zip(cuts, emitted)]
        fixed = max(
            c.fixed_bytes(e, e.again()[1] if o.group > 1 else ())
            for c, e, o in zip(cuts, emitted, both)
        )
        is_same_inside = many.inner == few.inner
        is_same = is_same_inside and (many.saved, many.offloaded) == (few.saved, few.offloaded)
        share = (many.bytes - few.bytes) / most_bytes
        n_splits = max(_MIN_SPLITS, math.ceil(share / step))
        for n_groups in partial_group_counts(joint.length // few.group, n_splits):
            n_first = n_groups * few.group
            n_rest = joint.length - n_first
            if min(n_groups, n_first, n_rest) < 2:
                continue
            most = n_rest * kept[1] + fixed
            if few.group == 1:
                most += n_first * kept[0]
            else:
                carry = sum(cuts[0].scope.bytes_of(v) for v in joint.carry)
                most = n_groups * carry + max(most, few.group * kept[0] + fixed)
            share = n_first / joint.length
            yield ScanOption(
                few.saved,
                most,
                share * few.seconds + (1 - share) * many.seconds,
                share * few.flops + (1 - share) * many.flops,
                few.group,
                n_groups,
                None if is_same else many.saved,
                few.inner,
                None if is_same_inside else many.inner,
                few.offloaded,
                () if is_same else many.offloaded,
                int(share * few.host_bytes + (1 - share) * many.host_bytes),
                share * few.transfer_seconds + (1 - share) * many.transfer_seconds,
            )


def _kept_by(eqn: _jax.JaxprEqn) -> Sequence[_jax.Var]:
    """Return the results of a loop or conditional that another one may read as residuals."""
    return eqn.outvars[_jax.scan_arity(eqn)[1] :] if eqn.primitive.name == "scan" else eqn.outvars


def _times(cost: _Cost, n: int) -> tuple[float, float]:
    return n * cost.seconds, n * cost.flops
