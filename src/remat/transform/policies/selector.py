"""Selectors: the values of a region that a part of a policy decides about."""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from remat import _jax, units
from remat.aliases import Aval, Eqn, Size
from remat.errors import PolicyError, closest
from remat.globs import any_name_matches, path_matches
from remat.ir import flops


class RegionValue(NamedTuple):
    """One value of a region, as a policy sees it."""

    names: frozenset[str]  # given by checkpoint_name
    primitive: str
    path: str  # the name stack: "encoder/layer_0/attention"
    aval: Aval
    eqn: Eqn  # the equation that computes it
    is_result_of_body: bool  # computed by a loop, branch or called function, whose body has it, too

    @property
    def n_bytes(self) -> Size:
        return self.aval.size * _jax.itemsize_bytes(self.aval)

    @property
    def flops(self) -> Size:
        # A loop or a call has none of its own: the operations in its body have them.
        return 0 if self.is_result_of_body else flops.flops_of(self.eqn, transcendental=1)


class Selectors(TypedDict, total=False):
    """The keywords by which `save`, `recompute` and `offload` select values."""

    primitive: str | Iterable[str]
    dtype: DTypeLike | Iterable[DTypeLike] | None
    path: str | None
    min_bytes: int | str | None
    max_bytes: int | str | None
    min_flops_per_byte: float | None
    strict: bool


@dataclasses.dataclass(frozen=True)
class Selector:
    """Selects the values that meet all given conditions.

    One of several names, primitives or dtypes is enough. Sizes are in bytes. If `strict`, it is an error
    that a name, a path or a primitive does not exist.
    """

    names: tuple[str, ...] = ()
    primitive: tuple[str, ...] = ()
    dtype: tuple[str, ...] = ()
    path: str | None = None
    min_bytes: int | None = None
    max_bytes: int | None = None
    min_flops_per_byte: float | None = None
    strict: bool = True

    @staticmethod
    def of(names: tuple[str, ...], given: Selectors) -> Selector:
        """Return the selector for the arguments of a call.

        Raises:
          TypeError: for an unknown selector.
          PolicyError: for a value of a wrong type, or bounds that no value can hold.
          UnitsError: for a size that is not a number of bytes.
        """
        known = [field.name for field in dataclasses.fields(Selector) if field.name != "names"]
        for keyword in given:
            if keyword not in known:
                raise TypeError(
                    f"{keyword!r} is not a selector of a policy; {closest(keyword, known)}"
                )
        check_strings(names, "checkpoint names")
        wanted = {name: _READ[name](value) for name, value in given.items()}
        selector = Selector(names, **wanted)
        fewest, most = selector.min_bytes, selector.max_bytes
        if fewest is not None and most is not None and fewest > most:
            raise PolicyError(
                f"min_bytes={given['min_bytes']!r} is more than max_bytes={given['max_bytes']!r}: no "
                "value has such a size. Exchange them, or leave one out."
            )
        return selector

    def selects(self, value: RegionValue, undecided: bool = False) -> bool:
        """Return whether a value is selected, or `undecided` where symbolic dimensions leave it open."""
        # The result of a loop or a call is selected by its name or by the primitive of the loop or
        # call only. Other properties select the same value inside the body.
        if value.is_result_of_body and not self.names and value.primitive not in self.primitive:
            return False
        return (
            (not self.names or any(any_name_matches(p, value.names) for p in self.names))
            and (not self.primitive or value.primitive in self.primitive)
            and (not self.dtype or str(getattr(value.aval, "dtype", None)) in self.dtype)
            and (self.path is None or path_matches(self.path, value.path))
            and self._is_within_bounds(value, undecided)
        )

    def _is_within_bounds(self, value: RegionValue, undecided: bool) -> bool:
        def holds(compare: Callable[[], object]) -> bool:
            answer = _jax.decided(compare)
            return undecided if answer is None else answer

        least, most, ratio = self.min_bytes, self.max_bytes, self.min_flops_per_byte
        if least is not None and not holds(lambda: value.n_bytes >= least):
            return False
        if most is not None and not holds(lambda: value.n_bytes <= most):
            return False
        if ratio is None:
            return True
        flops, n_bytes = ratio.as_integer_ratio()  # expressions in symbols have no fractions
        return holds(lambda: value.flops * n_bytes >= flops * _jax.largest(value.n_bytes, 1))

    def arguments(self) -> list[str]:
        """Return the arguments of a call that makes this selector, as source code."""
        keywords = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "names" and getattr(self, field.name) != field.default
        }
        return [
            *(repr(name) for name in self.names),
            *(f"{name}={value!r}" for name, value in keywords.items()),
        ]


