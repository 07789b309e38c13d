"""Plans for a platform's pools, and which of them comes first."""

from collections.abc import Sequence

from memplan.errors import SetupError
from memplan.estimator.time.run_cost import TimeQuestion
from memplan.fast_dataclass import dataclass, replace
from memplan.hardware.pool import Pool
from memplan.model.spec import ModelSpec
from memplan.search.planning.goal import Goal, Objective, Plan, PlannedSetup
from memplan.search.planning.planner import plan as make_plan
from memplan.training.setup import TrainingSetup


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolPlan:
    """What one pool means for a goal."""

    pool: Pool
    plan: Plan | None
    """None where the pool cannot be tried at all."""
    refused: str = ""
    """Why it cannot."""

    @property
    def best(self) -> PlannedSetup | None:
        """Its first setup; None where nothing fits."""
        return self.plan.setups[0] if self.plan is not None and self.plan.setups else None

    @property
    def token_cost(self) -> float:
        """What a token costs there, in the money that the pool's price is in; infinite where that is not known."""
        if self.best is None or self.best.time is None or self.pool.price is None:
            return float("inf")
        per_s = self.pool.price * self.best.setup.num_gpus / 3600
        return per_s / self.best.time.tokens_per_s


def pool_plans(
    model: ModelSpec,
    goal: Goal,
    pools: Sequence[Pool],
    *,
    times: TimeQuestion | None,
    is_open: bool,
    stoppable: bool = False,
) -> list[PoolPlan]:
    """A plan for each pool, the best first.

    An interruption, where that is allowed, ends the search with what was found by then. Raises ``SetupError`` where
    none of the pools can be tried, with why.
    """
    found: list[PoolPlan] = []
    for pool in pools:
        try:
            found.append(_planned(model, pool_goal(goal, pool, is_open=is_open), pool, times))
        except KeyboardInterrupt:
            if not (stoppable and any(each.best for each in found)):
                raise
            found[-1] = _interrupted(found[-1])
            break
    if all(each.plan is None for each in found):
        msg = "; ".join(f"{each.pool.name}: {each.refused}" for each in found)
        raise SetupError(msg)
    return best_first(found, goal.objective)


def _interrupted(last: PoolPlan) -> PoolPlan:
    return (
        replace(last, plan=replace(last.plan, is_interrupted=True))
        if last.plan is not None
        else last
    )


def _planned(
    model: ModelSpec, goal: Goal | None, pool: Pool, times: TimeQuestion | None
) -> PoolPlan:
    if goal is None:
        refused = f"has {pool.usable_gpus} GPUs for a job, fewer than are asked for"
        return PoolPlan(pool=pool, plan=None, refused=refused)
    try:
        plan = make_plan(model, goal, pool.gpu, times=pool_times(times, pool))
    except SetupError as error:
        return PoolPlan(pool=pool, plan=None, refused=str(error))
    return PoolPlan(pool=pool, plan=replace(plan, pool=pool))


def pool_goal(goal: Goal, pool: Pool, *, is_open: bool) -> Goal | None:
    """The goal with the numbers of GPUs that the pool has for a job; None where it has none of those asked for.

    ``is_open``: no number was asked for, so that every doubling is tried, and all that a job may have.

    >>> from memplan.sources.cards.catalog import load_gpu
    >>> dev = Pool(name="dev", gpu=load_gpu("t4"), num_gpus=6)
    >>> pool_goal(Goal(), dev, is_open=True).num_gpus, pool_goal(Goal(num_gpus=8), dev, is_open=False)
    ((1, 2, 4), None)
    """
    counts = _doublings(pool.usable_gpus) if is_open else goal.num_gpus
    counts = tuple(each for each in counts if not pool.shortage(each))
    if not counts:
        return None
    return replace(
        goal, num_gpus=counts, gpus_per_node=pool.gpus_per_node,
        node_memory_bytes=pool.node_memory_bytes or goal.node_memory_bytes,
    )  # fmt: skip


def _doublings(most: int) -> tuple[int, ...]:
    return tuple(1 << power for power in range(most.bit_length()) if 1 << power <= most)


def pool_times(times: TimeQuestion | None, pool: Pool) -> TimeQuestion:
    """What is asked of times there: at the pool's price, unless one was given."""
    asked = times or TimeQuestion()
    return replace(asked, prices=pool.price) if asked.prices is None else asked


def best_first(plans: Sequence[PoolPlan], objective: Objective) -> list[PoolPlan]:
    """Pools by the objective, those where nothing fits last; of equals the first of the file."""
    return sorted(plans, key=lambda each: _place(each, objective))


def usual_objective(pools: Sequence[Pool]) -> Objective:
    """What comes first where nobody says: a token's cost where every pool has a price, else speed."""
    return Objective.COST if all(each.price is not None for each in pools) else Objective.SPEED


def _place(found: PoolPlan, objective: Objective) -> tuple[float, ...]:
    best = found.best
    if best is None:
        return (float("inf"),)
    setup = best.setup
    speed = -best.time.tokens_per_s if best.time is not None else -best.total_speed
    if objective is Objective.COST:
        return found.token_cost, speed
    if objective is Objective.GPUS:
        return setup.num_gpus, found.token_cost, speed
    if objective is Objective.SPEED:
        return (speed,)
    return -_size(best, setup, objective), speed


def _size(best: PlannedSetup, setup: TrainingSetup, objective: Objective) -> int:
    """What is to be large."""
    if objective is Objective.SEQ_LEN:
        return setup.seq_len or 0
    if objective is Objective.LAYERS:
        return best.estimate.model.num_layers
    return setup.micro_batch_size * setup.data_parallel
