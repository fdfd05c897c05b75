"""The graph that solvers schedule: values in a fixed order, each with bytes, a time and operands.

A `Graph` is one training step (or any other computation) as the literature on rematerialization
draws it: node after node in a fixed order, each computed from earlier ones. It holds no JAX
object, so that solvers run on hand-made graphs in milliseconds and their answers can be checked
by anyone with the file.

The JSON format is the one in which Checkmate's graphs circulate::

    {"name": "unet",
     "nodes": [{"id": 0, "name": "conv1", "time": 305, "bytes": 2071986176, "deps": [],
                "backward": false}, ...]}

The order of the list is the order of computation. `id` is any unique whole number, `deps` lists the
ids of the operands, `name` and `backward` may be missing, and other keys are ignored: the
header's `peak_bytes_no_remat` and `time_no_remat` are a reader's convenience that `simulate`
computes anew.

A file is data from outside: every way in which it can be wrong is a `GraphError` that names the
line. Known limit: the whole file is read into memory.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from typing import Any

from remat.errors import GraphError
from remat.files import read_text, write_text
from remat.json_lines import Reader
from remat.printing import printable, shown
from remat.units import counted, format_bytes

# Sums of bytes are also taken in 64-bit integers and in doubles (by the solvers), both of which
# are exact up to here: 8 PiB.
_MOST_BYTES = 2**53


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """One value, with the costs of computing and keeping it.

    Args:
      id: a whole number, unique in its graph.
      time: of one computation, in any unit (seconds, FLOPs) that is the same for all nodes.
      bytes: that the value occupies from its computation until it is freed.
      deps: ids of its operands, all of them earlier in the graph's order.
      name: for display.
      backward: whether it belongs to the backward pass; for display, no solver reads it.
    """

    id: int
    time: int | float
    bytes: int
    deps: tuple[int, ...] = ()
    name: str = ""
    backward: bool = False


@dataclasses.dataclass(frozen=True)
class Graph:
    """Nodes in the order in which they are first computed.

    >>> graph = Graph((Node(0, time=2, bytes=10), Node(1, time=3, bytes=5, deps=(0,))))
    >>> graph.time, graph.sinks
    (5, (1,))

    Raises:
      GraphError: for ids that repeat, an operand that is unknown or not earlier, and numbers that
        are negative, not finite or of a wrong type.
    """

    nodes: tuple[Node, ...]
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", tuple(self.nodes))
        known: set[int] = set()
        for place, node in enumerate(self.nodes):
            problem = _what_is_wrong(node, known)
            if problem is not None:
                raise GraphError(f"graph {self.name!r}, node number {place}: {problem[1]}")
            known.add(node.id)
        problem_of_sums = _what_is_wrong_with_sums(self.nodes)
        if problem_of_sums is not None:
            raise GraphError(f"graph {self.name!r}: {problem_of_sums}")

    def __len__(self) -> int:
        return len(self.nodes)

    def __repr__(self) -> str:
        name = f"{printable(repr(self.name))}, " if self.name else ""
        return f"Graph({name}{counted(len(self), 'node')}, time {self.time:g})"

    @property
    def time(self) -> int | float:
        """Return the time of computing every node once: no schedule takes less."""
        return sum(node.time for node in self.nodes)

    @property
    def sinks(self) -> tuple[int, ...]:
        """Return the ids of the nodes that no other node uses: the results."""
        used = {dep for node in self.nodes for dep in node.deps}
        return tuple(node.id for node in self.nodes if node.id not in used)

    def positions(self) -> dict[int, int]:
        """Return each id's place in the order."""
        return {node.id: place for place, node in enumerate(self.nodes)}

    def operands(self) -> tuple[tuple[int, ...], ...]:
        """Return for each node, in order, the places of its operands: sorted, each once."""
        place_of = self.positions()
        return tuple(tuple(sorted({place_of[dep] for dep in node.deps})) for node in self.nodes)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Graph:
        """Read a graph from its JSON file.

        Raises:
          GraphError: the file cannot be read or is damaged; the message names the line and why.
        """
        text = read_text(path, GraphError)
        return _Reader(os.fsdecode(path), text, GraphError).graph()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON file that `load` reads: one node a line, so that files can be compared."""
        lines = ",\n".join(
            "  "
            + json.dumps(
                {
                    "id": node.id,
                    "name": node.name,
                    "time": node.time,
                    "bytes": node.bytes,
                    "deps": list(node.deps),
                    "backward": node.backward,
                }
            )
            for node in self.nodes
        )
        text = f'{{"name": {json.dumps(self.name)},\n "nodes": [\n{lines}\n ]}}\n'
        write_text(path, text, GraphError)


# Chains of stages


@dataclasses.dataclass(frozen=True, slots=True)
class StageOption:
    """One way to run a stage before its backward: the bytes it saves and its costs.

    Args:
      saved_bytes: kept from this forward to the backward, the stage's output included.
      forward_time: of the forward that saves it.
      backward_time: of the backward that uses it, recomputation inside the stage included.
      forward_temporary_bytes: occupied during that forward beside what it saves.
      backward_temporary_bytes: occupied during the backward beside its operands and its result.
    """

    saved_bytes: int
    forward_time: float
    backward_time: float
    forward_temporary_bytes: int = 0
    backward_temporary_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a chain: its input, its forward that saves nothing, and its options otherwise."""

    input_bytes: int
    forward_time: float
    options: tuple[StageOption, ...]
    forward_temporary_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Chain:
    """Stages one after the other; the gradient of a stage's input is as large as the input.

    The gradient of the last output counts from the start: let the last stage hold the loss.
    """

    stages: tuple[Stage, ...]
    output_bytes: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(self.stages))
        for k, stage in enumerate(self.stages):
            if not stage.options:
                raise GraphError(f"stage {k} of the chain has no option; give it at least one.")
            for option in stage.options:
                least = self.boundary_bytes(k + 1)
                if option.saved_bytes < least:
                    raise GraphError(
                        f"an option of stage {k} saves {option.saved_bytes} bytes, less than the "
                        f"stage's output of {least}; what is saved includes the output."
                    )
            numbers = [stage.input_bytes, stage.forward_time, stage.forward_temporary_bytes]
            for option in stage.options:
                numbers += dataclasses.astuple(option)
            if not all(_is_finite(number) and number >= 0 for number in numbers):
                raise GraphError(f"stage {k} of the chain has a negative or infinite number.")

    def __len__(self) -> int:
        return len(self.stages)

    def __repr__(self) -> str:
        return f"Chain({counted(len(self), 'stage')}, output {format_bytes(self.output_bytes)})"

    def boundary_bytes(self, k: int) -> int:
        """Return the bytes of the input of stage k; of the last output for k = len(chain)."""
        return self.stages[k].input_bytes if k < len(self.stages) else self.output_bytes


