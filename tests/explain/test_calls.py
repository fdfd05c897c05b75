"""Calls of the user's functions, descriptions of steps, and what is said of steps with checkpoints."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from explain_cases import DEEP_ARGS, codes, deep, finding, struct

import remat
from remat.explain.calls import repeated_calls
from remat.explain.phases import phased_program
from remat.explain.step import traced_step
from remat.program import targets


def block(w, x):
    h = jnp.tanh(x @ w)
    for _ in range(2):  # a loop in the function is not a call of its own
        h = jnp.sin(h)
        h = h @ w
    return x + h


def net(weights, x):
    for w in weights:
        x = block(w, x)
    return x.sum()


WEIGHTS, X = [struct(64, 64)] * 5, struct(2048, 64)


def calls_of(f, *args):
    step = traced_step(f, args, {}, targets.target(None))
    return {c.frame[2]: c for c in repeated_calls(phased_program(step.jaxpr, step.shards))}


def test_calls_that_follow_one_another_are_told_apart_and_loops_in_them_are_not():
    found = calls_of(net, WEIGHTS, X)
    assert set(found) == {"block"}
    calls = found["block"].calls
    assert len(calls) == len(WEIGHTS)
    assert len({len(call) for call in calls}) == 1
    assert [i for call in calls for i in call] == sorted(i for call in calls for i in call)


def test_the_function_that_saves_most_is_named_with_the_peak_that_checkpointing_it_leaves():
    by_hand = finding(remat.explain(net, WEIGHTS, X), "no_regions").options[-1]
    line = block.__code__.co_firstlineno
    assert by_hand.code.endswith(f"test_calls.py:{line}\n@remat.checkpoint\ndef block(...):")

    def checkpointed(weights, x):
        for w in weights:
            x = remat.checkpoint(block)(w, x)
        return x.sum()

    compiled = remat.testing.peak_bytes(jax.value_and_grad(checkpointed), WEIGHTS, X)
    assert by_hand.peak_bytes == pytest.approx(compiled, rel=0.3)


def test_the_description_has_the_loops_the_arguments_and_the_optimizer():
    def scanned(w, x):
        return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, w)[0].sum()

    weights, x = DEEP_ARGS
    said = remat.explain(scanned, weights, x, compile=False).description
    assert said.startswith("A loss with its gradient (jax.value_and_grad), without an optimizer")
    assert "a loop of 8 iterations (tests/explain/test_calls.py:" in said
    assert "Arguments: 640.0 KiB in 2 arrays (x 512.0 KiB, w 128.0 KiB)." in said

    def step(params, x):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(scanned)(params, x))

    said = remat.explain(step, weights, x, compile=False).description
    assert said.startswith("A training step that updates params")
    assert remat.explain(lambda n: n + 1, jnp.int32(1), compile=False).description.startswith(
        "A function without a gradient"
    )


@pytest.mark.parametrize(
    "loss",
    [
        deep(remat.checkpoint),
        deep(jax.checkpoint),
        lambda w, x: remat.scan(
            lambda c, w: (jnp.tanh(c @ w), None), x, w, checkpoints=2
        )[0].sum(),
    ],
)  # fmt: skip
def test_a_step_with_checkpoints_is_told_what_its_peak_is(loss):
    explanation = remat.explain(loss, *DEEP_ARGS, compile=False)
    assert any(f.next_step for f in explanation.findings if f.code != "checkpointed_loop")
    if "has_regions" in codes(explanation):
        assert "At its peak" in finding(explanation, "has_regions").message


def test_flops_of_branches_in_loops_are_said_to_be_an_upper_bound():
    def loss(w, x):
        def step(c, w):
            return jax.lax.cond(c[0, 0] > 0, lambda: jnp.tanh(c @ w), lambda: c), None

        return jax.lax.scan(step, x, w)[0].sum()

    explanation = remat.explain(loss, *DEEP_ARGS, compile=False)
    assert "every iteration is counted with its largest branch" in explanation.totals.at_most
    assert remat.explain(deep(lambda f: f), *DEEP_ARGS, compile=False).totals.at_most == ""


def test_a_value_without_a_lifetime_says_where_it_is():
    explanation = remat.explain(deep(lambda f: f), *DEEP_ARGS, compile=False)
    nowhere = [v for v in explanation.values if not v.lifetimes and not v.reserved]
    assert all(v.held_in for v in nowhere)
    donating = jax.jit(lambda p: jax.tree.map(lambda x: x * 2, p), donate_argnums=0)
    numbers = struct(8, dtype=jnp.int32)
    found = remat.explain(donating, numbers, compile=False).values
    assert [v.held_in for v in found if v.kind == "output"] == [
        "in the memory of a donated argument"
    ]
