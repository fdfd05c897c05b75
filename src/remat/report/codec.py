"""Explanations and differences as JSON: written from the dataclasses, every type checked on reading.

The file is one object with `format`, `version` and the fields of the dataclass; each value and
each step is on its own line, so that files can be compared line by line. Damaged files, files of other
programs and files of a later `remat` raise a `ReportError` that names the place (`values[3].kind`) and what
was expected there.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from remat.aliases import Json
from remat.errors import ReportError, closest

VERSION = 3  # of the format; later versions are refused
# The earliest version that can be read: its fields are all known, and others have defaults.
_OLDEST = 2

T = TypeVar("T")


def dumps(data: Any, format: str) -> str:
    """Return a dataclass of the model as JSON text.

    >>> from remat.report.model import Memory
    >>> print(dumps(Memory(peak_bytes=8), "memory").splitlines()[1])
     "peak_bytes": 8,
    """
    lines = []
    for field in dataclasses.fields(data):
        content = getattr(data, field.name)
        if field.name == "versions":
            written = json.dumps(dict(content))
        elif isinstance(content, tuple):
            items = ",\n  ".join(json.dumps(_plain(item), allow_nan=False) for item in content)
            written = f"[\n  {items}\n ]" if items else "[]"
        else:
            written = json.dumps(_plain(content), allow_nan=False)
        lines.append(f" {json.dumps(field.name)}: {written}")
    head = f'{{"format": {json.dumps(format)}, "version": {VERSION},\n'
    return head + ",\n".join(lines) + "\n}\n"


def loads(text: str, cls: type[T], format: str) -> T:
    """Return the `cls` that `dumps` wrote as this text.

    Raises:
      ReportError: the text is not JSON, of another format or of a later version, or a field is
        missing, unknown or of a wrong type.
    """
    try:
        content = json.loads(text, object_pairs_hook=_without_repeats, parse_constant=_constant)
    except _DamagedError as error:
        raise ReportError(f"this is not a valid {format}: {error.problem}.") from error
    except (ValueError, RecursionError) as error:  # a ValueError if a number has too many digits
        raise ReportError(f"this is not JSON, so it is not a {format} ({error}).") from error
    if not isinstance(content, dict) or content.pop("format", None) != format:
        raise ReportError(
            f"this JSON does not have the format {format!r}; write such a file with to_json()."
        )
    version = content.pop("version", None)
    if type(version) is not int or not _OLDEST <= version <= VERSION:
        raise ReportError(
            f"a {format} of version {version!r}; this remat reads versions {_OLDEST} to {VERSION}. "
            "Read it with the remat that wrote it, or write it again."
        )
    versions = content.get("versions")
    if isinstance(versions, dict):
        content["versions"] = [list(item) for item in versions.items()]
    try:
        return typing.cast(T, _reader_of(typing.cast(Any, cls), version)(content))
    except _DamagedError as error:
        raise ReportError(f"a damaged {format}: {error}.") from error


def _plain(item: object) -> Json:
    """Return a dataclass as a dict, for `json.dumps` to call again for the dataclasses inside."""
    if dataclasses.is_dataclass(item):
        return {f.name: _plain(getattr(item, f.name)) for f in dataclasses.fields(item)}
    if isinstance(item, tuple):
        return [_plain(part) for part in item]
    return item


# Reading, one function for each type


class _DamagedError(Exception):
    """An invalid value; readers of the objects around it add its place."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.place = ""

    def __str__(self) -> str:
        return f"{self.place.lstrip('.')}: {self.problem}" if self.place else self.problem


def _damaged(expected: str, found: Json) -> NoReturn:
    text = json.dumps(found)
    raise _DamagedError(
        f"{expected} expected, not {text if len(text) <= 60 else text[:57] + '...'}"
    )


def _without_repeats(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    content = dict(pairs)
    if len(content) != len(pairs):
        keys = [key for key, _ in pairs]
        raise _DamagedError(f"key {next(k for k in keys if keys.count(k) > 1)!r} is there twice")
    return content


def _constant(text: str) -> NoReturn:
    raise _DamagedError(f"{text} is not a JSON number")


Reader = Callable[[Json], Any]


# Cached by annotation of the dataclasses of `model`.
@functools.cache
def _reader_of(kind: Any, version: int) -> Reader:
    """Return the function that checks and converts a version's JSON for a type of the model's annotations."""
    if dataclasses.is_dataclass(kind):
        return _reader_of_dataclass(typing.cast(type, kind), version)
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return functools.partial(_word, parts)
    if origin in (types.UnionType, typing.Union):  # X | None is the only one
        return functools.partial(_optional, _reader_of(parts[0], version))
    if origin is tuple and parts[-1] is ...:
        return functools.partial(_sequence, _reader_of(parts[0], version))
    if origin is tuple:
        return functools.partial(_fixed, tuple(_reader_of(part, version) for part in parts))
    return {int: _whole, float: _number, str: _text, bool: _flag}[kind]


def _reader_of_dataclass(kind: type, version: int) -> Reader:
    hints = typing.get_type_hints(kind)
    fields = [f for f in dataclasses.fields(kind) if f.metadata.get("since", 0) <= version]
    readers = [(field.name, _reader_of(hints[field.name], version)) for field in fields]
    names = [field.name for field in fields]

    def read(content: Json) -> object:
        if type(content) is not dict:
            _damaged("an object", content)
        if content.keys() != set(names):
            unknown = next((key for key in content if key not in names), None)
            if unknown is not None:
                raise _DamagedError(f"unknown field {unknown!r}; {closest(unknown, names)}")
            raise _DamagedError(f"fields are missing: {sorted(set(names) - content.keys())}")
        arguments = {}
        for name, reader in readers:
            try:
                arguments[name] = reader(content[name])
            except _DamagedError as error:
                error.place = f".{name}{error.place}"
                raise
        return kind(**arguments)

    return read


def _sequence(reader: Reader, content: Json) -> tuple[object, ...]:
    if type(content) is not list:
        _damaged("a list", content)
    items = []
    for i, item in enumerate(content):
        try:
            items.append(reader(item))
        except _DamagedError as error:
            error.place = f"[{i}]{error.place}"
            raise
    return tuple(items)


def _fixed(readers: tuple[Reader, ...], content: Json) -> tuple[object, ...]:
    if type(content) is not list or len(content) != len(readers):
        _damaged(f"a list of {len(readers)}", content)
    return tuple(reader(item) for reader, item in zip(readers, content))


def _optional(reader: Reader, content: Json) -> object:
    return None if content is None else reader(content)


def _word(words: tuple[str, ...], content: Json) -> str:
    if type(content) is not str or content not in words:
        _damaged("one of " + ", ".join(words), content)
    return content


def _whole(content: Json) -> int:
    if type(content) is not int:
        _damaged("a whole number", content)
    return content


def _number(content: Json) -> float:
    if type(content) not in (int, float) or not (type(content) is int or math.isfinite(content)):
        _damaged("a finite number", content)
    return typing.cast(float, content)


def _text(content: Json) -> str:
    if type(content) is not str:
        _damaged("a text", content)
    return content


def _flag(content: Json) -> bool:
    if type(content) is not bool:
        _damaged("true or false", content)
    return content
