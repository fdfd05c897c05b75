"""The public names, and their relation to JAX's."""

from __future__ import annotations

import ast
import importlib
import inspect
import pathlib
import pickle
import pydoc
import subprocess
import sys
import traceback

import jax
import jax.numpy as jnp
import pytest

import remat
from remat import errors, solvers
from remat.loops import schedules
from remat.loops.schedules import Binomial, Hierarchical, Level, Mixed, Multilevel, Online
from remat.planner.plan_decisions import BodyPlan, Recomputation, ScanOption, WholeStep
from remat.planner.plan_file import Attempt, MadeFor
from remat.program.targets import target

PUBLIC = {
    "checkpoint", "remat", "checkpoint_name", "policies", "auto", "plan", "fit", "Fitted", "Plan",
    "residuals", "Residual", "Residuals", "saved_residuals", "print_saved_residuals", "testing",
    "remat_scan", "rematted", "TargetError", "MethodError",
    "scan", "fori_loop", "while_loop", "StepLimitError", "StoreError",
    "RematError", "StaticArgumentError", "StaticArgumentTypeError", "PreventCseError",
    "PolicyError", "UnknownNameError", "MemoryKindError", "EffectError", "GradientMismatchError",
    "LinearizationError", "ForwardModeError",
    "PeakMemoryError", "UnitsError", "ScheduleError", "GraphError", "PlanError", "BudgetError",
    "OptionError",
    "ReportError", "MissingExtraError", "SavedValuesError",
    "explain", "report", "largest", "Largest", "Storage",
}  # fmt: skip


def test_public_names_are_pinned():
    assert set(remat.__all__) == PUBLIC
    assert set(dir(remat)) == PUBLIC
    for name in remat.__all__:
        assert getattr(remat, name) is getattr(remat, name)


# The public names of the adapters and of other public modules, without submodules.
MODULES = {
    "solvers": "Answers Graph GridSearch Node Schedule Solver Usage no_remat schedule simulate smallest_peak",
    "testing": "assert_peak_below assert_same_gradients assert_saves_only peak_bytes",
    "report": "KINDS PHASES Decision Difference Explanation ExplanationData Finding Group LoopPart Memory "
    "Option ParetoPoint PlanSummary PlannedLoop Segment Step Timeline Totals Value difference groups live_at "
    "predicted_memory timeline",
    "linen": "checkpoint remat remat_scan",
    "nnx": "fit remat",
    "equinox": "filter_checkpoint fit with_remat without_remat",
    "haiku": "remat",
    "brainstate": "checkpoint fit remat",
}
FRAMEWORKS = {"linen": "flax", "nnx": "flax", "equinox": "equinox", "haiku": "haiku"}


@pytest.mark.parametrize("name", MODULES)
def test_dir_of_a_public_module_is_its_documented_interface(name):
    pytest.importorskip(FRAMEWORKS.get(name, name if name == "brainstate" else "remat"))
    module = importlib.import_module(f"remat.{name}")
    assert set(dir(module)) == set(module.__all__) == set(MODULES[name].split())
    reference = pathlib.Path(__file__).parent.parent / "docs" / "reference"
    documented = "\n".join(path.read_text() for path in reference.glob("*.rst")) + "\n"
    assert all(f":: remat.{name}.{public}\n" in documented for public in module.__all__)


def test_dir_of_the_schedules_is_what_the_package_imports():
    assert set(dir(schedules)) == set(schedules.__all__) >= {"Binomial", "Action", "replay"}
    assert not any(inspect.ismodule(getattr(schedules, name)) for name in dir(schedules))


def test_dir_of_the_policies_is_policies_and_what_makes_them():
    made = {name: getattr(remat.policies, name) for name in dir(remat.policies)}
    assert {"save", "recompute", "offload", "dots_saveable"} < set(made)
    for name, value in made.items():
        assert isinstance(value, remat.policies.Policy) or inspect.isfunction(value), name


def test_every_exception_is_an_attribute_of_the_package():
    assert "RematError" in dir(errors)
    for name in dir(errors):
        assert issubclass(getattr(errors, name), remat.RematError)
        assert getattr(remat, name) is getattr(errors, name)


def test_names_that_are_loaded_late_are_the_ones_that_type_checkers_see():
    tree = ast.parse(pathlib.Path(remat.__file__).read_text())
    at_once = [n for n in tree.body if isinstance(n, ast.ImportFrom)]
    branches = [n for n in tree.body if isinstance(n, ast.If)]
    (late,) = (n.body for n in branches if ast.unparse(n.test) == "TYPE_CHECKING")
    names = [alias.asname for node in (*at_once, *late) for alias in node.names]
    assert {name for name in names if name} | {"remat"} == PUBLIC
    for node in late:
        for alias in node.names:
            found = getattr(importlib.import_module(node.module), alias.name)
            assert getattr(remat, alias.asname) is found


