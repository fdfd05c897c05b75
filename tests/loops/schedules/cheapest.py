"""The least cost of a path from a state to an end state, by Dijkstra's algorithm."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

State = TypeVar("State", bound=Hashable)


def least_cost_from(
    start: State,
    is_end: Callable[[State], bool],
    moves: Callable[[State], Iterable[tuple[float, State]]],
) -> float | None:
    """Return the least sum of costs of moves to an end state; None if none is reachable.

    Args:
      start: the first state.
      is_end: whether a state is an end.
      moves: from a state, each with its cost of 0 or more.
    """
    least = {start: 0.0}
    queue = [(0.0, 0, start)]
    number = itertools.count(1)
    while queue:
        cost, _, at = heapq.heappop(queue)
        if is_end(at):
            return cost
        if least[at] < cost:
            continue
        for more, then in moves(at):
            if cost + more < least.get(then, float("inf")):
                least[then] = cost + more
                heapq.heappush(queue, (cost + more, next(number), then))
    return None
