"""Values of the same kind, told apart only by the numbers in their paths, as one line.

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
        """Return the path and the names or primitives, as far as they are known."""
        made = "/".join(self.names) or self.primitive
        return ": ".join(filter(None, (self.pattern, made))) or "unnamed"

    @property
    def what(self) -> str:
        """Return `called`, preceded by the number of values if there are several."""
        return f"{self.count} × {self.called}" if self.count > 1 else self.called

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
        key = (value.kind, value.aval, value.source, value.primitive, without_numbers(value.path))
        found.setdefault(key, []).append(value)
    made = [
        Group(
            kind=members[0].kind,
            aval=members[0].aval,
            source=members[0].source,
            pattern=with_ranges([value.path for value in members]),
            primitive=members[0].primitive,
            values=tuple(members),
        )
        for members in found.values()
    ]
    return tuple(sorted(made, key=lambda group: -group.n_bytes))  # equals stay in program order
