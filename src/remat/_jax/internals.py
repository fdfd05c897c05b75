"""All names of JAX's internals that the library uses, and the replacement for each if JAX removes it.

A test reads the code of this package. It fails on an internal name that is not listed and on a listed
name that is not used. The list has names of `jax._src`, of `jax.interpreters` and `jax.extend` (public,
but without a guarantee of stability), of private modules of `jax.experimental`, and private attributes of
JAX's objects.

The library does not use JAX's partial evaluation of jaxprs: `remat.ir.split` splits programs. The rows
about partial evaluation are for rules that JAX calls when it evaluates partially itself.
"""

from __future__ import annotations

from typing import NamedTuple


class Internal(NamedTuple):
    """Names of one module or class that serve one purpose.

    Attributes:
      where: the module, or `attribute` for private attributes of JAX's objects.
      names: the names that are used.
      purpose: their use here.
      replacement: their replacement if JAX removes them.
      versions: the JAX versions that have them, unless all supported ones do.
    """

    where: str
    names: tuple[str, ...]
    purpose: str
    replacement: str
    versions: str = ""


_PUBLIC = "public; follow its deprecation notes"
_LIST = "a few lines of Python"

INTERNALS = (
    # Programs as data
    Internal(
        "jax.extend.core",
        ("Jaxpr", "JaxprEqn", "Literal", "Var", "DropVar", "Primitive", "new_jaxpr_eqn"),
        "building and reading jaxprs, and defining the library's primitives",
        _PUBLIC,
    ),
    Internal("jax.extend.core", ("check_jaxpr",), "checking cuts under jax_enable_checks", _PUBLIC),
    Internal(
        "jax.extend.core.primitives",
        (
            "conv_general_dilated_p",
            "device_put_p",
            "dot_general_p",
            "jit_p",
            "name_p",
            "reduce_precision_p",
        ),
        "binding primitives, and recognizing equations by their primitive",
        "comparing primitives by name; `jax.lax` functions to bind them",
    ),
    Internal(
        "jax._src.core",
        ("ClosedJaxpr",),
        "whether a jaxpr carries its constants",
        "nothing: delete with JAX 0.11",
        "< 0.12",
    ),
    Internal(
        "jax._src.interpreters.partial_eval",
        ("close_jaxpr", "convert_constvars_jaxpr"),
        "jaxprs without constants",
        "`Jaxpr.replace` of constvars and invars",
    ),
    Internal(
        "jax._src.interpreters.partial_eval",
        ("make_jaxpr_effects", "has_effects"),
        "effects of a jaxpr's equations",
        "their union, without those of refs that the jaxpr makes",
    ),
    Internal(
        "jax._src.core",
        ("eqn_effects", "positional_effects"),
        "effects of an equation, which name operands, from those of its jaxpr, which name inputs",
        "`effect.replace(position)` for each effect on an input",
    ),
    Internal(
        "jax._src.core",
        ("subst_input_effects",),
        "effects of an equation on other operands",
        "`effect.replace(operand)` for each effect on an input",
    ),
    Internal(
        "jax._src.core",
        ("InternalMutableArrayEffect", "internal_mutable_array_effect", "NamedAxisEffect"),
        "effects that stay inside a program",
        "comparing effects by the names of their classes",
    ),
    Internal(
        "jax._src.core",
        ("filter_named_axis_effects", "remove_named_axis_effects"),
        "effects of the axes that a shard_map binds",
        "dropping the effects with those names",
    ),
    Internal(
        "jax._src.effects",
        ("ordered_effects", "remat_allowed_effects"),
        "which effects are ordered, and which may happen twice",
        "a table by effect type in this package",
    ),
    Internal(
        "jax._src.core",
        ("mapped_aval", "unmapped_aval", "unmapped_leading_aval", "unshard_aval"),
        "types of slices, and of stacked, batched and sharded residuals",
        "`jax.eval_shape` of a scan, a vmap or a shard_map",
    ),
    Internal(
        "jax._src.core",
        ("is_symbolic_dim", "max_dim"),
        "sizes with symbolic dimensions",
        "`jax.export.is_symbolic_dim`, and a comparison that may be inconclusive",
    ),
    Internal(
        "jax._src.core",
        ("mem_kind_to_space",),
        "memory kinds of policies as memory spaces of types",
        "a table of the two names",
    ),
    Internal(
        "jax._src.flattree",
        ("nones", "pack", "treedef_args_to_ft"),
        "the operands of a scan and of a traced function, as 0.11 groups them",
        "tracing the new scan with `jax.make_jaxpr`",
        ">= 0.11",
    ),
    Internal(
        "jax._src.tree_util",
        ("FlatTree",),
        "the same, in 0.10",
        "nothing: delete with JAX 0.10",
        "0.10",
    ),
    Internal(
        "jax._src.dispatch",
        ("ArrayCopySemantics",),
        "copies to the host's memory, which must not share buffers",
        "tracing `jax.device_put(x, space, may_alias=False)`",
    ),
    Internal(
        "jax._src.sharding_impls",
        ("UNSPECIFIED",),
        "shardings of jit that the user left open",
        "comparing with what a plain `jax.jit` holds",
    ),
    Internal(
        "jax._src.ad_util",
        ("empty_like_aval", "p2tz", "zeros_like_aval"),
        "values of branches' unused slots, zero tangents of a value, zeros of a type",
        "`jax.lax.empty`, `Zero(aval.to_tangent_aval())`, and `jax.lax.full` with a sharding",
    ),
    # Tracing
    Internal(
        "jax._src.interpreters.partial_eval",
        ("trace_to_jaxpr",),
        "tracing a checkpointed function, cached as `jax.checkpoint` does",
        "`jax.make_jaxpr`, or `jax.jit(f).trace`",
    ),
    Internal(
        "jax._src.api_util",
        (
            "check_no_transformed_refs_args",
            "check_no_aliased_ref_args",
            "_check_no_aliased_closed_over_refs",
        ),
        "refusing refs that are passed twice",
        "comparing the refs' identities",
    ),
    Internal(
        "jax._src.config",
        ("mutable_array_checks", "_check_vma"),
        "options that are in effect while a program is traced",
        "`jax.config`, and tracing inside of `jax.shard_map`",
    ),
    Internal(
        "jax._src.shard_map",
        ("_all_newly_manual_mesh_names", "_as_manual_mesh", "_extend_axis_env"),
        "the context and the residuals of a shard_map's body",
        "tracing inside of `jax.shard_map`",
    ),
    Internal(
        "jax._src.tree_util",
        ("tracing_registry", "broadcast_prefix"),
        "flattening arguments, where None is not a leaf, and expanding prefixes of them",
        "`jax.tree.flatten` and `jax.tree.broadcast`",
    ),
    Internal(
        "jax._src.util",
        ("merge_lists", "split_list"),
        "lists of operands",
        _LIST,
    ),
    Internal("jax._src.util", ("wraps",), "names of wrapped functions", "`functools.wraps`"),
    Internal(
        "jax._src.util",
        ("weakref_lru_cache",),
        "caches that let jaxprs go, cleared by `jax.clear_caches`",
        "a dictionary with `weakref.WeakKeyDictionary` keys",
    ),
    Internal(
        "jax._src.traceback_util",
        ("api_boundary", "register_exclusion"),
        "tracebacks that show the user's frames",
        "nothing: tracebacks get longer",
    ),
    Internal(
        "jax.extend.source_info_util",
        (
            "current",
            "extend_name_stack",
            "register_exclusion",
            "reset_name_stack",
            "summarize",
            "user_context",
        ),
        "source lines and name scopes of equations",
        _PUBLIC,
    ),
    Internal(
        "jax._src.source_info_util",
        ("is_user_filename", "user_frames"),
        "all frames of the user's code behind an equation, and the function of JAX's that they called",
        "the innermost frame, which `summarize` returns as text",
    ),
    Internal(
        "jax._src.core",
        (
            "ensure_no_leaks",
            "pytype_aval_mappings",
            "to_concrete_value",
            "trace_ctx",
        ),
        "`concrete=True`: a tracer that knows its value",
        "refusing `concrete=True`, which `jax.checkpoint` no longer has in 0.12",
    ),
    Internal("jax.extend.core", ("set_current_trace",), "`concrete=True`", _PUBLIC),
    Internal(
        "jax.interpreters.partial_eval",
        ("DynamicJaxprTracer",),
        "`concrete=True`",
        "refusing it",
    ),
    Internal(
        "jax._src.interpreters.partial_eval",
        ("DynamicJaxprTrace", "_check_no_returned_refs", "_check_returned_jaxtypes"),
        "`concrete=True`",
        "refusing it",
    ),
    Internal(
        "jax._src.dtypes",
        ("canonicalize_value",),
        "`concrete=True`",
        "refusing it",
    ),
    # Policies
    Internal(
        "jax._src.interpreters.partial_eval",
        ("ensure_enum",),
        "reading a policy's answer, a bool or one of JAX's cases",
        _LIST,
    ),
    # Differentiation
    Internal(
        "jax._src.interpreters.ad",
        ("jvp_jaxpr",),
        "the derivative of a region's jaxpr",
        "tracing `jax.jvp` of its evaluation",
    ),
    Internal(
        "jax._src.interpreters.ad",
        ("backward_pass",),
        "the transpose of a region's linear half",
        "tracing `jax.linear_transpose` of its evaluation",
    ),
    Internal(
        "jax.interpreters.ad",
        ("UndefinedPrimal", "is_undefined_primal", "Zero"),
        "linear operands and zero tangents",
        _PUBLIC,
    ),
    Internal(
        "jax._src.interpreters.ad",
        ("GradAccum", "fancy_transposes"),
        "transposition rules that accumulate cotangents",
        "rules that return them (`primitive_transposes`)",
    ),
    Internal(
        "jax._src.interpreters.ad",
        ("primitive_linearizations", "LinearizeTrace"),
        "the linearization rule",
        "`lin` and `linearized` of a high-level primitive (`jax_remat3` is one)",
    ),
    Internal(
        "jax._src.interpreters.ad",
        ("JVPTracer", "LinearizeTracer"),
        "which values of a loop are differentiated while it is traced",
        "assuming that all values are",
    ),
    Internal(
        "jax._src.interpreters.batching",
        ("BatchTracer",),
        "the same under `vmap`",
        "assuming that all values are",
    ),
    Internal(
        "jax.interpreters.ad",
        ("deflinear2", "primitive_jvps", "primitive_transposes"),
        "rules of the library's primitives",
        _PUBLIC,
    ),
    Internal(
        "jax._src.interpreters.batching",
        ("batch_jaxpr_axes", "zero_if_mapped"),
        "a region's jaxpr over one more axis",
        "tracing `jax.vmap` of its evaluation",
    ),
    Internal(
        "jax.interpreters.batching",
        ("broadcast", "fancy_primitive_batchers"),
        "the batching rule, which is told the axis, and broadcasting along an axis that is sharded",
        _PUBLIC,
    ),
    Internal(
        "jax.interpreters.partial_eval",
        ("dce_jaxpr", "dce_rules"),
        "dead-code elimination, and the rule for it",
        "a walk over the equations from the last to the first",
    ),
    Internal(
        "jax.interpreters.partial_eval",
        ("dce_jaxpr_closed_call_rule",),
        "recognizing call primitives of other libraries",
        "nothing: only the calls that `ir.jaxprs` lists are split",
    ),
    # Rules that JAX calls when it evaluates partially itself. They are not registered in versions of JAX
    # that no longer have the tables for them.
    Internal(
        "jax.interpreters.partial_eval",
        ("custom_partial_eval_rules", "partial_eval_jaxpr_custom_rules"),
        "JAX splitting a region itself: in its scans, and in regions of `jax.checkpoint`",
        "nothing: the rules are not registered where JAX has no such tables",
    ),
    Internal(
        "jax.interpreters.partial_eval",
        ("JaxprTracer", "PartialVal"),
        "the same",
        "nothing: used by those rules alone",
    ),
    Internal(
        "jax._src.interpreters.partial_eval",
        ("new_eqn_recipe",),
        "the same",
        "nothing: used by those rules alone",
    ),
    # Refs, checkify, random keys, high-level types
    Internal(
        "jax._src.state.discharge",
        ("discharge_state", "register_discharge_rule"),
        "refs in regions, as values",
        "refusing refs in checkpointed functions",
    ),
    Internal(
        "jax._src.state.types",
        ("AbstractRef", "AccumEffect", "RefEffect", "WriteEffect"),
        "which refs a region reads or writes",
        "comparing types and effects by the names of their classes",
    ),
    Internal(
        "jax._src.checkify",
        ("CheckifyContext", "error_checks", "jaxpr_to_checkify_jaxpr"),
        "`checkify` of checkpointed functions",
        "nothing: checkify refuses regions",
        "CheckifyContext: >= 0.12",
    ),
    Internal(
        "jax.experimental.key_reuse._core",
        (
            "KeyReuseSignature",
            "dynamic_key_reuse_signature",
            "jaxpr_type_signature",
            "key_reuse_signatures",
        ),
        "the checker of key reuse",
        "nothing: the checker refuses regions",
    ),
    Internal(
        "jax._src.interpreters.partial_eval",
        ("lower_jaxpr2",),
        "regions on high-level types",
        "tracing the region's evaluation on the arrays of those types",
    ),
    # Lowering
    Internal(
        "jax.interpreters.mlir",
        (
            "LoweringRuleContext",
            "ir_tree_registry",
            "jaxpr_subcomp",
            "lower_fun",
            "register_lowering",
        ),
        "lowering rules, and lowering a region in place",
        _PUBLIC,
    ),
    Internal(
        "jax._src.interpreters.mlir",
        ("call_lowering",),
        "a recomputation as a function that XLA does not inline",
        "`jax.interpreters.mlir.lower_jaxpr_to_fun` and a call of it",
    ),
    Internal(
        "jax._src.interpreters.mlir",
        ("_aval_to_ir_types", "lower_with_sharding_in_types"),
        "the results of an optimization barrier",
        "binding the primitive of `jax.lax.optimization_barrier`",
    ),
    Internal(
        "jax._src.interpreters.mlir",
        ("get_sharding_attr",),
        "unreduced values in a function's signature",
        "inlining recomputations where values are unreduced",
    ),
    Internal(
        "jax._src.interpreters.mlir",
        ("lower_per_platform",),
        "a different lowering rule on the CPU, also in modules for several platforms",
        "`register_lowering(platform=)`, which fails for several platforms in JAX 0.10",
    ),
    Internal(
        "jax._src.lib.mlir.ir",
        ("ArrayAttr", "DictAttr", "FlatSymbolRefAttr", "InsertionPoint", "StringAttr"),
        "attributes of functions and calls",
        "`jaxlib.mlir.ir`",
    ),
    Internal(
        "jax._src.lib.mlir.ir",
        (
            "MLIRError",
            "Module",
            "OpResult",
            "BlockArgument",
            "ComplexType",
            "RankedTensorType",
            "WalkResult",
        ),
        "reading the program that the partitioner's passes made",
        "`jaxlib.mlir.ir`",
    ),
    Internal(
        "jax._src.lib.mlir.ir",
        ("Block", "IntegerAttr", "ShapedType"),
        "which operation computes a value, and whether it only rounds to the type of its operand",
        "`jaxlib.mlir.ir`",
    ),
    Internal(
        "jax._src.lib.mlir.passmanager",
        ("PassManager",),
        "running the partitioner's passes",
        "`jaxlib.mlir.passmanager`; without them, no communication is priced",
    ),
    Internal(
        "jax._src.lib.mlir.dialects.hlo",
        ("OptimizationBarrierOp", "reshape"),
        "the barrier, and reshapes of what passes through it",
        "`jaxlib.mlir.dialects.stablehlo`",
    ),
    Internal(
        "jax.interpreters.mlir",
        ("_lowerings", "_platform_specific_lowerings"),
        "which primitives exist, to check names in policies",
        "`jax.extend.core.primitives`, and the primitives of the traced program",
    ),
    Internal(
        "jax._src.distributed",
        ("global_state",),
        "the store through which process 0 sends its plan to the others",
        "`jax.experimental.multihost_utils.broadcast_one_to_all`, which gives up after 30 s on CPU",
    ),
    # Private attributes
    Internal(
        "attribute",
        ("_jit_info",),
        "the options of a jitted function",
        "requiring them as options of `remat.explain` and `remat.fit`",
    ),
    Internal(
        "attribute",
        ("_meta_tys_flat", "_params"),
        "the shardings of a traced step's arguments",
        "`jax.stages.Traced.in_avals` and the arguments themselves",
    ),
    Internal(
        "attribute",
        ("_to_xla_hlo_sharding",),
        "comparing the layouts of arrays independently of the names of mesh axes",
        "`Sharding.shard_shape` and the names in a `PartitionSpec`",
    ),
    Internal(
        "attribute",
        ("_impl",),
        "the implementation of random keys",
        "`jax.random.key_impl` and `jax.random.key_data`",
    ),
    Internal(
        "attribute",
        ("_evaluate", "_get_vars"),
        "a symbolic size with numbers in place of its symbols",
        "a bound found by comparing, as `symbolic.upper_bound` does",
    ),
    Internal(
        "attribute",
        ("_to_sdy_sharding",),
        "unreduced values in a function's signature",
        "inlining recomputations where values are unreduced",
    ),
    Internal(
        "attribute",
        ("_item", "_line_info"),
        "`concrete=True`",
        "refusing it",
    ),
)
