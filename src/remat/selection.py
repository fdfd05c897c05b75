"""The modules and methods that a call of `rematted` selects: patterns of paths, names of methods.

`globs.py` defines what a pattern matches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from remat.errors import MethodError, PolicyError, TargetError, UnknownNameError, closest
from remat.globs import scope_matches


@dataclasses.dataclass(frozen=True)
class Selection:
    """The modules whose paths one of the patterns selects, and which of their methods are meant.

    >>> selection = Selection.of(["encoder/layers_*", "/head"])
    >>> [selection.matches(p) for p in ("encoder/layers_0", "encoder/layers_0/mlp", "a/head", "head")]
    [True, False, False, True]
    """

    patterns: tuple[str, ...]
    methods: tuple[str, ...]
    strict: bool = dataclasses.field(compare=False)  # whether each pattern has to match a module

    @staticmethod
    def of(
        path_globs: str | Iterable[str],
        methods: str | Iterable[str] = ("__call__",),
        *,
        strict: bool = True,
    ) -> Selection:
        """Return the selection for the arguments of a call: one or several patterns, one or several methods.

        Raises:
          PolicyError: if there is no pattern, or one is empty or not a string.
          MethodError: if there is no method, or one is empty or not a string.
        """
        return Selection(_as_patterns(path_globs), _as_methods(methods), strict)

    def matches(self, path: str) -> bool:
        """Return whether one of the patterns selects the module at a path."""
        return any(scope_matches(pattern, path) for pattern in self.patterns)

    def selects(self, path: str, cls: type) -> bool:
        """Return whether the module at a path is selected and its class has one of the methods."""
        return self.matches(path) and any(has_method(cls, name) for name in self.methods)

    def check(self, classes: Mapping[str, type]) -> None:
        """Raise for a pattern that matches no module, or only modules without any of the methods.

        Args:
          classes: the classes of a model's modules by path.

        Raises:
          UnknownNameError: with the paths that there are, if `strict`.
          TargetError: with a class that the pattern selects and the methods that it has.
        """
        if self.strict:
            self._check_patterns(classes)
        self._check_methods(classes)

    def _check_patterns(self, paths: Iterable[str]) -> None:
        known = sorted(set(paths))
        for pattern in self.patterns:
            if not any(scope_matches(pattern, path) for path in known):
                raise UnknownNameError(
                    f"rematted: no module of the model is at {pattern!r}; "
                    f"{closest(pattern, known)} A pattern matches the end of a path, or all of it "
                    "after a leading '/'; strict=False allows what may be absent."
                )

    def _check_methods(self, classes: Mapping[str, type]) -> None:
        for pattern in self.patterns:
            found = [cls for path, cls in classes.items() if scope_matches(pattern, path)]
            if found and not any(has_method(cls, name) for cls in found for name in self.methods):
                cls = found[0]
                public = [n for n in vars(cls) if not n.startswith("_") and has_method(cls, n)]
                own = [name for name in ("__call__", *public) if has_method(cls, name)]
                raise TargetError(
                    f"rematted: {cls.__name__} has none of the methods {self.methods}, nor has any "
                    f"other module at {pattern!r}; {closest(self.methods[0], own)}"
                )


def _as_patterns(given: str | Iterable[str]) -> tuple[str, ...]:
    patterns = (given,) if isinstance(given, str) else tuple(given)
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern.strip("/"):
            raise PolicyError(
                f"a path of modules is a non-empty string such as 'encoder/layers_*', "
                f"not {pattern!r}."
            )
    if not patterns:
        raise PolicyError("rematted needs at least one path, such as 'encoder/layers_*'.")
    return patterns


def _as_methods(given: str | Iterable[str]) -> tuple[str, ...]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        names: tuple[str, ...] = (given,)
    else:
        names = tuple(given)
    if not all(isinstance(name, str) and name for name in names):
        raise MethodError(f"methods has names of methods, such as '__call__', not {given!r}.")
    if not names:
        raise MethodError("methods is empty, so nothing would be rematerialized.")
    return names


def has_method(cls: type, name: str) -> bool:
    """Return whether a class itself has a method (`hasattr` would find `__call__` of its metaclass)."""
    return any(name in vars(base) for base in cls.__mro__) and callable(getattr(cls, name, None))
