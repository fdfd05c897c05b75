"""Bodies of loops and branches that are scheduled by themselves."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import remat
from remat.errors import PlanError
from remat.planner.bodies import (
    Fusing,
    bodies,
    program_of_flat,
    with_bodies,
    with_partial_sums,
)
from remat.planner.rewrite import flattened
from remat.planner.step_model import lowered
from remat.program.from_jaxpr import n_bytes
from remat.solvers.grid import GridSearch

KEY = jax.random.key(0)
W = jax.random.normal(KEY, (6, 32, 32)) / 6
X = jax.random.normal(KEY, (256, 32))


def mlp(w, x):
    for i in range(6):
        x = jnp.tanh(jnp.sin(x @ w[i]) * 2) + x
    return (x**2).mean()


def accumulated(w, x):
    def body(total, x):
        value, gradient = jax.value_and_grad(mlp)(w, x)
        return (total[0] + value, total[1] + gradient), None

    return jax.lax.scan(body, (0.0, jnp.zeros_like(w)), jnp.stack([x, x + 1]))[0]


def descended(w, x):
    def body(state):
        n, w = state
        return n + 1, w - 0.1 * jax.grad(mlp)(w, x)

    return jax.lax.while_loop(lambda state: state[0] < 3, body, (0, w))[1]


def in_a_branch(w, x):
    return jax.lax.cond(x.sum() > 0, lambda w: jax.grad(mlp)(w, x), lambda w: w, w)


def nested(w, x):
    """Return a gradient in a branch in a step of a loop."""

    def body(w, x):
        return w - in_a_branch(w, x), None

    return jax.lax.scan(body, w, jnp.stack([x, x + 1]))[0]


STEPS = [accumulated, descended, in_a_branch, nested]


def mesh():
    return jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))


def gathered(w, x):
    """Return a loss with weights that each device gathers, as fully sharded data parallelism by hand does."""
    for i in range(6):
        x = jnp.tanh(jnp.sin(x @ jax.lax.all_gather(w[i], "data", tiled=True)) * 2) + x
    return (x**2).mean()


SHARDED = P(None, "data"), P("data")


def with_its_gradient_in_a_shard_map(w, x):
    def local(w, x):
        value, gradient = jax.value_and_grad(gathered)(w, x)
        return jax.lax.psum(value, "data"), gradient

    return jax.shard_map(
        local, mesh=mesh(), in_specs=SHARDED, out_specs=(P(), SHARDED[0]), check_vma=False
    )(w, x)


def around_a_shard_map(w, x, check_vma=True):
    def local(w, x):
        return jax.lax.psum(gathered(w, x), "data")

    return jax.shard_map(
        local, mesh=mesh(), in_specs=SHARDED, out_specs=P(), check_vma=check_vma
    )(w, x)  # fmt: skip


def averaged_around_a_shard_map(w, x):
    def local(w, x):
        return jax.lax.pmean(gathered(w, x), "data")

    return jax.shard_map(local, mesh=mesh(), in_specs=SHARDED, out_specs=P(), check_vma=False)(w, x)


@pytest.mark.parametrize(
    "step",
    [
        with_its_gradient_in_a_shard_map,
        jax.value_and_grad(around_a_shard_map),
        jax.value_and_grad(averaged_around_a_shard_map),
    ],
)
def test_shard_maps_are_scheduled_by_the_bytes_of_one_device(step, tmp_path):
    args = [jax.device_put(a, NamedSharding(mesh(), s)) for a, s in zip((W, X), SHARDED)]
    fitted = remat.fit(step, budget="65%", cache=False, progress=False)
    for got, expected in zip(jax.tree.leaves(fitted(*args)), jax.tree.leaves(jax.jit(step)(*args))):
        np.testing.assert_array_equal(got, expected)
    (made,) = fitted.plans
    (body,) = made.whole_step.bodies
    assert body.recomputations
    assert made.peak_bytes <= made.budget_bytes
    made.save(tmp_path / "plan.json")
    again = remat.fit(step, plan=remat.Plan.load(tmp_path / "plan.json"))
    compiled = again.lower(*args).compile()
    assert remat.testing.peak_bytes(compiled) == made.peak_bytes


def price(flops, moved, dtype):
    return flops + moved


def flat(step):
    closed = jax.make_jaxpr(step)(W, X)
    assert not closed.consts
    return flattened(closed.jaxpr)


def run(jaxpr):
    return jax.jit(lambda *args: jax.core.eval_jaxpr(jaxpr, (), *args))


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_scheduled_bodies_give_the_same_bits_in_less_memory(step):
    jaxpr = flat(step)
    (body,) = bodies(jaxpr, price, GridSearch(), 10 * n_bytes(jaxpr.invars[1].aval))
    plain = run(jaxpr).lower(W, X).compile()
    (options,) = body.options
    as_written = options.as_written
    option = options.within(int(0.65 * as_written.bytes))
    assert option.seconds > 0 and as_written.seconds == 0
    changed = run(with_bodies(jaxpr, {body.id: option.decisions})).lower(W, X).compile()
    for a, b in zip(changed(W, X), plain(W, X), strict=True):
        np.testing.assert_array_equal(a, b)
    saved = (
        plain.memory_analysis().temp_size_in_bytes - changed.memory_analysis().temp_size_in_bytes
    )
    assert saved > 0.5 * (as_written.bytes - option.bytes)


def test_options_need_fewer_bytes_for_more_time():
    ((options,),) = (body.options for body in bodies(flat(descended), price, GridSearch(), 0))
    plain = options.as_written.bytes
    budgets = [plain * share // 100 for share in (100, 90, 75, 60)]
    found = [options.within(budget) for budget in budgets]
    assert found[0] == options.as_written
    for budget, option in zip(budgets, found, strict=True):
        assert option.bytes <= budget
    for many, few in itertools.pairwise(found):
        assert few.bytes < many.bytes and few.seconds > many.seconds


def test_the_smallest_option_is_given_where_none_fits():
    ((options,),) = (body.options for body in bodies(flat(descended), price, GridSearch(), 0))
    assert options.within(1) == options.smallest
    assert options.smallest.bytes < options.within(options.as_written.bytes * 3 // 4).bytes


def test_options_do_not_depend_on_those_asked_for_before():
    def answers(shares):
        ((options,),) = (body.options for body in bodies(flat(descended), price, GridSearch(), 0))
        plain = options.as_written.bytes
        return {share: options.within(plain * share // 100) for share in shares}

    shares = (95, 80, 65, 50, 30)
    forwards = answers(shares)
    assert len(set(map(repr, forwards.values()))) > 2
    assert forwards == answers(shares[::-1])


def test_a_body_has_options_for_each_model_of_fusion():
    def shared(w, x):
        for i in range(3):
            y = (x @ w[i]) * 2 + 1
            x = jnp.tanh(y) @ w[3] + jnp.sin(y) @ w[4] + jnp.cos(y) @ w[5]
        return (x**2).mean()

    def step(w, x):
        return jax.lax.fori_loop(0, 3, lambda _, w: w - jax.grad(shared)(w, x), w)

    fusing = (Fusing(duplicates=False), Fusing(duplicates=True))
    (body,) = bodies(flat(step), price, GridSearch(), 0, fusing=fusing)
    written, duplicated = body.options
    assert written.as_written.decisions == duplicated.as_written.decisions
    # sin(y) and cos(y) read y.
    assert written.smallest.decisions.stored > duplicated.smallest.decisions.stored


def test_partial_sums_are_written_only_where_they_free_memory():
    def sum_of(terms):
        return terms[0] if len(terms) == 1 else sum_of(terms[:-1]) + terms[-1]

    def graph(step):
        program = program_of_flat(flat(step))
        return with_partial_sums(program, price, Fusing())

    def one_by_one(w, x):
        return sum_of([w[i % 6] @ w[(i + 1) % 6] for i in range(12)]) @ w[0]

    def biases(w, x):
        total = w[0] @ w[1] + w[1] @ w[2]
        for i in range(10):
            total = total + w[3, i]
        return total @ w[0]

    def in_turn(w, x):
        total = w[0] @ w[1]
        for i in range(11):
            total = total + w[i % 6] @ w[(i + 2) % 6]
        return total @ w[0]

    assert graph(in_turn).partial_sums
    assert not graph(one_by_one).partial_sums and not graph(biases).partial_sums


def test_small_bodies_are_left_alone():
    assert not bodies(flat(descended), price, GridSearch(), 100 * jnp.zeros((6, 256, 256)).nbytes)


def test_a_plan_of_a_gradient_in_a_loop_holds_and_survives_its_file():
    plan = remat.plan(accumulated, W, X, budget="75%", cache=False)
    assert plan.peak_bytes <= 0.75 * plan.peak_bytes_without_remat
    (body,) = plan.whole_step.bodies
    assert body.recomputations and f"the body {body.id}" in plan.explain()
    again = remat.Plan.from_json(plan.to_json())
    assert again == plan
    for a, b in zip(remat.fit(accumulated, plan=again)(W, X), jax.jit(accumulated)(W, X)):
        np.testing.assert_array_equal(a, b)


def test_a_plan_of_a_body_that_the_program_does_not_have_is_refused():
    plan = remat.plan(accumulated, W, X, budget="75%", cache=False)
    (body,) = plan.whole_step.bodies
    for wrong in (
        dataclasses.replace(body, id="999.0/"),
        dataclasses.replace(body, n_equations=body.n_equations + 1),
    ):
        whole = dataclasses.replace(plan.whole_step, bodies=(wrong,))
        with pytest.raises(PlanError, match="lan again"):
            remat.fit(accumulated, plan=dataclasses.replace(plan, whole_step=whole))(W, X)


def test_bodies_are_lowered_until_the_program_around_them_fits():
    # With bodies of more than 950 bytes the program takes 1003, little more than the 1000 that there are.
    found = lowered(1000, lambda room: room, lambda option: 3 if option > 950 else -10)
    assert 900 < found <= 950
    assert lowered(1000, lambda room: room, lambda option: option - 990) == 990
