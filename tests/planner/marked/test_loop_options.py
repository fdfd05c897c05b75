"""What loops save at each step, on hand-made bodies."""

from __future__ import annotations

import dataclasses

import pytest

from remat.ir.operations import Fusion
from remat.planner.marked.loop_options import Body, loop_options
from remat.planner.tradeoffs import at_price, prices
from remat.program.program import Op, Place, Program

REGION = ("loss#1/scan0", "f0")
KB = 1000


def price(flops, moved, dtype):
    return flops


def body(length=16, carry=(0,), n_values=3, size=KB, movable=()):
    """h -> f1 -> f2 ... -> fn; each backward operation needs one of them."""
    ops = [
        Op("dot", Fusion.KERNEL, (i,), (i + 1,), flops=10.0 + i, place=Place(REGION, False, i))
        for i in range(n_values)
    ]
    last = n_values
    for i in reversed(range(n_values)):
        place = Place(REGION, True, n_values - 1 - i)
        ops.append(Op("dot", Fusion.KERNEL, (i + 1, last), (last + 1,), flops=20.0, place=place))
        last += 1
    program = Program(
        tuple(ops), (size,) * (last + 1), ("f32[]",) * (last + 1), frozenset({0}), (last,)
    )
    return Body(program, REGION, length, carry, movable=frozenset(movable))


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
    ops[1] = Op("psum", Fusion.KERNEL, (1,), (2,), place=Place(REGION, False, 1), repeatable=False)
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


# Offloading

MB = 10**6


def traffic_price(flops, moved, dtype):
    """Seconds of a device of 1 FLOP/s and 1 TB/s."""
    return flops + moved / 1e12


def link(bytes_per_s):
    return lambda n_bytes: n_bytes / bytes_per_s


def cheapest_within(options, n_bytes):
    return min((o for o in options if o.bytes <= n_bytes), key=lambda o: o.seconds)


def large_body(**more):
    return body(size=MB, movable=range(4), **more)


def test_loops_offload_over_a_fast_link_and_recompute_over_a_slow_one():
    fast = loop_options(large_body(), traffic_price, link(1e12))
    slow = loop_options(large_body(), traffic_price, link(1.0))
    room = 16 * 2 * MB  # three values of a step are needed, and two fit
    chosen = cheapest_within(fast, room)
    assert chosen.offloaded and chosen.seconds < 16 * 10  # no operation is repeated
    assert set(chosen.offloaded) <= set(chosen.saved)
    chosen = cheapest_within(slow, room)
    assert not chosen.offloaded and not chosen.host_bytes
    assert (
        chosen.seconds == cheapest_within(loop_options(large_body(), traffic_price), room).seconds
    )


def test_offloading_reaches_below_what_recomputing_needs_and_says_what_the_host_holds():
    b = body(size=MB, movable={0})
    alone = loop_options(b, traffic_price)
    more = loop_options(b, traffic_price, link(MB / 100))
    assert more[0].bytes == 0 < alone[0].bytes
    # The carry comes back, and the rest is recomputed from it.
    assert (more[0].offloaded_carry, more[0].saved) == ((0,), ())
    assert more[0].host_bytes == 16 * MB
    assert 0 < more[0].transfer_seconds < more[0].seconds


def test_only_what_a_step_does_not_hide_takes_the_time_of_the_link():
    # Each value takes 4 s in each direction. A step computes 33 s forward and 60 s backward, and half
    # of that hides copies: four values are hidden one way and seven the other.
    options = loop_options(large_body(), traffic_price, link(MB / 4))
    hidden = [o for o in options if o.host_bytes == 16 * 3 * MB]
    assert hidden and all(o.transfer_seconds < 1e-3 * 16 for o in hidden)
    # Three values of 10 s each are not hidden: 30 s of 16.5 one way, and none of 30 the other.
    slower = loop_options(large_body(), traffic_price, link(MB / 10))
    shown = [o for o in slower if o.host_bytes == 16 * 3 * MB]
    assert [o.transfer_seconds for o in shown] == [pytest.approx(16 * 13.5, rel=1e-3)]


@pytest.mark.parametrize("b", [body(movable=range(4)), body(size=MB)], ids=["small", "not movable"])
def test_small_values_and_those_that_cannot_move_stay_on_the_device(b):
    options = loop_options(b, traffic_price, link(1e12))
    assert options == loop_options(b, traffic_price)
    assert not any(o.host_bytes for o in options)


def test_groups_may_be_only_the_first_part_of_a_loop():
    some = [o for o in loop_options(body(64), price) if o.groups]
    assert some
    assert all(0 < o.groups * o.group < 64 for o in some)
    # What the rest saves is there at once, and is not recomputed.
    of_one_kind = [o for o in some if (o.group, o.saved) == (some[0].group, some[0].saved)]
    assert [o.groups for o in of_one_kind] == sorted((o.groups for o in of_one_kind), reverse=True)
