"""Operands of products and convolutions that are copied into another order of dimensions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from remat.program.costs import Roofline
from remat.program.from_jaxpr import program_of_jaxpr
from remat.program.fusion import fuse
from remat.program.products import transposed_operands
from remat.program.targets import target
from remat.solvers import no_remat


@pytest.mark.parametrize(
    ("formula", "shapes", "transposed"),
    [
        ("td,df->tf", [(16, 8), (8, 4)], ()),
        ("td,tf->df", [(16, 8), (16, 4)], ()),  # a matrix is read in either order
        ("btd,df->btf", [(2, 16, 8), (8, 4)], ()),
        ("btd,btf->df", [(2, 16, 8), (2, 16, 4)], (0,)),
        ("btd,btf->df", [(1, 16, 8), (1, 16, 4)], (0,)),
        ("bqhf,bkhf->bhqk", [(2, 6, 3, 4), (2, 5, 3, 4)], (0, 1)),
        ("bhqf,bhkf->bhqk", [(2, 3, 6, 4), (2, 3, 5, 4)], ()),
        ("bhqk,bkhf->bhqf", [(2, 3, 6, 5), (2, 5, 3, 4)], (1,)),
    ],
)
def test_operands_are_transposed_to_batch_kept_and_contracted(
    formula: str, shapes: list[tuple[int, ...]], transposed: tuple[int, ...]
) -> None:
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    jaxpr = jax.make_jaxpr(lambda a, b: jnp.einsum(formula, a, b))(*arrays)
    (product,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]
    if product.invars == list(reversed(jaxpr.jaxpr.invars)):
        transposed = tuple(1 - at for at in transposed)
    assert transposed_operands(product) == transposed


@pytest.mark.parametrize(
    ("x", "kernel", "result", "transposed"),
    [
        ("NHWC", "HWIO", "NHWC", ()),
        ("NCHW", "OIHW", "NCHW", (0, 1)),
        ("CHWN", "IHWO", "NHWC", (0, 1)),  # the gradient of a kernel
        ("NHWC", "OIHW", "NHWC", (1,)),
    ],
)
def test_operands_of_convolutions_are_transposed_to_space_before_features(
    x: str, kernel: str, result: str, transposed: tuple[int, ...]
) -> None:
    sizes = dict(zip("NHWCIO", (2, 8, 8, 3, 3, 4)))
    window = dict(sizes, H=3, W=3)
    args = (
        jax.ShapeDtypeStruct([sizes[d] for d in x], jnp.float32),
        jax.ShapeDtypeStruct([window[d] for d in kernel], jnp.float32),
    )
    numbers = x, kernel, result
    jaxpr = jax.make_jaxpr(
        lambda x, k: jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=numbers)
    )(*args)
    assert transposed_operands(jaxpr.eqns[0]) == transposed


@pytest.mark.parametrize("reads", [1, 2])
def test_a_model_counts_the_copy_that_the_compiler_makes(reads: int) -> None:
    # A value that only the product reads is written in the product's order at once.
    def step(x, w, g):
        h = jnp.tanh(g)
        weights = jnp.einsum("btf,btd->fd", h, x)
        return (weights, h @ w) if reads == 2 else weights

    args = jnp.ones((4, 64, 32)), jnp.ones((512, 16)), jnp.ones((4, 64, 512))
    memory = jax.jit(step).lower(*args).compile().memory_analysis()
    program = program_of_jaxpr(jax.make_jaxpr(step)(*args).jaxpr)
    price = Roofline(target(None).device)
    modelled = no_remat(fuse(program, price.seconds).graph).peak_bytes
    assert modelled == pytest.approx(memory.temp_size_in_bytes, rel=0.1)
