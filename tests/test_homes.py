"""Every module has a file of tests: `tests/a/test_b.py` for `a/b.py`, or one of those named here.

A module without a file of its own is tested through its effects for users. The table says where; add
a test of the module there.
"""

from __future__ import annotations

import fnmatch
import pathlib

import pytest

TESTS = pathlib.Path(__file__).parent
SRC = TESTS.parent / "src" / "remat"

HOMES = {
    "__main__": "test_remat_command",
    "_jax/autodiff": "transform/test_matrix",
    "_jax/called": "explain/test_findings",
    "_jax/compat": "test_internals",
    "_jax/concrete": "transform/test_concrete",
    "_jax/coordination": "planner/test_distributed_plan",
    "_jax/equations": "ir/test_jaxprs",
    "_jax/internals": "test_internals",
    "_jax/lowering": "transform/test_barrier",
    "_jax/partitioning": "program/test_partition",
    "_jax/refs": "transform/test_effects",
    "_jax/tracing": "transform/test_caches",
    "aliases": "test_layering",
    "cli/errors": "cli/test_cli_errors",
    "cli/planning": "cli/test_main",
    "explain/description": "explain/test_calls",
    "explain/difference": "explain/test_hlo",
    "explain/findings/*": "explain/test_findings",
    "explain/labels": "explain/test_explain_step",
    "explain/lifetimes": "explain/test_account",
    "explain/origins": "explain/test_account",
    "explain/phases": "explain/test_account",
    "explain/planned_loops": "explain/test_rows",
    "explain/recomputation": "explain/test_account",
    "explain/regions": "explain/test_findings",
    "explain/replaced": "explain/test_donation",
    "explain/roles": "explain/test_explain_step",
    "explain/runs": "explain/test_loops",
    "explain/segments": "explain/test_account",
    "explain/sources": "explain/test_explain_step",
    "explain/stages": "explain/test_explain_step",
    "explain/step": "explain/test_explain_step",
    "explain/unrolled": "explain/test_loops",
    "ir/equations": "ir/test_operations",
    "ir/formulas": "ir/test_flops",
    "ir/restriction": "planner/test_restriction",
    "ir/rewriting": "ir/test_swapped",
    "ir/split/*": "ir/test_split",
    "linen/by_path": "adapters/test_rematted",
    "linen/rng": "adapters/test_linen_scan",
    "linen/targets": "adapters/test_linen_checkpoint",
    "loops/choice": "loops/test_ways_to_keep",
    "loops/forward_mode": "loops/test_custom_vjp",
    "loops/halves": "loops/test_ways_to_keep",
    "loops/keep_rules": "loops/test_custom_jvp",
    "loops/loop": "loops/test_scan",
    "loops/mixed": "loops/test_scan",
    "loops/online": "loops/test_while_loop",
    "loops/reversal": "loops/test_scan",
    "loops/rows": "loops/test_buffers",
    "loops/sizes": "loops/test_symbolic_lengths",
    "loops/stacked": "loops/test_remat_scan",
    "loops/states": "loops/test_while_loop",
    "loops/times": "loops/test_ways_to_keep",
    "loops/tracing": "loops/test_scan",
    "loops/ways": "loops/test_ways_to_keep",
    "marked": "planner/test_restriction",
    "module_steps": "adapters/test_fit_modules",
    "nnx/*": "adapters/test_nnx",
    "planner/auto": "planner/test_restriction",
    "planner/planning": "planner/test_plan",
    "planner/step_model": "planner/test_plan",
    "planner/checked": "planner/test_plan_file",
    "planner/copy_windows": "planner/test_host_copies",
    "planner/host_updates": "planner/test_host_state",
    "planner/decisions": "planner/test_whole_step_file",
    "planner/fit_modules": "adapters/test_fit_modules",
    "planner/host_memory": "planner/test_offload",
    "planner/loop_choices": "planner/test_scan_pairs",
    "planner/loop_level": "planner/test_host_copies",
    "planner/plan_decisions": "planner/test_plan_file",
    "planner/priced_step": "planner/test_rewrite",
    "planner/processes": "planner/test_distributed_plan",
    "planner/programs": "planner/test_verified",
    "planner/progress": "planner/test_plan",
    "planner/refusal": "planner/test_plan",
    "planner/scan_pairs/*": "planner/test_scan_pairs",
    "planner/step": "planner/test_kinds_of_steps",
    "planner/traced_loops": "planner/test_scan_pairs",
    "program/from_jaxpr": "program/test_fusion",
    "report/*": "report/test_renderings",
    "report/codec": "report/test_model_and_json",
    "report/explanation": "report/test_model_and_json",
    "report/groups": "report/test_timeline_and_groups",
    "report/html": "report/test_browser",
    "report/payload": "report/test_browser",
    "solvers/effort": "solvers/test_grid",
    "toggle": "adapters/test_rematted",
    "transform/checkpoint": "transform/test_matrix",
    "transform/cut": "transform/test_linearization",
    "transform/derivative_rules": "transform/test_policies",
    "transform/marks": "transform/test_policies",
    "transform/policies/*": "transform/test_policies",
    "transform/primitive": "transform/test_matrix",
    "transform/refs": "transform/test_effects",
    "transform/statics": "transform/test_static_arguments",
}
MODULES = sorted(
    path.relative_to(SRC).with_suffix("").as_posix()
    for path in SRC.rglob("*.py")
    if path.name != "__init__.py"
)


def own_file(module: str) -> pathlib.Path | None:
    """Return the module's own file of tests, if it has one."""
    folder, name = pathlib.PurePath(module).parent, pathlib.PurePath(module).name
    adapter = TESTS / "adapters" / f"test_{module.replace('/', '_')}.py"
    return next((p for p in (TESTS / folder / f"test_{name}.py", adapter) if p.exists()), None)


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_a_file_of_tests(module):
    homes = [home for pattern, home in HOMES.items() if fnmatch.fnmatchcase(module, pattern)]
    assert own_file(module) or homes, f"add tests/{module} or a line of HOMES"
    assert all((TESTS / f"{home}.py").exists() for home in homes)


@pytest.mark.parametrize("pattern", HOMES)
def test_homes_are_those_of_modules_without_a_file_of_their_own(pattern):
    assert [m for m in fnmatch.filter(MODULES, pattern) if own_file(m) is None]
