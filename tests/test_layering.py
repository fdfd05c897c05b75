"""The layering: which module may import which, and which may use JAX's internals."""

from __future__ import annotations

import ast
import pathlib
import re
import subprocess
import sys

import pytest

SRC = pathlib.Path(__file__).parents[1] / "src" / "remat"
MODULES = sorted(SRC.rglob("*.py"))
FRAMEWORKS = ("flax", "equinox", "haiku", "brainstate")

# In dependency order: a module imports only from its own row and rows above it.
LAYERS = [
    ("aliases", "printing"),
    ("errors",),
    ("units", "files", "garbage", "globs", "paths", "marked", "versions"),
    ("json_lines", "cache"),
    ("solvers.graph",),
    ("solvers.liveness",),
    ("solvers.simulate", "solvers.effort"),
    ("solvers.mincut", "solvers.solver"),
    ("solvers.order_search", "solvers.relief"),
    ("solvers.chain", "solvers.evict", "solvers.frontier"),
    ("solvers.bounds", "solvers.segments"),
    ("solvers.grid",),
    ("solvers.schedule",),
    ("solvers",),
    ("ir.formulas",),
    ("ir.operations",),
    ("_jax.compat", "_jax.internals", "_jax.symbolic", "_jax.coordination"),
    ("_jax.tracing",),
    ("_jax.equations", "_jax.merging"),
    (
        "_jax.autodiff",
        "_jax.called",
        "_jax.concrete",
        "_jax.lowering",
        "_jax.partitioning",
        "_jax.refs",
    ),
    ("_jax",),
    ("ir.jaxprs",),
    ("ir.split.halves",),
    ("ir.split.branches", "ir.split.calls", "ir.split.loops", "ir.split.shards"),
    ("ir.split",),
    ("ir", "ir.equations", "ir.flops", "ir.fingerprint"),
    ("ir.repetitions", "ir.rewriting", "ir.updates"),
    ("ir.carries", "ir.numbers", "ir.restriction", "ir.swapped"),
    ("transform.outlining",),
    (
        "transform.barrier",
        "transform.derivative_rules",
        "transform.marks",
        "transform.refs",
        "transform.statics",
    ),
    ("transform.cut", "transform.policies.selector"),
    ("transform.policies.algebra",),
    ("transform.policies.check", "transform.policies.jax_names", "transform.policies.resolve"),
    ("transform.policies",),
    ("transform.residuals",),
    ("transform.primitive",),
    ("transform.checkpoint",),
    ("loops.schedules.shared",),
    ("loops.schedules.actions",),
    ("loops.schedules.binomial", "loops.schedules.mixed", "loops.schedules.multilevel"),
    ("loops.schedules.hierarchical", "loops.schedules.online", "loops.schedules.online_mixed"),
    ("loops.schedules",),
    ("loops.arguments", "loops.rows", "loops.sizes"),
    ("loops.buffers", "loops.halves", "loops.linear", "loops.store"),
    ("loops.forward_mode", "loops.times", "loops.tracing"),
    ("loops.loop",),
    ("loops.inverse", "loops.keep_rules", "loops.reversal", "loops.states"),
    ("loops.online",),
    ("loops.mixed",),
    ("loops.fitting", "loops.derivative", "loops.ways"),
    ("loops.choice",),
    ("loops.scan",),
    ("loops.while_loop", "loops.nesting", "loops.stacked"),
    ("loops.remat_scan",),
    ("selection", "array_leaves"),
    ("linen.axes", "linen.rng", "linen.targets"),
    ("linen.checkpoint", "linen.scan"),
    ("linen.by_path",),
    ("linen", "haiku"),
    ("toggle",),
    ("testing",),
    ("module_steps",),
    (
        "program.devices",
        "program.expansion",
        "program.partition",
        "program.program",
        "program.products",
    ),
    ("program.result_buffers",),
    ("program.costs", "program.fusion"),
    ("program.targets", "program.settings"),
    ("program.compiled", "program.from_jaxpr"),
    ("program",),
    ("planner.auto",),
    ("planner.checked",),
    ("planner.plan_decisions",),
    ("planner.unit_starts", "planner.traced_loops"),
    ("planner.stacks",),
    ("planner.plan_file", "planner.search", "planner.rewrite", "planner.progress"),
    ("planner",),
    ("planner.tradeoffs", "planner.host_memory"),
    ("planner.scan_pairs.matching",),
    ("planner.scan_pairs.inside",),
    ("planner.scan_pairs.joint",),
    ("planner.scan_pairs.shards", "planner.scan_pairs.emission"),
    ("planner.scan_pairs.branches",),
    ("planner.scan_pairs.groups",),
    (
        "planner.scan_pairs.opening",
        "planner.scan_pairs.rewriting",
        "planner.scan_pairs.sinking",
    ),
    ("planner.scan_pairs.scope",),
    ("planner.scan_pairs.pair_options",),
    ("planner.scan_pairs.options",),
    ("planner.scan_pairs",),
    ("planner.bodies", "planner.host_copies", "planner.copy_windows", "planner.host_updates"),
    ("planner.decisions",),
    ("planner.priced_step", "planner.whole_step_file"),
    ("planner.loop_choices", "planner.loop_level"),
    ("planner.step_model",),
    ("planner.step",),
    ("planner.host_state",),
    ("planner.programs",),
    ("planner.refusal",),
    ("planner.planning",),
    ("planner.plan",),
    ("planner.processes", "planner.largest"),
    ("planner.fit",),
    ("planner.fit_modules",),
    ("nnx.graphs", "nnx.targets"),
    ("nnx.checkpoint", "nnx.steps"),
    ("nnx.by_path",),
    ("nnx", "equinox", "brainstate"),
    ("report.model",),
    ("report.codec", "report.timeline", "report.groups"),
    ("report.document",),
    ("report.outline", "report.payload", "report.perfetto"),
    ("report.text", "report.markdown", "report.fragment"),
    ("report.html", "report.plot", "report.difference"),
    ("report.explanation",),
    ("report",),
    ("explain.unrolled",),
    ("explain.phases",),
    ("explain.step", "explain.hlo", "explain.loops", "explain.sources"),
    ("explain.calls", "explain.replaced", "explain.runs"),
    ("explain.roles",),
    ("explain.description", "explain.labels", "explain.recomputation"),
    ("explain.lifetimes",),
    ("explain.origins", "explain.segments"),
    ("explain.account", "explain.regions"),
    ("explain.decisions", "explain.difference", "explain.planned_loops"),
    ("explain.findings.facts", "explain.findings.stacks"),
    ("explain.findings.budgets",),
    ("explain.findings.by_hand",),
    ("explain.findings.donation",),
    (
        "explain.findings.arguments",
        "explain.findings.gradients",
        "explain.findings.planned",
        "explain.findings.policies",
        "explain.findings.recomputation",
        "explain.findings.unplanned",
    ),
    ("explain.findings",),
    ("explain.stages",),
    ("explain",),
    ("cli.errors", "cli.rendering"),
    ("cli.options", "cli.subject"),
    ("cli.planning",),
    ("cli.main",),
    ("cli",),
    ("__main__",),
]
# Modules that run on hand-made graphs, without JAX.
PURE = ("aliases", "errors", "files", "garbage", "paths", "printing", "units", "json_lines",
        "solvers", "ir.formulas", "ir.operations", "program.devices",
        "program.program", "program.fusion", "cache", "planner.plan_file",
        "planner.search", "loops.schedules", "planner.tradeoffs", "planner.host_memory",
        "loops.nesting", "globs", "selection", "report", "explain.hlo",
)  # fmt: skip


