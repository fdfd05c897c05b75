"""Values of unrolled code that are in the host's memory between two uses."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from planner.random_decisions import random_decisions
from remat import _jax
from remat.errors import PlanError
from remat.planner.decisions import LoopDecisions, StepDecisions, applied
from remat.planner.host_copies import HostCopy, with_host_copies
from remat.planner.priced_step import PricedStep
from remat.planner.rewrite import Decisions, flattened
from remat.planner.step import TargetStep
from remat.planner.step_model import StepModel
from remat.planner.whole_step_file import decisions_of_plan, whole_step_plan
from remat.program.costs import Roofline
from remat.program.devices import device
from remat.program.targets import target

needs_libtpu = pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="no libtpu")
NOTHING = Decisions(frozenset(), ())


def step(weights, x):
    def loss(weights):
        h = x
        for w in weights:
            h = h + jnp.tanh(h @ w)
        return jnp.sum(h * h)

    value, gradients = jax.value_and_grad(loss)(weights)
    return [w - 0.01 * g for w, g in zip(weights, gradients)], value


def arguments(layers=6, width=16, rows=24):
    weights = jax.random.normal(jax.random.key(0), (layers, width, width)) / width
    return list(weights), jax.random.normal(jax.random.key(1), (rows, width))


def flat_step(*args, fun=step):
    jaxpr, consts, _ = _jax.trace_call(fun, *args)
    assert not consts
    return flattened(jaxpr)


def large():
    """Return the types of a step whose matrix products are long enough to hide copies."""
    shapes = [jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)] * 11
    return shapes[1:], shapes[0]


def model_of(args, fun=step, **options):
    figures = Roofline(device("v5e"))
    priced = PricedStep(
        flat_step(*args, fun=fun),
        figures.seconds,
        into_products=True,
        transfer=figures.transfer_seconds,
        **options,
    )
    return StepModel(priced)


def run(jaxpr, args):
    leaves = jax.tree.leaves(args)
    return jax.jit(lambda *xs: _jax.eval_jaxpr(jaxpr, (), *xs))(*leaves)


def first_activation(flat):
    """Return the copy of the first `tanh` result, for its last reader in the backward pass."""
    value = next(i for i, eqn in enumerate(flat.eqns) if eqn.primitive.name == "tanh")
    v = flat.eqns[value].outvars[0]
    readers = [i for i, eqn in enumerate(flat.eqns) if v in eqn.invars]
    return HostCopy(value, 0, readers[-2], readers[-1] - 1, readers[-1])


def is_on_host(v):
    return _jax.is_on_host(v.aval)


def test_a_step_with_copies_returns_the_same_bits():
    # The planner's own choice is that for large arrays: the program has the same equations.
    model = model_of(large(), copies=True)
    proposal = model.within("inlined", int(0.9 * model.as_written("inlined").model_bytes))
    copies = proposal.decisions.loops.copies
    assert copies
    args = arguments(layers=len(large()[0]))
    flat = flat_step(*args)
    new = applied(flat, StepDecisions(LoopDecisions(copies=copies), NOTHING))
    assert sum(is_on_host(v) for eqn in new.eqns for v in eqn.outvars)
    for one, other in zip(run(flat, args), run(new, args), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(i, marks=pytest.mark.slow) for i in (2, 3))])
def test_copies_and_recomputation_together_return_the_same_values(seed):
    args = arguments()
    flat = flat_step(*args)
    copy = first_activation(flat)
    places = {i: i for i in range(len(flat.eqns))}
    with_copies = with_host_copies(flat, [copy], places)
    outside = random_decisions(with_copies, seed)
    new = applied(flat, StepDecisions(LoopDecisions(copies=(copy,)), outside))
    for one, other in zip(run(flat, args), run(new, args), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_later_uses_read_the_copy():
    flat = flat_step(*arguments())
    copy = first_activation(flat)
    new = with_host_copies(flat, [copy], {i: i for i in range(len(flat.eqns))})
    v = flat.eqns[copy.equation].outvars[0]
    copied = next(i for i, eqn in enumerate(new.eqns) if any(map(is_on_host, eqn.outvars)))
    late = [
        eqn
        for eqn in new.eqns[copied:]
        if v in [x for x in eqn.invars if _jax.is_var(x)] and eqn.primitive.name != "device_put"
    ]
    before = [eqn for eqn in flat.eqns[: copy.before] if v in eqn.invars]
    # The remaining readers run before the copy: the forward pass and the barrier's stack.
    assert len(late) <= len(before) + 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"before": 10_000}, "which the step does not have"),
        ({"result": 3}, "no such result"),
        ({"after": 0}, "must follow one another"),
        ({"again": (10**6,)}, "which the step does not have"),
    ],
)
def test_copies_that_the_program_does_not_have_are_refused(change, message):
    flat = flat_step(*arguments())
    with pytest.raises(PlanError, match=message):
        copy = dataclasses.replace(first_activation(flat), **change)
        with_host_copies(flat, [copy], {i: i for i in range(len(flat.eqns))})


def test_a_plan_holds_the_copies():
    flat = flat_step(*arguments())
    decided = StepDecisions(LoopDecisions(copies=(first_activation(flat),)), NOTHING)
    whole = whole_step_plan(flat, decided)
    assert decisions_of_plan(whole, flat) == decided
    (copy,) = whole.copies
    assert copy.bytes == 24 * 16 * 4 and "tanh" in copy.value
    assert not decisions_of_plan(dataclasses.replace(whole, copies=()), flat).loops.copies


def test_a_proposal_with_copies_fits_without_recomputation():
    model = model_of(large(), copies=True)
    n_bytes = int(0.9 * model.as_written("inlined").model_bytes)
    proposal = model.within("inlined", n_bytes)
    assert proposal.model_bytes <= n_bytes
    assert proposal.decisions.loops.copies and not proposal.decisions.outside.bursts
    without = model_of(large(), copies=False).within("inlined", n_bytes)
    assert without.decisions.outside.bursts
    assert without.extra_seconds > proposal.extra_seconds


def test_copies_wait_for_each_other_on_the_link():
    model = model_of(large(), copies=True)
    n_bytes = int(0.9 * model.as_written("inlined").model_bytes)
    copies = model.within("inlined", n_bytes).decisions.loops.copies
    assert len(copies) > 1
    # The first value that is computed is the last one that is read.
    for one, other in itertools.pairwise(copies):
        assert one.equation < other.equation
        assert one.there <= other.there < other.after <= one.after


def test_no_more_than_the_host_budget_is_copied():
    one = 8192 * 8192 * 2
    model = model_of(large(), copies=True, host_limit=2 * one)
    n_bytes = int(0.9 * model.as_written("inlined").model_bytes)
    assert len(model.within("inlined", n_bytes).decisions.loops.copies) == 2
    model = model_of(large(), copies=True, host_limit=one)
    assert not model.within("inlined", n_bytes).decisions.loops.copies


@needs_libtpu
def test_a_tpu_needs_less_memory_with_copies():
    model = model_of(large(), copies=True)
    n_bytes = int(0.9 * model.as_written("inlined").model_bytes)
    decisions = model.within("inlined", n_bytes).decisions
    of_tpu = TargetStep(step, large(), {}, target("tpu:v5e:1x1"), {"donate_argnums": (0,)})
    copied = of_tpu.trace_following(decisions, of_tpu.trace())
    one = 8192 * 8192 * 2
    for as_run in (False, True):
        without, memory = (t.memory(as_run=as_run) for t in (of_tpu.trace(), copied))
        assert memory.host_bytes == len(decisions.loops.copies) * one == 2 * one
        assert memory.peak_bytes < without.peak_bytes - 0.9 * one


def products(weights, x):
    """Return a step whose gradients are all live at its end, where the peak is as high as the one before."""

    def loss(weights):
        h = x
        for w in weights:
            h = h @ w
        return jnp.sum(h.astype(jnp.float32) ** 2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return [w - 0.01 * g for w, g in zip(weights, gradients)], value


def test_copies_that_leave_the_peak_as_it_is_are_not_made():
    model = model_of(large(), products, copies=True)
    n_bytes = int(0.97 * model.as_written("inlined").model_bytes)
    assert not model.within("inlined", n_bytes).decisions.loops.copies
