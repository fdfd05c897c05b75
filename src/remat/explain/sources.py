"""The source of an equation, as a user knows it.

The innermost frame is often in a library: ``flax/linen/attention.py:146 (dot_product_attention)``. It is
given relative to its package, with the first frame of the user's own code beside it. Frames of this library
are left out: the user did not write the loops that a plan makes.
"""

from __future__ import annotations

import functools

from remat import _jax
from remat.paths import is_of_remat, is_own, relative

#: File, line and function.
Frame = tuple[str, int, str]


def user_source_of(eqn: _jax.JaxprEqn) -> str:
    """Return the source of an equation: ``net.py:12 (mlp)``, or a library's line and the user's.

    For a library's line the first frame of the user's own code follows, as in
    ``flax/linen/attention.py:146 (softmax), from train.py:31 (loss)``.
    """
    return _text_of(user_frames_of(eqn))


def user_frames_of(eqn: _jax.JaxprEqn) -> tuple[Frame, ...]:
    """Return file, line and function of an equation's frames outside of JAX and of this library."""
    frames = _jax.source_frames_of(eqn)
    return tuple(frame for frame in frames if not is_of_remat(frame[0]))


# Cached by the stack of frames, which traces of equal layers share.
@functools.lru_cache(maxsize=4096)
def _text_of(frames: tuple[Frame, ...]) -> str:
    if not frames:
        return ""
    own = next((frame for frame in frames if is_own(frame[0])), frames[0])
    said = place_of_frame(frames[0])
    return said if own == frames[0] else f"{said}, from {place_of_frame(own)}"


def place_of_frame(frame: Frame) -> str:
    """Return a frame as text: ``net.py:12 (mlp)``."""
    file, line, function = frame
    return f"{relative(file)}:{line} ({function.replace('<locals>.', '')})"
