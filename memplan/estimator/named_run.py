"""An estimate's run played out, each of its blocks with a name: for snapshots."""

from memplan.errors import SetupError
from memplan.estimator.estimate import Estimate
from memplan.estimator.estimation import record_and_walk, shared_options, tape_options
from memplan.hardware.gpu import GpuSpec
from memplan.memory.named import NamedRun, play_named
from memplan.memory.rank import RankInput
from memplan.memory.runtime import NUM_HANDLES, workspace_bytes
from memplan.training.setup import TrainingSetup


def play_estimate(found: Estimate) -> NamedRun | None:
    """Play two steps of the estimate's run, on a card with room.

    None where its engine's allocations are not known one by one.
    """
    options = shared_options(found.model, tape_options(found.setup, found.gpu))
    tape, passes = record_and_walk(found.model, options)
    return play_named(
        RankInput(tape=tape, passes=passes, setup=found.setup),
        workspace_bytes=_workspace_bytes(found.setup, found.gpu),
        rank=found.account.rank,
    )


def named_run(found: Estimate) -> NamedRun:
    """Play the estimate's run, which must be known block by block.

    Raises ``SetupError`` for an engine of which it is not.
    """
    run = play_estimate(found)
    if run is None:
        stage = found.setup.zero_stage
        staged = f" with ZeRO stage {stage.value}" if stage is not None else ""
        msg = (
            f"engine: {found.setup.chosen_engine.value}{staged}: its allocations are not known one by one yet, so there is no "
            "snapshot of it; ddp, fsdp and ZeRO stages 1 and 2 have one"
        )
        raise SetupError(msg)
    return run


def _workspace_bytes(setup: TrainingSetup, gpu: GpuSpec | None) -> int:
    """What one of cuBLAS's handles asks for."""
    if not setup.kernel_scratch:
        return 0
    return workspace_bytes(gpu.compute_capability if gpu is not None else None) // NUM_HANDLES
