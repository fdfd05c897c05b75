"""The parser of the compiler's text of a program."""

from __future__ import annotations

import jax
from explain_cases import DEEP_ARGS, deep

from remat.explain import hlo


def test_the_compilers_text_accounts_for_its_temporaries():
    compiled = jax.jit(jax.value_and_grad(deep(lambda f: f))).lower(*DEEP_ARGS).compile()
    peak = hlo.peak_of(compiled.as_text())
    temp = compiled.memory_analysis().temp_size_in_bytes
    assert abs(peak.n_bytes - temp) < 0.05 * temp
    assert {h.type for h in peak.held} >= {"f32[2048,64]"}
