"""Steps of a pipeline where nobody says of how many micro-batches: of the fewest that its schedule takes."""

from collections.abc import Mapping

from memplan.training.splitting.parallelism import PipelineSchedule

STEPS = "gradient_accumulation_steps"


def fewest_steps(fields: Mapping[str, object]) -> int:
    """Micro-batches of a step of the setup with these fields, at least; 1 where it has no pipeline.

    DeepSpeed's own schedule takes fewer; nobody runs a pipeline so that most of it idles.

    >>> fewest_steps({"pipeline_parallel": 4}), fewest_steps({"pipeline_parallel": 1})
    (4, 1)
    """
    degree = fields.get("pipeline_parallel") or 1
    if not isinstance(degree, int) or degree == 1:
        return 1
    schedule = fields.get("pipeline_schedule") or PipelineSchedule.ONE_F_ONE_B
    try:
        named = PipelineSchedule(schedule)
    except ValueError:  # refused where the setup is made
        return 1
    from memplan.training.splitting.schedules import fewest_micro_batches  # only for pipelines

    return fewest_micro_batches(named, degree)
