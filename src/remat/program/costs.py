"""Seconds per equation: from a device's figures (`Roofline`), or measured on it (`Measured`).

The planner prices kernels (`Costs.seconds`). An operation that is not part of an elementwise fusion is
a separate kernel, whose price is multiplied by the measured `Costs.slowdown`.

The roofline (Williams, Waterman & Patterson, CACM 52(4), 2009): an operation takes as long as the
slower of its arithmetic and its memory traffic, plus the time to launch it, `Device.launch_s`. A
collective takes as long as sending its bytes on the links between devices. Fused operations share their
traffic, so the caller passes the FLOPs and bytes of a whole fusion to `seconds`. `remat.ir.flops` counts
those of an equation.

A measurement compiles each distinct equation (primitive, parameters, types) alone, runs it a few
times and caches the median, less the time of an empty program. Loops and calls are not run: the
equations inside them are, and their times are added up. A single equation is not fused, which would
overprice elementwise chains: these are priced by a roofline whose rates are measured too, on a long
chain of `tanh` and on a sum of two arrays larger than any cache.

Equations that cannot be run alone are priced by the roofline: those with effects, collectives,
callbacks, equations too large for the device, and those that fail.

Known limits: arrays are filled with ones and zeros, so times that depend on values are those for such
data; devices described ahead of time are not measured.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import Protocol

import jax
import jax.numpy as jnp
import jaxlib
from rich.console import Console
from rich.progress import track

from remat import _jax
from remat.aliases import Aval, PyTree
from remat.cache import Cache
from remat.errors import PlanError, closest
from remat.ir import jaxprs
from remat.ir.equations import fusion_of, is_collective
from remat.ir.flops import (
    TRANSCENDENTAL,
    bytes_moved,
    flops_of,
    link_bytes,
    n_bytes,
    through_bodies,
)
from remat.ir.operations import Fusion, operation
from remat.printing import printable
from remat.program.devices import Device, device
from remat.program.partition import UNKNOWN, Partition

_log = logging.getLogger(__name__)


class Costs(Protocol):
    """Prices kernels in seconds. Equal `key`s mean equal prices; plans are cached under it."""

    @property
    def name(self) -> str:
        """Return the name in plans, such as "roofline" or "measured"."""

    @property
    def key(self) -> str:
        """Return a key that is equal for cost models with equal costs."""

    def seconds(self, flops: float, bytes_moved: float, dtype: str = "float32") -> float:
        """Return the time of one kernel."""

    def slowdown(self, eqn: _jax.JaxprEqn) -> float:
        """Return the ratio of an unfused equation's time to the price of its FLOPs and bytes."""


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds from a device's figures.

    >>> from remat.program.devices import device
    >>> roofline = Roofline(device("h100"))
    >>> f"{roofline.seconds(flops=2 * 4096**3, bytes_moved=3 * 4096**2 * 2, dtype='bfloat16'):.2e}"
    '1.42e-04'
    """

    device: Device

    name = "roofline"

    @property
    def key(self) -> str:
        figures = dataclasses.replace(self.device, source="")
        return f"roofline {hashlib.sha256(repr(figures).encode()).hexdigest()[:16]}"

    def slowdown(self, eqn: _jax.JaxprEqn) -> float:
        """Return 1, or for a collective the ratio of its time on the links to that of its memory traffic."""
        sent = link_bytes(eqn)
        if not sent:
            return 1.0
        local_s = self.seconds(flops_of(eqn), bytes_moved(eqn), dtype_of(eqn))
        return max(1.0, self.link_seconds(sent) / local_s) if local_s else 1.0

    def link_seconds(self, n_bytes: float) -> float:
        """Return the time in which a device sends these bytes to other devices."""
        return n_bytes / self.device.link_bytes_per_s + self.device.launch_s

    def seconds(self, flops: float, bytes_moved: float, dtype: str = "float32") -> float:
        """Return the time of one kernel.

        Args:
          flops: its FLOPs.
          bytes_moved: the bytes of device memory that it reads and writes.
          dtype: of the operands of its matrix products.

        Returns:
          Seconds; 0 if there are no FLOPs and no bytes.
        """
        if not flops and not bytes_moved:
            return 0.0
        arithmetic_s = flops / self.device.flops_per_s(dtype)
        traffic_s = bytes_moved / self.device.bandwidth_bytes_per_s
        return max(arithmetic_s, traffic_s) + self.device.launch_s

    def transfer_seconds(self, n_bytes: float) -> float:
        """Return the time of a copy between the device's memory and the host's, in one direction."""
        return (
            n_bytes / self.device.host_link_bytes_per_s + self.device.launch_s if n_bytes else 0.0
        )

    def seconds_of(self, eqn: _jax.JaxprEqn) -> float:
        """Return the time of one equation with all that it runs inside, nothing fused."""
        return float(through_bodies(eqn, self._of_one))

    def _of_one(self, eqn: _jax.JaxprEqn) -> float:
        local_s = self.seconds(flops_of(eqn), bytes_moved(eqn), dtype_of(eqn))
        sent = link_bytes(eqn)
        return max(local_s, self.link_seconds(sent)) if sent else local_s


def slowdowns(
    costs: Costs, sender: Device | None = None, partition: Partition = UNKNOWN
) -> Callable[[_jax.JaxprEqn], float]:
    """Return the ratio of an equation's time to the price of its FLOPs and bytes, as a function.

    It is 1 for fusible equations, `Costs.slowdown` for kernels, and their average over a loop's body.

    Args:
      costs: the cost model.
      sender: the device that sends what the partition requires.
      partition: how equations are divided among devices.
    """

    def priced_s(eqn: _jax.JaxprEqn, n_devices: int = 1) -> float:
        flops, moved = flops_of(eqn), bytes_moved(eqn)
        if not flops and not moved and partition.sent(eqn) is not None:
            # A view becomes a copy where its value is distributed anew.
            moved = sum(n_bytes(v.aval) for v in (*eqn.invars, *eqn.outvars))
        return costs.seconds(flops / n_devices, moved / n_devices, dtype_of(eqn))

    def taken_s(eqn: _jax.JaxprEqn) -> float:
        is_kernel = fusion_of(eqn) in (Fusion.KERNEL, Fusion.REDUCE)
        alone_s = priced_s(eqn) * (costs.slowdown(eqn) if is_kernel else 1.0)
        of_eqn = partition.sent(eqn)
        if of_eqn is None or sender is None:
            return alone_s
        # Costs are of the whole equation; each device computes its part and then sends.
        part_s = priced_s(eqn, of_eqn.n_devices)
        link_s = Roofline(sender).link_seconds(of_eqn.n_bytes)
        return alone_s * (1 + link_s / part_s) if part_s else alone_s

    # Programs are stored with their sums, so that their ids stay valid.
    sums: dict[tuple[int, bool], tuple[_jax.Jaxpr, float]] = {}

    def total_s(eqn: _jax.JaxprEqn, *, taken: bool) -> float:
        def of_body(jaxpr: _jax.Jaxpr) -> float:
            key = id(jaxpr), taken
            if key not in sums:
                sums[key] = jaxpr, sum(total_s(inner, taken=taken) for inner in jaxpr.eqns)
            return sums[key][1]

        return float(through_bodies(eqn, taken_s if taken else priced_s, of_body))

    def slowdown(eqn: _jax.JaxprEqn) -> float:
        if not partition.is_known and isinstance(costs, Roofline) and not _communicates(eqn):
            return 1.0
        priced = total_s(eqn, taken=False)
        return total_s(eqn, taken=True) / priced if priced else 1.0

    return slowdown


def _communicates(eqn: _jax.JaxprEqn) -> bool:
    """Return whether an equation is a collective, or runs one."""
    if is_collective(eqn):
        return True
    return any(_has_collectives(_jax.open_jaxpr(body)) for body in jaxprs.bodies_of(eqn))


@_jax.weakref_lru_cache
def _has_collectives(jaxpr: _jax.Jaxpr) -> bool:
    return any(map(_communicates, jaxpr.eqns))


def dtype_of(eqn: _jax.JaxprEqn) -> str:
    """Return the dtype whose rate an equation runs at: that of its first operand."""
    avals = [v.aval for v in (*eqn.invars, *eqn.outvars) if hasattr(v.aval, "dtype")]
    return str(avals[0].dtype) if avals else "float32"


# Measuring

_REPEATS = 7  # runs per measurement; more give a steadier median
_MOST_OF_MEMORY = 0.25  # share of the device's memory; equations that move more are not measured
_MOST_BYTES_OF_UNKNOWN_MEMORY = 2**30  # bytes; the same limit where the memory is unknown
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class Measured:
    """Seconds as measured on a present device, kept in a cache.

    >>> import jax, jax.numpy as jnp
    >>> eqn = jax.make_jaxpr(lambda x: x @ x)(jnp.ones((64, 64))).eqns[0]
    >>> Measured(cache=Cache(None)).seconds_of(eqn) > 0
    True

    Args:
      at_hand: a JAX device; the default one if None.
      cache: where measurements are kept; the user's cache directory if None, `Cache(None)` for none.
      progress: whether to show a bar while measuring, if stderr is a terminal.
      time_alone: runs one equation (an empty program for None) and returns its seconds.
    """

    def __init__(
        self,
        at_hand: jax.Device | None = None,
        cache: Cache | None = None,
        *,
        progress: bool = True,
        time_alone: Callable[[_jax.JaxprEqn | None], float] | None = None,
    ) -> None:
        self.at_hand = jax.devices()[0] if at_hand is None else at_hand
        self.device = device(self.at_hand.device_kind, platform=self.at_hand.platform)
        self.roofline = Roofline(self.device)
        self.cache = Cache.default() if cache is None else cache
        self.progress = progress
        self.time_alone = time_alone_s if time_alone is None else time_alone
        self.machine = (
            f"{self.at_hand.platform}, {self.at_hand.device_kind}, {_processor()}, "
            f"jax {jax.__version__}, jaxlib {jaxlib.__version__}"
        )
        kept = self.cache.get("times", self.machine) or {}
        self.times_s = {
            key: float(time_s)
            for key, time_s in kept.items()
            if isinstance(time_s, (int, float)) and 0 <= time_s < 1e6
        }
        self._empty_s: float | None = None

    name = "measured"

    @property
    def key(self) -> str:
        return f"measured {self.machine}"

    def seconds(self, flops: float, bytes_moved: float, dtype: str = "float32") -> float:
        """Return the time of a fusion of elementwise operations, at measured rates."""
        return self.of_fusions.seconds(flops, bytes_moved, dtype)

    def slowdown(self, eqn: _jax.JaxprEqn) -> float:
        """Return the ratio of an equation's measured time to that of a fusion with its FLOPs and bytes."""
        expected_s = self.seconds(flops_of(eqn), bytes_moved(eqn), dtype_of(eqn))
        return self.seconds_of(eqn) / expected_s if expected_s else 1.0

    @functools.cached_property
    def of_fusions(self) -> Roofline:
        """Return a roofline with the measured rates of elementwise kernels on this device."""
        rate = self._rate("a chain of tanh", chain_of_tanh, CHAIN_FLOPS, 1)
        bandwidth = self._rate("sums in place", _sums, SUMS_BYTES, 2)
        if rate is None or bandwidth is None:
            return self.roofline
        flops = {dtype: rate / (2 if "64" in dtype else 1) for dtype in self.device.flops}
        measured = dataclasses.replace(
            self.device, flops=flops, bandwidth_bytes_per_s=bandwidth, source="measured"
        )
        return Roofline(measured)

    def _rate(self, what: str, fun: Callable, amount: float, n_args: int) -> float | None:
        """Return `amount` over a program's measured seconds; None if it cannot be run."""
        if what not in self.times_s:
            args = [jax.ShapeDtypeStruct((ELEMENTS,), jnp.float32)] * n_args
            eqn = _jax.open_jaxpr(jax.make_jaxpr(jax.jit(fun))(*args)).eqns[0]
            time_s = self._measure(eqn)
            if time_s is None:
                return None
            self._keep({what: time_s})
        return amount / max(self.times_s[what], 1e-9)

    def seconds_of(self, eqn: _jax.JaxprEqn) -> float:
        """Return the time of one equation with all that it runs, measured where possible."""
        self.measure([eqn])
        return float(through_bodies(eqn, self._of_one))

    def measure(self, eqns: Iterable[_jax.JaxprEqn]) -> None:
        """Measure all new equations and those inside them, and cache the times."""
        new: dict[str, _jax.JaxprEqn] = {}

        def note(eqn: _jax.JaxprEqn) -> int:
            key = _key(eqn)
            if key is not None and key not in self.times_s:
                new.setdefault(key, eqn)
            return 0

        for eqn in eqns:
            through_bodies(eqn, note)
        if not new:
            return
        measured = {}
        for key in self._shown(list(new)):
            time_s = self._measure(new[key])
            self.times_s[key] = self._roofline_s(new[key]) if time_s is None else time_s
            if time_s is not None:
                measured[key] = time_s
        self._keep(measured)

    def _keep(self, measured: dict[str, float]) -> None:
        self.times_s.update(measured)
        if measured:
            self.cache.update("times", self.machine, lambda old: {**(old or {}), **measured})

    def _of_one(self, eqn: _jax.JaxprEqn) -> float:
        key = _key(eqn)
        return self._roofline_s(eqn) if key is None else self.times_s[key]

    def _roofline_s(self, eqn: _jax.JaxprEqn) -> float:
        return self.roofline.seconds_of(eqn)

    def _shown(self, keys: list[str]) -> Iterable[str]:
        if not self.progress or not sys.stderr.isatty():
            return keys
        console = Console(stderr=True)
        return track(keys, "remat: measuring equations", console=console, transient=True)

    def _measure(self, eqn: _jax.JaxprEqn) -> float | None:
        allowed = self.device.memory_bytes * _MOST_OF_MEMORY or _MOST_BYTES_OF_UNKNOWN_MEMORY
        if bytes_moved(eqn) > allowed:
            return None
        try:
            # Planning may run while a function is being traced; the measurement must not be traced.
            with jax.ensure_compile_time_eval(), jax.default_device(self.at_hand):
                time_s = self.time_alone(eqn)
                if self._empty_s is None:
                    self._empty_s = self.time_alone(None)
        except Exception as error:  # compilers and runtimes raise anything
            name = printable(eqn.primitive.name)
            _log.debug("%s is not measured: %s", name, printable(str(error), keep="\n"))
            return None
        return max(time_s - self._empty_s, self.device.launch_s)


