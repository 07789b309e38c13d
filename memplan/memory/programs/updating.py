"""What a rank does with gradients: they wait for the optimizer, or are stepped as soon as they are there."""

from memplan.graph.core.tensors import Parameter
from memplan.memory.programs.loading.model import Loading
from memplan.memory.programs.stepping import Stepper, stepped, stepped_all
from memplan.memory.programs.weights import Weight, is_trained
from memplan.memory.rank import RankInput
from memplan.memory.replaying.ledger import Block, Ledger
from memplan.training.optimizers.script import ActKind

TRAINED = "every trained parameter"


class Updating(Loading):
    """Every gradient stays where autograd put it, until the optimizer steps it."""

    def __init__(self, given: RankInput, ledger: Ledger) -> None:
        super().__init__(given, ledger)
        self.gradients: dict[Weight, Block] = {}
        self.optimizer = Stepper(given, ledger)
        self.has_states: set[Weight] = set()
        """Weights that were stepped within backward, and have their states."""
        self.unstepped: tuple[Weight, Block] | None = None
        """The last gradient, where it is stepped when the next one is there."""

    @property
    def off_gpu_bytes(self) -> int:
        """States of the optimizer that are not on the GPU."""
        return self.optimizer.off_gpu_bytes

    def make_optimizer(self) -> None:
        """Some have their states from the beginning, those of weights that no pass reads too."""
        handed = [parameter for parameter, _ in self.weights if parameter.requires_grad]
        self.optimizer.construct(stepped_all(handed), of=TRAINED)

    def optimizer_step(self, *, first: bool) -> None:
        """States in the first step; then what the optimizer makes and lets go."""
        weights = [weight for weight in self.weights if is_trained(weight[0])]
        if self.optimizer.in_backward:
            for weight in weights if first else ():
                self._step_alone(weight, None)
            return
        for group in self.parameter_groups(weights):
            self._step_together(group, first=first)

    def parameter_groups(self, weights: list[Weight]) -> list[list[Weight]]:
        """What the optimizer steps at once."""
        return [weights]

    def _step_together(self, weights: list[Weight], *, first: bool) -> None:
        tensors = stepped_all(parameter for parameter, _ in weights)

        def replace(number: int, kind: ActKind, block: Block | None) -> None:
            self._replace(kind, weights[number], block)

        self.optimizer.step(tensors, of=TRAINED, first=first, replace=replace)

    def _leaves_gpu(self, parameter: Parameter) -> bool:
        """Whether its gradient goes to the CPU at once."""
        optimizer = self.optimizer
        return optimizer.takes_gradients and optimizer.takes_gradient(stepped(parameter))

    def _replace(self, kind: ActKind, weight: Weight, block: Block | None) -> None:
        """An optimizer is done with a gradient, or has put another tensor in its or a weight's place."""
        present = self.blocks if kind is ActKind.WEIGHT else self.gradients
        old = present.pop(weight, None)
        if old is not None:
            self.ledger.free(old)
            if block is not None:
                present[weight] = block
        elif block is not None:
            self.ledger.free(block)

    def _step_in_backward(self, weight: Weight, block: Block) -> None:
        """Step a gradient as soon as it is there, or when the one after it is."""
        ready: tuple[Weight, Block] | None = (weight, block)
        if self.optimizer.row.lags:
            ready, self.unstepped = self.unstepped, ready
        if ready is not None:
            self._step_alone(*ready)

    def _step_alone(self, weight: Weight, block: Block | None) -> None:
        """One parameter's own optimizer; then its gradient goes. None: only its states are made."""
        first = weight not in self.has_states
        self.has_states.add(weight)
        if block is not None:
            self.gradients[weight] = block

        def replace(_: int, kind: ActKind, made: Block | None) -> None:
            self._replace(kind, weight, made)

        self.optimizer.step([stepped(weight[0])], of=TRAINED, first=first, replace=replace)
        if weight in self.gradients:
            self.ledger.free(self.gradients.pop(weight))

    def zero_grad(self) -> None:
        """Gradients go in the order of the parameters."""
        if self.gradients:
            found = [self.gradients[each] for each in self.weights if each in self.gradients]
            self.ledger.free_all(found)
            self.gradients.clear()

    def gradient_ready(self, weight: Weight, block: Block) -> None:
        """Take a gradient that autograd finished; one that is there already takes it up."""
        if self.optimizer.in_backward:
            self._step_in_backward(weight, block)
        elif self._leaves_gpu(weight[0]) or weight in self.gradients:
            self.ledger.free(block)
        else:
            self.gradients[weight] = block
