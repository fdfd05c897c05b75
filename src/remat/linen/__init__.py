"""Flax Linen: `remat`, `checkpoint` and `remat_scan` with the signatures of `flax.linen`.

A Linen module is a function of its variables and random keys. Flax's core lifting
(`flax.core.lift.pack`) makes it one explicitly: it passes a module's variables and keys as plain
pytrees, and takes the changed variables back. `remat.checkpoint` is applied to that function:

    scopes --pack--> (variables, rngs, args) --remat.checkpoint--> (result, variables) --> scopes

So collections, `sow`, batch statistics and dropout need no special rules. The modules implement what the
signatures require:

    checkpoint  lifted methods, their static arguments, the name of the lifted class
    scan        layers in nested loops, with variables of each layer and shared ones
    axes        where variables, inputs and outputs are stacked
    rng         the random keys of repeated layers
    targets     classes, modules, methods and functions as targets
    by_path     `remat.rematted`: modules selected by path

Each module imports the undocumented names of `flax` that it uses at its top.
"""

import os

from flax import traceback_util

from remat.linen.checkpoint import checkpoint as checkpoint, remat as remat
from remat.linen.scan import remat_scan as remat_scan

traceback_util.register_exclusion(os.path.dirname(__file__))

__all__ = ["checkpoint", "remat", "remat_scan"]


def __dir__() -> list[str]:
    return sorted(__all__)
