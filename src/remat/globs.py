"""Paths of modules, the patterns that select them, and names of methods, for `rematted`.

A path is the names from the root of a model to a module, `encoder/layers_3`; numbers in containers
are names too, `layers/3`. A pattern describes a whole path: `*`, `?` and `[...]` stand for part of
one name, `**` for any number of names.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
from collections.abc import Iterable, Mapping
from typing import Any

from remat.errors import MethodError, PolicyError, TargetError, UnknownNameError, closest


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

    def check_methods(self, classes: Mapping[str, type], methods: tuple[str, ...]) -> None:
        """Refuse a pattern of which no module has one of the methods.

        Args:
          classes: the modules' classes by path.

        Raises:
          TargetError: with a class that the pattern selects and the methods that it has.
        """
        for pattern in self.patterns:
            found = [cls for path, cls in classes.items() if path_matches(pattern, path)]
            if found and not any(has_method(cls, name) for cls in found for name in methods):
                cls = found[0]
                public = [n for n in vars(cls) if not n.startswith("_") and has_method(cls, n)]
                own = [name for name in ("__call__", *public) if has_method(cls, name)]
                raise TargetError(
                    f"rematted: {cls.__name__} has none of the methods {methods}, nor has any other "
                    f"module at {pattern!r}; {closest(methods[0], own)}"
                )


def as_methods(given: str | Iterable[str]) -> tuple[str, ...]:
    """The names of methods in a call: one, or several.

    Raises:
      MethodError: if there is none, or one is no string.
    """
    is_one = isinstance(given, str) or not isinstance(given, Iterable)
    names: tuple[Any, ...] = (given,) if is_one else tuple(given)
    if not all(isinstance(name, str) and name for name in names):
        raise MethodError(f"methods has names of methods, such as '__call__', not {given!r}.")
    if not names:
        raise MethodError("methods is empty, so nothing would be rematerialized.")
    return names


def has_method(cls: type, name: str) -> bool:
    """Whether a class, and not only its metaclass, has a method. (All classes can be called.)"""
    return any(name in vars(base) for base in cls.__mro__) and callable(getattr(cls, name, None))


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
