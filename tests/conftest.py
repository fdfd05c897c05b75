"""Settings for all tests."""

from __future__ import annotations

from hypothesis import settings

# The same examples in every run, so that a change is judged by itself and not by luck. New ones:
# `pytest --hypothesis-profile=random`.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("random", deadline=None)
settings.load_profile("repeatable")
