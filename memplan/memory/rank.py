"""What every engine's account is made from."""

from memplan.graph.tape import Tape
from memplan.memory.step import StepPasses
from memplan.records import dataclass
from memplan.training.precision import PRECISIONS, PrecisionFormats
from memplan.training.setup import TrainingSetup


@dataclass(frozen=True, kw_only=True, slots=True)
class RankInput:
    """A recorded model, its walk, and the setup with every default filled in."""

    tape: Tape
    passes: StepPasses
    setup: TrainingSetup
    """Resolved: no field is None that has a default."""

    @property
    def formats(self) -> PrecisionFormats:
        """The formats of the setup's precision."""
        return PRECISIONS[self.setup.chosen_precision]
