"""The compiler's memory analysis of a program: the figures that a plan is verified against.

Which figure is the peak differs between platforms (measured):

* CPU and GPU: arguments + temporaries + results - aliased. On CPU the reported
  `peak_memory_in_bytes` leaves the temporaries out.
* TPU: the smaller of `peak_memory_in_bytes`, which counts arguments and results, and of arguments +
  temporaries + results - aliased. Both are upper bounds of the live bytes in HBM. At the default level
  the first also counts values in VMEM (184 MiB where 124 MiB are needed without VMEM). The second does not
  count these, but `temp_size_in_bytes` may count more bytes than are ever live at once. The first also
  counts values on the host: arguments that become results are there throughout, and are subtracted.

XLA's own rematerialization pass is off, so that a verified peak is due to the plan alone: on GPU
that pass reduced a program of 72 GiB to 56 GiB under the limit of an H100. A *compiler option* of the
one compilation turns it off. JAX's configuration flag `jax_compiler_enable_remat_pass` sets the same
option, but is not part of the key under which JAX caches compilations: a program that was compiled
before would be returned from that cache.

On TPU the level O0 compiles 6 to 14 times faster and keeps the peak within a few percent, of large
programs within 9 % (8 B parameters: 10.97 GiB, and 11.94 at the default level). There the
compiler refuses a program that does not fit, and names the bytes that it needs: that is a result too,
`OutOfMemory`. The check comes early, so it costs less than a compilation. Compilers for GPU and CPU
have no such limit: compare the peak with `target.device.memory_bytes`. Other errors of a compiler are
raised; the planner turns them into a `CompilerFailure` of the program that it tried.

Known limit: the text of that error gives two decimals of a GiB.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax

from remat import _jax, units
from remat.errors import PlanError
from remat.program.targets import Target


@dataclasses.dataclass(frozen=True)
class CompiledMemory:
    """The memory of a compiled program, in bytes per device.

    Args:
      peak_bytes: the largest number of bytes allocated at any time; a budget limits it.
      argument_bytes, output_bytes, temp_bytes: of the arguments, the results, and all other values.
      alias_bytes: of results that are written into donated arguments.
      host_bytes: in the host's memory (arguments + temporaries + results - aliased).
    """

    peak_bytes: int
    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int
    host_bytes: int

    fits = True


@dataclasses.dataclass(frozen=True)
class OutOfMemory:
    """The compiler's error for a program that does not fit the device.

    Args:
      needed_bytes: the bytes that the compiler says it needs, arguments included; a lower bound.
      limit_bytes: the memory of the device.
    """

    needed_bytes: int
    limit_bytes: int

    fits = False

    @property
    def peak_bytes(self) -> int:
        """Return `needed_bytes`, the compiler's lower bound of the peak."""
        return self.needed_bytes


@dataclasses.dataclass(frozen=True)
class CompilerFailure:
    """A compilation that failed for another reason than the device's memory.

    Compilers run out of host memory, run into their own errors, or take too long. The step itself need
    not be wrong: another program of the same step may compile.

    Args:
      reason: the first line of the compiler's message.
    """

    reason: str

    fits = False

    @staticmethod
    def of(error: Exception) -> CompilerFailure:
        """Return the failure that an error of the compiler reports."""
        text = str(error)
        found = _OUT_OF_HOST_MEMORY.search(text)
        if found is not None and "RESOURCE_EXHAUSTED" in text:
            return CompilerFailure(f"out of host memory: {found[0]}")
        first = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
        return CompilerFailure(first.strip()[:_LONGEST_REASON])


_LONGEST_REASON = 300  # characters of a compiler's message that are kept; more make errors longer


def memory_of(compiled: jax.stages.Compiled, target: Target) -> CompiledMemory:
    """Return the memory analysis of a compiled program, per device of the target.

    >>> import jax, jax.numpy as jnp
    >>> from remat.program.targets import target
    >>> compiled = jax.jit(jnp.sin).lower(jnp.ones(1000)).compile()
    >>> memory_of(compiled, target("cpu")).peak_bytes
    8000

    Raises:
      PlanError: the platform's compiler gives no analysis.
    """
    analysis = compiled.memory_analysis()
    if analysis is None:
        raise PlanError(
            f"the compiler for {target.platform!r} gives no memory analysis, so peaks cannot be "
            "verified there. Plan for another target."
        )
    host = (
        analysis.host_argument_size_in_bytes
        + analysis.host_temp_size_in_bytes
        + analysis.host_output_size_in_bytes
        - analysis.host_alias_size_in_bytes
    )
    total = (
        analysis.argument_size_in_bytes
        + analysis.temp_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
    )
    at_once = analysis.peak_memory_in_bytes - analysis.host_alias_size_in_bytes
    return CompiledMemory(
        peak_bytes=min(total, at_once) if target.platform == "tpu" else total,
        argument_bytes=analysis.argument_size_in_bytes,
        output_bytes=analysis.output_size_in_bytes,
        temp_bytes=analysis.temp_size_in_bytes,
        alias_bytes=analysis.alias_size_in_bytes,
        host_bytes=host,
    )


