"""Writing a report's file: all of it or nothing."""

from __future__ import annotations

import os
from pathlib import Path

from remat.errors import ReportError


def write(path: str | os.PathLike[str], text: str) -> Path:
    """Write the text in UTF-8; a reader sees the old file or the new one, never a half.

    Raises:
      ReportError: the file cannot be written; an old one is left as it was.
    """
    path = Path(path)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8", newline="\n")
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ReportError(f"{path}: cannot be written ({error.strerror or error}).") from error
    return path
