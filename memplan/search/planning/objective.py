"""A plan ranked by time: of the setups that fit, the fastest or the cheapest, and the front of memory and time."""

from collections import Counter
from typing import TYPE_CHECKING

from memplan.errors import UnsupportedOperationError
from memplan.estimator.time.run_cost import TimeQuestion
from memplan.estimator.time.step_time import StepTime, step_time
from memplan.fast_dataclass import replace
from memplan.search.planning.concessions import order_of
from memplan.search.planning.goal import Objective
from memplan.search.planning.order import EQUAL_SPEED, bucket, lost_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memplan.search.planning.goal import Goal, PlannedSetup

MOST_TIMED, LEAST_TIMED = 96, 3
"""Of the setups that fit, the first ones by relative speeds, shared out among the numbers of GPUs, and of each at
least so many: a step's time takes a tenth of an estimate, and a plan tells a few setups."""


def ranked_by_time(
    found: "Sequence[PlannedSetup]", goal: "Goal", question: TimeQuestion
) -> "list[PlannedSetup]":
    """The same setups with their times, the best first; among equals the order that they have.

    Those whose time is not known come last.
    """
    timed = [_timed(each, question) for each in _first(found)]
    places = {id(each): place for place, each in enumerate(timed)}
    return sorted(timed, key=lambda each: (*rank_by_time(each, goal, question), places[id(each)]))


def _first(found: "Sequence[PlannedSetup]") -> "list[PlannedSetup]":
    """The first ones of each number of GPUs, in the order that they have."""
    left = Counter(each.setup.num_gpus for each in found)
    share = max(LEAST_TIMED, MOST_TIMED // max(1, len(left)))
    left = Counter(dict.fromkeys(left, share))
    kept = []
    for each in found:
        if left[each.setup.num_gpus]:
            left[each.setup.num_gpus] -= 1
            kept.append(each)
    return kept


def _timed(each: "PlannedSetup", question: TimeQuestion) -> "PlannedSetup":
    return each if each.time is not None else replace(each, time=_time(each, question))


def _time(each: "PlannedSetup", question: TimeQuestion) -> StepTime | None:
    try:
        time = step_time(each.estimate, site=question.site)
    except UnsupportedOperationError:
        return None
    return time if question.mfu is None else time.with_mfu(question.mfu)


def rank_by_time(each: "PlannedSetup", goal: "Goal", question: TimeQuestion) -> tuple[float, ...]:
    """Its place among those of a plan by its time, the smallest first."""
    lost, time, objective = lost_of(goal, each), each.time, goal.objective
    if time is None:
        return (*lost, 1, 0.0)
    if objective is Objective.SPEED:
        return (*lost, 0, each.flushes, bucket(time.tokens_per_s))
    if objective is Objective.COST:
        price = question.price_of(each.estimate.gpu) or 1.0
        return (*lost, 0, each.flushes, bucket(time.tokens_per_s_per_gpu / price))
    if objective is Objective.GPUS:
        return (*lost, 0, time.num_gpus, each.flushes, bucket(time.tokens_per_s))
    return (*lost, 0)


def _lost(each: "PlannedSetup") -> tuple[int, int]:
    """What is given up for it to fit."""
    return (order_of(each.given_up), each.tier)


def memory_front(
    found: "Sequence[PlannedSetup]",
    is_open: "Callable[[PlannedSetup], bool]" = lambda _each: False,
) -> "list[PlannedSetup]":
    """Setups that none of the others beats in both: less memory of a card, more tokens per second.

    The fastest first, and faster by less than ``EQUAL_SPEED`` is no faster. Only of those that give up no more than
    the first: what trains less precisely is no trade of memory for time. Where it turns on one that is open, that one
    alone.
    """
    known = [each for each in found if each.time is not None]
    known = [each for each in known if _lost(each) == _lost(known[0])]
    fastest_first = sorted(known, key=lambda each: (-_speed(each), each.estimate.worst_bytes))
    front: list[PlannedSetup] = []
    for each in fastest_first:
        answer = each.estimate
        # What it allocates alone may be more already: then no run is replayed for it.
        least = answer.worst_bytes + answer.overhead_bytes.high
        lowest = front[-1].estimate.total_bytes.high if front else None
        if lowest is not None and least >= lowest:
            continue
        if is_open(each):
            return [each]
        if lowest is None or answer.total_bytes.high < lowest:
            front.append(each)
    kept = front[-1:]
    for each in reversed(front[:-1]):
        if _speed(each) > (1 + EQUAL_SPEED) * _speed(kept[-1]):
            kept.append(each)
    return kept[::-1]


def _speed(each: "PlannedSetup") -> float:
    assert each.time is not None
    return each.time.tokens_per_s