def compile_for_analysis(
    lowered: jax.stages.Lowered,
    target: Target,
    *,
    as_run: bool = False,
    default_level: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
) -> CompiledMemory | OutOfMemory:
    """Compile a lowered program for its memory analysis, without XLA's own rematerialization.

    >>> import jax, jax.numpy as jnp
    >>> from remat.program.targets import target
    >>> lowered = jax.jit(jnp.sin).lower(jnp.ones(1000))
    >>> compile_for_analysis(lowered, target("cpu")).peak_bytes
    8000

    Args:
      lowered: the result of `jax.jit(f).lower(...)`, with arguments that `place` put on the target.
      target: decides which figure is the peak.
      as_run: compile as JAX would for running, with XLA's own rematerialization. Slower on TPU. The
        arguments below have no effect then.
      default_level: compile at JAX's level of optimization, which is slower. Otherwise TPU programs are
        compiled at level O0, and CPU kernels are not optimized.
      compiler_options: as for `jax.jit`. A pass is added to `xla_disable_hlo_passes`, and the result
        replaces that option of the `jax.jit` of the program.

    Returns:
      `CompiledMemory`, or `OutOfMemory` where the compiler refuses the program; both have `peak_bytes` and
      `fits`.

    Raises:
      PlanError: the platform's compiler gives no analysis.
    """
    compiled = compile_plainly(
        lowered,
        target,
        as_run=as_run,
        default_level=default_level,
        compiler_options=compiler_options,
    )
    return compiled if isinstance(compiled, OutOfMemory) else memory_of(compiled, target)


def compile_plainly(
    lowered: jax.stages.Lowered,
    target: Target,
    *,
    as_run: bool = False,
    default_level: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
) -> jax.stages.Compiled | OutOfMemory:
    """Compile as `compile_for_analysis` does, and return the program itself, or `OutOfMemory`."""
    if as_run:
        return _compile(lowered, None)
    options = dict(compiler_options or {})
    disabled = options.get("xla_disable_hlo_passes", "")
    options["xla_disable_hlo_passes"] = ",".join(filter(None, (disabled, "rematerialization")))
    if not default_level:
        options = _jax.FAST_COMPILATION.get(target.platform, {}) | options
    return _compile(lowered, options)


def _compile(
    lowered: jax.stages.Lowered, options: dict[str, Any] | None
) -> jax.stages.Compiled | OutOfMemory:
    try:
        return lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        refused = parse_out_of_memory(str(error))
        if refused is None:
            raise
        return refused


# The messages of TPU compilers about the host's memory: after scheduling, and for one value alone.
_OUT_OF_HOST_MEMORY = re.compile(
    r"Used [0-9.]+[KMGT]? of [0-9.]+[KMGT]? host"
    r"|Allocation \(size=[0-9]+\) would exceed memory \(size=[0-9]+\)(?= :: .*host)"
)
# The messages of TPU compilers: before scheduling, and after.
_SIZE = r"([0-9]+(?:\.[0-9]+)?)\s?([KMGT]?)i?B?"
_OUT_OF_MEMORY = (
    re.compile(rf"required for HLO temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)"),
    re.compile(rf"Used {_SIZE} of {_SIZE} hbm"),
)


def parse_out_of_memory(text: str) -> OutOfMemory | None:
    """Parse the compiler's out-of-memory error; return None for others, such as one about VMEM.

    >>> parse_out_of_memory("RESOURCE_EXHAUSTED: Used 20.00G of 15.75G hbm. Exceeded by 4.25G.")
    OutOfMemory(needed_bytes=21474836480, limit_bytes=16911433728)
    """
    if "RESOURCE_EXHAUSTED" not in text:
        return None
    for pattern in _OUT_OF_MEMORY:
        match = pattern.search(text)
        if match:
            needed, limit = (
                units.parse_bytes(f"{match[i]}{match[i + 1]}{'iB' if match[i + 1] else 'B'}")
                for i in (1, 3)
            )
            return OutOfMemory(needed, limit)
    return None
