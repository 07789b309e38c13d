"""An estimate's run played out, each of its blocks with a name: for snapshots."""

from memplan.estimator.estimate import Estimate
from memplan.estimator.job import prepared
from memplan.hardware.gpu import GpuSpec
from memplan.memory.runtime import NUM_HANDLES, workspace_bytes
from memplan.memory.snapshots.named import NamedRun, play_named
from memplan.training.setup import TrainingSetup


def named_run(found: Estimate) -> NamedRun:
    """Play the estimate's run, on a card with room."""
    return play_named(
        prepared(found.model, found.setup, found.gpu).rank_input,
        workspace_bytes=_workspace_bytes(found.setup, found.gpu),
        rank=found.account.rank,
    )


def _workspace_bytes(setup: TrainingSetup, gpu: GpuSpec | None) -> int:
    """What one of cuBLAS's handles asks for."""
    if not setup.kernel_scratch:
        return 0
    return workspace_bytes(gpu.compute_capability if gpu is not None else None) // NUM_HANDLES
