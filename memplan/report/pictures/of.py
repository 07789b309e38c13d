"""The picture of an answer, by what is asked of it."""

from memplan.errors import UsageError, did_you_mean
from memplan.estimator import Estimate
from memplan.report.pictures.bars import phases_picture, ranks_picture
from memplan.report.pictures.heat import heat_picture
from memplan.report.pictures.picture import Picture, together
from memplan.report.pictures.scatter import front_picture
from memplan.report.pictures.steps import step_picture
from memplan.search.planning.goal import Plan
from memplan.search.sweep import Sweep

OF_ESTIMATE = {"components": phases_picture, "step": step_picture, "ranks": ranks_picture}


def estimate_picture(found: Estimate, what: str) -> Picture:
    """One of ``OF_ESTIMATE``. Raises ``UsageError`` for another word."""
    if what not in OF_ESTIMATE:
        known = tuple(OF_ESTIMATE)
        msg = f"{what!r} is not one of {', '.join(known)}.{did_you_mean(what, known)}"
        raise UsageError(msg)
    return OF_ESTIMATE[what](found)


def sweep_picture(sweep: Sweep, rows: str | None, columns: str | None) -> Picture:
    """Heat maps, one below the other."""
    found = heat_picture(sweep, rows, columns)
    return together(found, title=f"{sweep.model.name}: what each setup needs")


def plan_picture(plan: Plan) -> Picture:
    """The front of memory and time."""
    return front_picture(plan)
