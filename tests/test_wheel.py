"""The wheel in an environment with only its declared dependencies: the first pages' examples run there."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys
import venv

import jaxlib
import pytest

ROOT = pathlib.Path(__file__).parents[1]


def required(name: str, found: dict[str, importlib.metadata.Distribution]) -> None:
    """Add a distribution and its requirements, without extras, to those found."""
    key = re.sub(r"[-_.]+", "-", name).lower()
    if key in found:
        return
    found[key] = importlib.metadata.distribution(name)
    for text in found[key].requires or ():
        if "extra ==" not in text:
            try:
                required(re.split(r"[ ;<>=!~\[(]", text)[0], found)
            except importlib.metadata.PackageNotFoundError:
                continue  # for other platforms or versions of Python


def link_packages(
    distributions: dict[str, importlib.metadata.Distribution], target: pathlib.Path
) -> None:
    """Make distributions of this environment importable from another environment."""
    for distribution in distributions.values():
        for path in distribution.files or ():
            top = path.parts[0]
            if top in ("..", "__pycache__") or (target / top).exists():
                continue
            (target / top).symlink_to(distribution.locate_file(top))


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> pathlib.Path:
    """Return an environment with the wheel of this source and its base dependencies."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-index"]
    built = subprocess.run(
        [*build, "--no-build-isolation", "-w", str(folder), str(source)],
        capture_output=True,
        text=True,
    )
    if built.returncode and "setuptools" in built.stderr:
        pytest.skip("building a wheel needs setuptools >= 77 in this environment")
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("remat-*.whl")
    venv.create(folder / "env", with_pip=False, symlinks=True)
    (packages,) = (folder / "env").glob("lib/python*/site-packages")
    base: dict[str, importlib.metadata.Distribution] = {}
    for text in importlib.metadata.requires("remat") or ():
        if "extra ==" not in text:
            required(re.split(r"[ ;<>=!~\[(]", text)[0], base)
    link_packages(base, packages)
    python = folder / "env" / "bin" / "python"
    install = ["install", "-q", "--no-deps", "--no-index", "--no-compile", str(wheel)]
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), *install],
        check=True,
        capture_output=True,
    )
    return python


def run_in(folder: pathlib.Path, *command: str | pathlib.Path) -> str:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env={**kept, "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(folder / "cache")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_installed_wheel_needs_nothing_but_its_dependencies(bare, tmp_path):
    where = run_in(tmp_path, bare, "-c", "import remat; print(remat.__file__)")
    assert pathlib.Path(where.strip()).is_relative_to(bare.parents[1])
    without = (
        "import importlib.util as u; print([u.find_spec(m) for m in ('flax', 'equinox', 'pytest')])"
    )
    assert run_in(tmp_path, bare, "-c", without).strip() == "[None, None, None]"
    assert run_in(tmp_path, bare.with_name("remat"), "--version").startswith("remat, version ")
    assert "gpu:h100" in run_in(tmp_path, bare.with_name("remat"), "devices")


# The home page shows the bytes that this version's compiler reports.
PAGES = ["README", "docs/start", "docs/accelerators"]
PAGES += ["docs/index"] if jaxlib.__version__ == "0.10.2" else []


@pytest.mark.parametrize("page", PAGES)
def test_a_first_pages_examples_run_with_the_installed_wheel(page, bare, tmp_path):
    path = shutil.copy(ROOT / f"{page}.md", tmp_path)
    run_in(tmp_path, bare, "-m", "doctest", "-o", "NORMALIZE_WHITESPACE", path)


@pytest.mark.slow
def test_the_demo_of_the_installed_wheel_writes_a_page(bare, tmp_path):
    text = run_in(tmp_path, bare.with_name("remat"), "demo", "--html", "demo.html")
    assert "Memory over the step" in text
    assert (tmp_path / "demo.html").stat().st_size > 10_000
