"""Patterns with `*`, `?`, `[...]` and `**`, with one meaning wherever the library takes one.

A *name* is what `checkpoint_name` gives a value. A pattern selects a name if it matches the whole of it:
`*` stands for any characters, `?` for one, `[...]` for one of a set.

A *path* is the names of the scopes (modules, `jax.named_scope`s) around something, from the root,
`encoder/layers_3`; positions in containers are names too, `layers/3`. In a pattern of paths each part
between slashes is matched against one name of a path, and `**` stands for any number of names, zero
included.

* A pattern selects a scope if it matches the end of its path: `layers_*` selects `encoder/layers_3`.
* A leading `/` anchors the pattern at the root: `/layers_*` selects only `layers_3`.
* A value is selected if a scope around it is: `layers_*` selects what `encoder/layers_3/mlp` computes.

Upper and lower case differ.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Iterable


def any_name_matches(pattern: str, names: Iterable[str]) -> bool:
    """Return whether a pattern selects one of the names."""
    return any(fnmatch.fnmatchcase(name, pattern) for name in names)


def scope_matches(pattern: str, path: str) -> bool:
    """Return whether a pattern selects the scope that is at a path.

    >>> [scope_matches("encoder/*", path) for path in ("model/encoder/a", "encoder/a/b")]
    [True, False]
    >>> [scope_matches("/encoder/*", path) for path in ("model/encoder/a", "encoder/a")]
    [False, True]
    """
    return len(_parts(path)) in _ends(pattern, path)


def path_matches(pattern: str, path: str) -> bool:
    """Return whether a pattern selects a value by its path: one of the scopes around it.

    >>> path_matches("encoder/*/attention", "model/encoder/layer_3/attention/softmax")
    True
    >>> path_matches("/encoder", "model/encoder"), path_matches("enc", "encoder")
    (False, False)
    """
    return bool(_ends(pattern, path))


# Cached, since plans and explanations match the same paths many times.
@functools.lru_cache(maxsize=4096)
def _ends(pattern: str, path: str) -> frozenset[int]:
    """Return the lengths of the beginnings of a path that a pattern selects, in names."""
    names, parts = _parts(path), _parts(pattern)
    if not pattern.startswith("/"):
        parts = ["**", *parts]
    ends = {0}
    for part in parts:
        if part == "**":
            ends = set(range(min(ends), len(names) + 1)) if ends else ends
        else:
            ends = {i + 1 for i in ends if i < len(names) and fnmatch.fnmatchcase(names[i], part)}
    return frozenset(ends)


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part]
