"""`remat.plan`: search for a plan of a step whose compiled peak is within a budget (`planning`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from remat import units
from remat.aliases import PyTree
from remat.cache import Cache, find_cache
from remat.errors import PlanError
from remat.module_steps import of_arrays
from remat.planner.host_state import ACTIVATIONS, find_host_state, parse_offload, state_kinds
from remat.planner.plan_file import AS_RUN, FAST, Plan
from remat.planner.planning import Planning
from remat.planner.progress import Progress
from remat.planner.step import TargetStep, check_step, unfitted
from remat.printing import shown
from remat.program.costs import Costs, find_costs
from remat.program.targets import Target, target as find_target


def plan(
    step: Callable,
    /,
    *args: PyTree,
    budget: units.Number | None = None,
    target: str | Target | None = None,
    offload: bool | str = True,
    host_budget: units.Number | None = None,
    kwargs: Mapping[str, PyTree] | None = None,
    cache: Cache | bool | str | os.PathLike[str] = True,
    costs: str | Costs = "roofline",
    verify: str | None = None,
    progress: bool | Callable[[str], None] = True,
    **jit_options: Any,
) -> Plan:
    """Choose what a step saves and recomputes so that the compiler's peak is within a budget.

    The step is compiled but not run. Arguments may be arrays or `jax.ShapeDtypeStruct`s (with
    shardings, where the step runs on several devices).

    >>> import jax, jax.numpy as jnp, remat
    >>> def loss(w, x):
    ...     for _ in range(8):
    ...         x = jnp.tanh(x @ w)
    ...     return x.sum()
    >>> w, x = jnp.eye(64), jnp.ones((1000, 64))
    >>> plan = remat.plan(jax.value_and_grad(loss), w, x, budget="60%")
    >>> plan.is_verified, plan.peak_bytes <= 0.6 * plan.peak_bytes_without_remat
    (True, True)

    Args:
      step: the training step. Any operation may be recomputed; if functions in it are marked by
        `remat.auto`, only operations of these.
      args, kwargs: the arguments of the step.
      budget: the largest peak on one device that the compiler may report (arguments + temporaries +
        results - aliased): bytes, a text such as "8GiB", a share of the peak without
        rematerialization such as "60%", or None for all of the device's memory.
      target: None for the device at hand; "tpu:v5e:16x16", "gpu:h100" and the like for a device that
        is not attached (see `remat.program.targets`).
      offload: what may be kept in host memory, if the target supports that: "activations" (also True),
        "optimizer", "weights", several of these as in "activations|optimizer", or False for nothing.
        Activations are offloaded if that takes less time than recomputing them, or if no other plan fits.
        No activation is offloaded on a CPU, whose memory is the host's, or on a GPU, where XLA has
        miscompiled scans with offloaded residuals. If the compiler fails on all plans with offloading, the
        step is planned without. Optimizer state that the step only updates elementwise becomes an argument
        and a result in host memory and is updated chunk by chunk. So do weights that, besides, only loops
        read, slice by slice: a scan over layers fetches those of one layer in each iteration. Shares in
        `budget` are of the peak with these arguments on the host.
      host_budget: the most host memory per device that the compiler may report: bytes, or a text such
        as "48GiB". None for the share of a host's memory that a device of this kind has, where that is
        known (TPUs).
      cache: whether to use the plans in the user's cache directory and to add to them; or a cache or
        a folder to use instead.
      costs: the cost model of recomputation: "roofline", from the device's peak FLOP/s and bandwidth;
        "measured", by timing equations on the device at hand; or a `remat.program.costs.Costs`.
      verify: "as run" confirms the plan by compiling it with the options with which it will run, which
        takes minutes for large programs on TPUs; "fast" relies on the fast level at which the search
        compiles there. None confirms as run where that is expected to take less than three minutes. On
        CPUs both are the same. `Plan.verified_level` says what was done.
      progress: whether to show the progress on a terminal; or a function that is called with each
        status text instead.
      jit_options: options of `jax.jit`: donation, static arguments, shardings.

    Returns:
      The verified plan.

    Raises:
      BudgetError: no plan fits. The message has the smallest peak that was reached and its largest
        parts.
      PlanError: the step cannot be analysed on the target, or `costs` is invalid, or
        "measured" for a device that is not attached; or `verify` or `offload` is invalid, or no argument
        of these kinds can be in host memory.
      UnitsError: the budget is neither a number of bytes nor a share.
    """
    return planning_of(
        step,
        args,
        budget=budget,
        target=target,
        offload=offload,
        host_budget=host_budget,
        kwargs=kwargs,
        cache=cache,
        costs=costs,
        verify=verify,
        progress=progress,
        **jit_options,
    ).run()


def planning_of(
    step: Callable,
    args: tuple[PyTree, ...],
    *,
    budget: units.Number | None = None,
    target: str | Target | None = None,
    offload: bool | str = True,
    host_budget: units.Number | None = None,
    kwargs: Mapping[str, PyTree] | None = None,
    cache: Cache | bool | str | os.PathLike[str] = True,
    costs: str | Costs = "roofline",
    verify: str | None = None,
    progress: bool | Callable[[str], None] = True,
    **jit_options: Any,
) -> Planning:
    """Return the planning of a step. Its arguments and errors are those of `plan`."""
    check_step(step)
    step, args, kwargs = of_arrays(step, args, kwargs or {})
    step, jit_options = unfitted(step, jit_options)
    if verify not in (None, AS_RUN, FAST):
        raise PlanError(f"verify={shown(verify)} must be {AS_RUN!r}, {FAST!r} or None.")
    kinds, of_state = parse_offload(offload), state_kinds(offload)
    host_limit = None if host_budget is None else units.parse_bytes(host_budget)
    limit = None if budget is None else units.parse_budget(budget)
    at = find_target(target)
    if limit is None:
        limit = _all_memory(at)
    state = None
    if of_state:
        state = find_host_state(step, args, kwargs, at, jit_options, of_state)
        step, (args, kwargs) = state.hosted(step), state.moved(args, kwargs, at)
    store = find_cache(cache)
    here = None if at.ahead_of_time else at.devices[0]
    return Planning(
        TargetStep(step, args, kwargs, at, jit_options),
        limit,
        store,
        Progress(progress),
        find_costs(costs, at.device, here, store),
        offload=ACTIVATIONS in kinds,
        state=state,
        host_limit=host_limit,
        verify=verify,
    )


def _all_memory(target: Target) -> units.Budget:
    n_bytes = target.device.memory_bytes
    if not n_bytes:
        raise PlanError(f"the memory size of {target.name} is unknown; pass budget=.")
    return units.parse_budget(n_bytes)
