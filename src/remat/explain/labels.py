"""Names of operations and regions, by the user's modules and functions."""

from __future__ import annotations

import re

from remat.program.program import Op
from remat.report.groups import called

# The scopes that rematerialization leaves, and those of `jnp.einsum`: its subscripts.
_JAX_SCOPE = re.compile(r"rematted_computation|checkpoint|[A-Za-z., ]*->[A-Za-z. ]*")


def path_of(op: Op) -> str:
    """Return an operation's name scope, without JAX's own scopes."""
    return "/".join(name for name in op.path.split("/") if not _JAX_SCOPE.fullmatch(name))


def label(op: Op, source: str, function: str) -> str:
    """Return an operation's name: its modules or the user's function, and what is computed."""
    return called(path_of(op), source, (op.label,) if op.label else (), op.name, function)


def region_label(path: str, function: str, number: int) -> str:
    """Return the name of a region: its modules, or else the function that it is in."""
    names = [name for name in path.split("/") if name and not _JAX_SCOPE.fullmatch(name)]
    return "/".join(names) or function or f"region {number}"
