"""`remat.linen.checkpoint`: a lifted class, module, method or function that recomputes its residuals."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from flax import linen as nn
from flax.core import lift
from flax.linen.transforms import lift_transform

from remat.aliases import PolicyLike, PyTree
from remat.errors import (
    MethodError,
    PreventCseError,
    StaticArgumentError,
    TargetError,
    closest,
)
from remat.linen.targets import Filter, class_of, is_bound_method, is_module_class, lift_instance
from remat.selection import has_method
from remat.transform.checkpoint import checkpoint as _checkpoint
from remat.transform.statics import Statics, as_argnames

Target = TypeVar("Target")

_METHOD_OPTIONS = (
    "variables",
    "rngs",
    "concrete",
    "prevent_cse",
    "static_argnums",
    "static_argnames",
    "policy",
)


def checkpoint(
    target: Target,
    variables: Filter = True,
    rngs: Filter = True,
    concrete: bool = False,
    prevent_cse: bool = True,
    static_argnums: int | Sequence[int] = (),
    policy: PolicyLike = None,
    methods: Sequence[str] | Mapping[str, Mapping[str, Any]] | None = None,
    *,
    static_argnames: str | Iterable[str] = (),
    keep_names: bool = False,
) -> Target:
    """Make a module recompute its linearization points when it is differentiated.

    Without it every block of a deep model stores the residuals of its backward pass; with it a block
    stores only its inputs. Values, gradients and mutated variables are the same:

    >>> import jax, jax.numpy as jnp, flax.linen as nn
    >>> import remat.linen
    >>> class Block(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x):
    ...         return x + nn.Dense(x.shape[-1])(jnp.sin(nn.Dense(512)(x)))
    >>> class Model(nn.Module):
    ...     block: type[nn.Module]
    ...     @nn.compact
    ...     def __call__(self, x):
    ...         for _ in range(8):
    ...             x = self.block()(x)
    ...         return x.sum()
    >>> x = jnp.ones((256, 8))
    >>> def temporaries(block):
    ...     model = Model(block)
    ...     params = jax.eval_shape(model.init, jax.random.key(0), x)
    ...     step = jax.jit(jax.grad(lambda params: model.apply(params, x)))
    ...     return step.lower(params).compile().memory_analysis().temp_size_in_bytes
    >>> temporaries(remat.linen.remat(Block)) < 0.5 * temporaries(Block)
    True

    Args:
      target: a module class (the result is a class), a module (a module with the same fields,
        parent and name), a method (as a decorator in a class, over or under `nn.compact`), or a
        function that takes a module first.
      variables: the collections that are lifted: True, a name, names, or a `DenyList`. Other collections
        are not available inside.
      rngs: the sequences of random keys that are lifted, in the same way.
      concrete: whether Python may branch on the values of arguments; see `remat.checkpoint`.
      prevent_cse: whether to keep the compiler from merging the recomputation with the forward
        pass. It costs nothing where it is not needed.
      static_argnums: positions of arguments that are not traced. `self` is 0, the first argument
        after it 1; negative numbers count from the end. They hold for arguments given by keyword or
        left at their defaults, too.
      policy: what may be saved; see `remat.checkpoint`.
      methods: the methods to lift, `("__call__",)` if None: their names, or a mapping from names to
        options of this function that differ for that method. Ignored for functions and methods.
      static_argnames: the same as `static_argnums` by name. A name applies to the lifted methods
        that have an argument of that name.
      keep_names: whether submodules of the lifted class are named after the original class
        (`Block_0`) and not, as Flax does, after the lifted one (`CheckpointBlock_0`). Names determine
        the paths of parameters and the random keys that initialize them, so with `keep_names=True` both
        are those of the model without `remat`.

    Returns:
      The lifted target, of the same kind: a class, module, method or function.

    Raises:
      TargetError: for a target of another kind.
      MethodError: for a method that the class does not have.
      StaticArgumentError: for static arguments that a lifted method or a call does not have.
      PolicyError, PreventCseError, EffectError: as in `remat.checkpoint`.

    Reference: `flax.linen.remat`.
    """
    options = {
        "variables": variables,
        "rngs": rngs,
        "concrete": concrete,
        "prevent_cse": prevent_cse,
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
        "policy": policy,
    }
    if isinstance(target, nn.Module):
        return lift_instance(
            target, functools.partial(checkpoint, methods=methods, keep_names=keep_names, **options)
        )
    if is_module_class(target):
        lifted = _lift_class(target, methods, options)
        return _named_after(target, lifted) if keep_names else lifted
    if is_bound_method(target):
        module = target.__self__  # type: ignore[attr-defined]
        return functools.partial(_lift_function(target.__func__, options), module)  # type: ignore
    if callable(target):
        return _lift_function(target, options)
    raise TargetError(
        f"remat.linen.remat takes a Module class, a Module, a method, or a function that takes a "
        f"Module first, not {target!r}."
    )


remat = checkpoint


def _lift_class(target: Target, methods: object, options: dict[str, Any]) -> Target:
    cls = class_of(target)
    by_method = {name: {**options, **own} for name, own in _as_mapping(methods).items()}
    if len(by_method) > 1:
        _share_out_argnames(cls, by_method)
    for name, own in by_method.items():
        by_method[name] = _transform_options(_method_of(cls, name), own)
    return lift_transform(_core_checkpoint, target, methods=by_method)


def _share_out_argnames(cls: type, by_method: dict[str, dict[str, Any]]) -> None:
    """Give each method those static names that it has; raise for a name that no method has."""
    known = {name: _names_of_arguments(_method_of(cls, name)) for name in by_method}
    everywhere = frozenset().union(*(names or () for names in known.values()))
    for method, own in by_method.items():
        names, has = as_argnames(own["static_argnames"]), known[method]
        for name in names:
            if name not in everywhere and None not in known.values():
                raise StaticArgumentError(
                    f"static_argnames={names}: none of {cls.__name__}'s lifted methods "
                    f"{tuple(by_method)} has an argument {name!r}; {closest(name, everywhere)}"
                )
        own["static_argnames"] = tuple(name for name in names if has is None or name in has)


def _lift_function(target: Callable, options: dict[str, Any]) -> Any:
    transform_options = _transform_options(target, options)
    lifted = lift_transform(_core_checkpoint, target, **transform_options)
    if hasattr(target, "compact"):
        return lifted

    @functools.wraps(lifted)
    def method(*args: PyTree, **kwargs: PyTree) -> PyTree:
        # `nn.compact` over `remat` sets an attribute here, but Flax reads that of the lifted one.
        if hasattr(method, "compact"):
            return lift_transform(_core_checkpoint, compact, **transform_options)(*args, **kwargs)
        return lifted(*args, **kwargs)

    @nn.compact
    @functools.wraps(target)
    def compact(*args: PyTree, **kwargs: PyTree) -> PyTree:
        return target(*args, **kwargs)

    return method


def _transform_options(fun: Callable, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of `_core_checkpoint` for one method or function."""
    options = dict(options)
    argnums, argnames = options.pop("static_argnums"), options.pop("static_argnames")
    statics = Statics.of(fun, argnums, argnames)
    if 0 in statics.argnums or -len(statics.positional()) in statics.argnums:
        raise StaticArgumentError(
            f"static_argnums={argnums!r} of {getattr(fun, '__qualname__', fun)}: 0 is the module "
            "itself, which is never traced. The first argument after it is 1."
        )
    if not isinstance(options["prevent_cse"], bool):
        raise PreventCseError(
            f"prevent_cse of remat.linen.remat is a bool, not {options['prevent_cse']!r}. For one "
            "bool per argument use remat.checkpoint inside the module."
        )
    return {**options, "statics": statics}


