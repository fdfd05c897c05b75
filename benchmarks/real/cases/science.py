"""Simulators and scientific models: jaxley, brax, e3nn-jax, netket, optimistix, jraph."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.real.case import Case, Wrap, checkpoints, layers, scan_bodies, unchanged, whole


def jaxley_cell() -> Case:
    """Gradient of a voltage with respect to conductances of a branched cell with Hodgkin-Huxley channels."""
    import jaxley as jx
    from jaxley.channels import HH

    cell = jx.Cell([jx.Branch(jx.Compartment(), ncomp=4)] * 7, parents=[-1, 0, 0, 1, 1, 2, 2])
    cell.insert(HH())
    cell.branch(0).loc(0.0).stimulate(
        jx.step_current(0.5, 1.0, 0.02, 0.025, 9.975)  # no spike, which would amplify rounding
    )
    cell.branch(6).loc(1.0).record(verbose=False)
    cell.make_trainable("HH_gNa", verbose=False)
    params = cell.get_parameters()

    def step_of(**options: Any) -> Callable:
        def loss(params: Any) -> jax.Array:
            return jnp.mean((jx.integrate(cell, params=params, **options) + 60.0) ** 2)

        return jax.value_and_grad(loss)

    alternatives = {
        f"checkpoint_lengths={lengths}": step_of(checkpoint_lengths=lengths)
        for lengths in ([400], [20, 20], [8, 8, 7])
    }
    return Case(step_of(), (params,), alternatives)


def e3nn_points() -> Case:
    """Equivariant convolutions on a point cloud: gradient of an energy's error with Flax modules."""
    import e3nn_jax as e3nn
    import flax.linen as nn

    class Convolution(nn.Module):
        @nn.compact
        def __call__(self, x: Any, positions: jax.Array, senders: Any, receivers: Any) -> Any:
            vectors = positions[receivers] - positions[senders]
            sh = e3nn.spherical_harmonics([0, 1], e3nn.IrrepsArray("1o", vectors), True)
            lengths = jnp.linalg.norm(vectors, axis=-1)
            radial = e3nn.soft_one_hot_linspace(
                lengths, start=0.0, end=3.0, number=8, basis="gaussian", cutoff=False
            )
            messages = e3nn.tensor_product(x[senders], sh, filter_ir_out="0e + 1o")
            weights = nn.Dense(messages.irreps.num_irreps)(nn.gelu(nn.Dense(32)(radial)))
            sums = e3nn.scatter_sum(messages * weights, dst=receivers, output_size=len(positions))
            mixed = (e3nn.flax.Linear("16x0e + 8x1o", force_irreps_out=True)(y) for y in (sums, x))
            return functools.reduce(operator.add, mixed)

    class Network(nn.Module):
        layer: type[nn.Module] = Convolution

        @nn.compact
        def __call__(self, positions: jax.Array, senders: Any, receivers: Any) -> jax.Array:
            x = e3nn.IrrepsArray("16x0e", jnp.ones((len(positions), 16)))
            for i in range(3):
                x = self.layer(name=f"layer_{i}")(x, positions, senders, receivers)
                x = e3nn.scalar_activation(x, [jax.nn.gelu, None]) if i < 2 else x
            return e3nn.flax.Linear("0e")(x).array.sum()

    n, degree = 64, 12
    positions = jax.random.normal(jax.random.key(0), (n, 3))
    receivers = jnp.repeat(jnp.arange(n), degree)
    senders = (receivers + jnp.tile(jnp.arange(1, degree + 1), n)) % n
    args = positions, senders, receivers
    params = Network().init(jax.random.key(1), *args)

    def make(wrap: Wrap = unchanged, layer: type[nn.Module] = Convolution) -> Callable:
        def loss(params: Any, *args: Any) -> jax.Array:
            return (Network(layer).apply(params, *args) - 1.0) ** 2

        return jax.value_and_grad(wrap(loss))

    alternatives = {
        f"each layer, {label}": make(layer=nn.remat(Convolution, policy=w.keywords["policy"]))
        for label, w in checkpoints()
    }
    return Case(make(), (params, *args), alternatives | whole(make))


def netket_autoregressive() -> Case:
    """Gradient of the energy of a spin chain, from local energies of samples of an autoregressive model."""
    import netket as nk

    n, samples = 16, 64
    hilbert = nk.hilbert.Spin(0.5, n)
    hamiltonian = nk.operator.IsingJax(hilbert, nk.graph.Chain(n), h=1.0)
    model = nk.models.ARNNConv1D(hilbert, layers=4, features=16, kernel_size=4)
    spins = hilbert.random_state(jax.random.key(0), samples)
    params = model.init(jax.random.key(1), spins)

    def loss(params: Any, spins: jax.Array) -> jax.Array:
        connected, elements = hamiltonian.get_conn_padded(spins)
        log_psi = model.apply(params, spins)
        others = model.apply(params, connected.reshape(-1, n)).reshape(elements.shape)
        energies = jnp.sum(elements * jnp.exp(others - log_psi[:, None]), axis=-1)
        centred = jax.lax.stop_gradient(energies - energies.mean())
        return jnp.mean((centred.conj() * log_psi).real * 2 + energies.real)

    def make(wrap: Wrap) -> Callable:
        return jax.value_and_grad(wrap(loss))

    step = make(unchanged)
    from benchmarks.real.cases.transformers_flax import lifted

    alternatives = layers(step, nk.nn.MaskedConv1D, wrap=lifted) | whole(make)
    return Case(step, (params, spins), alternatives)


