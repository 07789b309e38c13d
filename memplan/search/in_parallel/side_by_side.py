"""Setups side by side on some GPUs."""

from collections.abc import Sequence

from memplan.estimator import Estimate, estimate, without_run
from memplan.fast_dataclass import dataclass, replace
from memplan.hardware.gpu import GpuSpec
from memplan.model.spec import ModelSpec
from memplan.search.in_parallel.together import all_of
from memplan.training.setup import TrainingSetup


@dataclass(frozen=True, kw_only=True, slots=True)
class SideBySide:
    """What is compared."""

    model: ModelSpec
    setups: Sequence[TrainingSetup]
    gpus: Sequence[GpuSpec | None]
    node_memory_bytes: int | None = None
    """CPU RAM of a node, where it is judged too."""
    notes: tuple[str, ...] = ()
    """What is to be said of each answer besides."""
    says_needs: bool = True
    """What each needs is told, not its verdict alone."""

    def rows(self) -> list[list[Estimate]]:
        """For each setup an answer on each GPU.

        Raises ``SetupError`` for a setup that this model or engine cannot be trained with.
        """
        shared = [self.model, *self.setups, *(each for each in self.gpus if each is not None)]
        if len(self.setups) == 1:
            (setup,) = self.setups

            def answer(number: int) -> Estimate:
                return self._answer(setup, self.gpus[number])

            return [all_of(answer, len(self.gpus), shared=shared)]
        return all_of(self._row, len(self.setups), shared=shared)

    def _row(self, number: int) -> list[Estimate]:
        return [self._answer(self.setups[number], gpu) for gpu in self.gpus]

    def _answer(self, setup: TrainingSetup, gpu: GpuSpec | None) -> Estimate:
        found = estimate(self.model, setup, gpu)
        if self.notes:
            found = replace(found, notes=(*found.notes, *self.notes))
        found = replace(found, node_memory_bytes=self.node_memory_bytes)
        # What is told of it is found where it was played.
        _ = found.required_bytes if self.says_needs else found.verdict
        return without_run(found)
