"""Patterns of names and paths: one meaning for policies, `rematted` and `assert_saves_only`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import remat
from remat.globs import any_name_matches, path_matches, scope_matches


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("layers_*", "layers_0", True),
        ("layers_*", "encoder/layers_0", True),
        ("layers_*", "layers_0/mlp", False),
        ("/layers_*", "layers_0", True),
        ("/layers_*", "encoder/layers_0", False),
        ("encoder/*", "encoder/a", True),
        ("encoder/*", "model/encoder/a", True),
        ("encoder/*", "encoder/a/b", False),
        ("encoder", "my_encoder", False),
        ("**/mlp", "mlp", True),
        ("**/mlp", "a/b/mlp", True),
        ("a/**/c", "a/c", True),
        ("a/**/c", "a/b/d", False),
        ("a/**", "x/a/b/c", True),
        ("/a/**", "x/a/b/c", False),
        ("a/", "a", True),
        ("/layers/?", "layers/1", True),
        ("layers/[01]", "layers/2", False),
        ("Layers_*", "layers_0", False),
        ("**", "", True),
        ("a", "", False),
    ],
)
def test_a_pattern_selects_a_scope_by_the_end_of_its_path(pattern, path, matches):
    assert scope_matches(pattern, path) is matches


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("layers_*", "encoder/layers_0/mlp/dot"), ("encoder/*", "model/encoder/a/b"),
        ("/a", "a/b"), ("/a", "b/a"), ("a/b", "a/c/b"), ("a/*/b", "x/a/c/b/d"), ("a/*/b", "a/b"),
        ("a/**/b", "a/c/d/b/e"), ("layer_?", "layer_31"), ("a", ""), ("**", ""), ("/", "a"),
    ],
)  # fmt: skip
def test_a_value_is_selected_if_a_scope_around_it_is(pattern, path):
    names = path.split("/") if path else []
    scopes = ["/".join(names[:n]) for n in range(len(names) + 1)]
    assert path_matches(pattern, path) is any(scope_matches(pattern, scope) for scope in scopes)


def test_a_pattern_selects_whole_names():
    assert any_name_matches("layer_*", ["a", "layer_1"])
    assert any_name_matches("layer_[12]", ["layer_1"])
    assert not any_name_matches("layer", ["layer_1", "my_layer"])


PATTERNS = [
    ("encoder/*", 2), ("/model/encoder/*", 2), ("block_1", 1), ("/encoder/*", 0), ("model/block_1", 0),
]  # fmt: skip


def scoped(x):
    with jax.named_scope("model"), jax.named_scope("encoder"):
        for n in range(2):
            with jax.named_scope(f"block_{n}"):
                x = remat.checkpoint_name(jnp.sin(x), f"block_{n}")
    return x


@pytest.mark.parametrize(("pattern", "n_selected"), PATTERNS)
def test_a_policy_selects_by_the_same_patterns(pattern, n_selected):
    policy = remat.policies.save(path=pattern, strict=False)
    found = remat.residuals(remat.checkpoint(scoped, policy=policy), 1.0)
    assert len([r for r in found if r.kind == "computed"]) == n_selected


@pytest.mark.parametrize(("pattern", "n_selected"), PATTERNS)
@pytest.mark.parametrize("framework", ["linen", "nnx", "equinox"])
def test_rematted_selects_by_the_same_patterns(framework, pattern, n_selected):
    pytest.importorskip("equinox" if framework == "equinox" else "flax")
    assert COUNTS[framework](pattern) == n_selected


def n_regions(f, *args):
    return str(jax.make_jaxpr(f)(*args)).count("remat[")


def count_in_linen(pattern):
    import flax.linen as nn

    class Encoder(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1, name="block_1")(nn.Dense(1, name="block_0")(x))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Encoder(name="encoder")(x)

    class Root(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Model(name="model")(x)

    root, x = Root(), jnp.ones((1, 1))
    variables = root.init(jax.random.key(0), x)
    with remat.rematted(pattern, root, strict=False):
        return n_regions(root.apply, variables, x)


def count_in_nnx(pattern):
    from flax import nnx

    class Node(nnx.Module):
        def __init__(self, **children):
            for name, child in children.items():
                setattr(self, name, child)

        def __call__(self, x):
            for name in ("model", "encoder", "block_0", "block_1"):
                x = getattr(self, name)(x) if hasattr(self, name) else x
            return jnp.sin(x)

    root = Node(model=Node(encoder=Node(block_0=Node(), block_1=Node())))
    with remat.rematted(pattern, root, strict=False):
        return n_regions(lambda x: root(x), jnp.ones(1))


def count_in_equinox(pattern):
    import equinox as eqx

    class Leaf(eqx.Module):
        def __call__(self, x):
            return jnp.sin(x)

    class Encoder(eqx.Module):
        block_0: Leaf
        block_1: Leaf

        def __call__(self, x):
            return self.block_1(self.block_0(x))

    class Model(eqx.Module):
        encoder: Encoder

        def __call__(self, x):
            return self.encoder(x)

    class Root(eqx.Module):
        model: Model

        def __call__(self, x):
            return self.model(x)

    root = Root(Model(Encoder(Leaf(), Leaf())))
    with remat.rematted(pattern, root, strict=False) as changed:
        return n_regions(lambda x: changed(x), jnp.ones(1))


COUNTS = {"linen": count_in_linen, "nnx": count_in_nnx, "equinox": count_in_equinox}


@pytest.mark.parametrize(("pattern", "allowed"), [("block_?", True), ("block", False)])
def test_names_that_a_test_allows_are_patterns_too(pattern, allowed):
    f = remat.checkpoint(lambda x: jnp.sin(scoped(x)), policy=remat.policies.save("block_*"))
    if allowed:
        remat.testing.assert_saves_only(f, 1.0, names=[pattern])
    else:
        with pytest.raises(remat.SavedValuesError):
            remat.testing.assert_saves_only(f, 1.0, names=[pattern])