def optimistix_fit() -> Case:
    """Gradient through a Levenberg-Marquardt fit by the implicit function theorem."""
    import equinox as eqx
    import optimistix as optx

    mlp = eqx.nn.MLP(8, "scalar", 64, 3, key=jax.random.key(0))
    weights, static = eqx.partition(mlp, eqx.is_inexact_array)
    x = jax.random.normal(jax.random.key(1), (512, 8))

    def residuals(shift: jax.Array, args: Any) -> jax.Array:
        weights, x = args
        return jax.vmap(eqx.combine(weights, static))(x + shift) - jnp.sin(x.sum(1))

    def make(wrap: Wrap) -> Callable:
        def loss(weights: Any, x: jax.Array) -> jax.Array:
            solver = optx.LevenbergMarquardt(rtol=1e-3, atol=1e-3)
            found = optx.least_squares(
                wrap(residuals), solver, jnp.zeros(8), (weights, x), max_steps=8, throw=False
            )
            return jnp.mean(residuals(found.value, (weights, x)) ** 2)

        return jax.value_and_grad(loss)

    return Case(
        make(unchanged), (weights, x), {f"residuals, {k}": make(w) for k, w in checkpoints()}
    )


def jraph_network() -> Case:
    """Message passing with Haiku networks on a random graph."""
    import haiku as hk
    import jraph

    n_nodes, n_edges, width = 128, 1024, 64
    senders, receivers = jax.random.randint(jax.random.key(0), (2, n_edges), 0, n_nodes)
    features = jax.random.normal(jax.random.key(1), (n_nodes, width))

    def graph(nodes: jax.Array) -> jraph.GraphsTuple:
        count = lambda n: jnp.array([n])  # noqa: E731
        edges = jnp.ones((n_edges, width))
        return jraph.GraphsTuple(
            nodes, edges, receivers, senders, jnp.ones((1, 1)), count(n_nodes), count(n_edges)
        )

    def network(nodes: jax.Array, wrap: Wrap) -> jax.Array:
        found = graph(nodes)
        for _ in range(4):
            edge, node = (hk.nets.MLP([width, width]) for _ in range(2))
            layer = jraph.GraphNetwork(jraph.concatenated_args(edge), jraph.concatenated_args(node))
            found = wrap(layer)(found)
        return found.nodes

    def make(loss_wrap: Wrap = unchanged, wrap: Wrap = unchanged) -> Callable:
        model = hk.without_apply_rng(hk.transform(lambda x: network(x, wrap)))
        return jax.value_and_grad(
            loss_wrap(lambda params, x: jnp.mean(model.apply(params, x) ** 2))
        )

    params = hk.transform(lambda x: network(x, unchanged)).init(jax.random.key(2), features)
    alternatives = {}
    for label, wrap in checkpoints():
        inner = lambda f, wrap=wrap: hk.remat(f, **wrap.keywords)  # noqa: E731
        alternatives[f"each layer, {label}"] = make(wrap=inner)
    return Case(make(), (params, features), alternatives | whole(make))


def brax_ppo() -> Case:
    """The loss of proximal policy optimization: a policy, a value function, and advantages in a scan."""
    from brax.training.agents.ppo import losses, networks
    from brax.training.types import Transition

    n, length, observed, actions = 32, 32, 27, 8
    ppo = networks.make_ppo_networks(
        observed, actions, value_hidden_layer_sizes=(128,) * 4, policy_hidden_layer_sizes=(128,) * 4
    )
    keys = jax.random.split(jax.random.PRNGKey(0), 4)
    params = losses.PPONetworkParams(
        ppo.policy_network.init(keys[0]), ppo.value_network.init(keys[1])
    )
    values = jax.random.normal(keys[2], (n, length, observed))
    acted = jax.random.normal(keys[3], (n, length, actions))
    data = Transition(
        observation=values,
        action=jnp.tanh(acted),
        reward=values[..., 0],
        discount=jnp.ones((n, length)),
        next_observation=values,
        extras={
            "state_extras": {"truncation": jnp.zeros((n, length))},
            "policy_extras": {
                "raw_action": acted,
                "log_prob": values[..., 1],
                "distribution_params": jnp.zeros((n, length, 2 * actions)),
            },
        },
    )

    def make(wrap: Wrap) -> Callable:
        def loss(params: Any, data: Any, key: jax.Array) -> Any:
            return losses.compute_ppo_loss(params, None, data, key, ppo)

        return jax.value_and_grad(wrap(loss), has_aux=True)

    step = make(unchanged)
    return Case(step, (params, data, keys[0]), scan_bodies(step) | whole(make))
