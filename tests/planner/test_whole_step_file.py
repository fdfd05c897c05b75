"""Decisions about a whole step in a plan's file: each line can be edited by itself."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from remat import _jax
from remat.errors import PlanError
from remat.planner.decisions import (
    LoopDecisions,
    StepDecisions,
    applied,
    program_to_plan,
    with_loops,
)
from remat.planner.rewrite import Burst, Decisions, flattened
from remat.planner.scan_pairs import pairs
from remat.planner.whole_step_file import decisions_of_plan, whole_step_plan

WEIGHTS, X = 0.1 * jnp.ones((8, 16, 16)), jnp.ones((32, 16))


def step(weights, x):
    def loss(weights):
        def body(h, w):
            return jnp.sin(jnp.tanh(h @ w)), None

        h, _ = jax.lax.scan(body, jnp.sin(x) * 2, weights)
        return jnp.sum(jnp.cos(h * h) * h)

    return jax.value_and_grad(loss)(weights)


def results(jaxpr):
    return jax.jit(lambda *args: jax.core.eval_jaxpr(jaxpr, (), *args))(WEIGHTS, X)


@pytest.fixture
def flat():
    return flattened(jax.make_jaxpr(step)(WEIGHTS, X).jaxpr)


def places(jaxpr, primitive):
    return [i for i, eqn in enumerate(jaxpr.eqns) if eqn.primitive.name == primitive]


@pytest.fixture
def decided(flat):
    """Return decisions: the loop in groups of two, and `cos(h * h)` recomputed for the backward pass."""
    (pair,) = pairs(flat, lambda flops, moved, dtype: 1e-9 + flops / 1e9 + moved / 1e10)
    option = dataclasses.replace(
        min(pair.options, key=lambda option: option.bytes), group=2, groups=0
    )
    loops = LoopDecisions(choices=((pair.id, option),))
    new = with_loops(flat, loops)
    assert len(new.eqns) != len(flat.eqns)
    again = places(new, "cos")[0]
    before = places(new, "mul")[-1]
    outside = Decisions(frozenset(range(len(new.eqns))), (Burst(before, (again,)),))
    return StepDecisions(loops, outside)


def test_decisions_survive_the_form_that_a_plan_has(flat, decided):
    assert decisions_of_plan(whole_step_plan(flat, decided), flat) == decided


def test_numbers_are_those_of_the_step_as_it_is_without_its_loops_groups(flat, decided):
    whole = whole_step_plan(flat, decided)
    assert whole.n_equations == len(flat.eqns)
    (recomputation,) = whole.recomputations
    assert recomputation.again == (places(flat, "cos")[0],)


def test_a_loop_can_be_removed_from_a_plan_and_the_rest_stays(flat, decided):
    whole = dataclasses.replace(whole_step_plan(flat, decided), loops=())
    found = decisions_of_plan(whole, flat)
    (burst,) = found.outside.bursts
    assert [flat.eqns[i].primitive.name for i in burst.again] == ["cos"]
    for one, other in zip(results(applied(flat, found)), results(flat)):
        np.testing.assert_array_equal(one, other)


def test_recomputations_around_what_a_removed_loop_had_added_are_refused(flat, decided):
    new = with_loops(flat, decided.loops)
    reshape = next(i for i in places(new, "reshape") if new.eqns[i] not in flat.eqns)
    (burst,) = decided.outside.bursts
    outside = dataclasses.replace(decided.outside, bursts=(Burst(burst.before, (reshape,)),))
    whole = whole_step_plan(flat, StepDecisions(decided.loops, outside))
    (added,) = whole.recomputations[0].again
    assert added >= whole.n_equations
    with pytest.raises(PlanError, match=rf"do not add any more: {added}\. Remove"):
        decisions_of_plan(dataclasses.replace(whole, loops=()), flat)


def test_equations_of_opened_checkpoints_are_numbered_like_others():
    block = jax.checkpoint(lambda h, w: jnp.sin(jnp.tanh(h @ w)) * jnp.cos(h))

    def with_checkpoints(weights, x):
        return jax.value_and_grad(lambda w: jnp.sum(block(block(x, w[0]), w[1]) ** 2))(weights)

    flat = flattened(jax.make_jaxpr(with_checkpoints)(WEIGHTS, X).jaxpr)
    source = program_to_plan(flat, opened=True)
    places_of_tanh = places(source, "tanh")
    burst = Burst(len(source.eqns) - 1, (places_of_tanh[0],))
    outside = Decisions(frozenset(range(len(source.eqns))), (burst,))
    decided = StepDecisions(LoopDecisions(opened=True), outside)
    whole = whole_step_plan(flat, decided)
    assert whole.n_added == 0
    assert whole.recomputations[0].again == (places_of_tanh[0],)
    assert decisions_of_plan(whole, flat) == decided


def test_a_plan_of_another_number_of_equations_is_refused(flat, decided):
    whole = whole_step_plan(flat, decided)
    shorter = _jax.rebuild(flat, eqns=flat.eqns[:-1])
    with pytest.raises(PlanError, match=rf"{len(flat.eqns)} equations; this one has"):
        decisions_of_plan(whole, shorter)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"saved": (999,)}, "saves 999. Remove these from its saved values"),
        ({"saved": ()}, "does not save .* Save them"),
        ({"group": 5, "groups": 2}, "2 groups of 5. Choose groups of fewer steps"),
        ({"id": "1-2"}, "no loop 1-2. Remove its line from the plan's loops"),
        ({"offloaded": (0,), "saved": ()}, "add 0 to its saved ones"),
    ],
)
def test_an_invalid_edit_of_a_loop_is_an_error_with_the_next_step(flat, decided, change, said):
    whole = whole_step_plan(flat, decided)
    ((id, option),) = whole.loops
    id, fields = change.get("id", id), {k: v for k, v in change.items() if k != "id"}
    edited = dataclasses.replace(whole, loops=((id, dataclasses.replace(option, **fields)),))
    with pytest.raises(PlanError, match=said):
        decisions_of_plan(edited, flat)
