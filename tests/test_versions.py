"""Versions of installed packages."""

import importlib.metadata

import jax.numpy as jnp
import pytest

import remat
from remat.versions import own_version, version_of


@pytest.fixture
def without_metadata(monkeypatch):
    """Import remat from a folder of sources, as far as metadata is concerned."""
    found = importlib.metadata.version

    def version(name):
        if name == "remat":
            raise importlib.metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_versions_are_those_of_the_metadata():
    assert own_version() == importlib.metadata.version("remat")
    assert version_of("jax") == importlib.metadata.version("jax")


def test_sources_without_metadata_plan_and_explain(without_metadata):
    plan = remat.plan(jnp.sin, jnp.ones(8), budget="1MiB", cache=False)
    assert dict(plan.versions)["remat"] == own_version() == "unknown"
    assert "unknown" in remat.explain(jnp.sin, jnp.ones(8)).to_json()