def _core_checkpoint(
    fn: Callable[..., PyTree],
    *,
    variables: Filter,
    rngs: Filter,
    concrete: bool,
    prevent_cse: bool,
    policy: PolicyLike,
    statics: Statics,
) -> Callable[..., PyTree]:
    """Checkpoint a function of scopes, as `flax.core.lift.checkpoint` does."""

    def inner(
        scope_fn: Callable,
        repack_fn: Callable,
        variables: PyTree,
        rngs: PyTree,
        *args: PyTree,
        **kwargs: PyTree,
    ) -> PyTree:
        # The method's first argument is its module. `rematted` has two others in its place: the
        # variables and the keys.
        argnums, argnames = statics.in_call((None, *args), kwargs)

        def rematted(variables: PyTree, rngs: PyTree, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
            scopes = scope_fn(variables, rngs)
            result = fn(scopes, *args, **kwargs)
            return result, repack_fn(scopes)

        return _checkpoint(
            rematted,
            concrete=concrete,
            prevent_cse=prevent_cse,
            policy=policy,
            static_argnums=tuple(n + 1 for n in argnums),
            static_argnames=argnames,
        )(variables, rngs, *args, **kwargs)

    return lift.pack(inner, (variables,), (variables,), (rngs,), name="remat", enable_kwargs=True)


_core_checkpoint.__name__ = "checkpoint"  # Flax names a lifted class after the transform


# --------------------------------------------------------------------------------------------------
# Methods


def _as_mapping(methods: object) -> dict[str, Mapping[str, Any]]:
    """Return the methods to lift, and the options that differ for each."""
    if methods is None:
        return {"__call__": {}}
    if isinstance(methods, (list, tuple, Mapping)) and not methods:
        raise MethodError("methods is empty, so nothing would be rematerialized.")
    if isinstance(methods, Mapping):
        for name, different in methods.items():
            for option in different:
                if option not in _METHOD_OPTIONS:
                    raise MethodError(
                        f"methods[{name!r}] has no option {option!r}; "
                        f"{closest(option, _METHOD_OPTIONS)}"
                    )
        return dict(methods)
    if isinstance(methods, (list, tuple)) and all(isinstance(name, str) for name in methods):
        return {name: {} for name in methods}
    raise MethodError(
        "methods is a list or tuple of method names, a mapping from names to options, or None, "
        f"not {methods!r}."
    )


def _method_of(cls: type[nn.Module], name: str) -> Callable:
    """Return a method of a class; raise for a name that is not a method's."""

    def is_method(name: str) -> bool:
        return has_method(cls, name) and name not in cls.__dataclass_fields__

    if not is_method(name):
        names = [n for n in dir(cls) if n not in dir(nn.Module) and not n.startswith("__")]
        own = [n for n in ("__call__", *names) if is_method(n)]
        raise MethodError(f"{cls.__name__} has no method {name!r} to lift; {closest(name, own)}")
    return getattr(cls, name)


def _names_of_arguments(fun: Callable) -> frozenset[str] | None:
    """Return the names of a function's parameters, or None if it takes any or has no signature."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (ValueError, TypeError):
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters)


def _named_after(original: object, lifted: Target) -> Target:
    """Return the lifted class under the original's name, since Flax names submodules by class."""
    cls, name = class_of(lifted), class_of(original)
    cls.__name__, cls.__qualname__, cls.__module__ = (
        name.__name__,
        name.__qualname__,
        name.__module__,
    )
    return lifted
