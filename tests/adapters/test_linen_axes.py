"""Invalid axes and arguments of `remat.linen.remat_scan`."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

import remat.linen
from remat.errors import OptionError, ScheduleError, TargetError

KEY = jax.random.key(0)
X = jnp.linspace(-1.0, 1.0, 15).reshape(5, 3)


class WithInputs(nn.Module):
    @nn.compact
    def __call__(self, x, bias, scale=1.0):
        return nn.Dense(3)(x) + bias * scale, x.sum()


@pytest.mark.parametrize(
    ("args", "kwargs", "says"),
    [
        ((X,), {}, "without in_axes= the layers take one argument, the carry, but the call has 2"),
        ((jnp.ones(7),), {}, "without in_axes="),
        ((False,), {}, "nn.broadcast for arguments of all layers"),
        ((), {"extra": X}, "'extra' came by keyword"),
    ],
)
def test_arguments_beside_the_carry_need_in_axes(args, kwargs, says):
    model = remat.linen.remat_scan(nn.Dense, (2, 2))(3)
    with pytest.raises(OptionError, match=re.escape(says)):
        model.init(KEY, X, *args, **kwargs)


def test_a_call_without_the_carry_says_so():
    with pytest.raises(OptionError, match="the carry, is missing"):
        remat.linen.remat_scan(nn.Dense, (2, 2))(3).init(KEY)


@pytest.mark.parametrize(
    ("target", "options", "inputs", "says"),
    [
        (WithInputs, {"in_axes": (0, 0)}, [jnp.ones((4, 3))], "has 2 entries, but the call has 1"),
        (WithInputs, {"in_axes": [0]}, [X, X], "has 1 entries, but the call has 2"),
        (WithInputs, {"in_axes": ((0, 0),)}, [X], "is not a prefix of the inputs"),
        (
            WithInputs,
            {"in_axes": 0},
            [jnp.ones((5, 3))],
            "at axis 0 of inputs[0], but its shape is",
        ),
        (WithInputs, {"in_axes": 0}, [{"a": 1.0}], "inputs[0]['a'] has no axis 0"),
        (WithInputs, {"in_axes": (3,)}, [jnp.ones((4, 3))], "inputs[0] has no axis 3"),
        (WithInputs, {"in_axes": (None,)}, [X], "but None is in (None,)"),
        (WithInputs, {"in_axes": "a"}, [X], "but 'a' is in 'a'"),
        (WithInputs, {"in_axes": 0}, {"bias": X}, "'bias' came by keyword"),
        (
            WithInputs,
            {"in_axes": 0, "out_axes": (0, 0)},
            [jnp.ones((4, 3))],
            "out_axes=(0, 0) is no",
        ),
        (WithInputs, {"in_axes": 0, "out_axes": 2}, [jnp.ones((4, 3))], "from -1 to 0, not at 2"),
        (nn.Dense, {"out_axes": 0}, [], "returns (carry, output)"),
        (nn.Dense, {"variable_axes": {"params": 5}}, [], "shape (3,), one of each layer"),
        (nn.Dense, {"variable_axes": {"params": "a"}}, [], "variable_axes['params'] is an int"),
        (nn.Dense, {"variable_axes": "params"}, [], "variable_axes is a mapping"),
        (nn.Dense, {"split_rngs": {"params": 3}}, [], "split_rngs['params'] is a bool"),
        (nn.Dense, {"split_rngs": "params"}, [], "split_rngs is a mapping"),
        (nn.Dense, {"metadata_params": 3}, [], "metadata_params is a mapping"),
    ],
)
def test_axes_that_do_not_fit_are_errors_that_name_the_option(target, options, inputs, says):
    args, kwargs = ([], inputs) if isinstance(inputs, dict) else (inputs, {})
    fields = {"features": 3} if target is nn.Dense else {}
    with pytest.raises((OptionError, ScheduleError, TargetError), match=re.escape(says)):
        remat.linen.remat_scan(target, (2, 2), **options)(**fields).init(KEY, X, *args, **kwargs)
