"""The models that a job names, looked up."""

from dataclasses import replace

from memplan.training.jobs import PLAIN, Job
from memplan.training.setup import TrainingSetup


def with_models(job: Job) -> Job:
    """The job with the names of its models replaced by what they name.

    Raises a ``MemplanError`` for a model that cannot be read.
    """
    names = job.names
    if not names:
        return job
    from memplan.sources.models import load_model

    return job.with_models({name: load_model(name) for name in names})


def looked_up(setup: TrainingSetup) -> TrainingSetup:
    """The setup with its job's models looked up."""
    if setup.job == PLAIN or not setup.job.names:
        return setup
    return replace(setup, job=with_models(setup.job))
