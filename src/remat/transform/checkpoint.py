"""`remat.checkpoint`: the public transform, from a function's arguments to one equation.

A call goes through four steps: static arguments are taken out, the function is traced to a jaxpr
(once for each function, signature and static values; the cache holds the function weakly), the
policy is checked against what was traced, and the primitive is bound.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from remat import _jax
from remat.aliases import Array, Aval, DebugInfo, Leaf, PolicyLike, PyTree, TreeDef
from remat.errors import PreventCseError
from remat.transform import policies, primitive
from remat.transform.refs import with_values
from remat.transform.statics import Statics, without_statics

_jax.exclude_from_tracebacks(__file__)

P = ParamSpec("P")
R = TypeVar("R")


@overload
def checkpoint(
    fun: Callable[P, R],
    /,
    *,
    concrete: bool = ...,
    prevent_cse: PyTree = ...,
    policy: PolicyLike = ...,
    static_argnums: int | Sequence[int] = ...,
    static_argnames: str | Iterable[str] = ...,
) -> Callable[P, R]: ...


@overload
def checkpoint(
    fun: None = None,
    /,
    *,
    concrete: bool = ...,
    prevent_cse: PyTree = ...,
    policy: PolicyLike = ...,
    static_argnums: int | Sequence[int] = ...,
    static_argnames: str | Iterable[str] = ...,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


@_jax.api_boundary
def checkpoint(
    fun: Callable | None = None,
    /,
    *,
    concrete: bool = False,
    prevent_cse: PyTree = True,
    policy: PolicyLike = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
) -> Callable:
    """Make a function recompute its linearization points when it is differentiated.

    Reverse-mode differentiation needs the points at which the function's operations were linearized.
    Without `checkpoint` they are stored in the forward pass; with it only the function's inputs are stored,
    and the other points are recomputed when the cotangents arrive. Values and gradients are the same. The
    compiler's own figures show the difference:

    >>> import jax, jax.numpy as jnp, remat
    >>> def block(x, w):
    ...     for _ in range(4):
    ...         x = jnp.tanh(x @ w)
    ...     return x
    >>> def loss(block, x, w):
    ...     for _ in range(8):
    ...         x = block(x, w)
    ...     return x.sum()
    >>> x, w = jnp.ones((1000, 64)), jnp.eye(64)
    >>> def temporaries(block):
    ...     step = jax.jit(jax.grad(lambda x: loss(block, x, w)))
    ...     return step.lower(x).compile().memory_analysis().temp_size_in_bytes
    >>> temporaries(remat.checkpoint(block)) < 0.5 * temporaries(block)
    True

    It is also a decorator, `@remat.checkpoint`; with options only it returns one,
    `@remat.checkpoint(policy=...)`.

    Args:
      fun: the function. Its array arguments and results may be in any pytree.
      concrete: whether `fun` may branch in Python on the values of its arguments (`if x > 0`). It
        works wherever the values are known: outside `jit`, also under `grad`, `vjp`, `jvp` and
        `linearize`. Values that a branch depends on are computed twice, and `fun` is traced in every call.
      prevent_cse: whether to keep the compiler from merging recomputation with the forward pass,
        which would undo the effect. It costs nothing where it is not needed (in bodies of `scan`).
        A pytree prefix of the (non-static) arguments with bool leaves chooses for each argument.
      policy: what may be saved: one of `remat.policies` or of `jax.checkpoint_policies`, or a
        callable `(primitive, *avals, **params)` that returns a bool, `Saveable`, `Recompute` or
        `Offloadable`. None saves only the inputs. The policy also applies to loops, branches and jitted
        functions inside `fun`.
      static_argnums: positions of arguments that are not traced but specialize the function, as in
        `jax.jit`; negative ones count from the end. They apply to arguments given by keyword or
        left at their defaults, too. Values need not be hashable, but `fun` is traced again in every call
        if one of them is not.
      static_argnames: the same by name. Each of the two implies the other if `fun` has a signature.

    Returns:
      A function with the same signature and results as `fun`.

    Raises:
      StaticArgumentError: for static arguments that `fun` or a call does not have.
      PolicyError: for an invalid policy, such as one that selects a name that no value has.
      PreventCseError: for a `prevent_cse` that is not a prefix of the arguments.
      EffectError: when it is differentiated and has an effect that must not happen twice.
    """
    if fun is None:
        return functools.partial(
            checkpoint,
            concrete=concrete,
            prevent_cse=prevent_cse,
            policy=policy,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
        )
    if not callable(fun):
        raise TypeError(f"remat.checkpoint takes a function, not {fun!r}.")
    if not isinstance(concrete, bool):
        raise TypeError(f"concrete is a bool, not {concrete!r}.")
    policies.check_policy(policy)
    cse = _normalize_prevent_cse(prevent_cse)
    statics = Statics.of(fun, static_argnums, static_argnames)

    # Like `jax.checkpoint`, this returns a function, so its repr is Python's: `<function f at 0x...>`. An
    # object with a repr of its own would not count as a method (`haiku.Module` wraps only what
    # `inspect.isfunction` accepts), and another `__qualname__` would prevent pickling of decorated functions.
    @_jax.wraps(fun)
    @_jax.api_boundary
    def checkpointed(*args: PyTree, **kwargs: PyTree) -> PyTree:
        argnums, argnames = statics.in_call(args, kwargs)
        debug = _jax.debug_info(fun, args, kwargs, argnums, argnames)
        traced, args, kwargs = without_statics(fun, args, kwargs, argnums, argnames)
        leaves, in_tree = _jax.flatten_arguments((args, kwargs))
        avals = tuple(_jax.abstractify(x) for x in leaves)
        _jax.check_ref_arguments(debug, avals, leaves)
        jaxpr, consts, out_tree = _trace(traced, in_tree, avals, leaves, debug, concrete)
        _jax.check_captured_refs(debug, consts, leaves)
        outs = with_values(
            jaxpr,
            (*consts, *leaves),
            lambda jaxpr, values, added: primitive.bind(
                values,
                jaxpr,
                policy=policy,
                prevent_cse=_flat_prevent_cse(cse, args, kwargs, added + len(consts)),
                names_pending=policies.check_names(policy, jaxpr),
            ),
        )
        return jax.tree.unflatten(out_tree, map(_as_array, outs))

    return checkpointed


def _as_array(x: Array) -> Array:
    """Return a result as an array; evaluated eagerly, a constant result is a literal of its jaxpr."""
    if isinstance(x, (bool, int, float, complex)) or (
        isinstance(x, np.ndarray) and x.dtype != jax.dtypes.float0
    ):
        return jnp.asarray(x)
    return x


# --------------------------------------------------------------------------------------------------
# Tracing


def _trace(
    fun: Callable,
    in_tree: TreeDef,
    avals: tuple[Aval, ...],
    leaves: Sequence[Leaf],
    debug: DebugInfo,
    concrete: bool,
) -> tuple[_jax.Jaxpr, tuple[Array, ...], TreeDef]:
    try:
        if concrete:
            values = [_jax.concrete_value(leaf) for leaf in leaves]
            return _jax.trace_concretely(fun, in_tree, avals, values, debug)
        return _cached_trace(fun, in_tree, avals, debug)
    except _jax.ConcretizationTypeError as e:
        (message,) = e.args
        if "for checkpoint" in message:
            e.args = (message + _CONCRETIZATION_HELP[concrete],)
        raise


# Cached: one trace for each function and structure and types of its arguments, while the function lives.
_cached_trace = _jax.weakref_lru_cache(_jax.trace)

_STATIC_HELP = (
    "\n\nIn a function under remat.checkpoint, declare an argument that decides Python control flow "
    "in `static_argnums` or `static_argnames`; "
)
_CONCRETIZATION_HELP = {
    False: _STATIC_HELP
    + "outside jit, `concrete=True` makes the values of all arguments available.\n",
    True: _STATIC_HELP
    + "`concrete=True` is set, but here (under jit, vmap or a loop) the argument has no value yet.\n",
}


# --------------------------------------------------------------------------------------------------
# prevent_cse


def _normalize_prevent_cse(given: PyTree) -> PyTree:
    if isinstance(given, bool):
        return given
    leaves = jax.tree.leaves(given)
    if not leaves or not all(isinstance(leaf, bool) for leaf in leaves):
        raise PreventCseError(
            "prevent_cse must be a bool or tuple of bools (or another pytree prefix of the arguments "
            f"with bool leaves), got {given!r} of {type(given)}"
        )
    return tuple(given) if isinstance(given, list) else given


def _flat_prevent_cse(
    given: PyTree, args: tuple, kwargs: dict, n_consts: int
) -> primitive.PreventCse:
    if isinstance(given, bool):
        return given
    arguments = (tuple(args), kwargs) if kwargs else tuple(args)
    try:
        flags = _jax.broadcast_prefix(given, arguments)
    except ValueError as e:
        raise PreventCseError(
            f"prevent_cse={given!r} is not a pytree prefix of the arguments {jax.tree.structure(arguments)}"
            " (static ones left out; with keyword arguments the pair (args, kwargs)). Give a bool, or "
            "one bool for each argument."
        ) from e
    return (False,) * n_consts + tuple(flags)
