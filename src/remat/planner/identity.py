"""What makes two programs the same: a fingerprint of a jaxpr, independent of names and addresses.

A plan speaks of values by their number in a program. It may only be applied to that very program, so
it carries this fingerprint: primitives, operands, types and parameters at every depth, in order.
Parameters that are functions or objects without a stable text count with their type's name.
"""

from __future__ import annotations

import enum
import hashlib
import re
from typing import Any

import numpy as np

from remat import _jax

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def fingerprint(jaxpr: _jax.Jaxpr, *more: Any) -> str:
    """Twenty hexadecimal digits that differ for different programs."""
    digest = hashlib.sha256()
    _add_jaxpr(digest, jaxpr)
    digest.update(repr(more).encode())
    return digest.hexdigest()[:20]


def _add_jaxpr(digest: Any, jaxpr: _jax.Jaxpr) -> None:
    number: dict[_jax.Var, int] = {}
    types: dict[Any, str] = {}

    def name(v: Any) -> str:
        if not _jax.is_var(v):
            return f"={v.val!r}"
        return str(number.setdefault(v, len(number)))

    def type_of(v: Any) -> str:
        if v.aval not in types:
            types[v.aval] = v.aval.str_short()
        return types[v.aval]

    for v in (*jaxpr.constvars, *jaxpr.invars):
        digest.update(f"{name(v)}:{type_of(v)};".encode())
    for eqn in jaxpr.eqns:
        ins = ",".join(map(name, eqn.invars))
        outs = ",".join(f"{name(v)}:{type_of(v)}" for v in eqn.outvars)
        digest.update(f"|{eqn.primitive.name}({ins})->{outs}".encode())
        for key in sorted(eqn.params):
            if key == "policy":
                continue  # what it decided shows in the program
            digest.update(f";{key}=".encode())
            _add_value(digest, eqn.params[key])
    digest.update(("->" + ",".join(map(name, jaxpr.outvars))).encode())


def _add_value(digest: Any, value: Any) -> None:
    if isinstance(value, tuple | list):
        digest.update(b"(")
        for item in value:
            _add_value(digest, item)
            digest.update(b",")
        digest.update(b")")
    elif _jax.is_jaxpr(value):
        _add_jaxpr(digest, _jax.open_jaxpr(value))
    elif value is None or isinstance(value, str | bool | int | float | complex | enum.Enum):
        digest.update(repr(value).encode())
    elif isinstance(value, np.dtype | np.generic):
        digest.update(str(value).encode())
    elif callable(value):
        digest.update(getattr(value, "__qualname__", type(value).__qualname__).encode())
    elif isinstance(value, np.ndarray):
        digest.update(value.tobytes())
    else:
        text = _ADDRESS.sub("", repr(value))
        digest.update(text.encode() if len(text) < 10_000 else type(value).__qualname__.encode())
