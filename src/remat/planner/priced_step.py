"""A step with the costs of its kernels, under several models of fusion.

The program outside of the loops becomes a graph of the values that its kernels write to memory
(`program.fusion`). How a compiler fuses the program cannot be predicted exactly, so there are two models of
fusion:

* `written`: a cheap value that several kernels need is written to memory once, unless the plan recomputes
  it. XLA for CPU does so.
* `fused`: every kernel that needs such a value computes it itself.

Compilers lie between the two. Those for TPUs also compute elementwise values inside the matrix products
that read them, so for TPUs the first variant is

* `inlined`: as `fused`, and a matrix product computes the elementwise values that it needs.

Compilers also choose the order of operations. A third variant, `ordered`, follows the first model and leaves
the compiler less freedom. On CPU the memory of most programs then agrees with the model, so it is tried
first; elsewhere it is tried if the compiler needs far more than the model predicts. If no proposal fits, or
the best one costs much, a last one is tried, except for TPUs:

* `lean`: as `fused`, and kernels that are far from each other compute costly values (exp, tanh), too. So the
  backward pass computes them inside of its kernels, from what matrix products wrote.

On CPU two more are tried then, in which barriers see to it that kernels compute what they need themselves
(`Decisions.separated`): `separated` differs from `fused` by that, and `separated lean` from `lean`, which is
ordered.

Compilers also compute a sum of many values in one kernel, which keeps all of them; if that takes much memory,
partial sums are written (`bodies.with_partial_sums`).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Sequence

from remat import _jax
from remat.ir.flops import flops_of_program
from remat.planner import scan_pairs
from remat.planner.bodies import MOST_AGAIN, Fusing, program_of_flat, with_partial_sums
from remat.planner.host_memory import Transfer
from remat.program import result_buffers
from remat.program.from_jaxpr import PLAIN, Execution
from remat.program.fusion import Fused, Price
from remat.program.program import Program
from remat.solvers.grid import GridSearch
from remat.solvers.solver import Solver
from remat.units import counted

WRITTEN, FUSED, INLINED, ORDERED, LEAN = "written", "fused", "inlined", "ordered", "lean"
SEPARATED, SEPARATED_LEAN = "separated", "separated lean"

_SMALLER = SEPARATED, SEPARATED_LEAN, LEAN

SOLVER = GridSearch(most_extra=MOST_AGAIN)
#: For devices whose programs compile in seconds, where the standard effort takes as long as compiling.
#: What a longer search gains there, some thousandths of the step's time, is less than planning then costs.
QUICK_SOLVER = dataclasses.replace(
    SOLVER,
    effort=0.5,
    resolution=1 / 256,
    segments_below=0.7,
    patience=30,
    close=0.005,
    tolerance=0.002,
    thorough=False,
)


@dataclasses.dataclass(frozen=True, eq=False)
class PricedStep:
    """A flat step, what its kernels cost, and what a plan of it may use.

    Args:
      flat: the step.
      price: the time of a kernel.
      shards: the shard count of each argument; 1 if not given.
      execution: how equations run on a device.
      solver: finds the schedules.
      into_products: whether matrix products compute the elementwise values that they read.
      by_flops: whether proposals of different variants are compared nearly by FLOPs alone. Models of fusion
        disagree about the time of cheap kernels, which a compiler may recompute in any case.
      transfer: the time of a copy to the host's memory or back; None if nothing may be offloaded.
      host_limit: bytes that may be kept there; None for no limit.
      copies: whether values outside of loops may be kept there, too.
      donated: the bytes of each donated argument; results reuse their buffers.
    """

    flat: _jax.Jaxpr
    price: Price
    shards: Sequence[int] | None = None
    execution: Execution = PLAIN
    solver: Solver = SOLVER
    _: dataclasses.KW_ONLY
    into_products: bool = False
    by_flops: bool = False
    transfer: Transfer | None = None
    host_limit: int | None = None
    copies: bool = False
    donated: Sequence[int] = ()

    def __repr__(self) -> str:
        return (
            f"PricedStep({counted(len(self.flat.eqns), 'equation')}, {' or '.join(self.fusions)})"
        )

    @property
    def fusions(self) -> tuple[str, ...]:
        """Return the variants that are models of fusion, the most accurate first."""
        if self.into_products:
            return INLINED, FUSED
        smaller = _SMALLER if self.by_flops else (LEAN,)
        return WRITTEN, FUSED, *smaller

    @property
    def smaller_fusions(self) -> tuple[str, ...]:
        """Return those of the variants whose programs may need less than all others, but may cost more."""
        return tuple(fusion for fusion in self.fusions if fusion in _SMALLER)

    @property
    def is_sharded(self) -> bool:
        """Return whether an argument is spread over several devices."""
        return any(n > 1 for n in self.shards or ())

    @property
    def copies_outside(self) -> bool:
        """Return whether a plan may keep values outside of loops in the host's memory."""
        return self.copies and self.transfer is not None

    def model_of(self, variant: str) -> str:
        """Return the variant whose model of fusion a variant uses."""
        return self.fusions[0] if variant == ORDERED else variant

    @functools.cached_property
    def source(self) -> _jax.Jaxpr:
        """Return the program that the decisions start from (`decisions.program_to_plan`)."""
        return scan_pairs.sunk(self._opened)

    def source_of(self, opened: bool) -> _jax.Jaxpr:
        """Return the program that decisions refer to (`decisions.program_to_plan`)."""
        return self.source if opened else self.flat

    @functools.cached_property
    def _opened(self) -> _jax.Jaxpr:
        return scan_pairs.opened(self.flat)

    @property
    def is_opened(self) -> bool:
        """Return whether there are checkpoints to open, or conversions to move into loops."""
        return self.source is not self.flat

    @functools.cached_property
    def seconds_of_conversions(self) -> float:
        """Return the time that conversions of weights take in loops beyond their time outside of them."""
        if self.source is self._opened:
            return 0.0
        return max(0.0, self._time(self.source) - self._time(self._opened))

    def _time(self, flat: _jax.Jaxpr) -> float:
        fused = self.fused(self.program_of(flat), FUSED, timed=True)
        return float(sum(fused.seconds.values()))

    @functools.cached_property
    def program(self) -> Program:
        """Return the step as it is written."""
        return self._program_of(self.flat)

    def fused(self, program: Program, variant: str, *, timed: bool = False) -> Fused:
        """Return the graph of a program under a model of fusion. Large partial sums are written.

        Args:
          program: of this step.
          variant: the model.
          timed: whether nodes have the times of their kernels, and not the prices of their recomputation.
        """
        if program is not self.program:
            return self._fused(program, variant, timed)
        if (variant, timed) not in self._fused_as_written:
            self._fused_as_written[variant, timed] = self._fused(program, variant, timed)
        return self._fused_as_written[variant, timed]

    def _fused(self, program: Program, variant: str, timed: bool) -> Fused:
        price = self.price if timed else self.price_of_recomputation
        return with_partial_sums(program, price, fusing(variant))

    @functools.cached_property
    def _fused_as_written(self) -> dict[tuple[str, bool], Fused]:
        return {}

    def program_of(self, flat: _jax.Jaxpr) -> Program:
        """Return a flat program with the costs of this model."""
        return self.program if flat is self.flat else self._program_of(flat)

    def _program_of(self, flat: _jax.Jaxpr) -> Program:
        return program_of_flat(flat, self.shards, self.execution, into_products=self.into_products)

    @functools.cached_property
    def flops(self) -> float:
        """Return the FLOPs of the step as it is written."""
        return flops_of_program(self.flat)

    @functools.cached_property
    def seconds(self) -> float:
        """Return the time of the step without recomputation."""
        return self._time(self.flat)

    @functools.cached_property
    def computing_seconds(self) -> float:
        """Return the time of the step without recomputation and without what the partitioner adds."""
        if self.execution.computing is None:
            return self.seconds
        alone = dataclasses.replace(self.execution, slowdown=self.execution.computing)
        return dataclasses.replace(self, execution=alone).seconds

    @property
    def seconds_per_flop(self) -> float:
        """Return the computing time of the step over its FLOPs; 0 if it has none."""
        return self.computing_seconds / self.flops if self.flops else 0.0

    @functools.cached_property
    def price_of_recomputation(self) -> Price:
        """Return the price of kernels in schedules outside of loops: the mean of time and scaled FLOPs.

        The time of a kernel is known roughly, its FLOPs exactly. By time alone, schedules would recompute
        matrix products to avoid cheap kernels that move about as many bytes. FLOPs are scaled so that both
        have the same sum over the step. The mean is at most the larger of the two, which proposals state, so
        lower bounds on it are lower bounds on that.
        """
        per_flop = self.seconds_per_flop

        def price(flops: float, moved: int, dtype: str) -> float:
            return 0.5 * (self.price(flops, moved, dtype) + per_flop * flops)

        return price

    def peak_bytes(self, fused: Fused, order: Sequence[int]) -> int:
        """Return the bytes of temporaries if the places of a graph are computed in this order."""
        return result_buffers.peak_bytes(fused.graph, order, self.buffers(fused))

    def buffers(self, fused: Fused) -> dict[int, list[int]]:
        """Return the bytes of results' buffers that may hold temporaries, by the nodes that write them."""
        if self.into_products:
            return {}  # compilers for TPUs assign buffers differently
        donated = collections.Counter(self.donated)
        free: dict[int, list[int]] = {}
        for id, sizes in fused.output_buffers.items():
            for size in sizes:
                if donated[size]:
                    donated[size] -= 1
                else:
                    free.setdefault(id, []).append(size)
        return free


def fusing(variant: str) -> Fusing:
    """Return the model of fusion of a variant."""
    return Fusing(
        duplicates=variant != WRITTEN,
        into_products=variant == INLINED,
        costly_inside=variant in (SEPARATED_LEAN, LEAN),
        separated=variant in (SEPARATED, SEPARATED_LEAN),
    )
