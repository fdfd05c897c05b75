"""`remat.rematted`: rematerialization of a model's submodules without editing the model.

Each adapter has a function `rematted` that finds submodules by path as its framework requires. This
module only chooses the adapter by the class of the model, so that no framework is imported before it
is needed.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from contextlib import AbstractContextManager

from remat.aliases import PolicyLike, PyTree
from remat.errors import TargetError
from remat.selection import Selection
from remat.transform.policies import check_policy

# The package that defines a framework's `Module` → the adapter module that has its `rematted`.
ADAPTERS = {
    "flax.linen": "remat.linen.by_path",
    "flax.nnx": "remat.nnx.by_path",
    "equinox": "remat.equinox",
}


def rematted(
    path_globs: str | Iterable[str],
    model: PyTree = None,
    *,
    policy: PolicyLike = None,
    prevent_cse: bool = True,
    methods: str | Iterable[str] = ("__call__",),
    strict: bool = True,
) -> AbstractContextManager[PyTree]:
    """Rematerialize the submodules at some paths, without editing the model.

    Names of parameters, their initial values and the random numbers that are drawn stay the same.

    In Flax Linen the context acts on the model's `init` and `apply`, or on those of every model if
    none is given:

    >>> import flax.linen as nn, jax, jax.numpy as jnp, remat
    >>> model = nn.Sequential([nn.Dense(4), jnp.sin, nn.Dense(1)])
    >>> x = jnp.ones((2, 3))
    >>> params = model.init(jax.random.key(0), x)
    >>> with remat.rematted("layers_*", model, policy=remat.policies.dots_saveable):
    ...     grads = jax.grad(lambda params: model.apply(params, x).sum())(params)

    In Flax NNX and Equinox the model is given, and the context returns it. An NNX model is changed
    in place until the context ends; of an Equinox model it is a changed copy.

    >>> from flax import nnx
    >>> rngs = nnx.Rngs(0)
    >>> model = nnx.Sequential(nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 1, rngs=rngs))
    >>> with remat.rematted("layers/*", model) as model:
    ...     grads = nnx.grad(lambda model: model(x).sum())(model)

    Args:
      path_globs: a pattern or several. A pattern selects a module if it matches the end of its path,
        `"encoder/layers_*"`, or with a leading `/` all of it; `*` and `?` stand for part of one name,
        `**` for any number of names. See `remat.globs`.
      model: the model. For Linen it may be left out; the context then acts on every model.
      policy, prevent_cse: as in `remat.checkpoint`.
      methods: a method name or several; those that a module has are rematerialized.
      strict: whether a pattern that matches nothing is an error.

    Returns:
      A context manager, which returns the model.

    Raises:
      UnknownNameError: a pattern matches no module; the message lists the paths; for Linen at
        the end of the context, as only then the modules are known.
      TargetError: for a model of no framework known here, or a pattern of which no module has such
        a method (for Linen at the end of the context).
      MethodError: `methods` has an item that is not a method name.
    """
    adapter = importlib.import_module(_adapter_of(model))
    check_policy(policy)
    selection = Selection.of(path_globs, methods, strict=strict)
    context: AbstractContextManager[PyTree] = adapter.rematted(
        selection, model, policy=policy, prevent_cse=prevent_cse
    )
    return context


def _adapter_of(model: PyTree) -> str:
    if model is None:
        return ADAPTERS["flax.linen"]
    for cls in type(model).__mro__:
        for package, adapter in ADAPTERS.items():
            if cls.__name__ == "Module" and f"{cls.__module__}.".startswith(f"{package}."):
                return adapter
    raise TargetError(
        f"remat.rematted takes a module of {', '.join(sorted(ADAPTERS))}, not a "
        f"{type(model).__module__}.{type(model).__qualname__}."
    )
