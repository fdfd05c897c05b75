"""A model of fusion: from operations to the values that kernels write to memory.

Chains of elementwise operations become one kernel, and values inside a kernel occupy no memory and no
bandwidth. The model follows XLA's fusion passes:

* A `KERNEL` (a matmul, convolution, sort, loop) reads its operands from memory and writes
  its results; a `REDUCE` operation fuses with the producers of its operands and writes its result.
* A `VIEW` is the same buffer as its operand.
* An elementwise result is written if a `KERNEL` reads it, if it is an output of the program, if it is
  `COSTLY` and several kernels need it, or if several kernels need it and would each read two or more
  operands of at least half its size to compute it. Kernels that read or write much larger values do not count
  for the last rule. Otherwise every kernel that needs it computes it from values that *are* written. With
  `into_products`, matrix products compute elementwise operands like other kernels.
* A loop updates its carry in place. If only the loop reads the constant from which a carry starts, the carry
  is in the constant's buffer; so are the carries of further loops to which it is passed on.
* Kernels in place: an elementwise kernel may write its result into the buffer of an operand that is not
  needed any more. So a value that only the next elementwise kernel reads is one node with it. Reductions
  between the two that only this kernel reads belong to the node, too, as in softmax.
* A sum of many values is one kernel, which keeps all of them alive until the last one is computed: for
  example the gradients of a weight that many layers share. With `partial_sums`, partial sums are
  written; a program must then put barriers around them (`Fused.partial_sums`).

The result is a `Graph` whose nodes are the written values; solvers schedule it.

Several results of one kernel (of a loop) are one node, or with `apart` one node for all results that the
same kernels read. Each of these takes the kernel's whole time, since the kernel runs again for any of them.

Known limits: the sizes of kernels are not limited, layouts are not modelled, and recomputing several nodes
of one kernel at once is priced as if it ran for each of them.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Container, Iterable, Sequence

from remat.ir.operations import FUSIBLE, Fusion
from remat.program.program import Op, Program
from remat.solvers.graph import Graph, Node

#: `seconds(flops, bytes moved, dtype)` of one kernel.
Price = Callable[[float, int, str], float]

_PRODUCTS = frozenset(("dot_general", "conv_general_dilated"))

_SUMS = frozenset(("add", "add_any", "sub"))

# Kernels that write to one buffer in turn are one node only if they read at most this many large values,
# all of which are live while the node runs. A larger number keeps the values of a long chain of such
# kernels from being recomputed one after the other; a smaller one counts the buffer more often.
_MOST_OPERANDS = 6

# If a kernel computed a value that is fused into it at more than this many positions for one element of the
# result, XLA writes the value instead. Slices and padding read a value at several positions, and again what
# it is made from.
_MOST_POSITIONS = 15

# Kernels that read or write a value of at least this many times the size of a cheap one compute the cheap one
# themselves, as they compute a mean from a sum in a normalization. A larger factor writes more small values,
# each of which takes a kernel of its own, and a compiler its time for that.
_MUCH_LARGER = 64

_SCALAR_BYTES = 16  # of the largest type of numbers

# The number of written values from which one kernel computes a value at most.
_MOST_SOURCES = 64

# The number of operations between two kernels from which on they are far from each other.
_FAR_APART = 16

# The number of large values in a sum from which partial sums are written. A larger one writes fewer of them,
# and each costs bandwidth; sums of fewer values save little memory.
_MANY_VALUES = 6


@dataclasses.dataclass(frozen=True)
class Fused:
    """A program's graph of written values, and the operations of its nodes.

    Args:
      graph: for n operations, a node has the number of the operation that writes it; node n is the end, which
        reads all results; nodes from n + 1 to 2 n are workspaces, and those from 2 (n + 1) on are the smaller
        ones of several nodes of an operation.
      ops: for each node its operations, in order; cheap ones that several nodes share are in each.
      once: nodes that must not be recomputed.
      seconds: for each node the time of one computation.
      holds: for each written value the node that holds it.
      partial_sums: operations whose results are written so that their terms are no longer needed.
      output_buffers: for each node that writes outputs, the bytes of each one's buffer, which the graph does
        not count.
    """

    graph: Graph
    ops: dict[int, tuple[int, ...]]
    once: frozenset[int]
    seconds: dict[int, float]
    holds: dict[int, int]
    partial_sums: frozenset[int] = frozenset()
    output_buffers: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Fused({self.graph!r}, {len(self.once)} of them computed once)"


def fuse(
    program: Program,
    price: Price,
    *,
    duplicates: bool = True,
    into_products: bool = False,
    apart: bool = False,
    partial_sums: int | None = None,
    alone: Callable[[int], bool] = lambda _: False,
    costly_inside: bool = False,
    joins_sums: bool = False,
) -> Fused:
    """Return the graph of the values that a program's kernels write.

    Args:
      program: without dead operations.
      price: the time of a kernel.
      duplicates: whether each of several kernels computes a shared cheap value itself. On CPU such values
        are written.
      into_products: whether a matrix product or a convolution computes the elementwise values that it
        reads, costly ones, too. Compilers for TPUs do so.
      apart: whether results of one operation that different kernels read are nodes of their own.
      partial_sums: partial sums are written if the terms of a sum take at least this many bytes; None
        for never.
      alone: which operations, by number, are nodes of their own even if the next kernel reuses the
        buffers of their results.
      costly_inside: whether kernels that are far from each other compute a shared costly value themselves.
      joins_sums: whether sums that do not depend on each other may be computed in one kernel, and barriers
        keep kernels that depend on each other apart: then both compute a shared costly value themselves, if
        `costly_inside` is set.
    """
    fusion = _Fusion(
        program, price, duplicates, into_products, partial_sums, costly_inside, joins_sums
    )
    return fusion.result(apart, alone)


def seconds_of_kernels(op: Op, flops: float, moved: float, price: Price) -> float:
    """Return the seconds of an operation that is a kernel, or that starts several."""
    seconds = price(flops, int(moved), op.dtype)
    if op.kernels > 1:
        seconds += (op.kernels - 1) * price(0.0, 1, op.dtype)
    return seconds * op.slowdown


def fills(op: Op, sizes: Sequence[int]) -> bool:
    """Return whether an operation makes arrays of much smaller values, such as of a constant.

    Args:
      sizes: the bytes of the program's values.
    """
    size = sum(sizes[v] for v in op.results)
    return op.fusion in FUSIBLE and all(2 * sizes[v] <= size for v in op.operands)


def _moves(op: Op) -> bool:
    """Return whether an operation that fuses reads its operands at other positions than its own."""
    return op.fusion is Fusion.CHEAP and not op.flops


class _Fusion:
    def __init__(
        self,
        program: Program,
        price: Price,
        duplicates: bool,
        into_products: bool,
        partial_sums: int | None,
        costly_inside: bool,
        joins_sums: bool,
    ) -> None:
        self.program = program
        self.costly_inside = costly_inside
        self.joins_sums = joins_sums
        self.into_products = into_products
        self.price = price
        ops = program.ops
        self.producer = {v: i for i, op in enumerate(ops) for v in op.results}
        self.readers: list[list[int]] = [[] for _ in ops]
        for i, op in enumerate(ops):
            for v in dict.fromkeys(op.operands):
                if v in self.producer:
                    self.readers[self.producer[v]].append(i)
        #: For each operation those that use a result, directly or through views.
        self.users = [self._users(i) for i in range(len(ops))]
        self.size = [sum(program.bytes[v] for v in op.results) for op in ops]
        #: For each operation the bytes of its results, or of its largest operand if that has more.
        self.work = [
            max((size, *(program.bytes[v] for v in op.operands)))
            for size, op in zip(self.size, ops, strict=True)
        ]
        #: Values whose memory is that of an output: these, and what outputs are views of.
        self.output_values = self._outputs_through_views()
        self.is_output = [any(v in self.output_values for v in op.results) for op in ops]
        self.written = self._written_in_any_case()
        self._mark_expensive()
        self._mark_of_many()
        if costly_inside:
            self._mark_costly_of_near_kernels()
        self._mark_often_computed()
        if not duplicates:
            self._mark_shared()
        self.partial_sums = (
            frozenset() if partial_sums is None else self._partial_sums(partial_sums)
        )
        for i in self.partial_sums:
            self.written[i] = True
        if self.partial_sums:  # more kernels, which may need the same values
            self._mark_expensive()
        self.buffer = self._buffers()
        self.reads = self._reads()

    def _outputs_through_views(self) -> set[int]:
        found = set(self.program.outputs)
        for op in reversed(self.program.ops):
            if op.fusion is Fusion.VIEW and any(v in found for v in op.results):
                found.update(op.operands)
        return found

    def _users(self, i: int) -> list[int]:
        found: dict[int, None] = {}
        stack = list(self.readers[i])
        while stack:
            user = stack.pop()
            if self.program.ops[user].fusion is Fusion.VIEW:
                stack += self.readers[user]
            else:
                found[user] = None
        return list(found)

    def _written_in_any_case(self) -> list[bool]:
        """Return what is written regardless of which other values are."""
        ops, users = self.program.ops, self.users
        written = [False] * len(ops)
        for i, op in enumerate(ops):
            if op.fusion in (Fusion.KERNEL, Fusion.REDUCE):
                written[i] = True
            elif op.fusion is not Fusion.VIEW:
                opaque = any(map(self._reads_from_memory, users[i]))
                # A value that must not be recomputed is written if kernels would compute it more than once.
                shared = not op.repeatable and (
                    len(users[i]) > 1 or any(ops[u].repeatable for u in users[i])
                )
                written[i] = self.is_output[i] or opaque or shared
        return written

    def _mark_expensive(self) -> None:
        """Also write what several kernels need and would compute at a higher cost than that of reading it."""
        ops = self.program.ops
        keeps_costly = not (self.into_products or self.costly_inside)
        # Kernels read what is written in any case, and costly values if they are written.
        written = [
            w or (keeps_costly and op.fusion is Fusion.COSTLY) for w, op in zip(self.written, ops)
        ]
        sources: list[set[int]] = []
        for op in ops:
            sources.append(self._sources_of(op, written, sources))

        def is_expensive(i: int, kernels: set[int]) -> bool:
            if len(kernels) < 2 or not self.size[i]:
                return False
            if ops[i].fusion is not Fusion.CHEAP:
                is_costly = ops[i].fusion is Fusion.COSTLY
                return keeps_costly and is_costly and len(self._without_joined(kernels)) > 1
            # Several kernels would have to read more than one operand of this size each.
            n_large = sum(2 * self._source_size(s) >= self.size[i] for s in sources[i])
            return n_large > 1 and self._n_small(kernels, i) > 1

        self._mark_by_kernels(is_expensive)

    def _mark_of_many(self) -> None:
        """Also write what is computed from many values; kernels read fewer."""
        sources: list[set[int]] = []
        for i, op in enumerate(self.program.ops):
            found = self._sources_of(op, self.written, sources)
            if len(found) > _MOST_SOURCES and op.fusion is not Fusion.VIEW:
                self.written[i] = True
            sources.append(found)

    def _sources_of(self, op: Op, written: Sequence[bool], sources: Sequence[set[int]]) -> set[int]:
        """Return the written operations that an operation's kernel reads, and -1 - v for each input v.

        Args:
          op: the operation.
          written: the operations that are written.
          sources: the result for each operation before this one.
        """
        found: set[int] = set()
        for v in op.operands:
            made_by = self.producer.get(v)
            if made_by is None:
                found.add(-1 - v)
            else:
                found |= {made_by} if written[made_by] else sources[made_by]
        return found

    def _mark_often_computed(self) -> None:
        """Also write the values that one kernel would compute at too many positions for one result."""
        ops = self.program.ops
        # For each value the positions at which the kernels that it is fused into compute it.
        positions: list[dict[int, int]] = [{} for _ in ops]
        for i in reversed(range(len(ops))):
            if ops[i].fusion is Fusion.VIEW or self.written[i]:
                continue
            own: collections.Counter[int] = collections.Counter()
            moved: collections.Counter[int] = collections.Counter()
            for u in self.users[i]:
                of_user = {u: 1} if self.written[u] else positions[u]
                if _moves(ops[u]):
                    moved.update(of_user)
                else:  # all elementwise users compute it at their own position
                    own |= collections.Counter(of_user)
            found = own + moved
            self.written[i] = max(found.values(), default=0) > _MOST_POSITIONS
            positions[i] = {} if self.written[i] else found

    def _mark_costly_of_near_kernels(self) -> None:
        """Also write the costly values that several kernels near each other would compute."""

        def is_near(i: int, kernels: set[int]) -> bool:
            return self.program.ops[i].fusion is Fusion.COSTLY and any(
                b - a < _FAR_APART and not (self.joins_sums and self._depends(b, a))
                for a, b in itertools.pairwise(self._without_joined(kernels))
            )

        self._mark_by_kernels(is_near)

    def _without_joined(self, kernels: set[int]) -> list[int]:
        """Return kernels in order, without sums that the kernel of the one before may compute."""
        found: list[int] = []
        for i in sorted(kernels):
            if not (self.joins_sums and found and self._can_join(found[-1], i)):
                found.append(i)
        return found

    def _can_join(self, a: int, b: int) -> bool:
        """Return whether one kernel may compute two results, the first one of which is computed before."""
        ops = self.program.ops
        are_sums = ops[a].fusion is ops[b].fusion is Fusion.REDUCE
        return are_sums and b - a < _FAR_APART and not self._depends(b, a)

    def _depends(self, b: int, a: int) -> bool:
        """Return whether an operation depends on an earlier one."""
        stack, seen = [b], {b}
        while stack:
            for v in self.program.ops[stack.pop()].operands:
                i = self.producer.get(v, -1)
                if i == a:
                    return True
                if i > a and i not in seen:
                    seen.add(i)
                    stack.append(i)
        return False

    def _reads_from_memory(self, i: int) -> bool:
        op = self.program.ops[i]
        return op.fusion is Fusion.KERNEL and not (self.into_products and op.name in _PRODUCTS)

    def _mark_shared(self) -> None:
        """Also write the cheap values that are computed from large ones and that several kernels need."""
        ops, sizes = self.program.ops, self.program.bytes

        def is_shared(i: int, kernels: set[int]) -> bool:
            if ops[i].fusion is not Fusion.CHEAP or not self.size[i]:
                return False
            large = any(2 * sizes[v] >= self.size[i] for v in ops[i].operands)
            # Pairs of elements of several arrays, such as differences, are not a mere repetition of one.
            of_pairs = len({v for v in ops[i].operands if sizes[v] > _SCALAR_BYTES}) > 1
            is_used_often = len(self.users[i]) > 1 and self._n_small(kernels, i) > 1
            return (large or of_pairs) and is_used_often

        self._mark_by_kernels(is_shared)

    def _n_small(self, kernels: set[int], i: int) -> int:
        """Return how many kernels neither read nor write a value that is much larger than a cheap one."""
        return sum(self.work[k] < _MUCH_LARGER * self.size[i] for k in kernels)

    def _mark_by_kernels(self, is_written: Callable[[int, set[int]], bool]) -> None:
        """Also write the values for which `is_written(operation, kernels that compute it or read it)`."""
        ops = self.program.ops
        kernels: list[set[int]] = [set() for _ in ops]
        for i in reversed(range(len(ops))):
            if ops[i].fusion is Fusion.VIEW:
                continue
            for u in self.users[i]:
                kernels[i] |= {u} if self.written[u] else kernels[u]
            self.written[i] = self.written[i] or is_written(i, kernels[i])

    def _partial_sums(self, least: int) -> frozenset[int]:
        """Return the partial sums to write. Each is read only by the next one, or by the whole sum."""
        terms = self._large_terms()
        found: set[int] = set()
        seen: set[int] = set()
        for end in reversed(range(len(self.program.ops))):
            sums = self._sums_to(end, terms, seen)
            seen.update(sums)
            n_bytes = sum(self.size[i] for i in terms[end]) if sums else 0
            is_long = len(sums) >= _MANY_VALUES - 1 and len(terms[end]) >= _MANY_VALUES
            if not is_long or n_bytes < least:
                continue
            found.update(i for i in sums[:-1] if len(self.users[i]) == 1)
        return frozenset(found)

    def _large_terms(self) -> list[frozenset[int]]:
        """Return for each operation the written values that its kernel reads, of at least half its size."""
        found: list[frozenset[int]] = []
        for i, op in enumerate(self.program.ops):
            inside: set[int] = set()
            if op.fusion in FUSIBLE or op.fusion is Fusion.VIEW:
                for j in self._producers(op):
                    inside |= {j} if self.written[j] else found[j]
            found.append(frozenset(j for j in inside if 2 * self.size[j] >= self.size[i] > 0))
        return found

    def _sums_to(
        self, end: int, terms: Sequence[frozenset[int]], seen: Container[int]
    ) -> list[int]:
        """Return a sum and the partial sums in its kernel that lead to it, the first one first.

        They end before one that was seen.
        """
        found: list[int] = []
        at = end
        while at not in seen and self.program.ops[at].name in _SUMS and len(terms[at]) > 1:
            found.append(at)
            inside = (j for j in self._producers(self.program.ops[at]) if not self.written[j])
            following = max(inside, key=lambda j: (len(terms[j]), j), default=None)
            if following is None:
                break
            at = following
        return found[::-1]

    def _producers(self, op: Op) -> list[int]:
        return [self.producer[v] for v in op.operands if v in self.producer]

    def _buffers(self) -> dict[int, int]:
        """Return the operation that allocated the memory of each value that a loop has updated in place."""
        ops, sizes = self.program.ops, self.program.bytes
        uses = collections.Counter(v for op in ops for v in op.operands)
        outputs = set(self.program.outputs)
        found: dict[int, int] = {}
        for op in ops:
            for v, result in op.in_place:
                made_by = found.get(v, self.producer.get(v))
                if made_by is None or uses[v] > 1 or v in outputs:
                    continue
                # Only carries that start as constants are tracked. Liveness alone reuses the buffers of
                # others, and these values stay repeatable.
                is_constant = fills(ops[made_by], sizes)
                is_same = sizes[v] == sizes[result] and self.written[made_by]
                if is_same and (v in found or is_constant):
                    found[result] = made_by
        returned = {made_by for v, made_by in found.items() if v in self.output_values}
        self.output_values.update(v for i in returned for v in ops[i].results)
        return found

    def _source_size(self, source: int) -> int:
        return self.size[source] if source >= 0 else 0  # inputs are always in memory

    def _reads(self) -> dict[int, tuple[list[int], list[int]]]:
        """Return for each kernel the values it reads, and the operations fused into it."""
        through: list[tuple[frozenset[int], frozenset[int]]] = []
        reads = {}
        for i, op in enumerate(self.program.ops):
            roots: set[int] = set()
            inside: set[int] = {i}
            for v in op.operands:
                j = self.producer.get(v)
                if j is None:
                    continue
                if self.written[j]:
                    roots.add(v)
                else:
                    roots |= through[j][0]
                    inside |= through[j][1]
            if self.written[i]:
                reads[i] = (sorted(roots), sorted(inside))
                through.append((frozenset(), frozenset()))
            else:
                through.append((frozenset(roots), frozenset(inside)))
        return reads

    def _sources(self, values: Iterable[int]) -> set[int]:
        """Return the operations whose results or memory these values are."""
        return {i for v in values for i in (self.producer[v], self.buffer.get(v)) if i is not None}

    def result(self, apart: bool, alone: Callable[[int], bool]) -> Fused:
        ops = self.program.ops
        self.sources = {i: self._sources(values) for i, (values, _) in self.reads.items()}
        nodes = {i: _Group([i], set(sources)) for i, sources in self.sources.items()}
        into = _merge(self, nodes, alone)
        seconds: dict[int, float] = {}
        members: dict[int, tuple[int, ...]] = {}
        graph_nodes: list[Node] = []
        once: set[int] = set()
        output_buffers: dict[int, tuple[int, ...]] = {}
        parts = self._parts(nodes) if apart else {}
        holds = {v: into.get(i, i) for i in self.reads for v in ops[i].results}
        holds.update((v, part.id) for of in parts.values() for part in of for v in part.values)
        made_memory = {into.get(i, i) for i in self.buffer.values()}
        ends: list[int] = []
        for i in sorted(nodes):
            group = nodes[i]
            seconds[i] = sum(self._seconds(member) for member in group.members)
            members[i] = tuple(
                dict.fromkeys(x for member in group.members for x in self.reads[member][1])
            )
            is_once = i in made_memory or not all(ops[x].repeatable for x in group.members)
            workspace = max(map(self._workspace_bytes, group.members))
            whole = _Part(i, ops[i].results, self.size[i] - self._in_place(i), self.is_output[i])
            deps = group.deps
            if parts:
                values = (v for member in group.members for v in self.reads[member][0])
                deps = {holds[v] for v in values} | (made_memory & deps)
                deps.discard(i)
            of_node = parts.get(i, (whole,))
            # A result that nothing reads is live only while the kernel runs.
            workspace += whole.bytes - sum(part.bytes for part in of_node)
            name = ops[i].label or ops[i].path or ops[i].name
            if workspace:
                # Workspace is modelled as a value that only this operation reads.
                work = len(ops) + 1 + i
                graph_nodes.append(Node(work, 0.0, workspace, (), f"workspace of {name}"))
                deps = {*deps, work}
            for part in of_node:
                buffers = self._output_buffers(part.values)
                if buffers:
                    output_buffers[part.id] = buffers
                if part.is_output:
                    ends.append(part.id)
                if is_once:
                    once.add(part.id)
                graph_nodes.append(
                    Node(
                        part.id,
                        time=seconds[i],
                        bytes=part.bytes - sum(buffers),
                        deps=tuple(sorted(deps)),
                        name=name,
                    )
                )
        graph_nodes.append(Node(len(ops), 0.0, 0, tuple(ends), "results"))
        once.add(len(ops))
        return Fused(
            Graph(tuple(graph_nodes)),
            members,
            frozenset(once),
            seconds,
            holds,
            self.partial_sums,
            output_buffers,
        )

    def _parts(self, nodes: dict[int, _Group]) -> dict[int, tuple[_Part, ...]]:
        """Return the parts of nodes whose results different nodes read, the one with the node's number last.

        The kernel computes all parts at once, so they follow one another.
        """
        ops, sizes = self.program.ops, self.program.bytes
        readers: dict[int, set[int]] = {}
        for i, group in nodes.items():
            for member in group.members:
                for v in self.reads[member][0]:
                    readers.setdefault(v, set()).add(i)
        found: dict[int, tuple[_Part, ...]] = {}
        number = 2 * (len(ops) + 1)
        for i in sorted(nodes):
            if len(ops[i].results) <= 1 or len(nodes[i].members) > 1:
                continue
            alike: dict[tuple[bool, frozenset[int]], list[int]] = {}
            for v in ops[i].results:
                is_output = v in self.output_values
                by = frozenset() if is_output else frozenset(readers.get(v, ()))
                if by or is_output:
                    alike.setdefault((is_output, by), []).append(v)
            if not alike:
                continue  # nothing reads its results: one node
            of = [
                _Part(0, values, sum(sizes[v] for v in values if v not in self.buffer), is_output)
                for (is_output, _), values in alike.items()
            ]
            of.sort(key=lambda part: part.bytes)
            found[i] = tuple(
                dataclasses.replace(part, id=i if part is of[-1] else number + k)
                for k, part in enumerate(of)
            )
            number += len(of)
        return found

    def _workspace_bytes(self, i: int) -> int:
        """Return the bytes that an operation occupies while it runs, with copies of its operands."""
        op = self.program.ops[i]
        copied = () if self.into_products else filter(self._is_copied, op.transposed)
        copies = [self.program.bytes[v] for v in copied]
        if op.name == "conv_general_dilated" and len(copies) > 1:
            # The first operand is usually freed once it is copied, before the second is.
            copies.remove(min(copies))
        return op.workspace_bytes + sum(copies)

    def _is_copied(self, v: int) -> bool:
        """Return whether a value is written and then copied, not directly written in the other order."""
        ops = self.program.ops
        i = self.producer.get(v)
        while i is not None and ops[i].fusion is Fusion.VIEW:
            i = self.producer.get(ops[i].operands[0])
        return i is None or ops[i].fusion not in FUSIBLE or len(self.users[i]) > 1

    def _in_place(self, i: int) -> int:
        """Return the bytes of a loop's results that are in the memory of its first carry."""
        return sum(self.program.bytes[v] for v in self.program.ops[i].results if v in self.buffer)

    def _output_buffers(self, values: Iterable[int]) -> tuple[int, ...]:
        """Return the bytes of each output among a kernel's results whose buffer it is the first to write."""
        first = (v for v in values if v in self.output_values and v not in self.buffer)
        return tuple(self.program.bytes[v] for v in first)

    def _seconds(self, i: int) -> float:
        """Return the seconds of one kernel from what it reads, computes and writes."""
        ops, sizes = self.program.ops, self.program.bytes
        roots, inside = self.reads[i]
        moved = self.size[i] + sum(sizes[v] for v in roots) + ops[i].extra_bytes
        for x in inside:
            moved += sum(sizes[v] for v in ops[x].operands if v in self.program.inputs)
        flops = sum(ops[x].flops for x in inside)
        return seconds_of_kernels(ops[i], flops, moved, self.price)


