"""All exceptions that `remat` raises for invalid or unsupported input.

    RematError
    ├── StaticArgumentError (ValueError)      static_argnums / static_argnames that do not fit the call
    │   └── StaticArgumentTypeError (TypeError)
    ├── PreventCseError (TypeError)           prevent_cse is neither a bool nor a prefix of the arguments
    ├── PolicyError (ValueError)              a policy that is invalid
    │   ├── UnknownNameError                  ... it selects a name that the region does not have
    │   └── MemoryKindError                   ... it offloads to a memory that the backend does not have
    ├── TargetError (TypeError, ValueError)   an adapter cannot wrap the target
    ├── OptionError (TypeError, ValueError)   an invalid option of an adapter
    ├── MethodError (AttributeError)          a method to wrap that the class does not have
    ├── EffectError (NotImplementedError)     an effect that cannot be recomputed
    ├── ForwardModeError (TypeError)          a derivative that the rules in a loop's body do not define
    ├── LinearizationError (ValueError)       an operation that mixes values and tangents inseparably
    ├── GradientMismatchError (AssertionError)   remat.testing: two functions that differ
    ├── PeakMemoryError (AssertionError)      remat.testing: a step that needs more than its limit
    ├── SavedValuesError (AssertionError)     remat.testing: a function that saves more than it should
    ├── UnitsError (ValueError)               a size or budget that is not a number of bytes or a share
    ├── ScheduleError (ValueError)            an impossible checkpointing schedule
    ├── StoreError (OSError)                  a directory that cannot hold checkpoints
    ├── StepLimitError (RuntimeError)         a loop that did not end within its max_steps
    ├── GraphError (ValueError)               a graph that is damaged or not acyclic
    ├── PlanError (ValueError)                a plan or cache file that is damaged, stale or does not fit
    ├── ReportError (ValueError)              an explanation that is damaged or contradicts itself
    ├── MissingExtraError (ImportError)       a package of an extra of `remat` is not installed
    └── BudgetError (ValueError)              a budget that no plan meets

Each message says what happened, with the numbers, and the next step. The second base class is the
built-in exception that code written for `jax.checkpoint` expects in the same place.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from remat.printing import printable


def __dir__() -> list[str]:
    """Return the names of the exceptions."""
    found = (name for name, value in globals().items() if isinstance(value, type))
    return sorted(name for name in found if issubclass(globals()[name], RematError))


class RematError(Exception):
    """Base of all errors that `remat` raises on purpose.

    Messages quote names, paths and other errors; `str(error)` is safe to print whatever these hold.
    """

    def __str__(self) -> str:
        return printable(super().__str__(), keep="\n")


class StaticArgumentError(RematError, ValueError):
    """`static_argnums` or `static_argnames` that do not fit the function or the call."""


class StaticArgumentTypeError(StaticArgumentError, TypeError):
    """`static_argnums` or `static_argnames` of a wrong type."""


class PreventCseError(RematError, TypeError):
    """`prevent_cse` that is neither a bool nor a pytree prefix of the arguments with bool leaves."""


class PolicyError(RematError, ValueError):
    """A policy that is malformed or cannot be applied where it was given."""


class UnknownNameError(PolicyError):
    """A policy selects a name or path that no value of the region has, or an unknown primitive."""


class MemoryKindError(PolicyError):
    """A policy offloads to a memory kind that the backend does not have."""


class TargetError(RematError, TypeError, ValueError):
    """An adapter cannot wrap its target (a method, class or module)."""


class OptionError(RematError, TypeError, ValueError):
    """An option of an adapter has a type or value that it does not take."""


class MethodError(RematError, AttributeError):
    """The module class does not have a method that was to be wrapped."""


class EffectError(RematError, NotImplementedError):
    """The region has an effect that cannot be repeated, so it cannot be recomputed."""


class ForwardModeError(RematError, TypeError):
    """A derivative of a loop needs a direction for which a function in its body has no rule."""


class LinearizationError(RematError, ValueError):
    """A checkpointed function has an operation that mixes values and tangents inseparably."""


class GradientMismatchError(RematError, AssertionError):
    """Two functions that should agree differ in values or gradients."""


class PeakMemoryError(RematError, AssertionError):
    """A step needs more memory than the test allows."""


class SavedValuesError(RematError, AssertionError):
    """A function keeps more for its backward pass than the test allows."""


class UnitsError(RematError, ValueError):
    """A size or budget is not a number of bytes, or is outside the possible range."""


class ScheduleError(RematError, ValueError):
    """The requested checkpointing schedule cannot exist."""


class StoreError(RematError, OSError):
    """A directory for checkpoints is missing, cannot be written to, or has too little space."""


class StepLimitError(RematError, RuntimeError):
    """A loop's condition still holds after `max_steps` steps."""


class GraphError(RematError, ValueError):
    """A graph is damaged, inconsistent or not acyclic."""


class PlanError(RematError, ValueError):
    """A plan or cache file is damaged, stale, or does not belong to the program at hand.

    Where a field of a plan is wrong, `field` is its name, and `item` the place in it if it is a list.
    """

    field: str = ""
    item: int | None = None


class ReportError(RematError, ValueError):
    """An explanation or its file is damaged, contradicts itself, or cannot be written."""


class MissingExtraError(RematError, ImportError):
    """A function needs a package that one of the extras of `remat` installs."""


class BudgetError(RematError, ValueError):
    """No plan that was found fits the memory budget."""


def closest(unknown: str, known: Iterable[str]) -> str:
    """Return the part of an error message that lists the known names, the closest first.

    >>> closest("atn", ["attn", "mlp"])
    "did you mean 'attn'? Known: 'attn', 'mlp'."
    >>> closest("attn", [])
    'There are none.'
    """
    names = sorted(set(known))
    if not names:
        return "There are none."
    listing = "Known: " + ", ".join(repr(name) for name in names) + "."
    near = difflib.get_close_matches(unknown, names, n=1)
    return f"did you mean {near[0]!r}? {listing}" if near else listing
