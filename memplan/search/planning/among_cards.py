"""Plans for several cards: which card's answer is the best one."""

from collections.abc import Sequence

from memplan.estimator.time.run_cost import TimeQuestion
from memplan.search.planning.goal import Objective, Plan, PlannedSetup
from memplan.search.planning.objective import rank_by_time
from memplan.search.planning.order import rank_of

BY_TIME = (Objective.SPEED, Objective.COST, Objective.GPUS)
"""What is wanted that times decide."""


def is_comparable(plans: Sequence[Plan], question: TimeQuestion) -> bool:
    """Whether the cards can be told apart by what is wanted: money only where each has a price."""
    if plans[0].goal.objective is not Objective.COST:
        return True
    return all(question.price_of(each.gpu) is not None for each in plans)


def best_card_first(plans: Sequence[Plan], question: TimeQuestion) -> list[Plan]:
    """The plans by their first setups, the best card first; cards that nothing fits come last."""
    return sorted(plans, key=lambda plan: _place(plan, question))


def _place(plan: Plan, question: TimeQuestion) -> tuple[float, ...]:
    if not plan.setups:
        return (1.0,)
    best = plan.setups[0]
    if plan.goal.objective in BY_TIME:
        return (0.0, *rank_by_time(best, plan.goal, question))
    return (0.0, *_rank(best, plan))


def _rank(best: PlannedSetup, plan: Plan) -> tuple[float, ...]:
    layers = best.estimate.model.num_layers
    return rank_of(plan.goal, best, best.setup, best.speed.per_gpu, layers)
