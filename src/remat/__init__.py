"""`remat`: rematerialization (gradient checkpointing) for JAX.

The packages, in the order of the data flow; the docstring of each lists its modules:

    ir          jaxprs as data; a table of what each primitive computes and moves
    transform   `remat.checkpoint`: a region as one primitive, policies, the cut into saved and recomputed
    loops       `remat.scan`, `fori_loop`, `while_loop`, `remat_scan`; `loops.schedules`
    program     from a step to a graph with costs: operations, fusion, costs, devices, targets
    solvers     schedules on plain graphs (import remat.solvers)
    planner     `remat.auto`, `remat.plan`, `remat.Plan`, `remat.fit`, `remat.largest`: plans within a budget
    linen, nnx, equinox, haiku, brainstate   adapters with the signatures of module systems
    toggle      rematerialization of submodules by path, without editing the model
    explain     analysis of what a step saves, recomputes and holds, and why
    report      explanations as data, and their renderings (import remat.report)
    cli         the command `remat`
    testing     assertions on gradients and on the compiler's memory figures

Shared by these:

    _jax          the only package that uses JAX's internals
    aliases       names for types in signatures
    errors        all exceptions
    units, printing, json_lines   bytes and FLOPs as text; safe printing; JSON with the line of a mistake
    files, paths, cache           atomic reads and writes; source paths as users know them; plans on disk
    globs         patterns of names and paths
    garbage       pauses of Python's garbage collector
    selection     the modules and methods that `rematted` selects
    array_leaves, module_steps    pytrees and steps with leaves that are not arrays
    marked        the functions marked by `remat.auto` that a trace runs
    versions      versions of installed packages

CONTRIBUTING.md has a table of where to find answers.
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

import remat_command

if remat_command.is_module_run():  # Python imports this package, and with it JAX, before `__main__`
    remat_command.end_quietly_on_interrupt()

from jax.ad_checkpoint import checkpoint_name as checkpoint_name

from remat.errors import (
    BudgetError as BudgetError,
    EffectError as EffectError,
    ForwardModeError as ForwardModeError,
    GradientMismatchError as GradientMismatchError,
    GraphError as GraphError,
    LinearizationError as LinearizationError,
    MemoryKindError as MemoryKindError,
    MethodError as MethodError,
    MissingExtraError as MissingExtraError,
    OptionError as OptionError,
    PeakMemoryError as PeakMemoryError,
    PlanError as PlanError,
    PolicyError as PolicyError,
    PreventCseError as PreventCseError,
    RematError as RematError,
    ReportError as ReportError,
    SavedValuesError as SavedValuesError,
    ScheduleError as ScheduleError,
    StaticArgumentError as StaticArgumentError,
    StaticArgumentTypeError as StaticArgumentTypeError,
    StepLimitError as StepLimitError,
    StoreError as StoreError,
    TargetError as TargetError,
    UnitsError as UnitsError,
    UnknownNameError as UnknownNameError,
    closest,
)
from remat.explain import explain as explain
from remat.transform import policies as policies
from remat.transform.checkpoint import checkpoint as checkpoint
from remat.transform.residuals import (
    Residual as Residual,
    Residuals as Residuals,
    print_saved_residuals as print_saved_residuals,
    residuals as residuals,
    saved_residuals as saved_residuals,
)

if TYPE_CHECKING:
    from remat import report as report, testing as testing
    from remat.loops.remat_scan import remat_scan as remat_scan
    from remat.loops.scan import scan as scan
    from remat.loops.store import Storage as Storage
    from remat.loops.while_loop import fori_loop as fori_loop, while_loop as while_loop
    from remat.planner.auto import auto as auto
    from remat.planner.fit import Fitted as Fitted, fit as fit
    from remat.planner.largest import Largest as Largest, largest as largest
    from remat.planner.plan import plan as plan
    from remat.planner.plan_file import Plan as Plan
    from remat.toggle import rematted as rematted

remat = checkpoint

# Imported on first use, to keep `import remat` fast: planning needs SciPy, and most programs do not plan.
_LAZY = {
    "Fitted": "remat.planner.fit",
    "Largest": "remat.planner.largest",
    "Plan": "remat.planner.plan_file",
    "Storage": "remat.loops.store",
    "auto": "remat.planner.auto",
    "fit": "remat.planner.fit",
    "fori_loop": "remat.loops.while_loop",
    "largest": "remat.planner.largest",
    "plan": "remat.planner.plan",
    "remat_scan": "remat.loops.remat_scan",
    "rematted": "remat.toggle",
    "scan": "remat.loops.scan",
    "while_loop": "remat.loops.while_loop",
}
_LAZY_MODULES = ("report", "testing")

__all__ = [
    "BudgetError",
    "EffectError",
    "Fitted",
    "ForwardModeError",
    "GradientMismatchError",
    "GraphError",
    "Largest",
    "LinearizationError",
    "MemoryKindError",
    "MethodError",
    "MissingExtraError",
    "OptionError",
    "PeakMemoryError",
    "Plan",
    "PlanError",
    "PolicyError",
    "PreventCseError",
    "RematError",
    "ReportError",
    "Residual",
    "Residuals",
    "SavedValuesError",
    "ScheduleError",
    "StaticArgumentError",
    "StaticArgumentTypeError",
    "StepLimitError",
    "Storage",
    "StoreError",
    "TargetError",
    "UnitsError",
    "UnknownNameError",
    "auto",
    "checkpoint",
    "checkpoint_name",
    "explain",
    "fit",
    "fori_loop",
    "largest",
    "plan",
    "policies",
    "print_saved_residuals",
    "remat",
    "remat_scan",
    "rematted",
    "report",
    "residuals",
    "saved_residuals",
    "scan",
    "testing",
    "while_loop",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY_MODULES:
        return importlib.import_module(f"remat.{name}")
    if name not in _LAZY:
        if not name.startswith("_") and importlib.util.find_spec(f"remat.{name}") is not None:
            raise AttributeError(f"remat.{name} is not loaded yet: write `import remat.{name}`.")
        raise AttributeError(f"module 'remat' has no attribute {name!r}: {closest(name, __all__)}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