def name_of(path: pathlib.Path) -> str:
    return ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")


def imports_of(path: pathlib.Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def of_remat(path: pathlib.Path) -> set[str]:
    """Return the modules of this library that a module imports, without the names taken from them."""
    known = {name_of(p) for p in MODULES}
    found = set()
    for imported in imports_of(path):
        parts = imported.split(".")
        if parts[0] == "remat":
            inner = ".".join(parts[1:])
            found.add(inner if inner in known else ".".join(parts[1:-1]))
    return found - {""}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_only_our_package_jax_touches_internals_of_jax(path):
    internal = {i for i in imports_of(path) if i.startswith(("jax._src", "jax.interpreters"))}
    assert name_of(path).split(".")[0] == "_jax" or not internal


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_frameworks_are_imported_by_their_adapters_only(path):
    imported = {i.split(".")[0] for i in imports_of(path)} & set(FRAMEWORKS)
    module = name_of(path).split(".")[0]
    adapters = {"linen", "nnx", "equinox", "haiku", "brainstate"}
    assert not imported or module in adapters, f"{name_of(path)} imports {imported}"


@pytest.mark.parametrize("path", [p for p in MODULES if name_of(p).startswith(PURE)], ids=name_of)
def test_pure_modules_do_not_import_jax(path):
    assert not {i for i in imports_of(path) if i.split(".")[0] in ("jax", "jaxlib")}
    assert "_jax" not in of_remat(path)


def private_names_in(path: pathlib.Path) -> set[str]:
    """Return the private names of this library's modules and classes that a test imports or reads."""
    tree = ast.parse(path.read_text())
    imports = [
        alias
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "remat"
        for alias in node.names
    ]
    ours = {alias.asname or alias.name for alias in imports} | {"remat"}
    read = [
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if node.value.id in ours and node.value.id != "_jax"
    ]
    names = {*(alias.name for alias in imports), *read} - {"_jax", "remat._jax"}
    return {name for name in names if re.fullmatch(r"(\w+\.)?_(?!_)\w+", name)}


TESTS = pathlib.Path(__file__).parent


@pytest.mark.parametrize(
    "path", sorted(TESTS.rglob("*.py")), ids=lambda path: str(path.relative_to(TESTS))
)
def test_tests_use_public_names(path):
    assert not private_names_in(path)


@pytest.mark.parametrize(
    "path", sorted(TESTS.rglob("*.py")), ids=lambda path: str(path.relative_to(TESTS))
)
def test_tests_replace_no_private_names_by_string(path):
    names = {
        str(arg.value)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("setattr", "getattr"))
        for arg in node.args[:2]
        if isinstance(arg, ast.Constant)
    }
    assert not {name for name in names if re.match(r"_(?!_)", name.split(".")[-1])}