@dataclasses.dataclass(frozen=True)
class _Part:
    """Results of one operation that are one node, and whether they are outputs."""

    id: int
    values: Sequence[int]
    bytes: int
    is_output: bool


@dataclasses.dataclass
class _Group:
    members: list[int]
    deps: set[int]


def _merge(
    fusion: _Fusion, nodes: dict[int, _Group], alone: Callable[[int], bool]
) -> dict[int, int]:
    """Merge values into the only kernel that reads them if it may reuse their buffers."""
    ops = fusion.program.ops
    users: dict[int, set[int]] = {i: set() for i in nodes}
    for i, group in nodes.items():
        for d in group.deps:
            users[d].add(i)
    into: dict[int, int] = {}
    for end in sorted(nodes):
        # The kernels of a node write to one buffer in turn; this is the first of them.
        first = end
        while end in nodes and ops[first].fusion in FUSIBLE:
            for d in sorted(fusion.sources[first] & nodes[end].deps, reverse=True):
                inner = users[d] - {end}
                if (
                    end in users[d]
                    and d not in fusion.partial_sums
                    and _adjacent(nodes, d, end, inner)
                    and all(users[c] == {end} for c in inner)
                    and not any(fusion.is_output[c] or alone(c) for c in (d, *inner))
                    and all(ops[c].fusion is Fusion.REDUCE for c in inner)
                    and 2 * fusion.size[d] > fusion.size[end]
                    and (fusion.size[d] <= 2 * fusion.size[end])
                    and not _keeps_many(fusion, nodes, end, (d, *inner))
                ):
                    for c in (*sorted(inner), d):
                        _absorb(nodes, users, end, c)
                        into[c] = end
                    first = d
                    break
            else:
                break
    for i in into:
        while into[i] in into:
            into[i] = into[into[i]]
    return into


def _keeps_many(fusion: _Fusion, nodes: dict[int, _Group], end: int, merged: Sequence[int]) -> bool:
    """Return whether a node would keep many large values alive, some of them longer than they are read."""
    of_end = nodes[end].deps.difference(merged)
    earlier = set().union(*(nodes[i].deps for i in merged)).difference(merged, of_end)

    def n_large(values: Iterable[int]) -> int:
        return sum(2 * fusion.size[d] >= fusion.size[end] for d in values)

    return n_large(earlier) > 0 and n_large(of_end | earlier) > _MOST_OPERANDS


def _adjacent(nodes: dict[int, _Group], d: int, end: int, inner: set[int]) -> bool:
    """Return whether nothing is computed between two operations, which would keep operands for longer."""
    return all(i not in nodes or i in inner for i in range(d + 1, end))


def _absorb(nodes: dict[int, _Group], users: dict[int, set[int]], end: int, c: int) -> None:
    group = nodes.pop(c)
    for d in group.deps:
        users[d].discard(c)
        users[d].add(end)
    nodes[end].deps |= group.deps
    nodes[end].deps.discard(c)
    nodes[end].members = sorted({*nodes[end].members, *group.members})
    users.pop(c)
