"""Loops with reverse-mode memory that the user chooses."""

import os

from remat import _jax

# The whole folder: the source lines of a loop's operations should be the user's.
_jax.exclude_from_tracebacks(os.path.dirname(__file__))
