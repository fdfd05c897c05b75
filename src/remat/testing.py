"""Assertions on gradients and on memory, for the tests of programs that use rematerialization.

Memory is the compiler's analysis (`Compiled.memory_analysis()`), which is exact and repeatable and needs
no run. On CPU the process's actual peak can be measured instead (`real=True`).
"""

from __future__ import annotations

import ctypes
import pathlib
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from remat import units
from remat.aliases import Leaf, PyTree
from remat.errors import GradientMismatchError, PeakMemoryError, RematError, SavedValuesError
from remat.globs import any_name_matches
from remat.transform.residuals import residuals

__all__ = ["assert_peak_below", "assert_same_gradients", "assert_saves_only", "peak_bytes"]


def __dir__() -> list[str]:
    return sorted(__all__)


# --------------------------------------------------------------------------------------------------
# Gradients


def assert_same_gradients(
    f: Callable[..., PyTree],
    g: Callable[..., PyTree],
    *args: PyTree,
    order: int = 1,
    rtol: float | None = None,
    atol: float = 0.0,
    seed: int = 0,
) -> None:
    """Assert that two functions have the same values and derivatives at some arguments.

    The derivatives are reverse-mode, with respect to every real or complex array in `args`, with random
    cotangents. With `order=2`, these derivatives are differentiated again with random cotangents.

    >>> import jax.numpy as jnp, remat
    >>> def f(x):
    ...     return jnp.sin(jnp.sin(x))
    >>> remat.testing.assert_same_gradients(f, remat.checkpoint(f), jnp.arange(3.0), order=2)

    Args:
      f, g: functions of the same arguments with results of the same structure.
      *args: pytrees of arrays.
      order: 1 or 2.
      rtol: the largest allowed difference, relative to the largest magnitude in the array; the default
        is 100 times the precision of its dtype.
      atol: the largest allowed absolute difference in addition.
      seed: the seed of the random cotangents.

    Raises:
      GradientMismatchError: an array differs; the message has its name and the largest difference.
      ValueError: `order` is neither 1 nor 2.
    """
    __tracebackhide__ = True
    if order not in (1, 2):
        raise ValueError(f"order is 1 or 2, not {order!r}.")
    first, second = (_values_and_gradients(fun, args, order, seed) for fun in (f, g))
    for what in first:
        structures = [jax.tree.structure(results[what]) for results in (first, second)]
        if structures[0] != structures[1]:
            raise GradientMismatchError(
                f"the two functions' {what}s differ in structure: "
                f"{structures[0]} and {structures[1]}."
            )
        paths = jax.tree_util.tree_flatten_with_path(first[what])[0]
        for (path, a), b in zip(paths, jax.tree.leaves(second[what])):
            _compare(f"{what}{jax.tree_util.keystr(path)}", a, b, rtol, atol)


def _values_and_gradients(fun: Callable, args: tuple, order: int, seed: int) -> dict[str, PyTree]:
    leaves, tree = jax.tree.flatten(args)
    chosen = [i for i, x in enumerate(leaves) if _is_inexact(x)]

    def of_chosen(xs: list[jax.Array]) -> PyTree:
        full = list(leaves)
        for i, x in zip(chosen, xs):
            full[i] = x
        return jax.tree.map(jnp.asarray, fun(*jax.tree.unflatten(tree, full)))

    def gradients(xs: list[jax.Array]) -> tuple[PyTree, PyTree]:
        out, vjp = jax.vjp(of_chosen, xs)
        return out, vjp(_random_like(out, seed, cotangent=True))[0]

    start = [leaves[i] for i in chosen]
    out, first = gradients(start)
    result = {"value": out, "gradient": first}
    if order == 2:

        def directional(xs: list[jax.Array]) -> PyTree:
            grads = gradients(xs)[1]
            weights = _random_like(grads, seed + 1)
            return sum(
                jnp.sum(jnp.real(a * b)) for a, b in zip(grads, weights) if _is_inexact(a)
            ) + jnp.zeros(())

        result["second derivative"] = jax.grad(directional)(start)
    return result


def _is_inexact(x: Leaf) -> bool:
    return jnp.issubdtype(getattr(x, "dtype", jnp.result_type(x)), jnp.inexact)


def _random_like(tree: PyTree, seed: int, cotangent: bool = False) -> PyTree:
    rng = np.random.default_rng(seed)

    def leaf(x: Leaf) -> Leaf:
        if not _is_inexact(x):
            return np.zeros(np.shape(x), jax.dtypes.float0) if cotangent else x
        values = rng.uniform(0.5, 1.5, np.shape(x))
        return jnp.asarray(values).astype(jnp.result_type(x))

    return jax.tree.map(leaf, tree)


