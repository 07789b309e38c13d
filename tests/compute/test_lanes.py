"""A step's lanes, stage by stage: what waits for what, to the second."""

import pytest

from memplan.compute.lanes import Clock, Interval, Lane, Stage


def ran(*stages: Stage, interference: float = 0.0) -> Clock:
    clock = Clock(interference=interference)
    clock.run(stages)
    return clock


def test_what_the_gpu_is_behind_hides_what_the_host_needs_longer_next() -> None:
    """The host has asked for everything after 3 + 8 seconds; the GPU would have been done after 6 + 2."""
    clock = ran(Stage("a", 3, 2.0, host_s=1.0), Stage("b", 2, 1.0, host_s=4.0))
    assert clock.now_s == 3 + 8
    assert clock.host_bound_s == 11 - 8
    assert not any(clock.exposed_s.values())
    assert [each[1:3] for each in clock.intervals] == [(0, 6), (6, 11)]


def test_a_host_that_waits_for_the_gpu_begins_anew() -> None:
    clock = ran(Stage("a", 3, 2.0, host_s=1.0))
    clock.synchronize()
    clock.run([Stage("b", 2, 1.0, host_s=4.0)])
    assert clock.now_s == 6 + 8
    assert clock.host_bound_s == 8 - 2


def test_what_goes_out_behind_holds_up_the_end_alone() -> None:
    clock = ran(Stage("a", 2, 1.0, behind_s=4.0), Stage("b", 1, 1.0))
    # Two seconds each: the second begins when the first is out, at two at the earliest.
    assert clock.now_s == 4
    assert clock.exposed_s[Lane.LINK] == 1
    assert Interval(Lane.LINK, 0, 4, "a", 4) in clock.intervals


def test_what_is_made_last_goes_out_last() -> None:
    clock = ran(Stage("a", 2, 3.0, behind_s=2.0))
    assert clock.now_s == 6 + 1
    assert Interval(Lane.LINK, 0, 7, "a", 2) in clock.intervals


def test_a_layer_waits_for_its_weights() -> None:
    """The first of three has nothing to hide its second behind; of nine each does, and is too late."""
    hidden, late = ran(Stage("a", 3, 2.0, ahead_s=3.0)), ran(Stage("a", 3, 2.0, ahead_s=9.0))
    assert hidden.now_s == 6
    assert hidden.exposed_s[Lane.LINK] == 0
    assert late.now_s == 9 + 2
    assert late.exposed_s[Lane.LINK] == 5


def test_the_first_of_a_stage_is_asked_for_while_the_stage_before_ends() -> None:
    clock = ran(Stage("a", 4, 2.0), Stage("b", 1, 1.0, ahead_s=5.0))
    # Asked for at six, there at eleven.
    assert clock.now_s == 11 + 1
    assert clock.exposed_s[Lane.LINK] == 3
    assert Interval(Lane.LINK, 6, 11, "b", 5) in clock.intervals


def test_both_ways_wait_in_one_queue() -> None:
    clock = ran(Stage("a", 1, 1.0, behind_s=6.0), Stage("b", 1, 1.0, ahead_s=2.0))
    # The link is free at seven, what is asked for there at nine.
    assert clock.now_s == 9 + 1
    assert clock.exposed_s[Lane.LINK] == 8
    both = ran(Stage("a", 2, 4.0, ahead_s=2.0, behind_s=4.0))
    # The last of what goes out does not hold up the last of what comes in.
    assert both.now_s == 8 + 2
    assert both.exposed_s[Lane.LINK] == 2


def test_exchanges_take_multiprocessors() -> None:
    clock = ran(Stage("a", 1, 10.0, ahead_s=2.0, behind_s=1.0), interference=0.5)
    # Nothing hides what comes first and what goes last.
    assert clock.now_s == 2 + 11.5 + 1


def test_what_nothing_hides() -> None:
    clock = ran(Stage("a", 1, 1.0, blocking_s=2.0, waited_s=3.0))
    assert clock.now_s == 6
    assert (clock.exposed_s[Lane.LINK], clock.exposed_s[Lane.HOST]) == (2, 3)
    clock.wait(Lane.COMPUTE, 4.0, "optimizer")
    clock.wait(Lane.LINK, 0.0, "nothing")
    assert clock.now_s == 10
    assert clock.exposed_s[Lane.COMPUTE] == 0
    assert clock.intervals[-1] == Interval(Lane.COMPUTE, 6, 10, "optimizer", 4)


def test_the_host_has_a_lane_of_its_own() -> None:
    clock = ran(Stage("a", 2, 2.0, behind_s=1.0, fetched_s=8.0, stored_s=1.0))
    assert {lane: each for lane, each in clock.exposed_s.items() if each} == {
        Lane.HOST: pytest.approx(7.0)
    }
    # Both fetched and the first stored by 8.5, then a layer, then the last is stored.
    assert clock.now_s == 8.5 + 2 + 0.5


def test_a_pass_without_exchanges_and_time_that_is_not_told() -> None:
    clock = ran(Stage("a", 1, 2.0))
    clock.compute([(1.0, 0.0), (2.0, 0.0)], "again")
    clock.skip(100.0)
    clock.run([Stage("b", 1, 1.0, ahead_s=1.0)])
    assert clock.now_s == 2 + 3 + 100 + 1 + 1
    assert clock.intervals[-1][1:3] == (5, 7)
    quiet = Clock(interference=0.0, draws=False)
    quiet.run([Stage("a", 1, 2.0, ahead_s=1.0, waited_s=1.0)])
    quiet.compute([(1.0, 0.0)], "b")
    assert (quiet.now_s, quiet.intervals) == (5, [])
