"""Text of unknown origin, made safe to print.

Region keys, names, paths, files and the messages of exceptions may hold any characters, also an
attacker's. On a terminal an escape sequence moves the cursor or sets the title, a
bidirectional control reorders the line, and an invisible character makes two different names look the
same. `printable` writes every such character as its Python escape.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

# Python calls these printable, and most fonts draw nothing: the code points that Unicode lists as
# Default_Ignorable (fillers and variation selectors; the others are controls), and the empty Braille cell.
_INVISIBLE = frozenset(
    map(
        chr,
        [
            *(0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x2800, 0x3164, 0xFFA0),
            *range(0x180B, 0x1810),
            *range(0xFE00, 0xFE10),
            *range(0xE0100, 0xE01F0),
        ],
    )
)


def printable(text: str, *, keep: str = "") -> str:
    r"""Return the text with every control, invisible or reordering character as an escape.

    >>> print(printable("two\nlines, \x1b[31mred, \u202eback"))
    two\nlines, \x1b[31mred, \u202eback

    Args:
      text: the text.
      keep: characters that stay as they are, such as "\n".
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        c if c in keep or (c.isprintable() and c not in _INVISIBLE) else _escape(c) for c in text
    )


def shown(value: object) -> str:
    """Return a value as an error message quotes it: its repr, cut after 60 characters.

    >>> shown([1, "two"]), shown("x" * 100)
    ("[1, 'two']", "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...")
    """
    try:
        text = repr(value)
    except RecursionError:
        return "something deeply nested"
    except Exception:  # a repr may run any code; that of an int raises above 4,300 digits
        return "a very large number" if type(value) is int else f"<{type(value).__name__}>"
    text = printable(text if len(text) <= 1000 else text[:1000])
    return text if len(text) <= 60 else text[:57] + "..."


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


# A number at the end of a word: as in block_3, layers[3] and Dense_0, but not in conv2d.
_NUMBER = re.compile(r"[0-9]+(?![0-9A-Za-z])")


def without_numbers(path: str) -> str:
    """Return a path with each number at the end of a word replaced, as a key to group similar paths.

    >>> without_numbers("net2/block_3/mlp") == without_numbers("net2/block_47/mlp")
    True
    """
    return _NUMBER.sub("\0", path)


def with_ranges(paths: Sequence[str]) -> str:
    """Return paths that differ only in such numbers as one path, with the first and last of each number.

    >>> with_ranges(["net2/block_0/mlp", "net2/block_1/mlp", "net2/block_2/mlp"])
    'net2/block_0…2/mlp'
    """
    numbers = [_NUMBER.findall(path) for path in paths]
    shown_numbers = iter([
        column[0] if len(set(column)) == 1 else f"{min(column, key=int)}…{max(column, key=int)}"
        for column in zip(*numbers)
    ])  # fmt: skip
    return _NUMBER.sub(lambda _: next(shown_numbers), paths[0])
