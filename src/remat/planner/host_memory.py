"""Which values a loop's steps keep in the host's memory, and the cost of the copies.

If the device can copy to host memory, a step can keep values there, its carry included (which the loop
would otherwise keep on the device). Offloading costs

* 2 x bytes of traffic in device memory, and
* the part of each direction's transfer that is not hidden behind computation. Copies to the host can
  hide behind half of a step's forward time, copies back behind half of its backward time. Beyond that
  the link's time counts in full.

So offloading is cheap until the copies no longer hide, and expensive from then on. To find the values
worth offloading, cuts are made at several shares of the link's time, and the actual cost of each cut
is computed afterwards: once as it is, and once with only as much offloaded as is hidden. (At one share,
all values cost the same per byte. Where saving costs more than that, the cut offloads instead of saving,
so a few prices per byte above it are enough.) Small values stay on the device, since a copy has a fixed
cost.

Known limit: the hidden share of a transfer is an assumption, not a measurement.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from remat.program.fusion import Price
from remat.solvers.mincut import CutProblem, MinimumCut, Network

#: `seconds(bytes)` of a copy between the device's memory and the host's, in one direction.
Transfer = Callable[[float], float]

# Bytes of a value at one step. Smaller values stay on the device: a copy of this size takes tens of
# microseconds. A larger bound offloads fewer values.
MIN_OFFLOAD_BYTES = 2**18

# Share of a step's computation time that copies can hide behind; a larger share makes offloading
# cheaper in the model.
HIDDEN_SHARE = 0.5
# Shares of the link's time that are added to the cost of offloading in cuts; more shares find more options.
_LINK_SHARES = (0.0, *(2.0**-k for k in range(8, -1, -1)))
# Prices per device byte of these cuts, as multiples of the cost of offloading a byte. A higher price
# offloads values instead of saving them.
_PRICE_FACTORS = (1.01, 10.0, 1000.0)


@dataclasses.dataclass(frozen=True)
class Copies:
    """The cost of copies to the host and back in each step of a loop.

    Args:
      price: the time of a kernel.
      transfer: the time of a copy in one direction.
      forward_s, backward_s: the times of a step's two halves, without recomputation.
    """

    price: Price
    transfer: Transfer
    forward_s: float
    backward_s: float

    def seconds(self, sizes: Sequence[int]) -> float:
        """Return the seconds that the copies of values of these bytes add to a step."""
        return sum(map(self.traffic_s, sizes)) + self.exposed_s(sizes)

    def traffic_s(self, n_bytes: int) -> float:
        """Return the seconds of traffic in the device's memory."""
        return self.price(0, 2 * n_bytes, "float32")

    def exposed_s(self, sizes: Sequence[int]) -> float:
        """Return the seconds of transfers that are not hidden behind a step's computation."""
        copies_s = sum(map(self.transfer, sizes))
        halves = self.forward_s, self.backward_s
        return sum(max(0.0, copies_s - HIDDEN_SHARE * half_s) for half_s in halves)


def cuts_with_copies(
    problem: CutProblem, movable: Sequence[bool], copies: Copies
) -> list[MinimumCut]:
    """Return cuts that keep some of the movable values in host memory, without repetitions."""
    found: dict[tuple[tuple[int, ...], ...], MinimumCut] = {}
    sizes = problem.bytes
    for share in _LINK_SHARES if any(movable) else ():
        prices = tuple(
            copies.traffic_s(n) + share * 2 * copies.transfer(n) if m else math.inf
            for n, m in zip(sizes, movable)
        )
        network = Network.of(dataclasses.replace(problem, transfer=prices))
        per_byte = max(p / n for p, n, m in zip(prices, sizes, movable) if m)
        for factor in _PRICE_FACTORS:
            cut, _ = network.cheapest(factor * per_byte)
            for one in (cut, _hidden(cut, sizes, copies)):
                if one.offloaded:
                    found.setdefault((one.saved, one.offloaded), one)
    return list(found.values())


def _hidden(cut: MinimumCut, sizes: Sequence[int], copies: Copies) -> MinimumCut:
    """Return the cut with only as much offloaded as is hidden, largest values first.

    It saves the rest.
    """
    kept: list[int] = []
    for v in sorted(cut.offloaded, key=lambda v: (-sizes[v], v)):
        if not copies.exposed_s([sizes[x] for x in (*kept, v)]):
            kept.append(v)
    back = [v for v in cut.offloaded if v not in kept]
    return dataclasses.replace(
        cut,
        saved=tuple(sorted((*cut.saved, *back))),
        offloaded=tuple(sorted(kept)),
        bytes=cut.bytes + sum(sizes[v] for v in back),
    )
