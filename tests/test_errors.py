"""The tree of exceptions."""

from __future__ import annotations

import re

import pytest

from remat import errors

ROWS = re.findall(r"^ {4}(│? *[├└]── )(\w+)(?: \(([\w, ]+)\))?(?: |$)", errors.__doc__ or "", re.M)


def test_the_tree_at_the_top_of_the_module_has_every_exception() -> None:
    assert sorted(["RematError", *(name for _, name, _ in ROWS)]) == dir(errors)


@pytest.mark.parametrize(("branch", "name", "builtin"), ROWS)
def test_the_tree_says_what_an_exception_is(branch: str, name: str, builtin: str) -> None:
    cls = getattr(errors, name)
    ours = [base for base in cls.__bases__ if issubclass(base, errors.RematError)]
    theirs = [base.__name__ for base in cls.__bases__ if base not in ours]
    assert (ours == [errors.RematError]) == (branch in ("├── ", "└── "))
    assert ", ".join(theirs) == builtin


def test_the_closest_known_name_comes_first() -> None:
    assert errors.closest("atn", ["mlp", "attn"]) == "did you mean 'attn'? Known: 'attn', 'mlp'."
    assert errors.closest("xyz", ["mlp", "attn"]) == "Known: 'attn', 'mlp'."
    assert errors.closest("xyz", []) == "There are none."
