"""How long an evaluation between two steps takes: forward passes alone, with what the engine gathers for them.

transformers' Trainer goes through its batches one after the other (``Trainer.evaluation_loop``); Megatron's ``evaluate`` runs as many
micro-batches as a step has through the pipeline, and lets it run empty in between.
"""

from typing import TYPE_CHECKING

from memplan.errors import InputError
from memplan.estimator.job import Job
from memplan.estimator.time.site import Site
from memplan.estimator.time.step_time import forward_seconds
from memplan.fast_dataclass import dataclass, replace
from memplan.training.activation_offload import ActivationOffload
from memplan.training.choices import Recomputation
from memplan.training.setup import TrainingSetup
from memplan.units import ceil_div

if TYPE_CHECKING:
    from memplan.estimator import Estimate


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluations:
    """How often a run is evaluated, and on how much."""

    every_steps: int
    examples: int
    """Sequences of all ranks."""

    def __post_init__(self) -> None:
        for name in ("every_steps", "examples"):
            if getattr(self, name) < 1:
                msg = f"evaluations: {name}: must be at least 1, got {getattr(self, name)}"
                raise InputError(msg)


def evaluation_seconds(answer: "Estimate", evaluations: Evaluations, site: Site) -> float:
    """One evaluation of an answer's setup [s].

    A batch has as many sequences as the setup's evaluation names, or a step's micro-batch has.
    """
    setup = evaluated(answer.setup)
    job = Job.of(answer.model, setup, answer.gpu)
    batches = ceil_div(evaluations.examples, setup.micro_batch_size * setup.data_parallel)
    stages = setup.pipeline_parallel
    together = answer.setup.gradient_accumulation_steps if stages > 1 else batches
    fills = ceil_div(batches, together)
    return (batches + fills * (stages - 1)) * forward_seconds(job, site=site)


def evaluated(setup: TrainingSetup) -> TrainingSetup:
    """The setup whose forward pass an evaluation runs: nothing is kept for backward, nothing is run again."""
    own = setup.evaluation
    batch, length = setup.micro_batch_size, setup.seq_len
    if own is not None:
        batch, length = own.batch_size, own.seq_len or length
    return replace(
        setup,
        micro_batch_size=batch,
        seq_len=length,
        evaluation=None,
        checkpointing=Recomputation.NONE,
        offload_activations=ActivationOffload.NONE,
        offload_activations_ratio=1.0,
    )
