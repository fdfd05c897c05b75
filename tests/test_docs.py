"""Every example in docstrings and in the documentation runs and prints the output that it shows.

`make docs` tests whether the site builds; the tests here do not need its generator.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import inspect
import pathlib
import re

import pytest

import remat
import remat.report
from remat import solvers

ROOT = pathlib.Path(__file__).parents[1]
SRC = ROOT / "src"
MODULES = sorted(
    ".".join(p.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")
    for p in SRC.rglob("*.py")
)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OPTIONS = doctest.NORMALIZE_WHITESPACE


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_print_what_they_say(name):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as e:
        pytest.skip(f"needs {e.name}")
    failed, _ = doctest.testmod(module, optionflags=OPTIONS)
    assert not failed


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_documentation_examples_print_what_they_say(page):
    try:
        failed, _ = doctest.testfile(
            str(page), module_relative=False, optionflags=OPTIONS, encoding="utf-8"
        )
    except ModuleNotFoundError as e:
        pytest.skip(f"needs {e.name}")
    assert not failed


# First words of a first line that names a thing instead of saying what is returned or done.
NO_VERB = re.compile(
    r"[^A-Z]|(The|A|An|All|Any|Each|Every|For|How|What|Where|Whether|Which|With)\b"
)


@pytest.mark.parametrize("path", sorted((SRC / "remat").rglob("*.py")), ids=lambda p: p.stem)
def test_docstrings_of_functions_begin_with_a_verb(path):
    functions = (
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    )
    first_lines = {f.name: (ast.get_docstring(f) or "Return.").splitlines()[0] for f in functions}
    assert not {name: line for name, line in first_lines.items() if NO_VERB.match(line)}


@pytest.mark.slow
def test_the_ahead_of_time_example_runs_as_written(tmp_path, monkeypatch):
    pytest.importorskip("libtpu")
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/distributed.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n((?!>>>).*?)```", page, re.S)
    names: dict = {}
    for block in re.findall(r">>> (@remat.auto\n(?:\.\.\. .*\n)*)", page):
        exec("import jax, jax.numpy as jnp, remat\n" + block.replace("\n... ", "\n"), names)
    exec(example.replace("target=at,", "target=at, cache=False,"), names)
    assert names["plan"].is_verified
    assert (tmp_path / "v5e-2x2.json").exists()


REFERENCE = "\n".join(
    p.read_text(encoding="utf-8") for p in (ROOT / "docs/reference").glob("*.rst")
)
DESCRIBED = set(
    re.findall(r"^\.\. (?:auto)?(?:function|class|data)\w*:: ([\w.]+)", REFERENCE, re.M)
)


@pytest.mark.parametrize("module", [remat, solvers, remat.report], ids=lambda m: m.__name__)
def test_reference_has_every_public_name(module):
    public = {name: getattr(module, name) for name in getattr(module, "__all__", vars(module))}
    names = {
        name
        for name, value in public.items()
        if not name.startswith("_")
        and not inspect.ismodule(value)
        and not (inspect.isclass(value) and issubclass(value, Exception))  # all of remat.errors
    }
    assert {name for name in names if f"{module.__name__}.{name}" not in DESCRIBED} == set()


def test_reference_has_every_policy():
    chosen = {
        name for name, p in vars(remat.policies).items() if isinstance(p, remat.policies.Policy)
    }
    aliases = {"checkpoint_dots", "checkpoint_dots_with_no_batch_dims"}
    assert all(name in REFERENCE for name in aliases)
    assert {n for n in chosen - aliases if f"remat.policies.{n}" not in DESCRIBED} == set()


def test_every_page_is_in_the_navigation():
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    entries = [
        line
        for block in re.findall(r"```{toctree}\n(.*?)```", index, re.S)
        for line in block.split()
    ]
    pages = {p.stem for p in (ROOT / "docs").glob("*.md")} - {"index"}
    assert {p for p in pages if not any(pathlib.PurePath(p).match(e) for e in entries)} == set()


def test_files_named_in_contributing_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w./]+\.(?:js|md|py|rst|toml))`", text)
    files = [
        f"/{path.relative_to(ROOT).as_posix()}"
        for folder in ("benchmarks", "docs", "src", "tests")
        for path in (ROOT / folder).rglob("*.*")
    ] + ["/pyproject.toml"]
    assert len(named) > 20
    assert [name for name in named if not any(f.endswith(f"/{name}") for f in files)] == []


def test_pictures_are_still_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    path = ROOT / "docs/make_pictures.py"
    spec = importlib.util.spec_from_file_location("make_pictures", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    drawn = {p.name for p in module.draw(tmp_path, percent_step=25)}
    assert drawn == {p.name for p in (ROOT / "docs/pictures").glob("*.svg")}
    used = (ROOT / "docs/how-it-works.md").read_text(encoding="utf-8")
    assert all(f"pictures/{name}" in used for name in drawn)
