"""Groups of values of the same kind that differ only in the numbers of their paths.

A stack of 48 equal layers saves 48 equal values; a reader wants
``48 × encoder/block_0…47/mlp/gelu  bf16[8,1024,4096]  3.0 GiB``. Values are grouped when kind, dtype
and shape, source line, primitive and path agree but for numbers in the path. A number in which the
values differ is shown with its first and its last.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from remat import units
from remat.printing import printable, with_ranges, without_numbers
from remat.report.model import Kind, Value


@dataclasses.dataclass(frozen=True)
class Group:
    """Values that differ only in the numbers of their paths, in program order."""

    kind: Kind
    aval: str
    source: str
    pattern: str  # the path, with the first and last of numbers in which the values differ
    primitive: str
    function: str
    values: tuple[Value, ...]

    @functools.cached_property
    def n_bytes(self) -> int:
        """Return the bytes of all values of the group."""
        return sum(value.n_bytes for value in self.values)

    @functools.cached_property
    def flops(self) -> float:
        """Return the FLOPs of computing each value of the group once."""
        return sum(value.flops for value in self.values)

    @functools.cached_property
    def time_s(self) -> float:
        """Return the predicted seconds of computing each value of the group once."""
        return sum(value.time_s for value in self.values)

    @functools.cached_property
    def count(self) -> int:
        """Return the number of arrays: a value of a loop stands for those that its iterations stack."""
        return sum(value.count for value in self.values)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the checkpoint names of the group's values, without repetitions."""
        return tuple(dict.fromkeys(value.name for value in self.values if value.name))

    @property
    def called(self) -> str:
        """Return the name of the values: where they are computed, and by which operation."""
        return called(self.pattern, self.source, self.names, self.primitive, self.function)

    @property
    def what(self) -> str:
        """Return `called`, preceded by the number of values if there are several."""
        return f"{self.count:,} × {self.called}" if self.count > 1 else self.called

    def __repr__(self) -> str:
        return f"Group({self})"

    def __str__(self) -> str:
        return printable(f"{self.what}  {self.aval}  {units.format_bytes(self.n_bytes)}")


def groups(values: Sequence[Value]) -> tuple[Group, ...]:
    """Group the values, the groups of most bytes first.

    >>> values = [Value(i, "saved", "f32[256]", 1024, path=f"net/block_{i}/Dense_0") for i in range(3)]
    >>> print(groups(values)[0])
    3 × net/block_0…2/Dense_0  f32[256]  3.0 KiB
    """
    found: dict[tuple[str, ...], list[Value]] = {}
    for value in values:
        what = (value.primitive, value.function, without_numbers(value.path))
        key = (value.kind, value.aval, value.source, *what)
        found.setdefault(key, []).append(value)
    made = [
        Group(
            kind=members[0].kind,
            aval=members[0].aval,
            source=members[0].source,
            pattern=with_ranges([value.path for value in members]),
            primitive=members[0].primitive,
            function=members[0].function,
            values=tuple(members),
        )
        for members in found.values()
    ]
    return tuple(sorted(made, key=lambda group: -group.n_bytes))  # equals stay in program order


def called(path: str, source: str, names: Sequence[str], primitive: str, function: str = "") -> str:
    """Return the name of a value: its modules or else the user's function, and its operation.

    >>> called("GPT/block_3", "net.py:12 (Block.__call__)", (), "mul", "gelu")
    'GPT/block_3: mul of gelu'
    >>> called("", "net.py:31 (attention)", (), "dot_general")
    'attention: dot_general'
    >>> called("", "net.py:31 (attention)", ("scores",), "dot_general")
    'attention: scores'
    """
    made = "/".join(names) or (f"{primitive} of {function}" if function else primitive)
    where = path or (own_function(source) if made else "")
    return ": ".join(filter(None, (where, made))) or "unnamed"


def own_line(source: str) -> str:
    """Return the user's line in a source.

    >>> own_line("flax/linen/linear.py:278 (Dense.__call__), from net.py:12 (Block.__call__)")
    'net.py:12'
    """
    return source.rpartition(", from ")[2].partition(" (")[0]


def own_function(source: str) -> str:
    """Return the user's function in a source, of a module's call the module's class.

    >>> own_function("flax/linen/linear.py:278 (Dense.__call__), from net.py:12 (Block.__call__)")
    'Block'
    >>> own_function("net.py:31 (loss)"), own_function("net.py:31 (attention.<genexpr>)")
    ('loss', 'attention')
    """
    if not source.endswith(")"):
        return ""
    names = source.rpartition("(")[2].rstrip(")").split(".")
    while names[-1:] and (names[-1] == "__call__" or names[-1].startswith("<")):
        names.pop()
    return names[-1] if names else ""
