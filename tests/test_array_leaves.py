"""Pytrees in two parts: arrays, and leaves that are not traced."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from remat import array_leaves


def test_a_split_tree_is_joined_with_other_arrays() -> None:
    tree = {"a": jnp.ones(2), "b": ["text", np.float32(3), None], "c": jnp.tanh, "d": 4}
    traced, parts = array_leaves.split(tree)
    assert [x.shape for x in traced] == [(2,), ()]
    assert parts.untraced == ("text", jnp.tanh, 4)
    assert parts.join(["x", "y"]) == {"a": "x", "b": ["text", "y", None], "c": jnp.tanh, "d": 4}


def test_arrays_of_texts_and_objects_are_not_traced() -> None:
    assert array_leaves.is_array(jnp.ones(2)) and array_leaves.is_array(np.int8(1))
    for leaf in (np.array("text"), np.array([object()]), np.str_("text"), 1.0, "text"):
        assert not array_leaves.is_array(leaf)


def test_a_lifted_call_traces_arrays_only() -> None:
    seen: list[Any] = []

    def method(module: str, x: Any, flag: str, *, scale: float) -> Any:
        seen.extend([module, flag, scale, isinstance(x, jax.core.Tracer)])
        return {"y": x * scale, "flag": flag, "module": module}

    def lift(fun: Any) -> Any:
        assert fun.__name__ == "method"
        return lambda module, *arrays: jax.jit(lambda *a: fun(module, *a))(*arrays)

    out = array_leaves.call(lift, method, "mine", (jnp.ones(2), "yes"), {"scale": 3.0})
    assert seen == ["mine", "yes", 3.0, True]
    assert out["y"].tolist() == [3.0, 3.0] and (out["flag"], out["module"]) == ("yes", "mine")
