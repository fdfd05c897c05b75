"""Which operands of products and convolutions a compiler copies into another order of dimensions.

XLA computes products of matrices, batched or not. If an operand of `dot_general` has several kept or
contracted dimensions, or its batch dimensions are not the first ones, XLA's pass DotDecomposer transposes the
operands to (batch, kept, contracted) and (batch, contracted, kept). On a CPU this is a copy: the gradient of
the weights of a dense layer on f32[batch, length, width] copies one of its two operands, which is often the
largest value of the layer. Compilers for TPUs and GPUs choose the layouts of operands instead.

Convolutions on a CPU take operands in the order (batch, space, features) and kernels in the order (space,
features, features of the result). In the gradient of a kernel, both operands have another order.
"""

from __future__ import annotations

from collections.abc import Sequence

from remat import _jax


def transposed_operands(eqn: _jax.JaxprEqn) -> tuple[int, ...]:
    """Return the places of the operands of an equation that are transposed before a product or convolution.

    >>> import jax, jax.numpy as jnp
    >>> x, g = jnp.ones((4, 16, 8)), jnp.ones((4, 16, 32))
    >>> weights = jax.make_jaxpr(lambda x, g: jnp.einsum("btd,btf->df", x, g))(x, g)
    >>> transposed_operands(weights.eqns[0])
    (0,)
    """
    if eqn.primitive.name == "conv_general_dilated":
        return _of_convolution(eqn)
    if eqn.primitive.name != "dot_general":
        return ()
    contracted, batch = eqn.params["dimension_numbers"]
    shapes = [tuple(v.aval.shape) for v in eqn.invars]
    if all(map(_is_matrix, shapes, contracted, batch)):
        return ()
    found = []
    for at, (shape, over, of_batch) in enumerate(zip(shapes, contracted, batch, strict=True)):
        kept = [d for d in range(len(shape)) if d not in over and d not in of_batch]
        order = [*of_batch, *over, *kept] if at else [*of_batch, *kept, *over]
        if not _is_in_order(order, shape):
            found.append(at)
    return tuple(found)


def _of_convolution(eqn: _jax.JaxprEqn) -> tuple[int, ...]:
    numbers = eqn.params["dimension_numbers"]
    batch, features, *space = numbers.lhs_spec
    of_result, of_operand, *window = numbers.rhs_spec
    orders = ([batch, *space, features], [*window, of_operand, of_result])
    operands = zip(orders, eqn.invars, strict=True)
    return tuple(
        n for n, (order, v) in enumerate(operands) if not _is_in_order(order, v.aval.shape)
    )


def _is_in_order(order: Sequence[int], shape: Sequence[int]) -> bool:
    """Return whether memory has dimensions in this order already; those of size 1 do not count."""
    long = [d for d in order if shape[d] > 1]
    return long == sorted(long)


def _is_matrix(shape: Sequence[int], over: Sequence[int], of_batch: Sequence[int]) -> bool:
    """Return whether an operand is already a matrix or a batch of matrices."""
    is_leading = list(of_batch) == list(range(len(of_batch)))
    return is_leading and len(over) == 1 and len(shape) <= len(of_batch) + 2
