"""The compiler's settings that change a compiled program.

A peak that the compiler confirmed under one set of XLA flags says little about another. Plans and the
cache's keys contain these settings, by name. Flags that only write dumps or create host devices are left
out, and so are settings at JAX's defaults.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from remat import files

# Flags that do not change programs.
_OF_NO_EFFECT = ("--xla_dump", "--xla_force_host_platform_device_count")
# JAX's options that reach the compiler, with their defaults. Some exist in some versions only.
_OPTIONS: Mapping[str, Any] = {
    "jax_compiler_enable_remat_pass": True,
    "jax_default_matmul_precision": None,
    "jax_disable_most_optimizations": False,
    "jax_enable_x64": False,
    "jax_exec_time_optimization_effort": 0.0,
    "jax_memory_fitting_effort": 0.0,
    "jax_memory_fitting_level": "O2",
    "jax_optimization_level": "UNKNOWN",
    "jax_use_shardy_partitioner": True,
}
_MOST_FLAGS_BYTES = 2**20  # larger files of flags are not read


def compiler_settings(
    platform: str, compiler_options: Mapping[str, Any] | None = None
) -> tuple[tuple[str, str], ...]:
    """Return the settings that differ from the defaults, by name.

    Args:
      platform: the target's; flags of libtpu count on "tpu" only.
      compiler_options: those given to `jax.jit`.
    """
    found = {"XLA_FLAGS": _flags(os.environ.get("XLA_FLAGS", ""))}
    if platform == "tpu":
        found["LIBTPU_INIT_ARGS"] = _flags(os.environ.get("LIBTPU_INIT_ARGS", ""))
    for name, default in _OPTIONS.items():
        value = getattr(jax.config, name, default)
        if value != default:
            found[name] = str(value)
    found |= {f"compiler_options {k}": str(v) for k, v in (compiler_options or {}).items()}
    return tuple(sorted((name, value) for name, value in found.items() if value))


def _flags(text: str) -> str:
    """Return flags sorted, without those that change nothing. XLA reads any other word as a file of flags."""
    if text and not text.lstrip().startswith("-"):
        try:
            with files.open_regular(Path(text)) as file:
                text = file.read(_MOST_FLAGS_BYTES).decode(errors="replace")
        except (OSError, files.NotRegularError):
            return text
    try:
        flags = shlex.split(text)
    except ValueError:  # an open quote
        flags = text.split()
    return " ".join(sorted({f for f in flags if not f.startswith(_OF_NO_EFFECT)}))
