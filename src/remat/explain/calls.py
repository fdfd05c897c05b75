"""The calls of the user's functions in a program, from the source lines of its operations.

A jaxpr does not contain calls of plain Python functions. But each operation has the frames that it was traced
from, and the operations of one call are consecutive. Consecutive calls of a function are told apart by its
statements: after a later one an earlier one only runs in another call, unless it is in a loop.

Known limits: calls of a function of one statement that follow one another count as one, and so do those of a
function whose source is not known; in nested traces JAX keeps only the innermost frames, so operations there
may belong to no call.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import linecache
from collections.abc import Iterable, Mapping, Sequence

from remat import _jax
from remat.explain.phases import PhasedProgram
from remat.explain.sources import Frame, user_frames_of
from remat.paths import is_own


@dataclasses.dataclass(frozen=True)
class Calls:
    """The calls of one function in the forward pass: for each the numbers of its operations.

    Args:
      frame: of the function, at the line of its first operation.
    """

    frame: Frame
    calls: tuple[tuple[int, ...], ...]


def repeated_calls(sides: PhasedProgram) -> list[Calls]:
    """Return the user's functions that the forward pass calls several times."""
    lines: dict[tuple[str, str], list[tuple[int, int]]] = {}
    # The place of an operation among those of the forward pass with a source.
    order: dict[int, int] = {}
    for number, (eqn, phase) in enumerate(zip(sides.eqns, sides.phases)):
        frames = user_frames_of(eqn) if phase == "forward" else ()
        if frames:
            order[number] = len(order)
        innermost: dict[tuple[str, str], int] = {}
        for file, line, function in reversed(frames):
            if is_own(file):
                innermost[file, function] = line
        for function_of, line in innermost.items():
            lines.setdefault(function_of, []).append((number, line))
    found = []
    for (file, function), operations in lines.items():
        calls = _separated(operations, order, _statements(_text(file)))
        if len(calls) > 1:
            found.append(Calls((file, operations[0][1], function), calls))
    return found


def _separated(
    operations: Sequence[tuple[int, int]],
    order: Mapping[int, int],
    statements: Mapping[int, _Statement],
) -> tuple[tuple[int, ...], ...]:
    """Return a function's operations, given as pairs of number and line, by call."""
    calls: list[list[int]] = []
    last, last_begins = -2, 0
    for number, line in operations:
        statement = statements.get(line, _Statement(0, True))
        is_earlier = statement.begins < last_begins and not statement.is_in_loop
        if order[number] != last + 1 or is_earlier:
            calls.append([])
        calls[-1].append(number)
        last, last_begins = order[number], statement.begins
    return tuple(map(tuple, calls))


@dataclasses.dataclass(frozen=True)
class _Statement:
    """The line in which a statement begins, and whether a loop of its function runs it."""

    begins: int
    is_in_loop: bool


def _text(file: str) -> str:
    """Return the source of a file; "" if it is not known."""
    return "".join(linecache.getlines(file))


# Cached by a file's text, which may be edited; a program's functions are in few files.
@functools.lru_cache(maxsize=64)
def _parsed(text: str) -> ast.Module:
    """Return the syntax tree of a file; an empty one if it cannot be read."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])


@functools.lru_cache(maxsize=64)
def _statements(text: str) -> Mapping[int, _Statement]:
    """Return the innermost statement of each line of a file; nothing if it cannot be read."""
    found: dict[int, _Statement] = {}

    def read(node: ast.AST, is_in_loop: bool) -> None:
        for child in ast.iter_child_nodes(node):
            inside = is_in_loop
            if isinstance(child, ast.stmt):
                statement = _Statement(child.lineno, is_in_loop)
                lines = range(child.lineno, (child.end_lineno or child.lineno) + 1)
                found.update(dict.fromkeys(lines, statement))
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                inside = False
            elif isinstance(child, (ast.For, ast.AsyncFor, ast.While)):
                inside = True
            read(child, inside)

    try:
        read(_parsed(text), False)
    except RecursionError:
        return {}
    return found


def definition_line(frame: Frame) -> int:
    """Return the line of the `def` of a frame's function; the frame's own line if it is not found."""
    file, line, function = frame
    name = function.rpartition(".")[2]
    around = [
        node.lineno
        for node in ast.walk(_parsed(_text(file)))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.name == name
        and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    return max(around, default=line)  # the innermost one


def common_function(eqns: Iterable[_jax.JaxprEqn]) -> Frame | None:
    """Return the innermost function that all these equations are traced in; None if there is none."""
    common: dict[tuple[str, str], Frame] | None = None
    for eqn in eqns:
        frames = {(frame[0], frame[2]): frame for frame in reversed(user_frames_of(eqn))}
        if not frames:
            continue
        if common is None:
            common = frames
        else:
            common = {key: frame for key, frame in common.items() if key in frames}
    return list(common.values())[-1] if common else None


def body_function(loop: _jax.JaxprEqn) -> Frame | None:
    """Return the user's function that is the body of a loop: the outermost in which all of it is traced."""
    outside = {(file, function) for file, _, function in user_frames_of(loop)}
    found: dict[tuple[str, str], int] = {}
    outermost: dict[tuple[str, str], Frame] = {}
    for eqn in _jax.open_jaxpr(loop.params["jaxpr"]).eqns:
        inside = [f for f in user_frames_of(eqn) if (f[0], f[2]) not in outside]
        # A lambda that only calls another function is not worth a name.
        named = [f for f in inside if not f[2].endswith("<lambda>")] or inside
        if named:
            key = named[-1][0], named[-1][2]
            found[key] = found.get(key, 0) + 1
            outermost.setdefault(key, named[-1])
    return outermost[max(found, key=lambda key: found[key])] if found else None


def name_of_function(frame: Frame | None) -> str:
    """Return the name of a function without those that it is defined in."""
    return "" if frame is None else frame[2].rpartition(".")[2]
