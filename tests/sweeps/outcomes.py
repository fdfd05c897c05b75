"""Helpers that both sweeps use."""


def described(error: BaseException) -> str:
    """Return an error's type and the beginning of its text."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"