# Two fusions that measure the device's rates: one computes, one moves more bytes than caches hold. They
# run in place, as within a program: fresh pages from the system cost several times more. More elements, and
# more operations on each (`_DEPTH`), make the measurement longer and the time of a launch count less.
ELEMENTS = 2**23
_DEPTH = 8
CHAIN_FLOPS = _DEPTH * ELEMENTS * TRANSCENDENTAL
SUMS_BYTES = _DEPTH * 3 * 4 * ELEMENTS


def chain_of_tanh(x: jax.Array) -> jax.Array:
    for _ in range(_DEPTH):
        x = jnp.tanh(x)
    return x


def _sums(x: jax.Array, y: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, _DEPTH, lambda _, x: x + y, x)


def _processor() -> str:
    """Return a text that differs between CPUs, for machines that share a cache directory."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError:
        return ""
    lines = [x for x in text.splitlines() if x.startswith(("model name", "flags", "Features"))]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _key(eqn: _jax.JaxprEqn) -> str | None:
    """Return a key that is equal for equal computations; None if the equation cannot be measured alone."""
    name = eqn.primitive.name
    row = operation(name)
    if eqn.effects or (row is not None and not row.runs_alone):
        return None
    params = sorted((key, str(value)) for key, value in eqn.params.items())
    operands = [str(v if not _jax.is_var(v) else v.aval) for v in eqn.invars]
    text = repr((name, params, operands, [str(v.aval) for v in eqn.outvars]))
    if _ADDRESS.search(
        text
    ):  # a function among the parameters, which another process cannot identify
        return None
    return f"{name} {hashlib.sha256(text.encode()).hexdigest()[:32]}"


def time_alone_s(eqn: _jax.JaxprEqn | None) -> float:
    """Return the median seconds of one equation, compiled and run alone; of nothing for None."""
    if eqn is None:
        args = [jnp.zeros((), jnp.float32)]
        return _median_s(jax.jit(lambda x: x + 1).lower(*args).compile(), args)
    jaxpr = _jax.jaxpr_of_equation(eqn)
    args = [_filled(v.aval) for v in jaxpr.invars]
    return _median_s(jax.jit(lambda *xs: _jax.call_jaxpr(jaxpr, xs)).lower(*args).compile(), args)


def _filled(aval: Aval) -> jax.Array:
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return _jax.zero_keys(aval)
    # Zeros are valid indices.
    fill = 1 if jnp.issubdtype(aval.dtype, jnp.inexact) else 0
    return jnp.full(aval.shape, fill, aval.dtype)


def _median_s(program: Callable[..., PyTree], args: list[jax.Array]) -> float:
    jax.block_until_ready(program(*args))
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(program(*args))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


# Costs by name

_NAMES = ("roofline", "measured")


def check_costs(costs: object) -> None:
    """Check that a value is a cost model or the name of one.

    Raises:
      PlanError: it is not; the message lists the possible names.
    """
    if isinstance(costs, str):
        if costs not in _NAMES:
            raise PlanError(f"unknown costs {costs!r}; {closest(costs, _NAMES)}")
        return
    missing = [name for name in ("name", "key", "seconds", "slowdown") if not hasattr(costs, name)]
    if missing:
        raise PlanError(
            f"costs= is 'roofline', 'measured' or a remat.program.costs.Costs, not "
            f"{type(costs).__name__}, which has no {' and no '.join(missing)}."
        )


def find_costs(
    costs: str | Costs, of: Device, at_hand: jax.Device | None, cache: Cache | None
) -> Costs:
    """Return the cost model with a name, for a device.

    >>> find_costs("roofline", device("h100"), None, None).device.name
    'h100'

    Args:
      costs: "roofline", "measured", or costs as they are.
      of: the device's figures.
      at_hand: the device itself, if it is attached.
      cache: where measurements are kept.

    Raises:
      PlanError: the name is unknown, or the device to be measured is not present.
    """
    check_costs(costs)
    if not isinstance(costs, str):
        return costs
    if costs == "roofline":
        return Roofline(of)
    if at_hand is None:
        raise PlanError(
            f"costs='measured' times equations on the device, and {of.name} is not here; take "
            "costs='roofline', or plan where it is."
        )
    return Measured(at_hand, cache, progress=False)
