"""Settings for all tests. Nothing here may import JAX before the flag is set."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

from hypothesis import settings

# Eight host devices, for what is sharded. Kernels are compiled without LLVM's optimizations, which takes a
# quarter less time for the whole suite: XLA has optimized the program and assigned its buffers before.
# `make test-all` sets LLVM's usual level.
_FLAGS = {
    "xla_force_host_platform_device_count": "8",
    "xla_backend_optimization_level": "0",
    "xla_llvm_disable_expensive_passes": "true",
}
_given = os.environ.get("XLA_FLAGS", "")
_added = [f"--{name}={value}" for name, value in _FLAGS.items() if name not in _given]
os.environ["XLA_FLAGS"] = " ".join([_given, *_added]).strip()

# The user's own cache of plans is neither read nor written.
_CACHE = tempfile.mkdtemp(prefix="remat-tests-")
atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)
os.environ["XDG_CACHE_HOME"] = _CACHE

# The same examples in every run, so that a change is judged by itself and not by luck. New ones:
# `pytest --hypothesis-profile=random`.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("random", deadline=None)
settings.load_profile("repeatable")
