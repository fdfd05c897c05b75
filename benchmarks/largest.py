"""The largest batch that fits: `remat.largest`, compared with a search over named values in a fixed order.

    python -m benchmarks largest
    python -m benchmarks largest --case llama-70b
    python -m benchmarks largest --size full

The other search works as MaxText's estimator does (AI-Hypercomputer/maxtext#2504): each layer names its large
values. First all are kept, then one after the other is moved to the host's memory, then one after the other
is recomputed. For each of these policies a bisection finds the largest batch, from that of the policy
before to that at which everything is recomputed. It has as many answers as policies.

For each batch among its answers, the best of its policies is compared with the plan for that batch. The time
of a step is that of its matrix products at the devices' peak rate or that of its copies to the host and
back, whichever is longer: copies are assumed to overlap with everything else. Larger batches have no other
advantage in this measure. The budget is the peak of the first batch without rematerialization, times
`ROOM`. Nothing is executed. It requires libtpu.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax

import remat
from benchmarks.ahead_of_time import SIZES, decoder
from benchmarks.ahead_of_time.case import Case
from benchmarks.ahead_of_time.measure import counted
from remat.program.compiled import compile_for_analysis
from remat.program.costs import Roofline
from remat.program.targets import Target, target as find_target
from remat.units import format_bytes, format_seconds

#: By case: its builder, and the targets of small and full sizes.
CASES: Mapping[str, tuple[Callable[..., Case], str, str]] = {
    "llama-8b": (decoder.llama_8b, "tpu:v5p:2x2x1", "tpu:v5p:4x4x4"),
    "llama-70b": (decoder.llama_70b, "tpu:v5p:2x2x2", "tpu:v5p:8x8x8"),
}
N_BATCHES = 24  # the batches are this many multiples of the number of devices
ROOM = 1.25  # a larger budget lets larger batches fit, and both searches take longer

#: The named values of a layer in the order in which they give up the device's memory: those that cost least
#: per byte first.
NAMES = ("up", "gate", "query", "key", "value", "context", "out", "down")


class Policy(NamedTuple):
    """Where the named values of each layer are while they wait for the backward pass."""

    kept: tuple[str, ...]
    on_host: tuple[str, ...]

    def __str__(self) -> str:
        again = [n for n in NAMES if n not in (*self.kept, *self.on_host)]
        parts = {"kept": self.kept, "host": self.on_host, "recomputed": again}
        return "; ".join(f"{what}: {' '.join(names)}" for what, names in parts.items() if names)

    def wrap(self, layer: Callable) -> Callable:
        policies = jax.checkpoint_policies
        if self.on_host:
            policy = policies.save_and_offload_only_these_names(
                names_which_can_be_saved=self.kept,
                names_which_can_be_offloaded=self.on_host,
                offload_src="device",
                offload_dst="pinned_host",
            )
        else:
            policy = policies.save_only_these_names(*self.kept)
        return jax.checkpoint(layer, policy=policy)


def policies() -> list[Policy]:
    """Return the policies in the order of the search.

    >>> len(policies()), policies()[0].kept == NAMES, policies()[-1]
    (17, True, Policy(kept=(), on_host=()))
    """
    to_host = [Policy(NAMES[n:], NAMES[:n]) for n in range(len(NAMES) + 1)]
    return to_host + [Policy((), NAMES[n:]) for n in range(1, len(NAMES) + 1)]


class Measured(NamedTuple):
    """A step as it is compiled: bytes of one device, and matrix products of all."""

    peak_bytes: int
    host_bytes: int
    matmul_flops: int


class Problem:
    """A case with its batches and its budget.

    Args:
      name: of the case.
      size: of `ahead_of_time.SIZES`.
    """

    def __init__(self, name: str, size: str) -> None:
        self.build, *places = CASES[name]
        self.size = size
        self.target: Target = find_target(places[SIZES.index(size)])
        self.batches = [self.target.n_devices * (n + 1) for n in range(N_BATCHES)]
        self._measured: dict[tuple[Policy | None, int], Measured] = {}
        self.budget = int(ROOM * self.measured(None, self.batches[0]).peak_bytes)
        self.options = {
            "budget": self.budget,
            "target": self.target,
            "cache": False,
            "verify": "fast",
            "progress": False,
        }

    def case(self, batch: int) -> Case:
        return self.build(self.target, self.size, batch=batch, names=NAMES)

    def measured(self, policy: Policy | None, batch: int) -> Measured:
        """Compile the step with a policy, or as it is written."""
        if (policy, batch) not in self._measured:
            case = self.case(batch)
            step = case.step if policy is None else case.build(policy.wrap)
            lowered = jax.jit(step, **case.options).lower(*case.args)
            memory = compile_for_analysis(lowered, self.target)
            found = Measured(memory.peak_bytes, memory.host_bytes, counted(step, case))
            self._measured[policy, batch] = found
        return self._measured[policy, batch]

    def rows_per_s(self, batch: int, matmul_flops: float, host_bytes: int) -> float:
        device = self.target.device
        of_products = matmul_flops / self.target.n_devices / device.flops_per_s("bfloat16")
        return batch / max(of_products, Roofline(device).transfer_seconds(2 * host_bytes))


def named_search(problem: Problem) -> list[tuple[Policy, int]]:
    """Return for each policy that fits some batch the number of the largest that fits."""
    every, n = policies(), len(problem.batches)

    def largest(policy: Policy, low: int, high: int) -> int:
        """Return the number of the first batch from `low` on that does not fit; at most `high`."""

        def fails(at: int) -> bool:
            return problem.measured(policy, problem.batches[at]).peak_bytes > problem.budget

        return bisect.bisect_left(range(high), True, low, high, key=fails)

    most = largest(every[-1], 0, n)
    found, low = [], 0
    for policy in every:
        end = largest(policy, low, most)
        if end > 0:
            found.append((policy, end - 1))
            low = end - 1
    return found


def compared(problem: Problem, answers: Sequence[tuple[Policy, int]]) -> list[dict[str, Any]]:
    """Return for each batch among the answers of `named_search` the best policy and the plan."""
    best: dict[int, tuple[float, Policy]] = {}
    for policy, at in answers:
        batch = problem.batches[at]
        made = problem.measured(policy, batch)
        rate = problem.rows_per_s(batch, made.matmul_flops, made.host_bytes)
        best[batch] = max(best.get(batch, (0.0, policy)), (rate, policy), key=lambda x: x[0])
    rows = []
    for batch, (rate, policy) in best.items():
        case = problem.case(batch)
        plan = remat.plan(case.step, *case.args, **problem.options, **case.options)
        fitted = remat.fit(case.step, plan=plan, target=problem.target, **case.options)
        ours = problem.rows_per_s(batch, counted(fitted, case), plan.host_bytes)
        rows.append(
            {"batch": batch, "policy": str(policy), "named_rows_per_s": rate, "rows_per_s": ours}
        )
        print(f"  {batch:5d} rows: {rate:9.0f} rows/s ({policy}), plan {ours:.0f}", flush=True)
    return rows


@contextlib.contextmanager
def counting_compiles() -> Iterator[list[None]]:
    """Yield a list with one item for each program that is compiled."""
    found: list[None] = []
    compile = jax.stages.Lowered.compile

    def counting(*args: Any, **kwargs: Any) -> Any:
        found.append(None)
        return compile(*args, **kwargs)

    with mock.patch.object(jax.stages.Lowered, "compile", counting):
        yield found


def measured(name: str, size: str) -> dict[str, Any]:
    problem = Problem(name, size)
    print(f"\n{name}: budget {format_bytes(problem.budget)}, batches {problem.batches}", flush=True)

    def make_step(batch: int) -> tuple[Callable, tuple, dict[str, Any]]:
        case = problem.case(batch)
        return case.step, case.args, dict(case.options)

    begin = time.perf_counter()
    with counting_compiles() as own_compiles:
        found = remat.largest(make_step, problem.batches, **problem.options)
    ours_s = time.perf_counter() - begin
    print(
        f"  remat.largest: {found.size} rows, {len(own_compiles)} compiles, {len(found.tried)} sizes, "
        f"{format_seconds(ours_s)}",
        flush=True,
    )
    begin = time.perf_counter()
    with counting_compiles() as named_compiles:
        answers = named_search(problem)
    named_s = time.perf_counter() - begin
    named_batch = max(problem.batches[at] for _, at in answers)
    print(
        f"  named values: {named_batch} rows, {len(named_compiles)} compiles, "
        f"{format_seconds(named_s)}",
        flush=True,
    )
    return {
        "budget_bytes": problem.budget,
        "batches": problem.batches,
        "named": {
            "batch": named_batch,
            "compiles": len(named_compiles),
            "seconds": named_s,
        },
        "largest": {
            "batch": found.size,
            "peak_bytes": found.plan.peak_bytes,
            "compiles": len(own_compiles),
            "sizes": len(found.tried),
            "seconds": ours_s,
        },
        "by_batch": compared(problem, answers),
    }


def main(options: Sequence[str] = ()) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks largest")
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--size", choices=SIZES, default="small")
    asked = parser.parse_args(list(options))
    if not importlib.util.find_spec("libtpu"):
        raise ImportError("libtpu is not installed: pip install '.[tpu]'")
    cases = {name: measured(name, asked.size) for name in asked.case}
    return {"size": asked.size, "cases": cases}
