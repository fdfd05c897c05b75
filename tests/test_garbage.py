"""Pauses of Python's garbage collector."""

from __future__ import annotations

import gc
import threading

import jax
import jax.numpy as jnp
import pytest

import remat
from remat import garbage
from remat.planner import search


def test_pauses_nest_and_end():
    assert gc.isenabled()
    with garbage.paused():
        assert not gc.isenabled()
        with garbage.paused():
            assert not gc.isenabled()
            with garbage.resumed():
                assert gc.isenabled()
                with garbage.paused():
                    assert not gc.isenabled()
                assert gc.isenabled()
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_pause_ends_when_something_raises():
    @garbage.paused()
    def fails():
        assert not gc.isenabled()
        with garbage.resumed():
            raise ValueError

    for _ in range(2):
        with pytest.raises(ValueError):
            fails()
        assert gc.isenabled()


def test_a_collector_that_the_user_disabled_stays_disabled():
    gc.disable()
    try:
        with garbage.paused(), garbage.resumed():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_collector_is_paused_until_the_last_thread_resumes_it():
    begun, may_end = threading.Event(), threading.Event()

    def other():
        with garbage.paused():
            begun.set()
            may_end.wait()

    thread = threading.Thread(target=other)
    with garbage.paused():
        thread.start()
        begun.wait()
    assert not gc.isenabled()
    with garbage.resumed():  # this thread does not pause it
        assert not gc.isenabled()
    may_end.set()
    thread.join()
    assert gc.isenabled()


def test_planning_pauses_the_collector_but_not_while_the_step_is_traced(monkeypatch):
    traced, searched = [], []
    inner = search.search

    def watched(*args):
        searched.append(gc.isenabled())
        return inner(*args)

    def loss(w, x):
        traced.append(gc.isenabled())
        for _ in range(6):
            x = jnp.tanh(x @ w)
        return x.sum()

    monkeypatch.setattr("remat.planner.planning.search", watched)
    step = remat.fit(jax.value_and_grad(loss), budget="75%", cache=False)
    step(jnp.eye(32), jnp.ones((1000, 32)))
    assert traced and all(traced)
    assert searched and not any(searched)
    assert gc.isenabled()
    with pytest.raises(remat.BudgetError):
        remat.plan(jax.grad(loss), jnp.eye(32), jnp.ones((1000, 32)), budget=1000, cache=False)
    assert gc.isenabled()
