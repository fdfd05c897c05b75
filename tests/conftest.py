"""Settings for all tests. This module must set the flag before anything imports JAX."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

from hypothesis import settings

# Eight host devices, for tests of sharding.
_FLAG = "--xla_force_host_platform_device_count=8"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}".strip()

# The user's cache of plans is neither read nor written.
_CACHE = tempfile.mkdtemp(prefix="remat-tests-")
atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)
os.environ["XDG_CACHE_HOME"] = _CACHE

# Every run has the same examples, so that a failure is due to the change that is tested. For new examples:
# `pytest --hypothesis-profile=random`.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("random", deadline=None)
settings.load_profile("repeatable")
