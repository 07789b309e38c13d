"""The FLOPs of a training setup, from the tape that its memory is read off."""

from memplan.compute.flops import ScoreCount, StepFlops, count_flops
from memplan.errors import UnsupportedOperationError
from memplan.estimator.recording import tape_options
from memplan.fast_dataclass import replace
from memplan.graph.model import record_model
from memplan.hardware.gpu import GpuSpec
from memplan.model.spec import ModelSpec
from memplan.training.setup import TrainingSetup


def estimate_flops(
    model: ModelSpec,
    setup: TrainingSetup,
    gpu: GpuSpec | None = None,
    *,
    scores: ScoreCount = ScoreCount.FULL,
) -> StepFlops:
    """FLOPs of one micro-batch through one copy of the model.

    ``gpu`` decides only which attention kernel runs. Raises ``SetupError`` for a setup that this
    model cannot be trained with, and ``UnsupportedOperationError`` for a model whose operations are
    not written down.
    """
    resolved = setup.resolve(model.context_length)
    whole = replace(
        resolved, tensor_parallel=1, sequence_parallel=False, loss_parallel=False, context_parallel=1,
        context_parallel_kind=None, expert_parallel=1, expert_imbalance=None,
    )  # fmt: skip
    tape = record_model(model, tape_options(whole, gpu))
    counted = count_flops(tape, model, scores=scores)
    if not counted.total:
        msg = (
            f"{model.source}: {model.family}: its operations are not written down yet, only its "
            "parameters, so its FLOPs are not known"
        )
        raise UnsupportedOperationError(msg)
    return counted
