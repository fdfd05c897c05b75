"""Tracebacks of errors in users' code: frames of the adapters are hidden, as frames of the frameworks are."""

import traceback

import jax
import jax.numpy as jnp
import pytest

import remat

X = jnp.ones((2, 2))


@pytest.fixture(autouse=True)
def filtering():
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "remove_frames")
    yield
    jax.config.update("jax_traceback_filtering", before)


class UserError(Exception):
    pass


def fail(x):
    raise UserError


def frames_of(f):
    """Return the files of the traceback that a user sees, without JAX's frames and hidden ones."""
    with pytest.raises(UserError) as info:
        f()
    files = [frame.filename for frame in traceback.extract_tb(info.value.__traceback__)]
    return ["remat" if "/src/remat/" in name else "other" for name in files]


def linen():
    nn = pytest.importorskip("flax.linen")
    import remat.linen

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return remat.linen.remat(Block)(name="block")(x)

    class Block(nn.Module):
        def __call__(self, x):
            return fail(x)

    return lambda: Model().apply({}, X)


def linen_by_path():
    nn = pytest.importorskip("flax.linen")

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Block(name="block")(x)

    class Block(nn.Module):
        def __call__(self, x):
            return fail(x)

    def run():
        with remat.rematted("block"):
            Model().apply({}, X)

    return run


def nnx():
    nnx = pytest.importorskip("flax.nnx")
    import remat.nnx

    class Block(nnx.Module):
        @remat.nnx.remat
        def __call__(self, x):
            return fail(x)

    return lambda: Block()(X)


def nnx_by_path():
    nnx = pytest.importorskip("flax.nnx")

    class Block(nnx.Module):
        def __call__(self, x):
            return fail(x)

    model = nnx.Sequential(Block())

    def run():
        with remat.rematted("layers/0", model):
            model(X)

    return run


def equinox():
    pytest.importorskip("equinox")
    import remat.equinox

    return lambda: remat.equinox.filter_checkpoint(fail)(X)


def equinox_by_path():
    eqx = pytest.importorskip("equinox")

    class Block(eqx.Module):
        def __call__(self, x):
            return fail(x)

    with remat.rematted("layers/0", eqx.nn.Sequential([eqx.nn.Lambda(Block())])) as model:
        return lambda: model(X)


def haiku():
    hk = pytest.importorskip("haiku")
    import remat.haiku

    f = hk.transform(lambda x: remat.haiku.remat(fail)(x))
    return lambda: f.apply({}, None, X)


def brainstate():
    pytest.importorskip("brainstate")
    import remat.brainstate

    return lambda: remat.brainstate.remat(fail)(X)


@pytest.mark.parametrize(
    "make", [linen, linen_by_path, nnx, nnx_by_path, equinox, equinox_by_path, haiku, brainstate]
)
def test_a_users_error_shows_no_frame_of_an_adapter(make):
    assert "remat" not in frames_of(make())


def test_frames_are_shown_where_flaxs_are():
    run = linen()
    from flax import traceback_util

    traceback_util.show_flax_in_tracebacks()
    try:
        assert "remat" in frames_of(run)
    finally:
        traceback_util.hide_flax_in_tracebacks()
    assert "remat" not in frames_of(run)


def test_equations_of_a_region_are_at_users_lines():
    nnx = pytest.importorskip("flax.nnx")

    class Block(nnx.Module):
        def __call__(self, x):
            return jnp.sin(x)

    model = nnx.Sequential(Block())
    with remat.rematted("layers/0", model):
        text = jax.make_jaxpr(lambda x: model(x))(X).pretty_print(source_info=True)
    assert "src/remat/" not in text and "test_tracebacks.py" in text