# Underscored names that are public: of this library's API, of Python and of JAX's jitted functions.
PUBLIC_UNDERSCORES = {"_asdict", "_cache_size", "_fields", "_jax", "_replace", "_repr_html_"}


@pytest.mark.parametrize(
    "path", sorted(TESTS.rglob("*.py")), ids=lambda path: str(path.relative_to(TESTS))
)
def test_tests_read_no_private_attributes_of_other_objects(path):
    attributes = {
        ast.unparse(node)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and re.fullmatch(r"_(?!_)\w+", node.attr)
        if node.attr not in PUBLIC_UNDERSCORES
        if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    }
    assert not {name for name in attributes if not name.startswith("jax.")}


PACKAGES = sorted(path for path in MODULES if path.name == "__init__.py")


@pytest.mark.parametrize("path", PACKAGES, ids=name_of)
def test_the_docstring_of_a_package_names_its_modules(path):
    words = set(re.findall(r"\w+", ast.get_docstring(ast.parse(path.read_text())) or ""))
    modules = {p.stem for p in path.parent.glob("*.py")} - {"__init__", "__main__"}
    assert modules | {p.parent.name for p in path.parent.glob("*/__init__.py")} <= words


def test_modules_import_only_from_the_layers_before_them():
    level = {name: i for i, layer in enumerate(LAYERS) for name in layer}
    # The package itself imports what it exports; at most two of its packages import `_jax`.
    in_no_layer = {name_of(path) for path in MODULES} - set(level)
    assert in_no_layer == {"__init__", "loops", "transform"}
    for path in MODULES:
        name = name_of(path)
        if name in level:
            for other in of_remat(path):
                assert other in level, f"{name} imports {other}, which is in no layer"
                assert level[other] < level[name] or other == name, f"{name} imports {other}"


def test_importing_remat_imports_no_framework():
    code = f"import sys, remat; print([m for m in {FRAMEWORKS!r} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "[]"


def test_there_is_no_module_level_import_inside_functions():
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                inner = [n for n in ast.walk(node) if isinstance(n, (ast.Import, ast.ImportFrom))]
                assert not inner, f"{name_of(path)}.{node.name} imports inside"


@pytest.mark.parametrize(
    ("package", "never"),
    [
        ("transform", ("planner", "program", "solvers", "explain", "report")),
        ("program", ("planner", "explain", "report")),
        ("explain", ("planner",)),
        ("report", ("planner", "program", "solvers", "transform")),
    ],
)
def test_packages_do_not_know_those_that_are_built_on_them(package, never):
    for path in MODULES:
        if name_of(path).startswith(package):
            found = {other for other in of_remat(path) if other.split(".")[0].startswith(never)}
            assert not found, f"{name_of(path)} imports {found}"


def test_files_of_tests_have_different_names():
    """Pytest mistakes the second of two files with one name for the first."""
    names = [path.name for path in pathlib.Path(__file__).parent.rglob("*.py")]
    assert not {n for n in names if names.count(n) > 1} - {"conftest.py", "__init__.py"}
