"""The table of primitives, compared with the primitives of the installed JAX."""

from __future__ import annotations

import contextlib
import importlib
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax._src import core

from remat import _jax
from remat.ir.equations import fusion_of, is_collective, is_fusible, is_repeatable
from remat.ir.formulas import TRANSCENDENTAL
from remat.ir.operations import FUSIBLE, Fusion, Traffic, add_rows, names_where, operation

# Modules that define primitives and that `import jax` does not load.
MODULES = (
    "jax._src.callback",
    "jax._src.compute_on",
    "jax._src.cudnn.fused_attention_stablehlo",
    "jax._src.cudnn.scaled_matmul_stablehlo",
    "jax._src.custom_batching",
    "jax._src.custom_partitioning",
    "jax._src.debugging",
    "jax._src.ffi",
    "jax._src.hijax",
    "jax._src.lax.ann",
    "jax._src.lax.fft",
    "jax._src.lax.linalg",
    "jax._src.lax.parallel",
    "jax._src.lax.special",
    "jax._src.pallas.primitives",
    "jax._src.random",
    "jax._src.state.primitives",
    "jax._src.xla_metadata",
    "jax.experimental.buffer_callback",
    "jax.experimental.checkify",
    "jax.experimental.multihost_utils",
    "jax.experimental.pallas",
    "jax.experimental.rnn",
    "jax.experimental.sparse",
    "jax.experimental.shard_map",
)


def primitives_of_jax() -> list[str]:
    """Return the names of all primitives that are attributes of one of JAX's modules."""
    for name in MODULES:
        with contextlib.suppress(ImportError, DeprecationWarning):  # not in this version
            importlib.import_module(name)
    modules = [m for name, m in list(sys.modules.items()) if name.split(".")[0] == "jax"]
    values = [value for module in modules for value in list(vars(module).values())]
    return sorted({value.name for value in values if isinstance(value, core.Primitive)})


def test_every_primitive_of_jax_has_a_row():
    names = primitives_of_jax()
    assert len(names) > 250
    missing = [name for name in names if operation(name) is None]
    assert not missing, f"write these into a group of ir/operations.py: {missing}"


def test_a_name_cannot_have_two_rows():
    with pytest.raises(AssertionError, match="tanh has two rows"):
        add_rows(operation("tanh"), "tanh")


@pytest.mark.parametrize(
    ("name", "function", "shapes"),
    [
        ("sub", lax.sub, [(3,), (3,)]),
        ("reduce_sum", lambda x: jnp.sum(x), [(2, 3)]),
        ("div", lax.div, [(3,), (3,)]),
        ("dynamic_update_slice", lambda x, y: lax.dynamic_update_slice(x, y, (1,)), [(4,), (2,)]),
        ("sin", lax.sin, [(3,)]),
        ("max", lax.max, [(3,), (3,)]),
    ],
)
def test_a_primitive_is_linear_in_the_operands_of_its_row(name, function, shapes):
    places = operation(name).linear_in
    places = range(len(shapes)) if places is None else places
    a, b = (
        [jax.random.normal(jax.random.key(n + i), s) for i, s in enumerate(shapes)] for n in (0, 9)
    )
    b = [y if i in places else x for i, (x, y) in enumerate(zip(a, b))]
    both = [x + y if i in places else x for i, (x, y) in enumerate(zip(a, b))]
    is_linear = jnp.allclose(function(*both), function(*a) + function(*b), atol=1e-5)
    assert is_linear == bool(places)


@pytest.mark.parametrize("name", sorted(names_where("is_bilinear")))
def test_a_product_is_not_linear_in_its_operands_together(name):
    assert operation(name).linear_in == ()


def test_views_compute_and_move_nothing():
    for name in names_where("fusion"):
        row = operation(name)
        if row.fusion is Fusion.VIEW:
            assert (row.flops, row.traffic) == (0, Traffic.NONE), name


def test_transcendental_operations_are_not_recomputed_in_every_kernel():
    for name in names_where("fusion"):
        if operation(name).flops == TRANSCENDENTAL:
            assert operation(name).fusion is Fusion.COSTLY, name