def _compare(path: str, a: Leaf, b: Leaf, rtol: float | None, atol: float) -> None:
    __tracebackhide__ = True
    if np.shape(a) != np.shape(b) or jnp.result_type(a) != jnp.result_type(b):
        raise GradientMismatchError(
            f"{path}: {jnp.result_type(a)}{list(np.shape(a))} from the first function and "
            f"{jnp.result_type(b)}{list(np.shape(b))} from the second."
        )
    if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    if a.dtype == jax.dtypes.float0 or a.size == 0:
        return
    if not _is_inexact(a):
        if not np.array_equal(a, b):
            raise GradientMismatchError(f"{path}: {np.sum(np.not_equal(a, b))} entries differ.")
        return
    relative = 100 * float(jnp.finfo(a.dtype).eps) if rtol is None else rtol
    wide = np.complex128 if jnp.issubdtype(a.dtype, jnp.complexfloating) else np.float64
    x, y = np.asarray(a).astype(wide), np.asarray(b).astype(wide)
    same_nans = np.array_equal(np.isnan(x), np.isnan(y))
    finite = ~(np.isnan(x) | (x == y))
    largest = float(np.max(np.abs(x - y), where=finite, initial=0.0))
    scale = float(np.max(np.abs(x), where=np.isfinite(x), initial=0.0))
    if not same_nans or not largest <= atol + relative * scale:
        raise GradientMismatchError(
            f"{path} differs by {largest:.3g} at most, where {atol + relative * scale:.3g} is allowed "
            f"({relative:.3g} of the largest magnitude, {scale:.3g})."
        )


# --------------------------------------------------------------------------------------------------
# Memory


_MOST_LINES = 10  # lines of saved values in an error; more make the message longer


def peak_bytes(step: Callable[..., PyTree], *args: PyTree, real: bool = False) -> int:
    """Return the peak memory of a step on one device: arguments, results and temporaries.

    >>> import jax, jax.numpy as jnp, remat
    >>> step = jax.jit(lambda x: jnp.sin(x) * 2)
    >>> remat.testing.peak_bytes(step, jax.ShapeDtypeStruct((1000,), jnp.float32))
    8000

    Args:
      step: a function, jitted or not, or the result of `jitted.lower(...).compile()`.
      *args: its arguments. Without `real`, they may be `jax.ShapeDtypeStruct`s.
      real: run the step and measure, instead of the compiler's figure for temporaries and results. On a
        CPU it is the largest growth of the process's resident memory, which includes the allocator's
        overhead, some 20 to 40 MiB, and needs Linux. On a GPU or TPU it is the statistics of the device's
        allocator, which have the peak since the process began: measure a step before larger ones.

    Returns:
      Bytes. The compiler's figure is `peak_memory_in_bytes` on TPU; elsewhere it is arguments +
      temporaries + results - aliased.

    Raises:
      RematError: the compiler gives no analysis, or the process's peak cannot be measured.
    """
    compiled: Any = step
    if not hasattr(step, "memory_analysis"):
        compiled = _jitted(step).lower(*args).compile()
    analysis = compiled.memory_analysis()
    if analysis is None:
        raise RematError(f"the backend {jax.default_backend()!r} has no memory analysis.")
    if real:
        if _platform(compiled) == "cpu":
            return analysis.argument_size_in_bytes + _growth_bytes(lambda: compiled(*args))
        device = next(iter(compiled.runtime_executable().local_devices()))
        growth = device_growth_bytes(device, compiled, jax.device_put(args))
        return analysis.argument_size_in_bytes + growth
    if _platform(compiled) == "tpu":
        return analysis.peak_memory_in_bytes
    return (
        analysis.argument_size_in_bytes
        + analysis.temp_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
    )


def assert_peak_below(
    step: Callable[..., PyTree], *args: PyTree, limit: str | int, real: bool = False
) -> None:
    """Assert that a step needs no more memory than a limit (see `peak_bytes`).

    >>> import jax.numpy as jnp, remat
    >>> remat.testing.assert_peak_below(jnp.sin, jnp.ones(1000), limit="8KiB")

    Args:
      step, *args, real: as for `peak_bytes`.
      limit: bytes, or a text such as `"2GiB"`.

    Raises:
      PeakMemoryError: the peak is above the limit; the message has both.
    """
    __tracebackhide__ = True
    check_peak(peak_bytes(step, *args, real=real), limit)


def check_peak(peak: int, limit: str | int) -> None:
    """Raise `PeakMemoryError` if a peak is above a limit."""
    __tracebackhide__ = True
    allowed = units.parse_bytes(limit, "limit=")
    if peak > allowed:
        raise PeakMemoryError(
            f"the step's peak is {units.format_bytes(peak)} ({peak} bytes), "
            f"{units.format_bytes(peak - allowed)} above the limit of {units.format_bytes(allowed)}. "
            "remat.print_saved_residuals shows what is kept for the backward pass."
        )


