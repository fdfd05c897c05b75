"""The benchmark of plans for devices that are not attached: its registry, its comparison, small cases."""

from __future__ import annotations

import ast
import doctest
import importlib.util
import pathlib

import pytest

from benchmarks import ahead_of_time, device

FOLDER = pathlib.Path(ahead_of_time.__file__).parent

needs_libtpu = pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="no libtpu")

#: Cases that take seconds; other cases take a minute or more.
FAST = ("chain", "mlp-2d", "fsdp-shard-map", "1f1b")


def test_the_examples_run() -> None:
    results = doctest.testmod(ahead_of_time)
    assert results.attempted
    assert not results.failed


def test_every_case_names_a_function_of_its_module() -> None:
    for place, *_ in ahead_of_time.CASES.values():
        module, function = place.split(":")
        tree = ast.parse((FOLDER / f"{module}.py").read_text())
        names = {f.name for f in tree.body if isinstance(f, ast.FunctionDef)}
        names |= {t.id for f in tree.body if isinstance(f, ast.Assign) for t in f.targets}
        assert function in names


def test_everything_that_can_be_wrong_with_a_plan_is_named() -> None:
    by_hand = [{"label": "full", "fits": True, "peak_bytes": 90, "extra_flops": 0.2}]

    def wrong(**plan):
        plan = {"budget_bytes": 100, **plan}
        ahead_of_time.compare(plan, by_hand)
        return plan["wrong"]

    good = {"peak_bytes": 80, "extra_flops": 0.1}
    assert wrong(**good, recompiled={"peak_bytes": 80}) == []
    assert wrong(**good, recompiled={"peak_bytes": 101}) == ["budget exceeded"]
    assert wrong(**good, recompiled={"peak_bytes": 99}) == ["peak differs"]
    assert wrong(**good, recompiled={"error": "no"}) == ["does not compile again"]
    assert wrong(**{**good, "extra_flops": 0.3}, recompiled={"peak_bytes": 80}) == [
        "worse than by hand"
    ]
    assert wrong(refusal="no plan fits") == ["refused though by hand fits"]
    assert wrong(budget_bytes=50, refusal="no plan fits") == []
    assert wrong(crash="Traceback") == ["crash"]


@needs_libtpu
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FAST else pytest.mark.slow)
        for name, (_, target, _) in ahead_of_time.CASES.items()
        if target.startswith("tpu:")
    ],
)
def test_plans_for_tpus_hold_when_another_process_compiles_them(name) -> None:
    found = ahead_of_time.run(name, "small", (), offload=False)
    assert "died" not in found, found
    assert found["plans"] and not found["failed_alternatives"]
    for plan in found["plans"]:
        assert not plan["wrong"], plan


def test_a_machine_without_an_accelerator_says_that_nothing_was_measured(capsys) -> None:
    assert device.main() == {"not_run": device.NOT_RUN}
    assert device.NOT_RUN in capsys.readouterr().out
