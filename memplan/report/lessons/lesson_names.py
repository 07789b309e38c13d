"""The lesson of a name: one that is written, or a row of the table of operators."""

from memplan.errors import UsageError, did_you_mean
from memplan.report.lessons.teaching import Lesson
from memplan.report.lessons.written import LESSONS


def find_lesson(name: str) -> Lesson:
    """The lesson of this name; ``UsageError`` names the nearest one."""
    wanted = name.lower().replace("-", "_")
    for lesson in LESSONS:
        if lesson.name == wanted:
            return lesson
    from memplan.report.lessons.of_operators import (  # for others alone
        operator_lesson,
        operator_names,
    )

    found = operator_lesson(name)
    if found is not None:
        return found
    known = tuple(lesson.name for lesson in LESSONS)
    hint = did_you_mean(wanted, known) or did_you_mean(wanted, operator_names())
    msg = (
        f"operation: there is no lesson on {name!r}.{hint} There are: {', '.join(known)}; and `all` for "
        "every operator of the table"
    )
    raise UsageError(msg)
