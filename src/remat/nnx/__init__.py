"""`remat.nnx`: `remat` with the signature of `flax.nnx.remat`, and `fit` in place of `nnx.jit`.

An NNX module is a graph of Python objects with Variables in them. The graphs among the arguments are
converted to pytrees before the region and back to graphs inside of it. Everything that the function
changes (Variables, counters of random streams, new attributes) is an additional result of the region,
and is written back to the caller's objects once. So the region is a function of pytrees. The
recomputation reads the same inputs, repeats no update and draws the same random numbers.

Flax has three modes, chosen by `graph` and `graph_updates`: graphs whose structure may change (the
default), graphs of fixed structure, and trees without shared Variables. The first is implemented here
with Flax's `flatten` and `unflatten`: Flax's own composition does not accept keyword arguments, traces
defaults (so that `train: bool = True` could not be left out), and rebuilds every object of the caller,
changed or not. The other two modes call Flax's own function, with a conversion before and after it.

    targets     functions, and errors about classes and methods of instances
    graphs      modules as pytrees, and a function's changes of them
    checkpoint  `remat`: functions of modules as regions
    steps       `fit`: training steps on modules
    by_path     `remat.rematted`: modules selected by path

Known limits: a Variable that belongs to another trace level (one that a function under `jax.jit`
closes over) cannot be changed, as in every transformation of Flax. It can be read.
"""

import os

from flax import traceback_util

from remat.nnx.checkpoint import remat as remat
from remat.nnx.steps import fit as fit

traceback_util.register_exclusion(os.path.dirname(__file__))

__all__ = ["fit", "remat"]


def __dir__() -> list[str]:
    return sorted(__all__)