def test_a_misspelt_name_is_answered_with_the_closest():
    with pytest.raises(AttributeError, match="did you mean 'checkpoint'"):
        _ = remat.chekpoint


def test_importing_remat_loads_neither_scipy_nor_rich():
    code = "import sys, remat; print([m for m in ('scipy', 'rich', 'click') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "[]"


def test_the_function_explain_stays_the_attribute_when_its_package_is_loaded():
    code = "import remat, remat.explain.findings; print(callable(remat.explain))"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "True"


FUNCTIONS = [
    name
    for name in sorted(PUBLIC - {"remat", "checkpoint_name"})  # an alias, and a function of JAX
    if inspect.isfunction(getattr(remat, name))
]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_help_shows_the_page_of_the_function_itself(name):
    function = getattr(remat, name)
    page = pydoc.plain(pydoc.render_doc(function))
    assert page.startswith(f"Python Library Documentation: function {name} in module remat.")
    assert f"\n{name}(" in page
    assert function.__doc__.splitlines()[0] in page


def scaled(w, x):
    for _ in range(3):
        x = jnp.tanh(x @ w)
    return x.sum()


def scan_step(carry, _):
    return carry * carry, None


class Step:
    def __call__(self, x):
        return x

    def __repr__(self):
        return "Step with\n" + 200 * "parameters "


GRAPH = solvers.Graph(
    tuple(solvers.Node(i, time=1, bytes=4, deps=(i - 1,) if i else ()) for i in range(5))
)
PLAN = remat.Plan(
    program="p", target="cpu", versions=(("jax", "0.10.2"),), budget_bytes=4096, peak_bytes=4000,
    predicted_bytes=3900, peak_bytes_without_remat=8000, flops=1e6, extra_flops=2e4,
    extra_seconds=1e-6, seconds=1e-4, lower_bound_seconds=1e-6, attempts=(),
    is_verified=True,
)  # fmt: skip
W, X = jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((1000, 8), jnp.float32)


def explained():
    return remat.explain(scaled, W, X, compile=False)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: remat.policies.dots_saveable, "dots_saveable"),
        (
            lambda: remat.policies.save("a", path="mlp") | ~remat.policies.dots_saveable,
            "(save('a', path='mlp') | ~dots_saveable)",
        ),
        (
            lambda: PLAN,
            "Plan(cpu: peak 3.9 KiB of 4.0 KiB, 7.8 KiB without remat, 2.0 % more FLOPs)",
        ),
        (explained, "Explanation('scaled' on cpu"),
        (lambda: explained().diff(explained()), "Difference('scaled' to 'scaled': 0 values appeared"),
        (lambda: remat.residuals(scaled, W, X), "Residuals("),
        (lambda: remat.residuals(scaled, W, X)[0], "Residual(f32[8,8] from the argument w)"),
        (lambda: remat.fit(scaled, budget="50%"), "<remat.fit of scaled>"),
        (lambda: remat.checkpoint(scaled), "<function scaled at "),
        (lambda: target("cpu"), "Target('cpu', "),
        (lambda: target("cpu").device, "Device('cpu', cpu)"),
        (lambda: solvers.schedule(GRAPH, 9), "Schedule(10 steps: peak 8 B, time 5, lower bound 5)"),
        (lambda: solvers.no_remat(GRAPH), "Usage(peak_bytes=8, "),
        (lambda: solvers.GridSearch(), "GridSearch(effort=1.0, "),
        (lambda: solvers.GridSearch().answers(GRAPH), "<answers of GridSearch on a graph of 5 nodes>"),
        (lambda: explained().groups()[0], "Group("),
        (lambda: explained().timeline(), "Timeline("),
        (lambda: remat.scan.explain(scan_step, jnp.ones(2), length=9, checkpoints=2), "Choice(mixed: 9"),
        (lambda: remat.fit(Step()), "<remat.fit of a Step>"),
        (
            lambda: WholeStep(9, (2, 5, 6, 8), (Recomputation(8, (5, 6)),)),
            "WholeStep(9 equations: 4 stored, 1 recomputation, 0 loops, 0 bodies, 0 copies)",
        ),
        (
            lambda: Attempt(3900, 4000, 2e4, 1e-6),
            "Attempt(predicted 3.8 KiB, compiled 3.9 KiB, 20.00 kFLOP more)",
        ),
        (
            lambda: MadeFor("v5e", 8, (0, 1), (("flag", "x" * 200),)),
            "MadeFor(8 x v5e, 2 donated arguments, 1 setting)",
        ),
        (lambda: ScanOption(tuple(range(99)), 2**20, 1e-3, 2e9), "ScanOption(99 saved values, 1.0 MiB, "),
        (lambda: BodyPlan("7.0/", 9, tuple(range(9)), ()), "BodyPlan('7.0/', 9 equations: 9 stored"),
        (lambda: explained().values[0], "Value(0: "),
        (lambda: explained().steps[0], "Step("),
        (lambda: explained().findings[0], "Finding("),
        (lambda: explained().totals, "Totals(predicted peak "),
        (lambda: GRAPH, "Graph("),
        (lambda: Binomial(10, 3), "Binomial(n=10, slots=3)"),
        (lambda: Mixed.of(10, 3, 1, 1), "Mixed(n=10, blocks=(1, 2, 3, 4))"),
        (
            lambda: Hierarchical.of_states(10, 2, [Level(3, 1, 1)]),
            "Hierarchical(n=10, blocks=(1, 1, 1), levels=(Level(slots=3, write=1, read=1),))",
        ),
        (lambda: Online(10, 3), "Online(n=10, slots=3)"),
        (lambda: Multilevel(10, (2, 5)), "Multilevel(n=10, lengths=(2, 5), "),
    ],
)  # fmt: skip
def test_a_repr_is_one_short_line_that_says_what_it_is(make, expected):
    text = repr(make())
    assert text.startswith(expected)
    assert len(text) <= 120 and text.isprintable()