def assert_saves_only(
    f: Callable[..., PyTree],
    *args: PyTree,
    names: Iterable[str] = (),
    limit: str | int = 0,
    **kwargs: PyTree,
) -> None:
    """Assert that a function saves only values with certain names for its backward pass.

    >>> import jax.numpy as jnp, remat
    >>> def f(x):
    ...     return jnp.sin(remat.checkpoint_name(jnp.sin(x), "inner")).sum()
    >>> policy = remat.policies.save("inner")
    >>> g = remat.checkpoint(f, policy=policy)
    >>> remat.testing.assert_saves_only(g, jnp.ones(1000), names=["inner"])
    >>> remat.testing.assert_saves_only(f, jnp.ones(1000), limit="8KiB")

    Args:
      f: a function, such as a loss (not a step that differentiates it).
      *args, **kwargs: its arguments, or `jax.ShapeDtypeStruct`s.
      names: names given by `checkpoint_name`, or patterns of them; see `remat.globs`.
      limit: bytes that other saved values may take, such as "1MiB". Arguments do not count.

    Raises:
      SavedValuesError: other values are saved; the message lists them, the largest first.
    """
    __tracebackhide__ = True
    allowed, patterns = units.parse_bytes(limit, "limit="), tuple(names)
    others = [
        r
        for r in residuals(f, *args, **kwargs)
        if r.kind == "computed" and not any(any_name_matches(p, r.names) for p in patterns)
    ]
    total = sum(r.n_bytes for r in others)
    if total > allowed:
        alike: dict[str, list[int]] = {}
        for r in others:
            alike.setdefault(str(r), []).append(r.n_bytes)
        largest = sorted(alike.items(), key=lambda item: -sum(item[1]))
        listing = "\n".join(_line(text, sizes) for text, sizes in largest[:_MOST_LINES])
        rest = sum(len(sizes) for _, sizes in largest[_MOST_LINES:])
        more = f"\n{rest:>12} more" if rest else ""
        besides = f" besides {', '.join(map(repr, patterns))}" if patterns else ""
        raise SavedValuesError(
            f"{units.format_bytes(total)} are saved for the backward pass{besides}, where "
            f"{units.format_bytes(allowed)} are allowed:\n{listing}{more}\nCheckpoint what computes "
            "them, or give them names that the policy saves."
        )


def _line(text: str, sizes: list[int]) -> str:
    """Return a line for values with one description: their total bytes, their number, the description."""
    times = f"{len(sizes)} × " if len(sizes) > 1 else ""
    return f"{units.format_bytes(sum(sizes)):>12}  {times}{text}"


def _jitted(step: Callable[..., PyTree]) -> Any:
    return step if hasattr(step, "lower") else jax.jit(step)


def _platform(compiled: jax.stages.Compiled) -> str:
    try:
        return next(iter(compiled.runtime_executable().local_devices())).platform
    except Exception:  # compiled ahead of time for devices that are not attached
        return getattr(jax.local_devices()[0], "platform", "cpu")


_STATUS = pathlib.Path("/proc/self/status")
_CLEAR_REFS = pathlib.Path("/proc/self/clear_refs")


def _growth_bytes(run: Callable[[], PyTree]) -> int:
    """Return the largest growth of the resident memory during a call."""
    jax.block_until_ready(run())  # memory that only the first run allocates
    try:
        before = _settled_bytes()
        _CLEAR_REFS.write_text("5")  # reset the high-water mark
        result = jax.block_until_ready(run())
        peak = _status_bytes("VmHWM")
    except (OSError, AttributeError, StopIteration) as e:
        raise RematError(
            f"the process's peak memory cannot be measured here ({e}): it takes Linux's /proc. "
            "Leave out real=True."
        ) from e
    del result
    return max(peak - before, 0)


def device_growth_bytes(
    device: jax.Device, run: Callable[..., PyTree], args: tuple[PyTree, ...]
) -> int:
    """Return the growth of a device's memory during a call whose arguments are already on it."""
    jax.block_until_ready(args)
    before = device.memory_stats()
    if not before or "peak_bytes_in_use" not in before:
        raise RematError(f"{device} has no statistics of its allocator. Leave out real=True.")
    jax.block_until_ready(run(*args))
    peak = device.memory_stats()["peak_bytes_in_use"]
    if peak <= before["peak_bytes_in_use"]:
        raise RematError(
            f"the step stays below {units.format_bytes(peak)}, which this process has used on {device} "
            "before, and its allocator has only the largest peak. Measure the step first, or in a process "
            "of its own."
        )
    return int(peak - before["bytes_in_use"])


def _settled_bytes() -> int:
    """Return the resident memory after that of earlier work has been released.

    The runtime frees a finished program's memory in another thread, and the allocator keeps freed pages,
    whose reuse would not count as growth.
    """
    trim = ctypes.CDLL("libc.so.6").malloc_trim
    smallest = _status_bytes("VmRSS")
    waits_without_change = 0
    while waits_without_change < 5:
        time.sleep(0.02)
        trim(0)
        now = _status_bytes("VmRSS")
        waits_without_change = waits_without_change + 1 if now > 0.99 * smallest else 0
        smallest = min(smallest, now)
    return smallest


def _status_bytes(field: str) -> int:
    lines = _STATUS.read_text().splitlines()
    line = next(line for line in lines if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024