# --------------------------------------------------------------------------------------------------
# Arguments


def check_strings(given: Iterable[object], what: str) -> None:
    """Raise unless all items are non-empty strings."""
    for item in given:
        if isinstance(item, str) and item:
            continue
        hint = ""
        if isinstance(item, (list, tuple, set, frozenset)):
            hint = " Give them one by one, as in save(*names)."
        elif isinstance(item, _jax.Primitive):
            hint = f" Write {item.name!r}."
        raise PolicyError(f"{what} in a policy are non-empty strings, not {item!r}.{hint}")


def _as_items(given: Any) -> tuple[Any, ...]:
    """Return one or several selected items as a tuple; an empty one for None."""
    if given is None:
        return ()
    if isinstance(given, (set, frozenset)):
        return tuple(sorted(given, key=str))  # equal sets make equal policies
    several = isinstance(given, Iterable) and not isinstance(given, str)
    return tuple(given) if several else (given,)


def _primitives(given: object) -> tuple[str, ...]:
    primitives = _as_items(given)
    check_strings(primitives, "names of primitives")
    return primitives


def _dtypes(given: object) -> tuple[str, ...]:
    return tuple(_dtype_name(d) for d in _as_items(given))


def _dtype_name(given: DTypeLike) -> str:
    if given in (bool, int, float, complex):  # of the size that JAX gives such values now
        return str(jax.dtypes.canonicalize_dtype(given))
    try:
        if not isinstance(given, str) and jnp.issubdtype(given, jax.dtypes.extended):
            return str(given)
        dtype = jnp.dtype(given)
    except TypeError as e:
        offer = f"; {closest(given, _dtypes_of_jax())}" if isinstance(given, str) else "."
        raise PolicyError(f"dtype={given!r} in a policy is not a dtype{offer}") from e
    if str(dtype) not in _dtypes_of_jax():
        raise PolicyError(f"dtype={given!r} in a policy: JAX has no arrays of type {dtype.name}.")
    return str(dtype)


def _dtypes_of_jax() -> list[str]:
    scalars = (v for v in vars(jnp).values() if isinstance(v, type(jnp.float32)))
    return sorted({str(jnp.dtype(scalar)) for scalar in scalars})


def _as_ratio(given: Any) -> float | None:
    if given is None:
        return None
    number = isinstance(given, numbers.Real) and not isinstance(given, bool)
    if not number or not math.isfinite(given) or given < 0:
        raise PolicyError(
            "min_flops_per_byte is a number of operations per byte, finite and at least 0, "
            f"not {given!r}."
        )
    return float(given)


def _path(given: Any) -> str | None:
    if given is not None:
        check_strings((given,), "paths")
    return given


def _as_bool(given: object) -> bool:
    if not isinstance(given, bool):
        raise PolicyError(f"strict is a bool, not {given!r}.")
    return given


def _n_bytes(given: Any, keyword: str) -> int | None:
    return None if given is None else units.parse_bytes(given, f"{keyword}=")


_READ: dict[str, Callable[[Any], Any]] = {
    "primitive": _primitives,
    "dtype": _dtypes,
    "path": _path,
    "min_bytes": functools.partial(_n_bytes, keyword="min_bytes"),
    "max_bytes": functools.partial(_n_bytes, keyword="max_bytes"),
    "min_flops_per_byte": _as_ratio,
    "strict": _as_bool,
}