def test_copies_are_rearrangements():
    assert names_where("is_copy") < names_where("is_rearrangement")


def test_what_has_an_effect_on_the_world_is_not_repeatable():
    for name in ("io_callback", "debug_callback", "rng_uniform", "get", "swap", "psend"):
        assert not operation(name).is_repeatable


def equation(fun, *args):
    return jax.make_jaxpr(fun)(*args).eqns[-1]


X = jnp.ones((4, 8), jnp.float32)


@pytest.mark.parametrize(
    ("fun", "expected"),
    [
        (jnp.tanh, Fusion.COSTLY),
        (lambda x: x + x, Fusion.CHEAP),
        (lambda x: x / x, Fusion.COSTLY),
        (lambda x: x / 3.0, Fusion.CHEAP),  # a product with 1/3
        (lambda x: 3.0 / x, Fusion.COSTLY),
        (lambda x: x.T, Fusion.CHEAP),
        (lambda x: x.reshape(8, 4), Fusion.VIEW),
        (lambda x: x.sum(0), Fusion.REDUCE),
        (lambda x: x @ x.T, Fusion.KERNEL),
        (jax.nn.silu, Fusion.COSTLY),
        (jax.jit(lambda x: x @ x.T), Fusion.KERNEL),
        (jax.jit(lambda x: (x, x)), Fusion.KERNEL),
        (lambda x: lax.cond(True, jnp.sin, jnp.cos, x), Fusion.KERNEL),
        (lambda x: lax.scan(lambda c, _: (c, None), x, None, 3)[0], Fusion.KERNEL),
    ],
)
def test_an_equation_fuses_as_its_row_or_its_body_says(fun, expected):
    assert fusion_of(equation(fun, X)) is expected
    assert is_fusible(equation(fun, X)) == (expected in FUSIBLE)


def test_an_unknown_primitive_is_elementwise_if_its_shapes_agree():
    unknown = core.Primitive("a_primitive_without_a_row")
    unknown.def_abstract_eval(lambda x, shape: core.ShapedArray(shape, x.dtype))
    alike = equation(lambda x: unknown.bind(x, shape=(4, 8)), X)
    other = equation(lambda x: unknown.bind(x, shape=(3,)), X)
    assert (fusion_of(alike), fusion_of(other)) == (Fusion.CHEAP, Fusion.KERNEL)


def test_a_body_is_repeatable_if_all_of_its_equations_are():
    def pure(x):
        return lax.scan(lambda c, _: (jnp.sin(c), None), x, None, 3)[0]

    def drawing(x):
        return lax.scan(lambda c, _: (c + lax.rng_uniform(0.0, 1.0, (4, 8)), None), x, None, 3)[0]

    assert is_repeatable(equation(pure, X))
    assert not is_repeatable(equation(drawing, X))


def test_halves_of_a_communication_are_not_computed_again():
    assert operation("all_gather").is_repeatable
    for name in ("all_gather_start", "all_gather_done", "psum_done", "ppermute_start"):
        assert operation(name).is_collective and not operation(name).is_repeatable


def test_collectives_are_known_by_their_row():
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec()
    summed = jax.shard_map(lambda x: lax.psum(x, "i"), mesh=mesh, in_specs=spec, out_specs=spec)
    body = next(_jax.jaxprs_of(equation(summed, X)))
    assert any(is_collective(eqn) for eqn in _jax.open_jaxpr(body).eqns)
    assert not is_collective(equation(jnp.sin, X))


def test_a_product_that_sums_over_one_term_is_elementwise() -> None:
    """The gradient of weights for a single example is such a product."""

    def gradients(w, xs):
        return jax.vmap(jax.grad(lambda w, x: jnp.tanh(x[None] @ w).sum()), (None, 0))(w, xs)

    jaxpr = jax.make_jaxpr(gradients)(jnp.ones((4, 8)), jnp.ones((3, 4))).jaxpr
    products = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]
    found = [(eqn.outvars[0].aval.size, fusion_of(eqn)) for eqn in products]
    assert found == [(3 * 8, Fusion.KERNEL), (3 * 8 * 4, Fusion.CHEAP)]