@remat.checkpoint
def decorated(x):
    return jnp.sin(x)


class WithMethod:
    @remat.checkpoint(static_argnums=0)
    def method(self, x):
        return jnp.sin(x)


def test_a_checkpointed_function_pickles_and_is_a_function_to_inspect():
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    assert inspect.isfunction(decorated)
    assert decorated.__name__ == decorated.__qualname__ == "decorated"
    assert decorated.__module__ == __name__
    assert decorated.__wrapped__(1.0) == decorated(1.0)
    assert list(inspect.signature(decorated).parameters) == ["x"]


def test_a_checkpointed_function_in_a_class_is_a_method():
    assert inspect.isfunction(WithMethod.__dict__["method"])
    assert WithMethod().method(1.0) == jnp.sin(1.0)


def test_remat_is_checkpoint():
    assert remat.remat is remat.checkpoint


def test_a_misspelt_name_is_an_error_with_the_closest_one():
    with pytest.raises(AttributeError, match=r"'remat'.*did you mean 'checkpoint'\?"):
        _ = remat.chekpoint
    with pytest.raises(ImportError) as error:
        exec("from remat import chekpoint")
    if sys.version_info >= (3, 12):  # Python suggests the closest name from 3.12 on
        assert "'checkpoint'?" in "".join(traceback.format_exception(error.value))


def test_a_module_that_is_not_loaded_is_an_error_that_says_so():
    with pytest.raises(AttributeError, match=r"write `import remat\.linen`"):
        remat.__getattr__("linen")  # Python calls this while remat.linen is not loaded


def test_a_function_may_have_a_parameter_f():
    found = remat.saved_residuals(lambda f: f * f * f, f=1.0)
    assert [origin for _, origin in found if "argument" in origin]
    assert remat.residuals(lambda f: f, f=1.0).total_bytes == 0


def test_checkpoint_name_is_that_of_jax():
    assert remat.checkpoint_name is jax.ad_checkpoint.checkpoint_name


def test_every_policy_of_jax_is_there():
    # From 0.11 on it is a module, whose names include classes that are not policies.
    for name, policy in vars(jax.checkpoint_policies).items():
        if callable(policy) and not isinstance(policy, type) and name.islower():
            assert hasattr(remat.policies, name), name


def test_checkpoint_has_the_parameters_of_jax_by_keyword():
    parameters = inspect.signature(remat.checkpoint).parameters
    assert list(parameters) == [
        "fun", "concrete", "prevent_cse", "policy", "static_argnums", "static_argnames",
    ]  # fmt: skip
    kinds = {name: p.kind for name, p in parameters.items()}
    assert kinds.pop("fun") is inspect.Parameter.POSITIONAL_ONLY
    assert set(kinds.values()) == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize(
    "error", [v for v in vars(remat).values() if isinstance(v, type) and issubclass(v, Exception)]
)
def test_every_error_is_a_remat_error(error):
    assert issubclass(error, remat.RematError)
    assert error.__doc__


def test_it_is_a_decorator_and_a_maker_of_decorators():
    def f(x):
        """Its doc."""
        return x * 2

    for wrapped in (
        remat.checkpoint(f),
        remat.checkpoint()(f),
        remat.checkpoint(policy=remat.policies.dots_saveable)(f),
    ):
        assert wrapped(3.0) == 6.0
        assert wrapped.__name__ == "f"
        assert wrapped.__doc__ == "Its doc."


@pytest.mark.parametrize("bad", [3, "f", None.__class__])
def test_a_step_that_is_not_callable_is_an_error(bad):
    if bad is None.__class__:
        return
    with pytest.raises(TypeError, match="takes a function"):
        remat.checkpoint(bad)
