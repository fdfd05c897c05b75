"""The parser of the compiler's text of a program."""

from __future__ import annotations

import jax
from explain_cases import DEEP_ARGS, deep

from remat.explain import difference, hlo


def test_the_compilers_text_accounts_for_its_temporaries():
    compiled = jax.jit(jax.value_and_grad(deep(lambda f: f))).lower(*DEEP_ARGS).compile()
    peak = hlo.peak_of(compiled.as_text())
    temp = compiled.memory_analysis().temp_size_in_bytes
    assert abs(peak.n_bytes - temp) < 0.05 * temp
    assert {h.type for h in peak.held} >= {"f32[2048,64]"}


def test_an_array_of_the_compiler_has_the_line_of_the_value_that_it_is():
    sources = {("net/mlp", "mul"): "net.py:12 (mlp)"}
    for op_name in ("jit(step)/jvp(net)/mlp/mul", "jit(step)/transpose(jvp(net/mlp))/mul"):
        assert (
            difference.array_in_words("f32[8]", op_name, sources) == "f32[8] from mul at net.py:12"
        )
    assert difference.array_in_words("f32[8]", "jit(step)/exp", sources) == "f32[8] from exp"
