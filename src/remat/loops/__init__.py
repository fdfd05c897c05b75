"""Loops whose reverse-mode memory is chosen by the user."""

import os

from remat import _jax

# Of the whole folder: the source lines of a loop's operations are the user's.
_jax.exclude_from_tracebacks(os.path.dirname(__file__))