# Checks of nodes, whether they come from a file or from a program


def _what_is_wrong(node: Node, known: set[int]) -> tuple[str, str] | None:
    """Return the invalid field and the reason, or None; `known` holds the ids of all earlier nodes."""
    if type(node.id) is not int:
        return "id", f"id must be a whole number, not {shown(node.id)}."
    if node.id in known:
        return "id", f"id {node.id} is taken by an earlier node; give each node its own."
    if type(node.time) not in (int, float) or not _is_finite(node.time) or node.time < 0:
        return "time", f"time must be a finite number of at least 0, not {shown(node.time)}."
    if type(node.bytes) is not int or not 0 <= node.bytes <= _MOST_BYTES:
        return "bytes", (
            f"bytes must be a whole number between 0 and {_MOST_BYTES}, not {shown(node.bytes)}."
        )
    if type(node.name) is not str:
        return "name", f"name must be a text, not {shown(node.name)}."
    if type(node.backward) is not bool:
        return "backward", f"backward must be true or false, not {shown(node.backward)}."
    if type(node.deps) is not tuple:
        return "deps", f"deps must be a sequence of ids, not {shown(node.deps)}."
    for dep in node.deps:
        if type(dep) is not int or dep not in known:
            return "deps", (
                f"operand {shown(dep)} of node {node.id} is not an earlier node; a graph has no "
                "cycles, and its nodes stand in the order of computation."
            )
    return None


def _what_is_wrong_with_sums(nodes: tuple[Node, ...]) -> str | None:
    n_bytes = sum(node.bytes for node in nodes)
    if n_bytes > _MOST_BYTES:
        return f"the values take {n_bytes} bytes in total; at most {_MOST_BYTES} are supported."
    if not _is_finite(sum(node.time for node in nodes)):
        return "the sum of the times is not finite; choose a larger unit."
    return None


def _is_finite(number: int | float) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an integer too large for a double
        return False


# Reading


class _Reader(Reader):
    """Reads a graph's file."""

    def graph(self) -> Graph:
        header: dict[str, Any] = {}
        nodes: list[Node] | None = None
        for key in self.members("the file must hold one JSON object"):
            if key == "nodes":
                if nodes is not None:
                    self.fail("the key 'nodes' appears a second time.")
                nodes = self.nodes()
            else:
                header[key] = self.value()
        self.end("graph")
        if nodes is None:
            self.fail("the key 'nodes' is missing.")
        name = header.get("name", "")
        if type(name) is not str:
            self.fail(f"name must be a text, not {shown(name)}.", 0)
        problem = _what_is_wrong_with_sums(tuple(nodes))
        if problem is not None:
            self.fail(problem)
        return Graph(tuple(nodes), name)

    def nodes(self) -> list[Node]:
        nodes: list[Node] = []
        known: set[int] = set()
        for _ in self.items("'nodes' must be a list"):
            start = self.at
            node = self.node(start)
            problem = _what_is_wrong(node, known)
            if problem is not None:
                field, why = problem
                key = re.compile(rf'"{field}"\s*:').search(self.text, start, self.at)
                self.fail(why, key.start() if key else start)
            nodes.append(node)
            known.add(node.id)
        return nodes

    def node(self, start: int) -> Node:
        fields = self.value()
        if type(fields) is not dict:
            why = "a node must be an object with id, time, bytes and deps"
            self.fail(f"{why}: {shown(fields)}.", start)
        for key in ("id", "time", "bytes", "deps"):
            if key not in fields:
                self.fail(f"the node has no {key!r}.", start)
        deps = fields["deps"]
        return Node(
            fields["id"],
            fields["time"],
            fields["bytes"],
            tuple(deps) if type(deps) is list else deps,
            fields.get("name", ""),
            fields.get("backward", False),
        )
