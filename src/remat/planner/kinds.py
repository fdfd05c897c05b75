"""What an equation means to a compiler that fuses loops: which values are kernels of their own.

The names are those of JAX's primitives. One that is not listed and looks elementwise is taken as such.
"""

from __future__ import annotations

from remat import _jax
from remat.planner.program import FUSIBLE, Kind

_VIEWS = frozenset(
    {"reshape", "squeeze", "expand_dims", "copy", "copy_p", "name", "stop_gradient", "remat_mark",
     "optimization_barrier", "pvary", "pcast", "sharding_constraint", "bitcast_convert_type",
     "mesh_cast", "reshard", "symbolic_zeros"}
)  # fmt: skip
_COSTLY = frozenset(
    {"exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic", "erf", "erfc", "erf_inv", "sin",
     "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "asinh", "acosh", "atanh", "pow",
     "sqrt", "rsqrt", "cbrt", "lgamma", "digamma", "div", "rem", "igamma", "igammac"}
)  # fmt: skip
_CHEAP = frozenset(
    {"add", "sub", "mul", "neg", "max", "min", "select_n", "convert_element_type", "abs", "sign",
     "broadcast_in_dim", "iota", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "not",
     "transpose", "integer_pow", "square", "reduce_precision", "add_any", "slice", "pad", "rev",
     "is_finite", "clamp", "floor", "ceil", "round", "real", "imag", "complex", "conj", "nextafter",
     "shift_left", "shift_right_logical", "shift_right_arithmetic", "population_count", "clz",
     "eq_to", "lt_to", "le_to", "full", "concatenate", "dynamic_slice", "split",
     "random_wrap", "random_unwrap", "empty2"}
)  # fmt: skip
# Of the shape of their operands, but kernels of their own.
_OPAQUE = frozenset(
    {"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "sort", "fft", "cholesky", "lu", "qr",
     "triangular_solve", "eigh", "eig", "svd", "schur", "hessenberg", "random_bits", "threefry2x32",
     "random_gamma", "rng_bit_generator", "rng_uniform", "pallas_call", "custom_lin", "device_put",
     "ffi_call", "pure_callback", "io_callback", "debug_callback", "custom_partitioning",
     "tridiagonal_solve", "approx_top_k", "dynamic_update_slice", "scatter", "scatter-add",
     "scatter_add", "scatter_mul", "scatter-update", "conv_general_dilated", "dot_general",
     "linear_solve", "custom_root", "symmetric_product"}
)  # fmt: skip
COLLECTIVES = frozenset(
    {"psum", "psum2", "psum_invariant", "pmax", "pmin", "ppermute", "pbroadcast", "all_to_all",
     "all_gather", "all_gather_invariant", "all_gather_reduced", "reduce_scatter",
     "psum_scatter", "unreduced_psum", "ragged_all_to_all"}
)  # fmt: skip


def inline_body(eqn: _jax.JaxprEqn) -> _jax.Jaxpr | None:
    """The body of an equation that is a call: its operations stand in the program around it."""
    name = eqn.primitive.name
    if name in ("jit", "pjit", "closed_call", "core_call", "eval_jaxpr", "shard_map", "custom_jvp_call",
                "custom_vjp_call", "custom_vjp_call_jaxpr"):  # fmt: skip
        for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
            if _jax.is_jaxpr(eqn.params.get(key)):
                return _jax.open_jaxpr(eqn.params[key])
    if name in ("remat", "checkpoint", "remat2"):
        return _jax.open_jaxpr(eqn.params["jaxpr"])
    return None


def kind_of(eqn: _jax.JaxprEqn) -> Kind:
    """What an equation means to a compiler that fuses loops."""
    name = eqn.primitive.name
    body = inline_body(eqn)
    if body is not None:
        return _kind_of_call(body) if len(eqn.outvars) == 1 else Kind.OPAQUE
    if name in _VIEWS:
        return Kind.VIEW
    if name in _CHEAP:
        return Kind.CHEAP
    if name in _COSTLY:
        return Kind.COSTLY
    if name.startswith(("reduce_", "argm")) and name != "reduce_scatter":
        return Kind.REDUCE
    if name in _OPAQUE | COLLECTIVES or _jax.has_body(eqn) or eqn.effects or len(eqn.outvars) != 1:
        return Kind.OPAQUE
    # What is not known and looks elementwise is: new JAX versions bring new ones.
    shape = getattr(eqn.outvars[0].aval, "shape", None)
    alike = all(getattr(v.aval, "shape", None) in (shape, ()) for v in eqn.invars)
    return Kind.CHEAP if alike and eqn.invars else Kind.OPAQUE


def _kind_of_call(body: _jax.Jaxpr) -> Kind:
    """The dearest of what it does, if compilers fuse all of it."""
    kinds = {kind_of(eqn) for eqn in body.eqns}
    if not kinds <= FUSIBLE:
        return Kind.OPAQUE
    return next((kind for kind in (Kind.COSTLY, Kind.CHEAP) if kind in kinds), Kind.VIEW)


def is_elementwise(eqn: _jax.JaxprEqn) -> bool:
    """Whether compilers compute it inside the kernel that uses it."""
    return kind_of(eqn) in FUSIBLE
