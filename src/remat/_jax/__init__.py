"""The only package that uses JAX's internals. It exports those that `remat` needs under stable names.

Everything else in the library imports from here, so a change in JAX requires an edit in one place.
Each difference between JAX 0.10 and 0.12 is in one short function, which says with which JAX version its
older branch can be deleted.

* `compat`: JAX's version, names that every supported version has, properties of types.
* `tracing`: tracing functions to jaxprs; the types of values.
* `equations`: building and reading equations and jaxprs.
* `called`: which of JAX's own functions an equation was traced in.
* `concrete`: tracing with known argument values (`concrete=True`).
* `autodiff`: differentiation, transposition, batching, and registering a primitive's rules.
* `refs`: rewriting jaxprs that read or write refs as jaxprs on values.
* `symbolic`: sizes with symbolic dimensions.
* `coordination`: the key-value store that the processes of a run share.
* `merging`: values of a StableHLO module that the compiler will find to be one.
* `lowering`: lowering rules: from equations to operations of a StableHLO module.
* `partitioning`: how the partitioner divides a lowered program among devices.
* `internals`: a list of every internal name in use, and what would replace it if JAX removed it.
"""

import os

from remat._jax.autodiff import (
    Transposed as Transposed,
    batch_jaxpr as batch_jaxpr,
    batched as batched,
    batched_type as batched_type,
    dce as dce,
    disallowed_effects as disallowed_effects,
    is_differentiated as is_differentiated,
    is_linear_input as is_linear_input,
    is_undefined as is_undefined,
    is_zero as is_zero,
    jvp_of_jaxpr as jvp_of_jaxpr,
    known_tracers as known_tracers,
    known_values as known_values,
    register as register,
    register_batching as register_batching,
    register_checkify as register_checkify,
    register_dce as register_dce,
    register_discharge as register_discharge,
    register_hijax as register_hijax,
    register_jvp as register_jvp,
    register_key_reuse as register_key_reuse,
    register_linear_transpose as register_linear_transpose,
    register_linearization as register_linearization,
    register_partial_eval as register_partial_eval,
    register_split as register_split,
    register_transpose as register_transpose,
    stage_eqn as stage_eqn,
    transpose as transpose,
    zero_tangent as zero_tangent,
)
from remat._jax.called import function_called_at as function_called_at
from remat._jax.compat import (
    EFFECTS_NOT_SUPPORTED as EFFECTS_NOT_SUPPORTED,
    JAX_VERSION as JAX_VERSION,
    JAXLIB_VERSION as JAXLIB_VERSION,
    PARTIAL_EVALUATION_DROPS_RULES as PARTIAL_EVALUATION_DROPS_RULES,
    AbstractRef as AbstractRef,
    ConcretizationTypeError as ConcretizationTypeError,
    Jaxpr as Jaxpr,
    JaxprEqn as JaxprEqn,
    Literal as Literal,
    Offloadable as Offloadable,
    Primitive as Primitive,
    Recompute as Recompute,
    RecomputeType as RecomputeType,
    Saveable as Saveable,
    SaveableType as SaveableType,
    ShapedArray as ShapedArray,
    Tracer as Tracer,
    Var as Var,
    Zero as Zero,
    api_boundary as api_boundary,
    as_case as as_case,
    broadcast_prefix as broadcast_prefix,
    can_be_on_host as can_be_on_host,
    check_jaxpr as check_jaxpr,
    checks_enabled as checks_enabled,
    detach_consts as detach_consts,
    eval_jaxpr as eval_jaxpr,
    exclude_from_tracebacks as exclude_from_tracebacks,
    has_tangent as has_tangent,
    is_array as is_array,
    is_dropped as is_dropped,
    is_in_memory as is_in_memory,
    is_on_host as is_on_host,
    is_threefry as is_threefry,
    is_var as is_var,
    itemsize_bytes as itemsize_bytes,
    logs_residuals as logs_residuals,
    memory_kinds as memory_kinds,
    merge_lists as merge_lists,
    name_p as name_p,
    open_jaxpr as open_jaxpr,
    positional_effects as positional_effects,
    reduce_precision_p as reduce_precision_p,
    residuals_logger as residuals_logger,
    split_list as split_list,
    stays_in_memory as stays_in_memory,
    typeof as typeof,
    unflatten as unflatten,
    weakref_lru_cache as weakref_lru_cache,
    wraps as wraps,
    zero_keys as zero_keys,
)
from remat._jax.concrete import (
    concrete_value as concrete_value,
    trace_concretely as trace_concretely,
)
from remat._jax.coordination import (
    has_store as has_store,
    publish as publish,
    published as published,
)
from remat._jax.equations import (
    ADDED_OPERAND as ADDED_OPERAND,
    ADDED_RESULT as ADDED_RESULT,
    HostCopy as HostCopy,
    checkpoint_name_of as checkpoint_name_of,
    empty as empty,
    fixed as fixed,
    has_hidden_rules as has_hidden_rules,
    has_lasting_effects as has_lasting_effects,
    hoist_constants as hoist_constants,
    host_copy as host_copy,
    in_scope as in_scope,
    inside_shard_map as inside_shard_map,
    is_call as is_call,
    is_copy as is_copy,
    is_fixed as is_fixed,
    is_high_checkpoint as is_high_checkpoint,
    is_jaxpr as is_jaxpr,
    is_marked as is_marked,
    is_plain_jit as is_plain_jit,
    is_recomputation as is_recomputation,
    is_transposed as is_transposed,
    jaxpr_of as jaxpr_of,
    jaxpr_of_equation as jaxpr_of_equation,
    jaxprs_of as jaxprs_of,
    marked_scope as marked_scope,
    name_stack_of as name_stack_of,
    new_body_eqn as new_body_eqn,
    new_eqn as new_eqn,
    new_var as new_var,
    offloaded_copy as offloaded_copy,
    only_names_axes as only_names_axes,
    rebuild as rebuild,
    row_type as row_type,
    scan_arity as scan_arity,
    scan_body as scan_body,
    shard_map_residual as shard_map_residual,
    source_frames_of as source_frames_of,
    source_line_of as source_line_of,
    source_of as source_of,
    source_of_caller as source_of_caller,
    stacked as stacked,
    traceback_of as traceback_of,
    with_equations as with_equations,
    with_lines_of as with_lines_of,
    with_scan_arity as with_scan_arity,
    with_variables as with_variables,
    without_axis_effects as without_axis_effects,
    without_marks as without_marks,
    without_scopes as without_scopes,
    without_traceback as without_traceback,
)
from remat._jax.lowering import (
    FAST_COMPILATION as FAST_COMPILATION,
    LoweringContext as LoweringContext,
    has_unreduced as has_unreduced,
    is_partly_manual as is_partly_manual,
    lower_barrier as lower_barrier,
    lower_call as lower_call,
    lower_inline as lower_inline,
    n_devices as n_devices,
    primitive_names as primitive_names,
    register_lowering as register_lowering,
)
from remat._jax.partitioning import (
    Divided as Divided,
    NotPartitionedError as NotPartitionedError,
    partitioned as partitioned,
)
from remat._jax.refs import (
    WithoutRefs as WithoutRefs,
    has_ref_effects as has_ref_effects,
    is_ref as is_ref,
    uses_refs as uses_refs,
    without_refs as without_refs,
)
from remat._jax.symbolic import (
    decided as decided,
    is_symbolic as is_symbolic,
    largest as largest,
    typical as typical,
    upper_bound as upper_bound,
)
from remat._jax.tracing import (
    abstractify as abstractify,
    argument_names as argument_names,
    argument_shardings as argument_shardings,
    call_jaxpr as call_jaxpr,
    check_captured_refs as check_captured_refs,
    check_ref_arguments as check_ref_arguments,
    debug_info as debug_info,
    device_count as device_count,
    donated_arguments as donated_arguments,
    filled as filled,
    flatten_arguments as flatten_arguments,
    has_explicit_axes as has_explicit_axes,
    in_avals as in_avals,
    in_mesh as in_mesh,
    options_of_jit as options_of_jit,
    out_avals as out_avals,
    result_shardings as result_shardings,
    sharding_text as sharding_text,
    slice_types as slice_types,
    static_arguments as static_arguments,
    trace as trace,
    trace_call as trace_call,
    unjitted as unjitted,
    varying_as as varying_as,
    varying_axes as varying_axes,
    zeros as zeros,
)

# For the whole folder, so that source lines of operations and frames of tracebacks are the user's.
exclude_from_tracebacks(os.path.dirname(__file__))
