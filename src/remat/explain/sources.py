"""The source of an equation, as a user knows it.

The innermost frame is often in a library: ``flax/linen/attention.py:146 (dot_product_attention)``. It is
given relative to its package, with the first frame of the user's own code beside it.
"""

from __future__ import annotations

import functools

from remat import _jax
from remat.paths import is_own, relative


def user_source_of(eqn: _jax.JaxprEqn) -> str:
    """Return the source of an equation: ``net.py:12 (mlp)``, or a library's line and the user's.

    For a library's line the first frame of the user's own code follows, as in
    ``flax/linen/attention.py:146 (softmax), from train.py:31 (loss)``.
    """
    return _text_of(_jax.source_frames_of(eqn))


# Cached by the stack of frames, which traces of equal layers share.
@functools.lru_cache(maxsize=4096)
def _text_of(frames: tuple[tuple[str, int, str], ...]) -> str:
    if not frames:
        return ""
    own = next((frame for frame in frames if is_own(frame[0])), frames[0])
    said = _place(frames[0])
    return said if own == frames[0] else f"{said}, from {_place(own)}"


def _place(frame: tuple[str, int, str]) -> str:
    file, line, function = frame
    return f"{relative(file)}:{line} ({function.replace('<locals>.', '')})"
