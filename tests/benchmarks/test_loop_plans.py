"""Plans of loops need fewer FLOPs than mixtures of checkpoints placed by hand."""

import pytest
from benchmarks.loop_plans import Point, gru, hull, lstm, measure, pde


@pytest.mark.parametrize(
    "loop",
    [
        gru(n=60, batch=16, width=32),
        pytest.param(lstm(n=60, batch=16, width=32), marks=pytest.mark.slow),
        pytest.param(pde(n=60, size=48), marks=pytest.mark.slow),
    ],
    ids=["gru", "lstm", "pde"],
)
def test_plans_are_below_the_hull_of_checkpoints_by_hand(loop):
    points, rows = measure(loop, (75, 50, 35))
    assert {p.label for p in points} >= {"nothing", "dots", "groups of 2", "groups of 4"}
    for row in rows:
        assert row.plan is not None and row.plan.peak <= row.percent / 100
        assert row.plan.extra < row.hull


def test_the_hull_mixes_two_points():
    points = [Point("as written", 1.0, 0.0), Point("nothing", 0.2, 0.4), Point("bad", 0.6, 0.5)]
    assert hull(points, 0.6) == pytest.approx(0.2)
    assert hull(points, 0.2) == pytest.approx(0.4)
    assert hull(points, 0.1) is None
