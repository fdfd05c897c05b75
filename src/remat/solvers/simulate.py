"""The only memory accountant: the peak and the time of a schedule's steps.

The rules of the problem (after Jain et al., "Checkmate", MLSys 2020):

- nodes are first computed in the graph's order, and every node without users at least once;
- a step computes a node, while all its operands are live, or frees a live value;
- a value counts from its computation until it is freed, and computing a live value again is
  no step (it would occupy the same bytes twice);
- the peak is the largest number of live bytes after any step, the time is the sum over all
  computations.

Every solver's answer goes through `simulate`, which executes it step by step. Solvers search over
*orders of computation* (a sequence of places in the graph, repeats allowed) and never place a free
themselves: freeing each value right after its last use is optimal for a given order, because
liveness only adds up. `steps_of` writes those frees; `liveness` measures an order in NumPy, some
twenty times faster than executing it, and the tests hold it equal to `simulate`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from typing import Literal

import numpy as np

from remat.errors import ScheduleError
from remat.solvers.graph import Graph
from remat.solvers.liveness import Arrays

Step = tuple[Literal["compute", "free"], int]


@dataclasses.dataclass(frozen=True)
class Usage:
    """The costs of executing steps: the peak in bytes, the step that reaches it, and the time."""

    peak_bytes: int
    peak_step: int
    time: int | float


def simulate(graph: Graph, steps: Iterable[Step]) -> Usage:
    """Execute steps on a graph and return their peak and time.

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
            raise ScheduleError(
                f"{where}: {step!r} is not a pair of an action and an id."
            ) from None
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
            raise ScheduleError(f"{where}: {kind!r} is not an action; use 'compute' or 'free'.")
    # First computations follow the order, so those that never happened are the last nodes; the
    # very last node has no users, hence a schedule that stops early misses a result.
    if n_first < len(nodes):
        raise ScheduleError(
            f"the schedule ends before node {nodes[n_first].id} is computed: "
            f"{len(nodes) - n_first} of {len(nodes)} nodes are missing."
        )
    return Usage(peak_bytes, peak_step, time)


def steps_of(graph: Graph, order: Sequence[int]) -> tuple[Step, ...]:
    """Return the steps that compute places of the graph in an order and free values after their last use.

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
    """Return the peak and time without recomputation: budgets are often given as shares of that peak.

    >>> from remat.solvers.graph import Graph, Node
    >>> no_remat(Graph((Node(0, time=2, bytes=10), Node(1, time=3, bytes=5, deps=(0,)))))
    Usage(peak_bytes=15, peak_step=1, time=5)
    """
    return simulate(graph, steps_of(graph, range(len(graph))))


def floor_bytes(graph: Graph, once: Collection[int] = ()) -> int:
    """Return a lower bound on the peak of any schedule: what must be live while some node is computed.

    That is the node, its operands, and the values that are kept because they are computed `once`.

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
