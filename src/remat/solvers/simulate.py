"""The only memory accountant: what a schedule's steps occupy and how long they take.

The rules of the problem (Jain et al., "Checkmate", MLSys 2020, in the form of FACTS.md):

- nodes are first computed in the graph's order, and every node without users at least once;
- a step computes a node, while all its operands are live, or frees a live value;
- a value counts from its computation until it is freed, and computing a live value again is
  no step (it would occupy the same bytes twice);
- the peak is the largest number of live bytes after any step, the time is the sum over all
  computations.

Every solver's answer goes through `simulate`, which executes it step by step. Solvers search over
*orders of computation* (a sequence of places in the graph, repeats allowed) and never place a free
themselves: freeing each value right after its last use is optimal for a given order, because
liveness only adds up. `steps_of` writes those frees; `Liveness` measures an order in numpy, faster
by some twenty times than executing it, and the tests hold it equal to `simulate`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from remat.errors import ScheduleError
from remat.solvers.graph import Chain, Graph, StageOption

Step = tuple[Literal["compute", "free"], int]
Ints = NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Usage:
    """What executing steps takes: the peak in bytes, the step at which it is reached, the time."""

    peak_bytes: int
    peak_step: int
    time: int | float


def simulate(graph: Graph, steps: Iterable[Step]) -> Usage:
    """Execute steps on a graph and measure them.

    >>> from remat.solvers.graph import Graph, Node
    >>> graph = Graph((Node(0, time=2, bytes=10), Node(1, time=3, bytes=5, deps=(0,))))
    >>> simulate(graph, (("compute", 0), ("compute", 1), ("free", 0)))
    Usage(peak_bytes=15, peak_step=1, time=5)

    Raises:
      ScheduleError: a step breaks a rule of the problem (module docstring); the message names it.
    """
    nodes = graph.nodes
    place_of = graph.positions()
    live: set[int] = set()
    n_first = live_bytes = peak_bytes = peak_step = 0
    time: int | float = 0
    for number, step in enumerate(steps):
        where = f"step {number} of the schedule"
        try:
            kind, key = step
            place = place_of[key]
        except (TypeError, ValueError):
            raise ScheduleError(f"{where}: {step!r} is no pair of an action and an id.") from None
        except KeyError:
            raise ScheduleError(f"{where}: the graph has no node {key!r}.") from None
        node = nodes[place]
        if kind == "free":
            if key not in live:
                raise ScheduleError(f"{where}: node {key} is freed while it is not live.")
            live.remove(key)
            live_bytes -= node.bytes
        elif kind == "compute":
            if key in live:
                raise ScheduleError(f"{where}: node {key} is computed while it is still live.")
            missing = [dep for dep in node.deps if dep not in live]
            if missing:
                raise ScheduleError(
                    f"{where}: node {key} is computed while its operand {missing[0]} is not live; "
                    "compute that first, or free it later."
                )
            if place > n_first:
                raise ScheduleError(
                    f"{where}: node {key} is first computed before node {nodes[n_first].id}, "
                    "which comes earlier in the graph's order."
                )
            n_first = max(n_first, place + 1)
            live.add(key)
            live_bytes += node.bytes
            time += node.time
            if live_bytes > peak_bytes:
                peak_bytes, peak_step = live_bytes, number
        else:
            raise ScheduleError(f"{where}: {kind!r} is no action; use 'compute' or 'free'.")
    # First computations follow the order, so those that never happened are the last nodes; the
    # very last node has no users, hence a schedule that stops early misses a result.
    if n_first < len(nodes):
        raise ScheduleError(
            f"the schedule ends before node {nodes[n_first].id} is computed: "
            f"{len(nodes) - n_first} of {len(nodes)} nodes are missing."
        )
    return Usage(peak_bytes, peak_step, time)


def steps_of(graph: Graph, order: Sequence[int]) -> tuple[Step, ...]:
    """The steps that compute places of the graph in this order and free each value when it can be.

    >>> from remat.solvers.graph import Graph, Node
    >>> graph = Graph((Node(0, time=2, bytes=10), Node(1, time=3, bytes=5, deps=(0,))))
    >>> steps_of(graph, [0, 1])
    (('compute', 0), ('compute', 1), ('free', 0), ('free', 1))
    """
    operands = graph.operands()
    latest: dict[int, int] = {}
    last_use = list(range(len(order)))
    for at, place in enumerate(order):
        for operand in operands[place]:
            last_use[latest[operand]] = at
        latest[place] = at
    dying: list[list[int]] = [[] for _ in order]
    for computed_at, used_at in enumerate(last_use):
        dying[used_at].append(computed_at)
    ids = [node.id for node in graph.nodes]
    steps: list[Step] = []
    for at, place in enumerate(order):
        steps.append(("compute", ids[place]))
        steps.extend(("free", ids[order[computed_at]]) for computed_at in dying[at])
    return tuple(steps)


def no_remat(graph: Graph) -> Usage:
    """What the graph takes when nothing is computed twice: the peak that budgets are fractions of.

    >>> from remat.solvers.graph import Graph, Node
    >>> no_remat(Graph((Node(0, time=2, bytes=10), Node(1, time=3, bytes=5, deps=(0,)))))
    Usage(peak_bytes=15, peak_step=1, time=5)
    """
    return simulate(graph, steps_of(graph, range(len(graph))))


def floor_bytes(graph: Graph, once: Collection[int] = ()) -> int:
    """What is live while some node is computed, in any schedule: none has a lower peak.

    That is the node, its operands, and what must be kept because it is computed only `once`.

    >>> from remat.solvers.graph import Graph, Node
    >>> nodes = Node(0, 1, 8), Node(1, 1, 8), Node(2, 1, 8, (1,)), Node(3, 1, 8, (0, 2))
    >>> floor_bytes(Graph(nodes[:3])), floor_bytes(Graph(nodes), once={0, 1})
    (16, 24)
    """
    arrays = Arrays.of(graph, once)
    n = len(arrays)
    user = np.repeat(np.arange(n), np.diff(arrays.start))
    last_use = np.arange(n)
    np.maximum.at(last_use, arrays.dep, user)
    kept_bytes = np.where(arrays.once, arrays.bytes, 0)
    change = np.zeros(n + 1, np.int64)
    change[:-1] = kept_bytes
    np.subtract.at(change, last_use + 1, kept_bytes)
    other_bytes = arrays.bytes - kept_bytes
    live_bytes = np.cumsum(change[:-1]) + other_bytes
    np.add.at(live_bytes, user, other_bytes[arrays.dep])
    return int(live_bytes.max(initial=0))


# Chains of stages

ChainStep = tuple[Literal["forward", "free", "save", "backward"], int, int]


def simulate_chain(chain: Chain, steps: Iterable[ChainStep]) -> Usage:
    """Execute the steps of a chain and measure them.

    ("forward", k, 0) computes the input of stage k + 1 and nothing else; ("free", k, 0) frees the
    input of stage k; ("save", k, o) runs stage k's forward as option o and keeps what that saves,
    the input of stage k + 1 among it; ("backward", k, 0) turns the gradient of stage k's output
    into that of its input, and what the stage had saved is freed.

    Raises:
      ScheduleError: a step lacks what it needs, repeats what is live, or backwards are missing.
    """
    n = len(chain)
    inputs = {0}
    saved: dict[int, StageOption] = {}
    gradient = n
    peak_bytes = peak_step = 0
    time: int | float = 0
    for number, (kind, k, o) in enumerate(steps):
        where = f"step {number} of the chain, {kind} of stage {k}"
        held = sum(chain.boundary_bytes(j) for j in inputs) + chain.boundary_bytes(gradient)
        held += sum(option.saved_bytes for option in saved.values())
        if kind == "free":
            if k not in inputs:
                raise ScheduleError(f"{where}: its input is not live.")
            inputs.remove(k)
            continue
        if not 0 <= k < n:
            raise ScheduleError(f"{where}: the chain has {n} stages.")
        if k not in inputs and k - 1 not in saved:
            raise ScheduleError(f"{where}: its input is not live.")
        stage = chain.stages[k]
        if kind == "forward":
            if k + 1 in inputs:
                raise ScheduleError(f"{where}: its output is still live.")
            inputs.add(k + 1)
            held += chain.boundary_bytes(k + 1) + stage.forward_temporary_bytes
            time += stage.forward_time
        elif kind == "save":
            if k in saved:
                raise ScheduleError(f"{where}: what it saves is still live.")
            saved[k] = stage.options[o]
            held += saved[k].saved_bytes + saved[k].forward_temporary_bytes
            time += saved[k].forward_time
        else:
            if gradient != k + 1 or k not in saved:
                raise ScheduleError(f"{where}: it lacks its gradient or what it saved.")
            option = saved.pop(k)
            gradient = k
            held += stage.input_bytes + option.backward_temporary_bytes
            time += option.backward_time
        if held > peak_bytes:
            peak_bytes, peak_step = held, number
    if gradient:
        raise ScheduleError(f"the steps end before the backward of stage {gradient - 1}.")
    return Usage(peak_bytes, peak_step, time)


# Measuring an order of computation in numpy


@dataclasses.dataclass(frozen=True, eq=False)
class Arrays:
    """A graph as arrays: `dep[start[v]:start[v + 1]]` are the places of v's operands.

    `once` says what must not be computed again.
    """

    bytes: Ints
    time: NDArray[np.float64]
    start: Ints
    dep: Ints
    once: NDArray[np.bool_]

    @classmethod
    def of(cls, graph: Graph, once: Collection[int] = ()) -> Arrays:
        operands = graph.operands()
        sizes = np.fromiter((len(us) for us in operands), np.int64, len(operands))
        start = np.zeros(len(operands) + 1, np.int64)
        np.cumsum(sizes, out=start[1:])
        return cls(
            bytes=np.array([node.bytes for node in graph.nodes], np.int64),
            time=np.array([float(node.time) for node in graph.nodes], np.float64),
            start=start,
            dep=np.fromiter((u for us in operands for u in us), np.int64, int(start[-1])),
            once=np.fromiter((node.id in once for node in graph.nodes), np.bool_, len(graph)),
        )

    def __len__(self) -> int:
        return len(self.bytes)


@dataclasses.dataclass(frozen=True, eq=False)
class Liveness:
    """An order of computation, measured.

    Args:
      order: the places of the graph that are computed, in turn.
      last_use: for each computation, where it is last used (itself, if never).
      used: whether it is used at all.
      live_bytes: the bytes that are live at each computation, the computed value included.
    """

    order: Ints
    last_use: Ints
    used: NDArray[np.bool_]
    live_bytes: Ints

    @property
    def peak_bytes(self) -> int:
        return int(self.live_bytes.max(initial=0))


def liveness(arrays: Arrays, order: Sequence[int] | Ints) -> Liveness:
    """Measure an order; the use of a value is served by its latest computation before."""
    computed = np.asarray(order, np.int64)
    n_steps = len(computed)
    at = np.arange(n_steps, dtype=np.int64)
    uses_per_step = arrays.start[computed + 1] - arrays.start[computed]
    user = np.repeat(at, uses_per_step)
    first_use = np.cumsum(uses_per_step) - uses_per_step
    operand = arrays.dep[
        arrays.start[computed[user]] + np.arange(len(user)) - np.repeat(first_use, uses_per_step)
    ]
    # (value, step) pairs in one sorted key: the latest computation of u before step p is the last
    # key below (u, p).
    key = computed * (n_steps + 1) + at
    by_key = np.argsort(key, kind="stable")
    served_by = by_key[np.searchsorted(key[by_key], operand * (n_steps + 1) + user) - 1]
    last_use = at.copy()
    np.maximum.at(last_use, served_by, user)
    used = np.zeros(n_steps, np.bool_)
    used[served_by] = True
    # Bytes enter at the computation and leave after the last use.
    n_bytes = arrays.bytes[computed]
    change = np.zeros(n_steps + 1, np.int64)
    change[:-1] = n_bytes
    np.subtract.at(change, last_use + 1, n_bytes)
    return Liveness(computed, last_use, used, np.cumsum(change[:-1]))
