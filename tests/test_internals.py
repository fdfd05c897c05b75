"""The list of JAX's internals that the library uses, compared with the code that uses them."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import remat
from remat._jax.internals import INTERNALS

PACKAGE = pathlib.Path(remat.__file__).parent / "_jax"
SOURCES = sorted(PACKAGE.glob("*.py"))


def is_internal(name: str) -> bool:
    is_private = any(p.startswith("_") and not p.startswith("__") for p in name.split("."))
    return name.startswith(("jax.interpreters", "jax.extend")) or is_private


def aliases(tree: ast.AST) -> dict[str, str]:
    """Return the full names of the objects that a module imports from JAX, by their local names."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jax":
            names = ((a.asname or a.name, f"{node.module}.{a.name}") for a in node.names)
            found.update(names)
        elif isinstance(node, ast.Import):
            for a in node.names:
                assert not is_internal(a.name), f"import {a.name}: from its package instead"
    return found


def attributes(tree: ast.AST) -> Iterator[tuple[ast.expr, str]]:
    """Return every attribute that is read, and the object of which it is an attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.value, node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            assert isinstance(node.args[1], ast.Constant)
            yield node.args[0], node.args[1].value


def module_of(owner: ast.expr, known: dict[str, str]) -> str:
    """Return the module of JAX that an expression denotes, an alias or `jax.….module`; None for others."""
    text = ast.unparse(owner)
    name = known.get(text, text if text.split(".")[0] == "jax" else "")
    # Members of an object that is not a module, such as a class, belong to their owner's row.
    return name if name.rsplit(".", 1)[-1].islower() else ""


def names_used(source: str) -> set[str]:
    """Return the internal names that a module uses: members of modules, and private attributes."""
    tree = ast.parse(source)
    known = aliases(tree)
    used, modules = set(), set()
    for owner, name in attributes(tree):
        if module := module_of(owner, known):
            modules.add(module)
            if is_internal(f"{module}.{name}"):
                used.add(f"{module}.{name}")
        elif name.startswith("_") and not name.startswith("__"):
            used.add(f"attribute.{name}")
    used |= {name for name in known.values() if is_internal(name) and name not in modules}
    return used - modules - {f"attribute.{name}" for name in own_attributes(tree)}


def own_attributes(tree: ast.AST) -> set[str]:
    """Return the attributes of a module's own classes."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in ("self", "cls")
    }


LISTED = [f"{row.where}.{name}" for row in INTERNALS for name in row.names]


def test_every_internal_of_jax_in_use_is_listed():
    for path in SOURCES:
        missing = names_used(path.read_text()) - set(LISTED)
        assert not missing, f"{path.name} uses {sorted(missing)}: list them in _jax/internals.py"


def test_every_listed_internal_of_jax_is_in_use_and_listed_once():
    used = {name for path in SOURCES for name in names_used(path.read_text())}
    assert sorted(LISTED) == sorted(set(LISTED) & used)


def test_unlisted_names_are_found_however_they_are_reached():
    source = """
import jax
from jax._src import core as c, util
from jax._src.dispatch import device_put_p as put
from jax.interpreters import partial_eval
try:
    from jax._src.somewhere import thing
except ImportError:
    thing = None
c.Var.kind, util, jax.Array, jax.extend.core.Jaxpr, jax._private.x
getattr(partial_eval, "rules", None)
tracer._kind, self._own
"""
    assert names_used(source) == {
        "attribute._kind",
        "jax._private.x",
        "jax._src.core.Var",
        "jax._src.dispatch.device_put_p",
        "jax._src.somewhere.thing",
        "jax._src.util",
        "jax.extend.core.Jaxpr",
        "jax.interpreters.partial_eval.rules",
    }


def test_every_row_says_what_the_names_are_for_and_what_replaces_them():
    assert all(row.names and row.purpose and row.replacement for row in INTERNALS)


WITHOUT_PARTIAL_EVALUATION = """
import jax, jax.numpy as jnp, jax.interpreters.partial_eval as public, numpy as np
from jax import lax
from jax._src.interpreters import partial_eval

def gone(*_, **__):
    raise AssertionError("JAX's partial evaluation of jaxprs")

starts = ("partial_eval_jaxpr_", "trace_to_subjaxpr_nounits", "trace_to_jaxpr_nounits")
removed = [name for name in dir(partial_eval) if name.startswith(starts)]
assert removed
for name in removed:
    if callable(getattr(partial_eval, name)):
        setattr(partial_eval, name, gone)
tables = ("custom_partial_eval_rules", "partial_eval_jaxpr_custom_rules", "JaxprTracer", "PartialVal")
for name in tables:
    vars(public).pop(name, None)

import remat

def operations(x, w):
    y = jax.jit(lambda y: jnp.cos(y) * y)(jnp.sin(x @ w))
    y = lax.cond(y[0] > 0, jnp.sin, jnp.cos, y)
    y = remat.checkpoint(lambda y: jnp.sin(jnp.exp(y)))(jax.nn.relu(y) + y)
    return jnp.sum(y)

def loops(x, w):
    y = lax.scan(lambda c, row: (jnp.sin(c * row), c), x, w)[0]
    y = lax.fori_loop(0, 3, lambda i, c: jnp.sin(c), y)
    return jnp.sum(y * lax.while_loop(lambda c: c < 3, lambda c: c + 1, 0.5))

x, w = jnp.arange(1, 4.) / 3, jnp.arange(1, 10.).reshape(3, 3) / 9
for f in (operations, loops):
    for policy in (None, remat.policies.save(primitive="sin"), remat.policies.offload(primitive="cos")):
        g = remat.checkpoint(f, policy=policy)
        jax.make_jaxpr(jax.jit(jax.grad(g, (0, 1))))(x, w)
    jax.make_jaxpr(jax.vmap(jax.grad(remat.checkpoint(f)), (0, None)))(jnp.stack([x, x]), w)
    slope = jax.jvp(f, (x, w), (x, w))[1]
    dx, dw = jax.jit(jax.grad(remat.checkpoint(f), (0, 1)))(x, w)
    np.testing.assert_allclose(jnp.vdot(dx, x) + jnp.vdot(dw, w), slope, rtol=1e-5)
jax.make_jaxpr(jax.hessian(remat.checkpoint(operations)))(x, w)
"""


def test_gradients_do_without_jaxs_partial_evaluation_of_jaxprs():
    subprocess.run([sys.executable, "-W", "error", "-c", WITHOUT_PARTIAL_EVALUATION], check=True)
