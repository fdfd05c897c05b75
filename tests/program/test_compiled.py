"""Memory that compilers report, for attached devices and ahead of time."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from remat import _jax
from remat.program.compiled import (
    CompiledMemory,
    CompilerFailure,
    OutOfMemory,
    compile_for_analysis,
    memory_of,
    parse_out_of_memory,
)
from remat.program.devices import device
from remat.program.targets import place, target

needs_libtpu = pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="no libtpu")
needs_cuda_plugin = pytest.mark.skipif(
    not importlib.util.find_spec("jax_cuda12_plugin"), reason="no CUDA plugin"
)
MIB = 2**20


def two_products(x, w):
    return jnp.sin(x @ w) @ w


def struct(*shape, dtype=jnp.float32, sharding=None):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


@functools.partial(jax.jit, donate_argnums=0)
def step(x, w):
    return two_products(x, w)


def gradient_of_a_stack(x, w):
    """Return a gradient that keeps 36 values for the backward pass, which XLA may recompute."""

    def loss(w):
        y = x
        for _ in range(12):
            y = jnp.sin(jnp.cos(y) @ w) * jnp.exp(y)
        return y.sum()

    return jax.grad(loss)(w)


# Attached devices


def test_the_peak_on_cpu_is_arguments_temporaries_and_results_without_the_aliased():
    x = struct(512, 512)
    memory = compile_for_analysis(step.lower(x, x), target("cpu"))
    assert memory.argument_bytes == 2 * MIB
    assert memory.output_bytes == memory.alias_bytes == MIB
    assert memory.peak_bytes == 2 * MIB + memory.temp_bytes
    assert memory.host_bytes == 0 and memory.fits
    assert memory == memory_of(step.lower(x, x).compile(), target("cpu"))


class Lowered:
    """A lowered program that records the options with which it is compiled."""

    def compile(self, compiler_options):
        self.options = compiler_options
        return step.lower(struct(8, 8), struct(8, 8)).compile()


def test_options_of_the_caller_are_kept():
    given, lowered = {"xla_disable_hlo_passes": "cse", "xla_cpu_enable_fast_math": True}, Lowered()
    compile_for_analysis(lowered, target("cpu"), compiler_options=given)
    wanted = given | {"xla_disable_hlo_passes": "cse,rematerialization"}
    assert lowered.options.items() >= wanted.items()
    assert given["xla_disable_hlo_passes"] == "cse"


def test_a_compiler_for_gpus_tries_out_no_kernels_until_the_step_is_compiled_to_run():
    """Trials need the memory of their operands on the device, so that large steps could not be planned."""
    gpu = dataclasses.replace(target("cpu"), device=device("h100"))
    lowered = Lowered()
    compile_for_analysis(lowered, gpu)
    assert lowered.options["xla_gpu_autotune_level"] == 0
    compile_for_analysis(lowered, gpu, as_run=True)
    assert not lowered.options


@pytest.mark.skipif(_jax.JAXLIB_VERSION >= (0, 11, 1), reason="barriers survive CSE there")
def test_an_option_of_the_caller_takes_effect_beside_ours():
    @jax.jit
    def blocks(w, x):
        def loss(w):
            block = jax.checkpoint(lambda x, w: jnp.tanh(jnp.sin(jnp.cos(x @ w))))
            y = x
            for _ in range(6):
                y = block(y, w)
            return y.sum()

        return jax.grad(loss)(w)

    lowered = blocks.lower(struct(64, 64), struct(4096, 64))
    merged = compile_for_analysis(lowered, target("cpu"))
    options = {"xla_disable_hlo_passes": "cse_barrier_expander"}
    kept = compile_for_analysis(lowered, target("cpu"), compiler_options=options)
    assert kept.peak_bytes < 0.7 * merged.peak_bytes


def test_other_errors_of_the_compiler_are_not_hidden():
    class Failing:
        def compile(self, compiler_options):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: scoped vmem of a kernel")

    with pytest.raises(jax.errors.JaxRuntimeError, match="vmem"):
        compile_for_analysis(Failing(), target("cpu"))


# Texts of compilers' refusals

_BEFORE = "the total memory required for HLO temporaries ({}) exceeds available HBM ({})."


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, " + _BEFORE.format("48.00G", "15.75G"),
            OutOfMemory(48 * 2**30, int(15.75 * 2**30)),
        ),
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, "
            + _BEFORE.format("1.50T", "95.74G"),
            OutOfMemory(3 * 2**39, int(95.74 * 2**30)),
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 16.25G of 15.75G hbm. "
            "Exceeded hbm capacity by 512.00M.",
            OutOfMemory(int(16.25 * 2**30), int(15.75 * 2**30)),
        ),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. 3.00M of 1.00M", None),
        ("INVALID_ARGUMENT: Used 16.25G of 15.75G hbm", None),
    ],
)
def test_refusals_are_read(text, expected):
    assert parse_out_of_memory(text) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space host. Used 146.08G of 128.00G host.",
            "out of host memory: Used 146.08G of 128.00G host",
        ),
        (
            "RESOURCE_EXHAUSTED: Allocation (size=644245094400) would exceed memory "
            "(size=137438953472) :: %s0 = inlined_call_operand.host [shape: bf16[600,32768,16384]]",
            "out of host memory: Allocation (size=644245094400) would exceed memory (size=137438953472)",
        ),
        ("\nINTERNAL: Mosaic failed\nat line 3", "INTERNAL: Mosaic failed"),
        ("", "ValueError"),
        ("x" * 999, "x" * 300),
    ],
)
def test_failures_keep_the_compilers_reason(text, reason):
    assert parse_out_of_memory(text) is None
    assert CompilerFailure.of(ValueError(text)) == CompilerFailure(reason)


# TPU, ahead of time


@needs_libtpu
def test_the_peak_on_tpu_counts_arguments_and_results():
    there = target("tpu:v5e")
    x = struct(1024, 1024)
    kept, donated = (
        compile_for_analysis(f.lower(*place((x, x), there)), there)
        for f in (jax.jit(two_products), step)
    )
    # Two arguments, the first product, and the result.
    assert (kept.argument_bytes, kept.output_bytes, kept.peak_bytes) == (8 * MIB, 4 * MIB, 16 * MIB)
    assert (donated.alias_bytes, donated.peak_bytes) == (4 * MIB, 12 * MIB)


@needs_libtpu
def test_both_levels_of_optimization_compile_for_tpu():
    there = target("tpu:v5e")
    lowered = jax.jit(jnp.sin).lower(place(struct(1024, 1024), there))
    fast = compile_for_analysis(lowered, there)
    slow = compile_for_analysis(lowered, there, default_level=True)
    assert fast.peak_bytes == 8 * MIB
    assert slow.peak_bytes >= 8 * MIB


@needs_libtpu
def test_values_in_vmem_are_not_counted_in_a_tpu_s_peak():
    def layers(ws, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]

    there = target("tpu:v5e")
    args = place((struct(4, 1024, 1024), struct(1024, 1024)), there)
    memory = compile_for_analysis(jax.jit(layers).lower(*args), there, as_run=True)
    assert memory.argument_bytes + memory.output_bytes == 24 * MIB
    assert memory.peak_bytes <= 24 * MIB + memory.temp_bytes


@needs_libtpu
def test_what_does_not_fit_a_tpu_is_a_result_with_the_bytes_needed():
    there = target("tpu:v5e")
    lowered = jax.jit(lambda *xs: sum(xs)).lower(*place([struct(2**28)] * 20, there))
    refused = compile_for_analysis(lowered, there)
    assert refused == OutOfMemory(
        21 * 2**30, there.device.memory_bytes
    )  # 20 arguments and a result
    assert not refused.fits and refused.peak_bytes == 21 * 2**30


@needs_libtpu
@pytest.mark.parametrize("name", ["v4", "v5e", "v5p", "v6e", "tpu7x"])
def test_the_memory_of_a_tpu_in_the_registry_is_the_compilers_limit(name):
    there = target(f"tpu:{name}:2x2" + "x1" * (name in ("v4", "v5p", "tpu7x")))
    refused = compile_for_analysis(
        jax.jit(lambda x: x + 1).lower(place(struct(2**18, 2**18), there)), there
    )
    assert isinstance(refused, OutOfMemory)
    assert abs(refused.limit_bytes - there.device.memory_bytes) <= 2**30 / 64


@needs_libtpu
def test_memory_is_per_device_under_fsdp_over_256_tpus():
    there = target("tpu:v5e:16x16")
    mesh = there.mesh((256,), ("fsdp",))
    sharded = NamedSharding(mesh, P("fsdp"))
    x = struct(256 * 16, 1024, sharding=sharded)
    w = struct(1024, 1024, sharding=sharded)
    memory = compile_for_analysis(jax.jit(two_products).lower(x, w), there)
    assert memory.argument_bytes == (16 * 1024 + 4 * 1024) * 4
    assert 4 * MIB <= memory.peak_bytes < 10 * MIB  # the weights, gathered for each product


@needs_libtpu
def test_values_in_the_hosts_memory_are_counted_apart():
    there = target("tpu:v5e")
    host = jax.sharding.SingleDeviceSharding(there.devices[0], memory_kind="pinned_host")
    device = jax.sharding.SingleDeviceSharding(there.devices[0])

    @functools.partial(jax.jit, out_shardings=device)
    def f(x):
        return jax.device_put(x, device) + 1

    memory = compile_for_analysis(f.lower(struct(1024, 1024, sharding=host)), there)
    assert memory.host_bytes == 4 * MIB
    assert memory.argument_bytes == 0


# GPU, ahead of time


@needs_cuda_plugin
def test_rematerialization_of_the_compiler_is_off_while_analysing():
    # Too large for an H100, so XLA would recompute by itself. It is compiled with XLA's rematerialization
    # first, to check that no cached result of that compilation is returned.
    there = target("gpu:h100")
    lowered = jax.jit(gradient_of_a_stack).lower(
        *place((struct(2**17, 4096), struct(4096, 4096)), there)
    )
    by_itself = memory_of(lowered.compile(), there)
    pinned = compile_for_analysis(lowered, there)
    assert isinstance(pinned, CompiledMemory)
    assert pinned.peak_bytes > 1.2 * by_itself.peak_bytes
    assert pinned.peak_bytes == pytest.approx(
        pinned.argument_bytes + pinned.temp_bytes + pinned.output_bytes
    )
