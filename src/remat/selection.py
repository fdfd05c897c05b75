"""The modules and methods that a call of `rematted` selects: patterns of paths, names of methods.

What a pattern means is said in `globs.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from remat.errors import MethodError, PolicyError, TargetError, UnknownNameError, closest
from remat.globs import scope_matches


@dataclasses.dataclass(frozen=True)
class PathGlobs:
    """Patterns that select a module if one of them matches the end of its path.

    >>> globs = PathGlobs.of(["encoder/layers_*", "/head"])
    >>> [globs.matches(p) for p in ("encoder/layers_0", "encoder/layers_0/mlp", "a/head", "head")]
    [True, False, False, True]
    """

    patterns: tuple[str, ...]

    @staticmethod
    def of(given: str | Iterable[str]) -> PathGlobs:
        """Return the patterns of a call: one, or several.

        Raises:
          PolicyError: if there is none, or one is empty or not a string.
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
        return PathGlobs(patterns)

    def matches(self, path: str) -> bool:
        """Return whether one of the patterns selects the module at a path."""
        return any(scope_matches(pattern, path) for pattern in self.patterns)

    def check(self, paths: Iterable[str]) -> None:
        """Refuse a pattern that matches none of these paths.

        Raises:
          UnknownNameError: with the paths that there are.
        """
        known = sorted(set(paths))
        for pattern in self.patterns:
            if not any(scope_matches(pattern, path) for path in known):
                raise UnknownNameError(
                    f"rematted: no module of the model is at {pattern!r}; "
                    f"{closest(pattern, known)} A pattern matches the end of a path, or all of it "
                    "after a leading '/'; strict=False allows what may be absent."
                )

    def check_methods(self, classes: Mapping[str, type], methods: tuple[str, ...]) -> None:
        """Refuse a pattern of which no module has one of the methods.

        Args:
          classes: the modules' classes by path.

        Raises:
          TargetError: with a class that the pattern selects and the methods that it has.
        """
        for pattern in self.patterns:
            found = [cls for path, cls in classes.items() if scope_matches(pattern, path)]
            if found and not any(has_method(cls, name) for cls in found for name in methods):
                cls = found[0]
                public = [n for n in vars(cls) if not n.startswith("_") and has_method(cls, n)]
                own = [name for name in ("__call__", *public) if has_method(cls, name)]
                raise TargetError(
                    f"rematted: {cls.__name__} has none of the methods {methods}, nor has any other "
                    f"module at {pattern!r}; {closest(methods[0], own)}"
                )


def as_methods(given: str | Iterable[str]) -> tuple[str, ...]:
    """Return the names of methods in a call: one, or several.

    Raises:
      MethodError: if there is none, or one is empty or not a string.
    """
    is_one = isinstance(given, str) or not isinstance(given, Iterable)
    names: tuple[Any, ...] = (given,) if is_one else tuple(given)
    if not all(isinstance(name, str) and name for name in names):
        raise MethodError(f"methods has names of methods, such as '__call__', not {given!r}.")
    if not names:
        raise MethodError("methods is empty, so nothing would be rematerialized.")
    return names


def has_method(cls: type, name: str) -> bool:
    """Return whether a class itself has a method. (Its metaclass has `__call__` in any case.)"""
    return any(name in vars(base) for base in cls.__mro__) and callable(getattr(cls, name, None))
