"""JSON files that people edit: read with the line of every mistake.

`json` reports lines of syntax errors only, but an edited file is more often well-formed and invalid. So a
`Reader` walks the outer objects and lists itself, and knows the position of each value; `json` parses the
values.

All errors in a file are of the type that the reader was given, and name the file and the line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NoReturn

from remat.aliases import Json
from remat.errors import RematError

_DEEPEST = (
    100  # brackets inside each other; deeper ones are named as the cause of a `RecursionError`
)
_SPACE = re.compile(r"[ \t\r\n]*")
_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)


class Reader:
    """A position in a JSON text, from which values are read one after another.

    >>> reader = Reader("sizes.json", '{"a": [1, 2],\\n "b": 3}', RematError)
    >>> for key in reader.members():
    ...     print(key, reader.value())
    a [1, 2]
    b 3

    Args:
      origin: the file's name, for errors.
      text: the file's content.
      error: the type of exception to raise.
      advice: the next step for the user, appended to each message.
    """

    def __init__(self, origin: str, text: str, error: type[RematError], advice: str = "") -> None:
        self.origin = origin
        self.text = text
        self.error = error
        self.advice = advice
        self.at = 0
        self._strict = json.JSONDecoder(
            parse_constant=self._constant, object_pairs_hook=self._pairs_without_repeats
        )
        # Skipped values are read again later, with all checks.
        self._lenient = json.JSONDecoder(parse_int=len, parse_float=len, parse_constant=len)

    def members(self, rule: str = "an object is needed here") -> Iterator[str]:
        """Yield each key of an object, with the position at its value."""
        self.expect("{", rule)
        return self._each("}")

    def items(self, rule: str = "a list is needed here") -> Iterator[str]:
        """Move to each item of a list in turn and yield."""
        self.expect("[", rule)
        return self._each("]")

    def value(self) -> Json:
        """Read the value at the current position."""
        return self._decode(self._strict)

    def skip(self) -> None:
        """Skip the value at the current position; only its syntax is checked."""
        self._decode(self._lenient)

    def end(self, of: str) -> None:
        """Refuse text after the current position."""
        self.skip_space()
        if self.at < len(self.text):
            self.fail(f"there is more text after the end of the {of}.")

    def expect(self, mark: str, rule: str) -> None:
        self.skip_space()
        if self.text[self.at : self.at + 1] != mark:
            self.fail(f"{rule}: '{mark}' was expected here.")
        self.at += 1

    def skip_space(self) -> None:
        found = _SPACE.match(self.text, self.at)
        assert found is not None
        self.at = found.end()

    def fail(self, why: str, at: int | None = None) -> NoReturn:
        line = self.text.count("\n", 0, self.at if at is None else at) + 1
        advice = f" {self.advice}" if self.advice else ""
        raise self.error(f"{self.origin}, line {line}: {why}{advice}") from None

    def _each(self, end: str) -> Iterator[str]:
        self.skip_space()
        if self.text[self.at : self.at + 1] == end:
            self.at += 1
            return
        while True:
            key = ""
            if end == "}":
                self.skip_space()
                if self.text[self.at : self.at + 1] != '"':
                    self.fail("a key in double quotes was expected here.")
                key = self.value()
                self.expect(":", "a key is followed by ':'")
            self.skip_space()
            yield key
            self.skip_space()
            mark = self.text[self.at : self.at + 1]
            if mark not in (",", end) or not mark:
                self.fail(f"',' or '{end}' was expected here.")
            self.at += 1
            if mark == end:
                return

    def _decode(self, decoder: json.JSONDecoder) -> Json:
        self.skip_space()
        try:
            value, self.at = decoder.raw_decode(self.text, self.at)
        except json.JSONDecodeError as error:
            self.fail(f"not JSON: {error.msg}.", error.pos)
        except self.error:  # from the two hooks below
            raise
        except RecursionError:
            self.fail("nested too deeply.", self._deep_place())
        except ValueError as error:  # a number with too many digits
            self.fail(f"{error}.")
        return value

    def _deep_place(self) -> int:
        depth = 0
        for found in _STRING_OR_BRACKET.finditer(self.text, self.at):
            depth += (found[0] in "[{") - (found[0] in "]}")
            if depth > _DEEPEST:
                return found.start()
        return self.at

    def _constant(self, text: str) -> NoReturn:
        self.fail(f"{text} is not a JSON number.", max(self.at, self.text.find(text, self.at)))

    def _pairs_without_repeats(self, pairs: list[tuple[str, Json]]) -> dict[str, Json]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            self.fail("an object holds the same key twice.")
        return fields
