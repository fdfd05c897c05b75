"""Fingerprints of jaxprs, independent of names and addresses.

A plan refers to values by their number in a program, so it may only be applied to the same program. Its
fingerprint covers primitives, operands, types and parameters at every depth, in order. Parameters that
are functions, or objects without a stable text, count with their type's name. Sets count in sorted
order, since Python's order changes from process to process.
"""

from __future__ import annotations

import enum
import hashlib
import re
from typing import Any, TypeAlias

import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from remat import _jax
from remat.aliases import Atom

Digest: TypeAlias = Any  # a hash object of `hashlib`, which does not export its class

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_SET = re.compile(r"\{([^{}]*)\}")
# Parameters by primitive that do not change the result.
_OF_NO_EFFECT = {
    name: frozenset(("name", "ctx_mesh", "inline", "keep_unused", "compiler_options_kvs"))
    for name in ("jit", "pjit")
} | {"sharding_constraint": frozenset(("context_mesh",))}


def fingerprint(jaxpr: _jax.Jaxpr, *more: object, literals: bool = True) -> str:
    """Return twenty hexadecimal digits that identify a program.

    Args:
      jaxpr: the program.
      more: further values that the fingerprint depends on.
      literals: whether it depends on literals in the program.
    """
    digest = hashlib.sha256()
    _add_jaxpr(digest, jaxpr, literals)
    _add_value(digest, more, literals)
    return digest.hexdigest()[:20]


def _add_jaxpr(digest: Digest, jaxpr: _jax.Jaxpr, literals: bool) -> None:
    number: dict[_jax.Var, int] = {}
    types: dict[_jax.Var, str] = {}

    def name(v: Atom) -> str:
        if not _jax.is_var(v):
            return f"={v.val!r}" if literals else f"={_type_of(v)}"
        return str(number.setdefault(v, len(number)))

    def type_of(v: Atom) -> str:
        if v.aval not in types:
            types[v.aval] = _type_of(v)
        return types[v.aval]

    for v in (*jaxpr.constvars, *jaxpr.invars):
        digest.update(f"{name(v)}:{type_of(v)};".encode())
    for eqn in jaxpr.eqns:
        ins = ",".join(map(name, eqn.invars))
        outs = ",".join(f"{name(v)}:{type_of(v)}" for v in eqn.outvars)
        digest.update(f"|{eqn.primitive.name}({ins})->{outs}".encode())
        ignored = _OF_NO_EFFECT.get(eqn.primitive.name, ())
        for key in sorted(eqn.params):
            if key == "policy" or key in ignored:
                continue  # the program already reflects the policy's decisions
            digest.update(f";{key}=".encode())
            _add_value(digest, eqn.params[key], literals)
    digest.update(("->" + ",".join(map(name, jaxpr.outvars))).encode())


def _type_of(v: Atom) -> str:
    return _stable(v.aval.str_short())


def _says_nothing(sharding: NamedSharding) -> bool:
    """Return whether a sharding in a program leaves everything to the compiler, as if there were none."""
    auto = all(kind is AxisType.Auto for kind in sharding.mesh.axis_types)
    return auto and isinstance(sharding.mesh, AbstractMesh) and not any(sharding.spec)


def _stable(text: str) -> str:
    """Return a text without addresses, and with the items of sets in order."""
    text = _ADDRESS.sub("", text)
    if "{" not in text:
        return text
    return _SET.sub(lambda found: "{" + ", ".join(sorted(found[1].split(", "))) + "}", text)


def _add_value(digest: Digest, value: object, literals: bool) -> None:
    if isinstance(value, tuple | list):
        digest.update(b"(")
        for item in value:
            _add_value(digest, item, literals)
            digest.update(b",")
        digest.update(b")")
    elif isinstance(value, set | frozenset):
        _add_value(digest, sorted(_stable(repr(item)) for item in value), literals)
    elif isinstance(value, dict):
        _add_value(digest, sorted(value.items(), key=lambda item: repr(item[0])), literals)
    elif _jax.is_jaxpr(value):
        _add_jaxpr(digest, _jax.open_jaxpr(value), literals)
    elif value is None or isinstance(value, str | bool | int | float | complex | enum.Enum):
        digest.update(repr(value).encode())
    elif isinstance(value, np.dtype | np.generic):
        digest.update(str(value).encode())
    elif callable(value):
        digest.update(getattr(value, "__qualname__", type(value).__qualname__).encode())
    elif isinstance(value, NamedSharding) and _says_nothing(value):
        digest.update(b"None")
    elif isinstance(value, np.ndarray):
        digest.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    else:
        text = _stable(repr(value))
        digest.update(text.encode() if len(text) < 10_000 else type(value).__qualname__.encode())
