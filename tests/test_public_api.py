"""The public names, and their relation to JAX's."""

from __future__ import annotations

import ast
import inspect
import pathlib
import subprocess
import sys
import traceback

import jax
import pytest

import remat

PUBLIC = {
    "checkpoint", "remat", "checkpoint_name", "policies", "auto", "plan", "fit", "Fitted", "Plan",
    "residuals", "Residual", "Residuals", "saved_residuals", "print_saved_residuals", "testing",
    "remat_scan", "rematted", "TargetError", "MethodError",
    "scan", "fori_loop", "while_loop", "StepLimitError", "StoreError",
    "RematError", "StaticArgumentError", "StaticArgumentTypeError", "PreventCseError",
    "PolicyError", "UnknownNameError", "MemoryKindError", "EffectError", "GradientMismatchError",
    "PeakMemoryError", "UnitsError", "ScheduleError", "GraphError", "PlanError", "BudgetError",
    "ReportError", "MissingExtraError", "SavedValuesError",
    "explain", "report",
}  # fmt: skip


def test_public_names_are_pinned():
    assert set(remat.__all__) == PUBLIC
    assert set(dir(remat)) == PUBLIC
    for name in remat.__all__:
        assert getattr(remat, name) is getattr(remat, name)


def test_names_that_are_loaded_late_are_the_ones_that_type_checkers_see():
    tree = ast.parse(pathlib.Path(remat.__file__).read_text())
    block = next(n for n in tree.body if isinstance(n, ast.If))
    seen = {alias.asname for node in block.body for alias in node.names}
    assert seen == {*remat._LAZY, *remat._LAZY_MODULES}
    for node in block.body:
        for alias in node.names:
            if node.module != "remat":
                assert remat._LAZY[alias.asname] == node.module


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


def test_remat_is_checkpoint():
    assert remat.remat is remat.checkpoint


def test_a_misspelt_name_is_an_error_with_the_closest_one():
    with pytest.raises(AttributeError, match=r"'remat'.*did you mean 'checkpoint'\?"):
        _ = remat.chekpoint
    with pytest.raises(ImportError) as error:
        exec("from remat import chekpoint")
    if sys.version_info >= (3, 12):  # Python itself offers the closest name from then on
        assert "'checkpoint'?" in "".join(traceback.format_exception(error.value))


def test_a_module_that_is_not_loaded_is_an_error_that_says_so():
    with pytest.raises(AttributeError, match=r"write `import remat\.linen`"):
        remat.__getattr__("linen")  # what Python calls while remat.linen is not loaded


def test_a_function_may_have_a_parameter_f():
    found = remat.saved_residuals(lambda f: f * f * f, f=1.0)
    assert [origin for _, origin in found if "argument" in origin]
    assert remat.residuals(lambda f: f, f=1.0).total_bytes == 0


def test_checkpoint_name_is_that_of_jax():
    assert remat.checkpoint_name is jax.ad_checkpoint.checkpoint_name


def test_every_policy_of_jax_is_there():
    # From 0.11 on it is a module, with classes that are no policies among its names.
    for name, policy in vars(jax.checkpoint_policies).items():
        if callable(policy) and not isinstance(policy, type) and name.islower():
            assert hasattr(remat.policies, name), name


def test_parameters_of_checkpoint():
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
def test_what_is_no_function_is_refused(bad):
    if bad is None.__class__:
        return
    with pytest.raises(TypeError, match="takes a function"):
        remat.checkpoint(bad)
