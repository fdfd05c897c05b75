"""What loops save at each step, on hand-made bodies."""

from __future__ import annotations

import dataclasses

import pytest

from remat.planner.bodies import Body, at_price, loop_options, prices
from remat.planner.program import Kind, Op, Place, Program

REGION = ("loss#1/scan0", "f0")
KB = 1000


def price(flops, moved, dtype):
    return flops


def body(length=16, carry=(0,), n_values=3, size=KB):
    """h -> f1 -> f2 ... -> fn; each backward operation needs one of them."""
    ops = [
        Op("dot", Kind.OPAQUE, (i,), (i + 1,), flops=10.0 + i, place=Place(REGION, False, i))
        for i in range(n_values)
    ]
    last = n_values
    for i in reversed(range(n_values)):
        place = Place(REGION, True, n_values - 1 - i)
        ops.append(Op("dot", Kind.OPAQUE, (i + 1, last), (last + 1,), flops=20.0, place=place))
        last += 1
    program = Program(
        tuple(ops), (size,) * (last + 1), ("f32[]",) * (last + 1), frozenset({0}), (last,)
    )
    return Body(program, REGION, length, carry)


def test_options_go_from_the_fewest_bytes_to_the_most_and_none_is_worse_in_both():
    options = loop_options(body(), price)
    assert len(options) > 2
    assert [o.bytes for o in options] == sorted({o.bytes for o in options})
    assert [o.seconds for o in options] == sorted({o.seconds for o in options}, reverse=True)


def test_between_distant_vertices_there_are_options_that_no_price_finds():
    # Two values alike: every price saves both or neither.
    b = body(n_values=2, carry=())
    ops = [dataclasses.replace(op, flops=10.0) for op in b.program.ops]
    program = dataclasses.replace(b.program, ops=tuple(ops))
    options = loop_options(dataclasses.replace(b, program=program), price)
    assert [(len(o.saved), o.seconds) for o in options] == [(0, 320.0), (1, 160.0), (2, 0.0)]
    assert len({at_price(options, p) for p in prices(options)}) < len(options)


def test_last_option_saves_what_is_needed_and_recomputes_nothing():
    most = loop_options(body(), price)[-1]
    assert (most.saved, most.group, most.seconds) == ((0, 1, 2), 1, 0)
    # A carry that is not needed by the backward pass costs nothing: values of 16 steps.
    assert most.bytes == 16 * 3 * KB


def test_values_that_must_not_be_repeated_are_saved_at_any_price():
    b = body()
    ops = list(b.program.ops)
    ops[1] = Op("psum", Kind.OPAQUE, (1,), (2,), place=Place(REGION, False, 1), repeatable=False)
    program = Program(
        tuple(ops), *(getattr(b.program, k) for k in ("bytes", "types", "inputs", "outputs"))
    )
    for option in loop_options(Body(program, REGION, 2, (0,)), price):
        assert 1 in option.saved


def test_prices_go_from_one_end_of_the_options_to_the_other():
    options = loop_options(body(), price)
    at = prices(options)
    assert at == sorted(at)
    assert at_price(options, 0.0) == options[-1]
    assert at_price(options, at[-1]) == options[0]
    # Each of them picks another.
    assert len({at_price(options, p) for p in at}) == len(at)


def test_bytes_never_rise_with_the_price():
    options = loop_options(body(n_values=5), price)
    found = [at_price(options, p).bytes for p in (0.0, 1e-4, 1e-3, 1e-2, 0.1, 1.0)]
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize("length", [16, 17, 64])
def test_long_loops_can_run_in_groups(length):
    groups = [o.group for o in loop_options(body(length), price) if o.group > 1]
    assert groups
    assert all(1 < g < length for g in groups)
    if length != 17:
        assert all(length % g == 0 for g in groups)


def test_short_loops_and_loops_without_a_carry_do_not():
    for b in (body(3), body(16, carry=())):
        assert all(o.group == 1 for o in loop_options(b, price))


def test_one_option_has_one_price():
    b = body(n_values=1, length=2)
    (option,) = loop_options(b, price)[-1:]
    assert prices([option]) == [0.0]
