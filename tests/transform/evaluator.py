"""An interpreter of jaxprs that compiles almost nothing: it uses NumPy where that is equivalent.

Python runs loops, branches and calls. A primitive without an entry in `NUMPY` is bound, and therefore
compiled by itself for every new shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal


def interpreted(f: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Return a function that traces `f`, evaluates its jaxpr here, and returns the leaves of its results."""

    def run(*args: Any) -> list[Any]:
        closed = jax.make_jaxpr(f)(*args)
        return evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args))

    return run


def evaluate(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Return a jaxpr's results, evaluated operation by operation, loops and branches included."""
    with np.errstate(all="ignore"):
        return _evaluate(jaxpr, [_array(c) for c in consts], [_array(a) for a in args])


def _evaluate(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    env = dict(zip(jaxpr.constvars, consts)) | dict(zip(jaxpr.invars, args, strict=True))

    def read(v: Any) -> Any:
        return np.asarray(v.val, v.aval.dtype) if isinstance(v, Literal) else env[v]

    for eqn in jaxpr.eqns:
        outs = _apply(eqn, [read(v) for v in eqn.invars])
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _array(x: Any) -> Any:
    """Return a NumPy array; keys and refs, which have none, are returned as they are."""
    if isinstance(x, jax.Array) and not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return np.asarray(x)
    return x


def _apply(eqn: JaxprEqn, args: list[Any]) -> list[Any]:
    params = eqn.params
    kind = eqn.primitive.name
    in_numpy = NUMPY.get(kind)
    if in_numpy is not None and all(isinstance(a, np.ndarray) for a in args):
        out = in_numpy(*args, **params)
        if out is not NotImplemented:
            outs = out if eqn.primitive.multiple_results else [out]
            for a, v in zip(outs, eqn.outvars, strict=True):
                assert a.dtype == v.aval.dtype and a.shape == v.aval.shape, (kind, params)
            return [np.asarray(a) for a in outs]
    body = params.get("jaxpr", params.get("call_jaxpr", params.get("fun_jaxpr")))
    if kind == "scan":
        return _scan(eqn, body, args)
    if kind == "while":
        return _while(args, params)
    if kind == "cond":
        index, *args = args
        return _call(params["branches"][int(index)], args)
    if body is not None:
        return _call(body, args)
    out = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(params))
    return [_array(o) for o in (out if eqn.primitive.multiple_results else [out])]


def _call(body: Any, args: Sequence[Any]) -> list[Any]:
    inner = getattr(body, "jaxpr", body)
    return _evaluate(inner, [_array(c) for c in getattr(body, "consts", ())], args)


def _scan(eqn: JaxprEqn, body: Any, args: Sequence[Any]) -> list[Any]:
    params = eqn.params
    if "ft_in" in params:  # from JAX 0.11 on
        n_consts, n_carry, _ = (len(part) for part in params["ft_in"].unpack())
    else:
        n_consts, n_carry = params["num_consts"], params["num_carry"]
    consts, carry = list(args[:n_consts]), list(args[n_consts : n_consts + n_carry])
    xs = args[n_consts + n_carry :]
    order = range(params["length"])
    rows = {}
    for i in reversed(order) if params["reverse"] else order:
        outs = _call(body, [*consts, *carry, *(_array(x[i]) for x in xs)])
        carry, rows[i] = outs[:n_carry], outs[n_carry:]
    columns = zip(*(rows[i] for i in order)) if rows else [[] for _ in eqn.outvars[n_carry:]]
    return [*carry, *(_stacked(c, v.aval) for c, v in zip(columns, eqn.outvars[n_carry:]))]


def _stacked(rows: Sequence[Any], aval: Any) -> Any:
    if not rows:
        return _array(jax.numpy.zeros(aval.shape, aval.dtype))
    if all(isinstance(row, np.ndarray) for row in rows):
        return np.stack(rows)
    return jax.numpy.stack(rows)


def _while(args: list[Any], params: dict[str, Any]) -> list[Any]:
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    of_cond, of_body = args[:n_cond], args[n_cond : n_cond + n_body]
    carry = args[n_cond + n_body :]
    while True:
        (goes_on,) = _call(params["cond_jaxpr"], [*of_cond, *carry])
        if not goes_on.any():
            return carry
        new = _call(params["body_jaxpr"], [*of_body, *carry])
        # With a batched condition only some examples continue.
        carry = [_where(goes_on, n, c) for n, c in zip(new, carry)] if goes_on.ndim else new


def _where(goes_on: Any, new: Any, old: Any) -> Any:
    is_key = jax.dtypes.issubdtype(new.dtype, jax.dtypes.extended)  # NumPy has no such type
    where = jax.numpy.where if is_key else np.where
    return where(goes_on.reshape(goes_on.shape + (1,) * (new.ndim - goes_on.ndim)), new, old)


# --------------------------------------------------------------------------------------------------
# Operations


def _broadcast(x: Any, *_: Any, shape: Any, broadcast_dimensions: Any, **__: Any) -> Any:
    ones = [1] * len(shape)
    for size, at in zip(x.shape, broadcast_dimensions):
        ones[at] = size
    return np.broadcast_to(x.reshape(ones), shape)


def _start(index: Sequence[Any], sizes: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    starts = [min(max(int(i), 0), n - size) for i, size, n in zip(index, sizes, shape)]
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes))


