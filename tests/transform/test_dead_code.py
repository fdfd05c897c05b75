"""Dead-code elimination by outer transformations does not change a region's results."""

import jax
import jax.numpy as jnp
import numpy as np

import remat


def test_a_strict_name_may_disappear_as_dead_code():
    def f(x):
        return jnp.sin(x), jnp.cos(remat.checkpoint_name(jnp.sin(x), "a"))

    g = remat.checkpoint(f, policy=remat.policies.save("a"))
    h = jax.hessian(jax.checkpoint(lambda x: g(x)[0]))
    np.testing.assert_allclose(h(1.0), -np.sin(1.0), rtol=1e-6)
