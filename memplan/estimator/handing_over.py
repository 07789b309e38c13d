"""An answer for another process: what replays have found of its run, without the run."""

from memplan.estimator.estimate import Estimate
from memplan.fast_dataclass import replace
from memplan.memory.required import Replays


def without_run(answer: Estimate) -> Estimate:
    """The answer with what its replays have found so far; what they have not is found anew where it is asked."""
    source = answer.run_source
    if isinstance(source, Replays):
        return answer
    crowded = without_run(answer.crowded) if answer.crowded is not None else None
    return replace(answer, run_source=source.played.replays(source), crowded=crowded)
