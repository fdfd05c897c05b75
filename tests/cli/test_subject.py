"""Subjects of commands: MODULE:FUNCTION and FILE.py:FUNCTION."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest

from remat.cli.subject import load_subject
from remat.report import Explanation


@pytest.mark.parametrize("name", ["training:step", "training.py:problem", "training:keywords"])
def test_steps_files_and_keyword_arguments_are_taken(run, name):
    result = run("explain", name, "--no-compile", "--json")
    assert result.exit_code == 0, result.output
    assert "backward" in {s.phase for s in Explanation.from_json(result.stdout).steps}


def test_what_the_users_code_prints_is_not_in_the_output(run):
    result = run("explain", "training:noisy", "--no-compile", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["title"] == "training:noisy"
    assert "loading the data" in result.stderr
    assert "tracing" in result.stderr


def test_it_runs_as_a_module_in_the_current_directory(run, tmp_path):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    out = subprocess.run(
        [sys.executable, "-m", "remat", "explain", "training:problem", "--no-compile"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    assert out.returncode == 0, out.stderr
    assert "training:problem" in out.stdout
    assert out.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["explain", "training"], "MODULE:FUNCTION"),
        (["explain", "absent:problem"], "no module 'absent'"),
        (["explain", "absent.py:problem"], "no file"),
        (["explain", "training:problm"], "did you mean 'problem'"),
        (["explain", "training:number"], "is not a function but int 3"),
        (["explain", "training:needs"], "needs arguments (n)"),
        (["explain", "training:wrong"], "must return (step, args)"),
        (["explain", "training:flat"], "return step, (params, batch)"),
        (["explain", "training:flat"], "not (function, dict, ShapeDtypeStruct)"),
        (["explain", "training:longer"], "not (function, ShapeDtypeStruct, ShapeDtypeStruct, int)"),
        (["explain", "not-a-name:problem"], "cannot be a module"),
        (["explain", ".training:problem"], "cannot be a module"),
        (["explain", "a\0b.py:problem"], "no file"),
        (["explain", "training:Odd.problem"], "there is no function 'problem'"),
        (["explain", "training:odd"], "not Odd \\x1b[2J"),
        (["explain", "training:worse"], "not Worse <Worse>"),
    ],
    ids=ascii,
)
def test_what_names_no_step_is_refused(refused, arguments, said):
    assert said in refused(*arguments)


MODULES = """
import jax.numpy as jnp, optax
import equinox as eqx
from flax import nnx
import jax, remat.equinox, remat.nnx

x = jnp.ones((64, 8))

def in_place(model, optimizer, x):
    grads = nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)
    optimizer.update(model, grads)

def of_nnx(jit):
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    return jit(in_place), (model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), x)

def nnx_plain():
    return of_nnx(lambda step: step)

def nnx_jitted():
    return of_nnx(lambda step: nnx.jit(step, donate_argnums=(0, 1)))

def nnx_fitted():
    return of_nnx(remat.nnx.fit)

def loss(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2)

def of_equinox(jit):
    model = eqx.nn.MLP(8, 8, 8, 2, key=jax.random.key(0))
    return jit(eqx.filter_value_and_grad(loss)), (model, x)

def equinox_plain():
    return of_equinox(lambda step: step)

def equinox_jitted():
    return of_equinox(eqx.filter_jit)

def equinox_fitted():
    return of_equinox(remat.equinox.fit)

def equinox_loss():
    return loss, (eqx.nn.MLP(8, 8, 8, 2, key=jax.random.key(0)), x)
"""


@pytest.mark.parametrize("how", ["plain", "jitted", "fitted"])
@pytest.mark.parametrize("system", ["nnx", "equinox"])
def test_steps_on_modules_are_subjects_as_they_are(run, system, how):
    pytest.importorskip("flax")
    pytest.importorskip("equinox")
    pathlib.Path("modules.py").write_text(MODULES)
    subject = load_subject(f"modules.py:{system}_{how}")
    assert subject.is_step
    assert all(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(subject.args))
    assert not load_subject("modules.py:equinox_loss").is_step
