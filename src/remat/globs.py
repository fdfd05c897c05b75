"""Paths of modules and the patterns that select them, for `rematted`.

A path is the names from the root of a model to a module, `encoder/layers_3`; numbers in containers
are names too, `layers/3`. A pattern describes a whole path: `*`, `?` and `[...]` stand for part of
one name, `**` for any number of names.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
from collections.abc import Iterable

from remat.errors import PolicyError, UnknownNameError, closest


@dataclasses.dataclass(frozen=True)
class PathGlobs:
    """Patterns of which a path has to match one.

    >>> globs = PathGlobs.of(["encoder/layers_*", "**/head"])
    >>> [globs.matches(p) for p in ("encoder/layers_0", "encoder/layers_0/mlp", "a/b/head", "head")]
    [True, False, True, True]
    """

    patterns: tuple[str, ...]

    @staticmethod
    def of(given: str | Iterable[str]) -> PathGlobs:
        """The patterns of a call: one, or several.

        Raises:
          PolicyError: if there is none, or one is no string or empty.
        """
        if isinstance(given, PathGlobs):
            return given
        patterns = (given,) if isinstance(given, str) else tuple(given)
        for pattern in patterns:
            if not isinstance(pattern, str) or not pattern.strip("/"):
                raise PolicyError(
                    f"a path of modules is a non-empty string such as 'encoder/layers_*', "
                    f"not {pattern!r}."
                )
        if not patterns:
            raise PolicyError("rematted needs at least one path, such as 'encoder/layers_*'.")
        return PathGlobs(tuple(pattern.strip("/") for pattern in patterns))

    def matches(self, path: str) -> bool:
        return any(path_matches(pattern, path) for pattern in self.patterns)

    def check(self, paths: Iterable[str]) -> None:
        """Refuse a pattern that matches none of these paths.

        Raises:
          UnknownNameError: with the paths that there are.
        """
        known = sorted(set(paths))
        for pattern in self.patterns:
            if not any(path_matches(pattern, path) for path in known):
                raise UnknownNameError(
                    f"rematted: no module of the model is at {pattern!r}; "
                    f"{closest(pattern, known)} A pattern describes the whole path; '**/' in front "
                    "stands for any beginning, and strict=False allows what may be absent."
                )


@functools.lru_cache(maxsize=4096)
def path_matches(pattern: str, path: str) -> bool:
    """Whether a pattern describes a whole path."""
    return _match(tuple(pattern.split("/")), tuple(path.split("/")) if path else ())


def _match(wanted: tuple[str, ...], names: tuple[str, ...]) -> bool:
    if not wanted:
        return not names
    if wanted[0] == "**":
        return any(_match(wanted[1:], names[n:]) for n in range(len(names) + 1))
    return (
        bool(names) and fnmatch.fnmatchcase(names[0], wanted[0]) and _match(wanted[1:], names[1:])
    )
