"""The versions of installed packages."""

from __future__ import annotations

import importlib.metadata


def version_of(package: str) -> str | None:
    """Return the version of an installed package, or None if it is not installed.

    A package that is imported from a folder of sources may have no metadata, and so is not installed.

    >>> version_of("no-such-package")
    """
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def own_version() -> str:
    """Return the version of remat; "unknown" if it is imported from a folder of sources."""
    return version_of("remat") or "unknown"
