"""Settings for all tests. This module must set the flag before JAX looks for devices."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile

import jax
from hypothesis import settings

# Eight host devices, for tests of sharding.
_FLAG = "--xla_force_host_platform_device_count=8"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}".strip()

# Caches of this run alone: the user's are neither read nor written. The processes of a run have caches of
# plans of their own, in the first one's folder. They share what JAX has compiled: most is single operations,
# which each process would compile again, and again wherever checks for leaked tracers keep JAX from using its
# caches. Programs that tests start do not, since JAX warns if an entry is still being written.
if "PYTEST_XDIST_WORKER" in os.environ:
    _FOLDER = os.environ["XDG_CACHE_HOME"]
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(dir=_FOLDER)
else:
    _FOLDER = os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="remat-tests-")
    atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)
jax.config.update("jax_compilation_cache_dir", os.path.join(_FOLDER, "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# JAX makes many objects that stay. With Python's defaults, a twentieth of the time is spent in looking at
# them.
gc.set_threshold(100_000, 50, 100)

# Every run has the same examples, so that a failure is due to the change that is tested. For new examples:
# `pytest --hypothesis-profile=random`.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("random", deadline=None)
settings.load_profile("repeatable")
