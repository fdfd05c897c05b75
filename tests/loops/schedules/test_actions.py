"""Execution of schedules' actions, and their diagrams."""

from __future__ import annotations

import pytest

from remat.errors import ScheduleError
from remat.loops.schedules import Action, Binomial, Hierarchical, Level, Online, picture, replay


def test_pictures_show_every_sweep_or_say_how_many_are_missing() -> None:
    assert len(Binomial(10, 3).picture().splitlines()) == 10
    long = Binomial(1000, 10).picture(width=60, rows=5).splitlines()
    assert len(long) == 6
    assert long[-1] == "… 995 more steps to reverse"
    assert max(map(len, long)) <= 80
    assert picture([], 0) == ""
    assert Binomial(6, 2).picture() == Binomial(6, 2).picture(rows=6)
    assert Hierarchical.of_states(3, 1, [Level(1)]).picture().splitlines() == [
        "oo<  2 checkpoints",
        "o<   1 checkpoint",
        "<    0 checkpoints",
    ]
    assert Online(7, 2).picture().splitlines()[0].startswith("o")


def test_replay_refuses_actions_that_cannot_be_done() -> None:
    with pytest.raises(ScheduleError, match="cannot be done"):
        replay([Action("reverse", 0, 0)], 2)
    with pytest.raises(ScheduleError, match="not reversed"):
        replay([], 1)
    with pytest.raises(ScheduleError, match="cannot be done"):
        replay([Action("restore", 0, 0, 0)], 1)
