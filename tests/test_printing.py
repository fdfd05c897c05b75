"""No text of a user, a file or another library reaches a terminal with a control character."""

from __future__ import annotations

import dataclasses
import logging
import pickle
import unicodedata

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, strategies as st

import remat
from remat import errors
from remat.errors import RematError
from remat.planner.plan_decisions import Recomputation, WholeStep
from remat.printing import printable

HOSTILE = [
    "\x1b]0;owned\x07",  # sets the title
    "\x9b2J",  # the C1 form of an escape sequence
    "\x08\x7f",
    "\u200f\u202e\u2067\u061c",  # reorders the line
    "\u200b\u200d\u2060\u00ad\ufeff",  # invisible
    "\U000e0041\U000e007f",  # tags
    "\u3164\u115f\ufe0f\u2800\u034f",  # drawn as nothing
    "\u2028\u2029\x85",  # end a line
    "\ud800\udcff",
    "\ue000\uffff",  # private use, and not a character
]


@pytest.mark.parametrize("text", HOSTILE, ids=ascii)
def test_each_hostile_character_is_written_as_its_escape(text):
    shown = printable(f"a{text}b")
    assert shown.isascii() and shown.isprintable()
    assert shown == "a" + text.encode("unicode_escape", "surrogatepass").decode() + "b"


@given(st.text(st.characters(exclude_categories=())))
def test_printable_text_is_visible_and_printable_again_unchanged(text):
    shown = printable(text)
    assert shown.isprintable()
    shown.encode("utf-8")
    assert printable(shown) == shown
    assert all(unicodedata.category(c)[0] in "LMNPS" or c == " " for c in shown)


def test_every_character_that_people_write_stays():
    text = "naïve × 1.5 µs → Größe 日本語 שלום مرحبا ελληνικά 😀 ▁▂▃ “quoted”"
    assert printable(text) is text or printable(text) == text


def test_no_code_point_of_the_general_category_other_stays():
    points = map(chr, [*range(0x3000), *range(0xD7F0, 0x10100), *range(0xE0000, 0xE0200)])
    others = [c for c in points if unicodedata.category(c)[0] == "C"]
    assert not set(printable("".join(others))) & set(others)


def every_error(base=RematError):
    for cls in base.__subclasses__():
        yield cls
        yield from every_error(cls)


@pytest.mark.parametrize("cls", sorted({*every_error()}, key=repr))
def test_the_message_of_every_error_can_be_printed(cls):
    error = cls("region " + "".join(HOSTILE) + "\nsecond line")
    assert str(error).replace("\n", "").isprintable()
    assert len(str(error).splitlines()) == 2
    assert error.args == ("region " + "".join(HOSTILE) + "\nsecond line",)
    if cls.__module__ == errors.__name__:
        assert str(pickle.loads(pickle.dumps(error))) == str(error)


def hostile_step():
    def loss(w, x):
        for _ in range(3):
            x = remat.checkpoint_name(jnp.tanh(x @ w), "".join(HOSTILE[:-2]))
            x = x * x
        return jnp.sum(x)

    loss.__qualname__ = loss.__name__ = "loss" + HOSTILE[0] + HOSTILE[1]
    return loss


def test_plans_and_logs_of_hostile_names_can_be_printed(caplog):
    marked = remat.auto(hostile_step(), name="".join(HOSTILE[:-2]))
    step, w, x = jax.value_and_grad(marked), jnp.eye(32), jnp.ones((256, 32))
    made = remat.plan(step, w, x, budget="100%", cache=False, progress=False)
    again = Recomputation(1, (0,), ("\x1b[2J",), "\x9b")
    other = dataclasses.replace(made, whole_step=WholeStep(2, (0, 1), (again,)))
    texts = [other.explain(), str(dataclasses.replace(made, target="\x1b[2J"))]
    for wrong in (other, dataclasses.replace(made, program="\x1b[2J-0")):
        with pytest.raises(remat.PlanError) as refused:
            remat.fit(step, plan=wrong, cache=False, progress=False).lower(w, x)
        texts.append(str(refused.value))
    with caplog.at_level(logging.DEBUG, "remat"):
        fitted = remat.fit(step, budget="100%", cache=False, progress=False)
        fitted.lower(w, x), fitted.lower(w, x[:128])
    texts += [record.getMessage() for record in caplog.records if record.name == "remat"]
    assert all(line.isprintable() for text in texts for line in text.splitlines())


def test_residuals_print_as_printable_text(capsys):
    f, w, x = hostile_step(), jnp.eye(8), jnp.ones((16, 8))
    remat.print_saved_residuals(f, w, x)
    texts = [capsys.readouterr().out, str(remat.residuals(f, w, x))]
    texts += [str(group) for group in remat.explain(f, w, x, compile=False).groups()]
    with pytest.raises(AssertionError) as failed:
        remat.testing.assert_saves_only(f, w, x, limit=0)
    texts.append(str(failed.value))
    assert all(line.isprintable() for text in texts for line in text.splitlines())
    assert any("\\x1b" in text for text in texts)
