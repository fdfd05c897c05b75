"""A table of JAX's primitives: how each fuses, what it computes and moves, whether it may be recomputed.

All properties of operations in this library come from this table: which values XLA writes to memory
(`fusion`), FLOPs and bytes (`flops`, `traffic`), which operations the planner may recompute
(`is_repeatable`), which values a cut does not save twice (`is_rearrangement`), which operations can be
measured alone (`runs_alone`), which become separate functions on CPUs (`has_index_arrays`), which may be
applied to a cotangent (`linear_in`). A test fails on a
primitive of the installed JAX without a row.

To add a primitive, write its name into its group below. For a primitive without a row, `ir.equations`
derives the properties from the equation, which is correct for elementwise ones.

This module imports no JAX, so solvers and hand-made programs can use it.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from remat.ir import formulas
from remat.ir.formulas import TRANSCENDENTAL, Formula


class Fusion(enum.Enum):
    """How a compiler that fuses loops treats an operation."""

    VIEW = "view"  # the same bytes under another type or shape: free
    CHEAP = "cheap"  # elementwise; recomputed in every kernel that uses it
    COSTLY = "costly"  # elementwise, but too costly to compute in several kernels: exp, tanh
    REDUCE = "reduce"  # fuses with the producers of its operands; its result is written
    KERNEL = "kernel"  # a separate kernel that reads its operands and writes its results
    CALL = "call"  # runs jaxprs: a call, a loop, branches


#: Operations that compilers compute inside the kernel that uses them.
FUSIBLE = frozenset({Fusion.VIEW, Fusion.CHEAP, Fusion.COSTLY})


class Traffic(enum.Enum):
    """Which bytes an operation reads and writes, if nothing is fused with it."""

    ALL = "all"  # operands are read, results are written
    NONE = "none"
    PART = "part"  # reads only as much of its first operand as it writes
    REPLACE_1 = "replace 1"  # writes operand 1 into operand 0 in place
    REPLACE_2 = "replace 2"  # writes operand 2 into operand 0 in place, at the indices in operand 1
    COMBINE_2 = "combine 2"  # the same, combined with the previous values there


@dataclasses.dataclass(frozen=True)
class Operation:
    """The properties of a primitive.

    Args:
      fusion: how a compiler that fuses loops treats it.
      flops: FLOPs per element of the largest operand or result, or a formula that counts them.
      traffic: which bytes it reads and writes.
      is_rearrangement: whether its result is its first operand reordered, repeated or cast, so that
        recomputing it costs no arithmetic.
      is_copy: whether its result has the value of its first operand, at the same type.
      is_expansion: whether its result is usually larger than its operands.
      is_random: whether it draws random numbers.
      is_collective: whether it communicates between devices.
      is_repeatable: whether recomputing it gives the same result and has no other effect.
      runs_alone: whether its time can be measured by running it alone, on arbitrary operands.
      has_index_arrays: whether XLA for CPU creates arrays of indices for it, as large as its operand.
      is_written_on_cpu: whether XLA for CPU writes its operands and its result to memory, where compilers for
        other devices fuse it.
      linear_in: the numbers of the operands in which, taken together, it is linear; None for all operands.
      is_bilinear: whether it is a product, linear in each of its two operands.
    """

    fusion: Fusion
    flops: int | Formula = 1
    traffic: Traffic = Traffic.ALL
    is_rearrangement: bool = False
    is_copy: bool = False
    is_expansion: bool = False
    is_random: bool = False
    is_collective: bool = False
    is_repeatable: bool = True
    runs_alone: bool = True
    has_index_arrays: bool = False
    is_written_on_cpu: bool = False
    linear_in: tuple[int, ...] | None = ()
    is_bilinear: bool = False


_TABLE: dict[str, Operation] = {}


def operation(name: str) -> Operation | None:
    """Return the row of a primitive, or None if the table has none.

    >>> operation("tanh").fusion, operation("reshape").flops, operation("io_callback").is_repeatable
    (<Fusion.COSTLY: 'costly'>, 0, False)
    """
    return _TABLE.get(name)


def writes_into_operand(name: str) -> bool:
    """Return whether a primitive writes a part of its first operand, in place where that is possible.

    >>> writes_into_operand("dynamic_update_slice"), writes_into_operand("dynamic_slice")
    (True, False)
    """
    row = operation(name)
    return row is not None and row.traffic in (
        Traffic.REPLACE_1, Traffic.REPLACE_2, Traffic.COMBINE_2,
    )  # fmt: skip


def written_rows(name: str) -> int | None:
    """Return the operand that a primitive writes into its first one as rows; None if it does not.

    >>> written_rows("dynamic_update_slice"), written_rows("scatter"), written_rows("scatter-add")
    (1, 2, None)
    """
    row = operation(name)
    return {Traffic.REPLACE_1: 1, Traffic.REPLACE_2: 2}.get(row.traffic) if row else None


def names_where(attribute: str) -> frozenset[str]:
    """Return the primitives for which a Boolean column of the table is true.

    >>> "transpose" in names_where("is_rearrangement"), "sin" in names_where("is_collective")
    (True, False)
    """
    return frozenset(name for name, row in _TABLE.items() if getattr(row, attribute))


def add_rows(row: Operation, names: str) -> None:
    """Give these primitives this row; a primitive has only one."""
    for name in names.split():
        assert name not in _TABLE, f"{name} has two rows"
        _TABLE[name] = row


# --------------------------------------------------------------------------------------------------
# Views: the same bytes

_VIEW = Operation(Fusion.VIEW, 0, Traffic.NONE)
_COPY = dataclasses.replace(_VIEW, is_rearrangement=True, is_copy=True)
add_rows(_COPY, "copy copy_p name remat_mark optimization_barrier pvary pcast")
add_rows(dataclasses.replace(_VIEW, is_rearrangement=True), "reshape squeeze expand_dims")
add_rows(
    _VIEW,
    """
    remat_align remat_any_example stop_gradient sharding_constraint layout_constraint bitcast
    bitcast_convert_type random_wrap random_unwrap random_clone mesh_cast reshard relayout symbolic_zeros
    reduced_vary_cast reduced_vary_cast_p vary_unreduced_cast vary_unreduced_cast_p preduced
    to_edtype from_edtype tie add_dependency pin unpin with_memory_space_constraint
    xla_metadata_value create_token dim_as_value dimension_size shape_assertion has_memory_space
    multiple_of max_contiguous trace_value
    """,
)

# --------------------------------------------------------------------------------------------------
# Elementwise operations, and data movement that fuses like them

_CHEAP = Operation(Fusion.CHEAP)
add_rows(
    _CHEAP,
    """
    add add_any sub mul mulhi neg max min abs sign floor ceil round square integer_pow polynomial
    one_minus_square reciprocal select_n clamp nextafter is_finite eq ne lt le gt ge eq_to lt_to le_to
    and or xor not shift_left shift_right_logical shift_right_arithmetic population_count clz
    real imag complex conj stochastic_round pack_elementwise unpack_elementwise
    """,
)
add_rows(dataclasses.replace(_CHEAP, is_rearrangement=True), "convert_element_type")
add_rows(dataclasses.replace(_CHEAP, is_rearrangement=True, is_copy=True), "reduce_precision")
_MOVE = Operation(Fusion.CHEAP, 0)
add_rows(dataclasses.replace(_MOVE, is_rearrangement=True), "transpose rev")
add_rows(
    dataclasses.replace(_MOVE, is_rearrangement=True, is_expansion=True),
    "broadcast_in_dim broadcast_to",
)
add_rows(
    dataclasses.replace(_MOVE, is_expansion=True), "iota full zeros_like empty empty2 empty_ref"
)
add_rows(_MOVE, "pad tile stack unstack roll")
add_rows(dataclasses.replace(_MOVE, is_written_on_cpu=True), "concatenate")
add_rows(
    dataclasses.replace(_MOVE, traffic=Traffic.PART), "slice dynamic_slice split remat_read_row"
)
add_rows(
    Operation(Fusion.COSTLY, TRANSCENDENTAL),
    """
    exp exp2 expm1 log log1p log2 logistic sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh
    atanh erf erfc erf_inv lgamma digamma polygamma zeta bessel_i0e bessel_i1e pow cbrt sqrt rsqrt
    igamma igammac igamma_grad_a random_gamma_grad regularized_incomplete_beta
    """,
)
add_rows(Operation(Fusion.COSTLY), "div rem")

# --------------------------------------------------------------------------------------------------
# Reductions

add_rows(
    Operation(Fusion.REDUCE, formulas.reduction),
    """
    reduce_sum reduce_prod reduce_max reduce_min reduce_and reduce_or reduce_xor argmax argmin
    """,
)
add_rows(
    Operation(Fusion.REDUCE, formulas.window),
    "reduce_window_sum reduce_window_max reduce_window_min",
)
add_rows(Operation(Fusion.KERNEL, formulas.reduction), "reduce approx_top_k")
add_rows(Operation(Fusion.KERNEL, formulas.window), "reduce_window select_and_gather_add")
add_rows(
    Operation(Fusion.KERNEL, formulas.scatter_window, has_index_arrays=True),
    "select_and_scatter_add select_and_scatter",
)

# --------------------------------------------------------------------------------------------------
# Separate kernels

add_rows(Operation(Fusion.KERNEL, formulas.dot_general), "dot_general")
add_rows(Operation(Fusion.KERNEL, formulas.ragged_dot), "ragged_dot_general")
add_rows(Operation(Fusion.KERNEL, formulas.convolution), "conv_general_dilated")
add_rows(Operation(Fusion.KERNEL), "scaled_dot scaled_matmul scaled_matmul_wrapper conv")
add_rows(
    Operation(Fusion.KERNEL, formulas.attention),
    """
    dot_product_attention_fwd dot_product_attention_fwd_wrapper dot_product_attention_bwd
    dot_product_attention_bwd_wrapper dot_product_attention_fp8_fwd
    dot_product_attention_fp8_fwd_wrapper dot_product_attention_fp8_bwd
    dot_product_attention_fp8_bwd_wrapper
    """,
)
add_rows(Operation(Fusion.KERNEL), "rnn_fwd rnn_bwd cudnn_fusion spsolve")
add_rows(Operation(Fusion.KERNEL, formulas.sort), "sort")
add_rows(Operation(Fusion.KERNEL, formulas.top_k), "top_k")
add_rows(Operation(Fusion.KERNEL, formulas.fft), "fft")
add_rows(Operation(Fusion.KERNEL, formulas.cumulative), "cumsum cumprod cummax cummin")
add_rows(Operation(Fusion.KERNEL, formulas.cumulative_transcendental), "cumlogsumexp")
add_rows(Operation(Fusion.KERNEL, 0, Traffic.PART), "gather")
add_rows(Operation(Fusion.KERNEL, 0, Traffic.REPLACE_1), "dynamic_update_slice remat_write_row")
add_rows(Operation(Fusion.KERNEL, 0, Traffic.REPLACE_2), "scatter")
add_rows(
    Operation(Fusion.KERNEL, formulas.scatter_updates, Traffic.COMBINE_2),
    """
    scatter-add scatter_add scatter-sub scatter_sub scatter-mul scatter_mul scatter-min scatter_min
    scatter-max scatter_max scatter-update
    """,
)
add_rows(Operation(Fusion.KERNEL, 0, runs_alone=False), "device_put")
add_rows(Operation(Fusion.KERNEL), "lu_pivots_to_permutation iota_2x32_shape")

for _name, _formula in {
    "cholesky": formulas.cholesky,
    "cholesky_update": formulas.cholesky_update,
    "lu": formulas.lu,
    "qr": formulas.qr,
    "geqrf": formulas.qr,
    "geqp3": formulas.qr,
    "householder_product": formulas.qr,
    "ormqr": formulas.qr,
    "svd": formulas.svd,
    "eigh": formulas.eigh,
    "eig": formulas.eig,
    "schur": formulas.eig,
    "hessenberg": formulas.hessenberg,
    "tridiagonal": formulas.tridiagonal,
    "symmetric_product": formulas.symmetric_product,
    "triangular_solve": formulas.triangular_solve,
    "tridiagonal_solve": formulas.tridiagonal_solve,
}.items():
    add_rows(Operation(Fusion.KERNEL, _formula), _name)

# Sparse arrays: their primitives are lowered to gathers, scatters and products.
add_rows(
    Operation(Fusion.KERNEL),
    """
    bcoo_dot_general bcoo_dot_general_sampled bcoo_extract bcoo_fromdense bcoo_sort_indices
    bcoo_spdot_general bcoo_sum_duplicates bcoo_todense bcoo_transpose bcsr_dot_general bcsr_extract
    bcsr_fromdense bcsr_todense coo_fromdense coo_matmat coo_matvec coo_spmm coo_spmv coo_todense
    csr_fromdense csr_matmat csr_matvec csr_spmm csr_spmv csr_todense todense
    """,
)

# --------------------------------------------------------------------------------------------------
# Random numbers: a function of their key, so a repetition draws the same

_RANDOM = Operation(Fusion.KERNEL, formulas.threefry, is_random=True)
add_rows(
    _RANDOM,
    """
    threefry2x32 threefry4x32 philox2x32 philox4x32 random_bits random_split random_fold_in random_seed
    prng_random_bits prng_split prng_join prng_seed
    """,
)
add_rows(dataclasses.replace(_RANDOM, flops=formulas.gamma), "random_gamma")
add_rows(dataclasses.replace(_RANDOM, flops=formulas.device_bits), "rng_bit_generator")
# Its state is the device's: a repetition draws other numbers.
add_rows(
    dataclasses.replace(_RANDOM, flops=formulas.device_bits, is_repeatable=False), "rng_uniform"
)

# --------------------------------------------------------------------------------------------------
# Communication between devices

# Recomputing one is correct, since every device does it, but costs the communication again.
_COLLECTIVE = Operation(Fusion.KERNEL, is_collective=True, runs_alone=False)
add_rows(
    _COLLECTIVE,
    """
    psum psum2 psum_invariant pmax pmin ppermute pbroadcast pgather all_to_all
    ragged_all_to_all all_gather all_gather_invariant all_gather_reduced reduce_scatter psum_scatter
    unreduced_psum unreduced_pmax unreduced_pmin unreduced_reduce_scatter pbroadcast_dynamic
    """,
)
# They change the description of an array and send nothing.
add_rows(
    dataclasses.replace(_COLLECTIVE, is_collective=False),
    "global_array_to_host_local_array host_local_array_to_global_array",
)
# Halves of one communication: the second completes what the first started.
add_rows(
    dataclasses.replace(_COLLECTIVE, is_repeatable=False),
    """
    all_gather_start all_gather_done all_gather_reduced_start all_to_all_start all_to_all_done
    pbroadcast_start pbroadcast_done ppermute_start ppermute_done psum_start psum_done
    psum_invariant_start reduce_scatter_start reduce_scatter_done unreduced_psum_start
    unreduced_reduce_scatter_start
    """,
)
add_rows(dataclasses.replace(_COLLECTIVE, is_repeatable=False), "psend precv")
add_rows(Operation(Fusion.CHEAP, 0, runs_alone=False), "axis_index platform_index")

# --------------------------------------------------------------------------------------------------
# Calls, loops, branches

_CALL = Operation(Fusion.CALL)
add_rows(
    _CALL,
    """
    jit pjit closed_call core_call core_closed_call call jaxpr_call eval_jaxpr remat remat2 remat_opt
    checkpoint remat_linear remat_keep_rules custom_jvp_call custom_jvp_call_jaxpr
    custom_vjp_call custom_vjp_call_jaxpr custom_vmap_call composite compute_on xla_metadata_call linear_call
    linear_solve custom_root custom_linear_solve shard_map scan while cond run_state
    call_hi_primitive call_hi_primitive_linearized call_exported
    """,
)
add_rows(Operation(Fusion.KERNEL), "remat_body custom_lin")
# They run user code that JAX does not see. JAX attributes no effect to them, so they may be recomputed.
add_rows(Operation(Fusion.KERNEL, runs_alone=False), "pure_callback custom_partitioning")
add_rows(Operation(Fusion.KERNEL), "ffi_call tpu_custom_call mosaic_gpu_p pallas_call")
add_rows(Operation(Fusion.KERNEL, 0, is_repeatable=False, runs_alone=False), "inspect_sharding")
add_rows(
    Operation(Fusion.KERNEL, 1, is_repeatable=False, runs_alone=False),
    """
    io_callback debug_callback debug_print buffer_callback check dce_sink after_all unreachable consume
    assert_consumed_value
    """,
)

# --------------------------------------------------------------------------------------------------
# Mutable state: refs, boxes and logs. The values that they read depend on when they run.

_STATE = Operation(Fusion.KERNEL, 0, Traffic.PART, is_repeatable=False, runs_alone=False)
add_rows(
    _STATE,
    """
    get swap addupdate accum_grad_in_ref new_ref free_ref freeze new_box box_get box_set new_log
    log_read log_extend create_linear
    """,
)

# --------------------------------------------------------------------------------------------------
# Primitives inside of Pallas kernels: they occur only in kernels' bodies, not in planned programs

add_rows(
    Operation(Fusion.KERNEL, 0, is_repeatable=False, runs_alone=False),
    """
    atomic_cas atomic_rmw core_map debug_barrier debug_barrier_p delay dma_start dma_wait
    elementwise_inline_asm elementwise_inline_asm_p get_barrier_semaphore get_global masked_load
    masked_swap matmul_acc_lhs matmul_lhs_fifo matmul_pop matmul_pop_fifo matmul_push_rhs mpmd_map
    num_programs program_id run_scoped semaphore_read semaphore_signal semaphore_wait stage
    """,
)

# --------------------------------------------------------------------------------------------------
# Linearity: a column of the rows above


def _set_columns(names: str, **columns: Any) -> None:
    for name in names.split():
        _TABLE[name] = dataclasses.replace(_TABLE[name], **columns)


_set_columns(
    """
    add add_any sub neg concatenate pad reshape broadcast_in_dim transpose rev squeeze expand_dims copy
    copy_p convert_element_type reduce_sum cumsum reduce_window_sum real imag complex conj slice
    reduce_precision optimization_barrier sharding_constraint device_put psum psum_invariant
    all_gather reduce_scatter all_to_all ppermute pvary pcast reshard name
    """,
    linear_in=None,
)
_set_columns("div gather dynamic_slice", linear_in=(0,))
_set_columns("triangular_solve", linear_in=(1,))
_set_columns("dynamic_update_slice", linear_in=(0, 1))
_set_columns("scatter-add scatter_add", linear_in=(0, 2))
_set_columns("mul dot_general conv_general_dilated", is_bilinear=True)