def _updated(x: Any, update: Any, *index: Any, **_: Any) -> Any:
    x = x.copy()
    x[_start(index, update.shape, x.shape)] = update
    return x


def _dot(a: Any, b: Any, *, dimension_numbers: Any, preferred_element_type: Any, **_: Any) -> Any:
    (a_summed, b_summed), (a_batch, b_batch) = dimension_numbers
    letters = iter("abcdefghijklmnop")
    of_a, of_b = [next(letters) for _ in a.shape], [next(letters) for _ in b.shape]
    for i, j in zip((*a_summed, *a_batch), (*b_summed, *b_batch)):
        of_b[j] = of_a[i]
    batch = [of_a[i] for i in a_batch]
    rest = [s for i, s in enumerate(of_a) if i not in (*a_summed, *a_batch)]
    rest += [s for j, s in enumerate(of_b) if j not in (*b_summed, *b_batch)]
    dtype = np.dtype(preferred_element_type or a.dtype)
    wide = np.float64 if dtype.kind in "fV" else dtype
    subscripts = f"{''.join(of_a)},{''.join(of_b)}->{''.join(batch + rest)}"
    return np.einsum(subscripts, a.astype(wide), b.astype(wide)).astype(dtype)


def _rounded(x: Any, *, exponent_bits: int, mantissa_bits: int) -> Any:
    """Return a value that already has the requested precision, as residuals do."""
    of = {"float64": (11, 52), "float32": (8, 23), "float16": (5, 10), "bfloat16": (8, 7)}
    return x if of.get(x.dtype.name) == (exponent_bits, mantissa_bits) else NotImplemented


def _selected(which: Any, *cases: Any) -> Any:
    return np.choose(which, cases) if len(cases) > 2 else np.where(which, *reversed(cases))


def _converted(x: Any, *, new_dtype: Any, **_: Any) -> Any:
    if jax.dtypes.issubdtype(new_dtype, jax.dtypes.extended):
        return NotImplemented
    return x.astype(new_dtype)


def _floating(f: Callable) -> Callable:
    return lambda *args, **_: f(*args) if args[0].dtype.kind in "fVc" else NotImplemented


def _same(f: Callable) -> Callable:
    return lambda *args, **_: f(*args)


def _reduced(f: Callable) -> Callable:
    return lambda x, *, axes, **_: f(x, axis=tuple(axes))


_FLOATING = {
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "tanh": np.tanh,
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "log1p": np.log1p,
    "expm1": np.expm1,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: (1 / np.sqrt(x)).astype(x.dtype),
    "logistic": lambda x: (1 / (1 + np.exp(-x))).astype(x.dtype),
    "floor": np.floor,
    "div": np.divide,
}
_SAME = {
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "neg": np.negative,
    "abs": np.abs,
    "sign": np.sign,
    "square": np.square,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "real": np.real,
    "imag": np.imag,
    "conj": np.conj,
    "is_finite": np.isfinite,
    "copy": np.copy,
    "copy_p": np.copy,
    "stop_gradient": np.asarray,
    "name": np.asarray,
    "optimization_barrier": lambda *args: list(args),
}
NUMPY: dict[str, Callable[..., Any]] = {
    **{name: _floating(f) for name, f in _FLOATING.items()},
    **{name: _same(f) for name, f in _SAME.items()},
    "integer_pow": lambda x, *, y: (x**y if y > 0 else 1 / x**-y).astype(x.dtype),
    "select_n": _selected,
    "convert_element_type": _converted,
    "reduce_precision": _rounded,
    "broadcast_in_dim": _broadcast,
    "reshape": lambda x, *, new_sizes, **_: x.reshape(new_sizes),
    "squeeze": lambda x, *, dimensions: np.squeeze(x, tuple(dimensions)),
    "transpose": lambda x, *, permutation: np.transpose(x, permutation),
    "rev": lambda x, *, dimensions: np.flip(x, tuple(dimensions)),
    "concatenate": lambda *xs, dimension: np.concatenate(xs, dimension),
    "slice": lambda x, *, start_indices, limit_indices, strides: x[
        tuple(map(slice, start_indices, limit_indices, strides or [None] * x.ndim))
    ],
    "dynamic_slice": lambda x, *index, slice_sizes: x[_start(index, slice_sizes, x.shape)],
    "dynamic_update_slice": _updated,
    "reduce_sum": lambda x, *, axes, **_: np.sum(x, axis=tuple(axes), dtype=x.dtype),
    "reduce_max": _reduced(np.max),
    "reduce_min": _reduced(np.min),
    "reduce_and": _reduced(np.all),
    "reduce_or": _reduced(np.any),
    "argmax": lambda x, *, axes, index_dtype: np.argmax(x, axes[0]).astype(index_dtype),
    "dot_general": _dot,
}
