"""Paths of source files as users know them."""

import os

import jax

from remat.paths import is_own, relative


def test_files_of_packages_are_relative_to_where_they_are_imported_from():
    assert relative(jax.__file__) == os.path.join("jax", "__init__.py")
    assert relative(f"{jax.__file__}:3:1 (f)") == f"{os.path.join('jax', '__init__.py')}:3:1 (f)"


def test_the_users_files_are_relative_to_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert relative(str(tmp_path / "model" / "net.py")) == os.path.join("model", "net.py")
    assert relative("/elsewhere/net.py") == "/elsewhere/net.py"


def test_libraries_are_not_the_users_own():
    import remat

    assert is_own("/home/user/train.py")
    assert not any(map(is_own, (jax.__file__, os.__file__, remat.__file__, "<string>")))
