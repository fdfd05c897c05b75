"""The reader of JSON files: values, and the line number of every error."""

from __future__ import annotations

import re

import pytest

from remat.errors import RematError
from remat.json_lines import Reader


def read(text: str) -> dict[str, object]:
    """Read {"name": any value, "sizes": [values], "more": skipped}."""
    reader = Reader("sizes.json", text, RematError, "Correct it.")
    found: dict[str, object] = {}
    for key in reader.members():
        if key == "sizes":
            found[key] = [reader.value() for _ in reader.items()]
        elif key == "more":
            reader.skip()
        else:
            found[key] = reader.value()
    reader.end("sizes")
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", {}),
        (' { "sizes" : [ ] } \n', {"sizes": []}),
        ('{"name": {"a": [1, null]}, "sizes": [1, 2.5]}', {"name": {"a": [1, None]}, "sizes": [1, 2.5]}),
        ('{"more": [NaN, {"a": 1, "a": 2}], "name": "é"}', {"name": "é"}),
    ],
)  # fmt: skip
def test_values_are_those_of_json(text: str, expected: dict[str, object]) -> None:
    assert read(text) == expected


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("[]", 1, "an object is needed here: '{' was expected here."),
        ('{\n"sizes": {}}', 2, "a list is needed here: '[' was expected here."),
        ('{"name": 1\n\n"sizes": []}', 3, "',' or '}' was expected here."),
        ('{"sizes": [1,\n2', 2, "',' or ']' was expected here."),
        ("{\nname: 1}", 2, "a key in double quotes was expected here."),
        ('{"name"\n 1}', 2, "a key is followed by ':'"),
        ('{"name":\n\n nothing}', 3, "not JSON: Expecting value."),
        ('{"name": [1,\n -Infinity]}', 2, "-Infinity is not a JSON number."),
        ('{"name":\n {"a": 1, "a": 1}}', 2, "an object holds the same key twice."),
        ("{}\n\n{}", 3, "there is more text after the end of the sizes."),
        ('{"name": ' + "[\n" * 100_000, 101, "nested too deeply."),
    ],
)
def test_a_mistake_is_an_error_with_file_line_and_advice(text: str, line: int, why: str) -> None:
    with pytest.raises(
        RematError, match=f"^sizes.json, line {line}: {re.escape(why)}.*Correct it.$"
    ):
        read(text)
