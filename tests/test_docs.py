"""Every example in docstrings and in the documentation runs and prints what it says."""

from __future__ import annotations

import doctest
import importlib
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SRC = ROOT / "src"
MODULES = sorted(
    ".".join(p.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")
    for p in SRC.rglob("*.py")
)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OPTIONS = doctest.NORMALIZE_WHITESPACE


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as e:
        pytest.skip(f"needs {e.name}")
    failed, _ = doctest.testmod(module, optionflags=OPTIONS)
    assert not failed


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_documentation_examples(page):
    try:
        failed, _ = doctest.testfile(
            str(page), module_relative=False, optionflags=OPTIONS, encoding="utf-8"
        )
    except ModuleNotFoundError as e:
        pytest.skip(f"needs {e.name}")
    assert not failed
