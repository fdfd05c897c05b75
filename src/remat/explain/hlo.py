"""The arrays that are live at a compiled program's peak, parsed from the compiler's text.

The text of a compiled program (`compiled.as_text()`) lists its instructions in the order in which they
run, so the live arrays can be counted: a buffer lives from the instruction that writes it to the last that
reads it. Tuples, views and loops return the buffers of their operands, and an instruction may reuse the
buffer of an operand of the same size after its last use. The memory inside of loops and calls counts while
they run. So the text shows *which* values the compiler holds and the prediction does not, and the reverse.

Known limits: the allocator's fragmentation and scratch memory of libraries are not in the text.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable

_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{\s*$")
_ARRAY = re.compile(r"\b([a-z]+[0-9]*(?:e[0-9]m[0-9]\w*)?)\[([0-9,]*)\](?:\{[^}]*\})?")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|branch_computations)=\{?%?([\w.\-]+)")
_BODY = re.compile(r"body=%?([\w.\-]+)")
_INDEX = re.compile(r"index=([0-9]+)")
_BITS = {"pred": 8, "s4": 4, "u4": 4, "token": 0, "opaque": 0}
_PASSED_ON = frozenset(
    ("bitcast", "tuple", "get-tuple-element", "while", "optimization-barrier", "parameter",
     "copy-done", "async-done", "add-dependency", "domain", "dynamic-update-slice")
)  # fmt: skip
_NO_MEMORY = frozenset(("constant", "partition-id", "replica-id", "after-all", "iota-none"))


@dataclasses.dataclass(frozen=True)
class HeldBuffer:
    """An array that is live at the peak: its size, type, origin, and whether a loop holds it."""

    n_bytes: int
    type: str
    op_name: str
    inside: bool = False


@dataclasses.dataclass(frozen=True)
class Peak:
    """The peak of a compiled program, arguments and results left out."""

    n_bytes: int
    held: tuple[HeldBuffer, ...]


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    rest: str
    is_root: bool


def peak_of(text: str) -> Peak | None:
    """Return the peak of a compiled program's entry computation; None if the text cannot be parsed.

    >>> peak_of("nothing that a compiler wrote") is None
    True
    """
    computations, entry = _parse(text)
    if entry is None:
        return None
    return _Counting(computations).peak(entry)


def _parse(text: str) -> tuple[dict[str, list[_Instruction]], str | None]:
    computations: dict[str, list[_Instruction]] = {}
    entry = current = None
    for line in text.splitlines():
        if not line.startswith(" "):
            head = _HEAD.match(line)
            current = head[2] if head else None
            if head:
                computations[head[2]] = []
                entry = head[2] if head[1] else entry
            continue
        found = _LINE.match(line) if current is not None else None
        if found and current is not None:
            root, name, type_, opcode, rest = found.groups()
            inside, _, _ = rest.partition("), ")
            computations[current].append(
                _Instruction(
                    name, type_, opcode, tuple(_OPERAND.findall(inside)), rest, root is not None
                )
            )
    return computations, entry


class _Counting:
    def __init__(self, computations: dict[str, list[_Instruction]]) -> None:
        self.computations = computations
        self._known: dict[str, Peak] = {}

    def peak(self, name: str) -> Peak:
        if name not in self._known:
            self._known[name] = Peak(
                0, ()
            )  # ends the recursion of computations that call themselves
            self._known[name] = self._count(self.computations.get(name, []))
        return self._known[name]

    def _count(self, instructions: list[_Instruction]) -> Peak:
        buffers: dict[str, list[list[int]]] = {}  # value → for each of its elements, its buffers
        made: dict[int, HeldBuffer] = {}
        last: dict[int, int] = {}
        born: list[list[int]] = [[] for _ in instructions]
        results: set[int] = set()
        for at, one in enumerate(instructions):
            mine = self._buffers(one, buffers)
            for operand in one.operands:
                for element in buffers.get(operand, ()):
                    for b in element:
                        last[b] = at
            if mine is None:
                mine = []
                op_name = _between(one.rest, 'op_name="', '"').replace("\\'", "'")
                for type_, n_bytes in _arrays(one.type):
                    b = len(made)
                    made[b] = HeldBuffer(n_bytes, type_, op_name or one.opcode)
                    last[b] = at
                    born[at].append(b)
                    mine.append([b])
            buffers[one.name] = mine
            if one.is_root:
                results = {b for element in mine for b in element}
        return self._walk(instructions, made, last, born, results)

    def _walk(
        self,
        instructions: list[_Instruction],
        made: dict[int, HeldBuffer],
        last: dict[int, int],
        born: list[list[int]],
        results: set[int],
    ) -> Peak:
        dying: list[list[int]] = [[] for _ in instructions]
        for b, at in last.items():
            dying[at].append(b)
        live: dict[int, int] = {}
        total, best = 0, -1
        held: tuple[HeldBuffer, ...] = ()
        for at, one in enumerate(instructions):
            free = [live[b] for b in dying[at] if b in live]
            for b in born[at]:
                if b in results:
                    continue
                n_bytes = made[b].n_bytes
                if n_bytes in free and one.opcode not in ("dot", "convolution", "custom-call"):
                    free.remove(n_bytes)  # written where an operand was
                    total -= n_bytes
                live[b] = n_bytes
                total += n_bytes
            inner = self._inner(one)
            if total + inner.n_bytes > best:
                best = total + inner.n_bytes
                loops = one.opcode != "call"
                inside = (
                    dataclasses.replace(array, inside=array.inside or loops) for array in inner.held
                )
                held = (*(made[b] for b in live), *inside)
            for b in dying[at]:
                live.pop(b, None)
            total = sum(live.values())
        return Peak(max(best, 0), held)

    def _inner(self, one: _Instruction) -> Peak:
        if one.opcode not in ("while", "call", "conditional"):
            return Peak(0, ())
        names = _CALLED.findall(one.rest)
        return max((self.peak(n) for n in names), key=lambda p: p.n_bytes, default=Peak(0, ()))

    def _buffers(
        self, one: _Instruction, buffers: dict[str, list[list[int]]]
    ) -> list[list[int]] | None:
        """Return the operands whose buffers an instruction returns; None if it writes new ones."""
        if one.opcode in _NO_MEMORY or one.opcode == "parameter":
            return []
        if one.opcode == "tuple":
            return [
                [b for element in buffers.get(operand, ()) for b in element]
                for operand in one.operands
            ]
        if one.opcode == "get-tuple-element":
            index = _INDEX.search(one.rest)
            whole = buffers.get(one.operands[0], []) if one.operands else []
            at = int(index[1]) if index else 0
            return [whole[at]] if at < len(whole) else []
        if one.opcode in _PASSED_ON:
            return buffers.get(one.operands[0], []) if one.operands else []
        if one.opcode == "fusion" and "dynamic-update-slice" in one.name:
            same = [o for o in one.operands if buffers.get(o)]
            return buffers[same[0]] if same else []
        return None


def _arrays(type_: str) -> Iterable[tuple[str, int]]:
    for dtype, dims in _ARRAY.findall(type_):
        bits = _BITS.get(dtype)
        if bits is None:
            digits = re.search(r"[0-9]+", dtype)
            bits = int(digits[0]) if digits else 32
        sizes = [int(d) for d in dims.split(",") if d]
        yield f"{dtype}[{dims}]", -(-math.prod(sizes) * bits // 8)


def _between(text: str, begin: str, end: str) -> str:
    _, found, rest = text.partition(begin)
    return rest.partition(end)[0] if found else ""
