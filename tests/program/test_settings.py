"""The settings of compilers that a plan was made under."""

from __future__ import annotations

import jax

from remat.program.settings import compiler_settings


def test_settings_of_the_compiler_are_named_unless_they_change_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/tmp/x --b=2 --a='1 2'")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_x=1")
    flags = ("XLA_FLAGS", "--a=1 2 --b=2")
    assert compiler_settings("cpu") == (flags,)
    assert compiler_settings("tpu") == (("LIBTPU_INIT_ARGS", "--xla_tpu_x=1"), flags)
    file = tmp_path / "flags"
    file.write_text("--xla_force_host_platform_device_count=8\n--b=2")
    monkeypatch.setenv("XLA_FLAGS", str(file))
    assert compiler_settings("cpu", {"k": 1}) == (
        ("XLA_FLAGS", "--b=2"),
        ("compiler_options k", "1"),
    )
    monkeypatch.setenv("XLA_FLAGS", "")
    assert compiler_settings("cpu") == ()
    with jax.enable_x64(True):
        assert compiler_settings("cpu") == (("jax_enable_x64", "True"),)
