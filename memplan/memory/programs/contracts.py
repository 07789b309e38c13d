"""What programs, their players and a job's other models ask of each other."""

from collections.abc import Mapping
from typing import Protocol

from memplan.graph.core.tensors import Parameter
from memplan.memory.account import ComponentKind, HostMemory
from memplan.memory.beside import When
from memplan.memory.programs.weights import Weight
from memplan.memory.rank import RankInput
from memplan.memory.replaying.ledger import Block, Ledger


class Player(Protocol):
    """Who writes the model's own blocks into a ledger, pass by pass."""

    workspaces: dict[bool, int]
    """What cuBLAS has yet to ask for, in the forward pass's thread and in the other: a process's programs
    share it."""

    def need_workspace(self, *, forward: bool) -> None:
        """A product of matrices is next, in the thread of the one pass or of the other."""

    def fetch_batch(self) -> None:
        """The first batch comes to the GPU."""

    def forward(self) -> None:
        """Every segment's forward pass."""

    def return_loss(self) -> None:
        """The model has returned: its outputs but the loss go."""

    def backward(self) -> None:
        """Every segment's backward pass."""

    def backward_inputs(self) -> None:
        """The backward pass of a pipeline's stage for its input's gradient alone."""

    def backward_weights(self) -> None:
        """The one for the weights' gradients."""

    def let_go(self) -> None:
        """The loss goes, and what its graph still holds."""

    def hand_outputs_over(self, name: str) -> Block:
        """The outputs of a pass without gradients, which somebody else holds; everything else goes."""

    def send(self, micro_batch: int, num_bytes: int, least_bytes: int) -> None:
        """So much of what a parked micro-batch keeps goes to CPU RAM."""

    def park(self, micro_batch: int) -> None:
        """Another pass is to run before this micro-batch's backward one."""

    def resume(self, micro_batch: int) -> None:
        """Go on with it."""


class Company(Protocol):
    """A job's other models, and what they do when."""

    def load(self) -> None:
        """Everything of theirs that stays."""

    def settle(self, *, num_micro_batches: int) -> None:
        """Those that are trained come to where every further step is like the last."""

    def before_step(self, step: int, *, num_micro_batches: int) -> None:
        """What comes before the trained model's part of a step."""

    def run(self, when: When) -> None:
        """Passes that run at a point of it."""

    def evaluate(self, step: int) -> None:
        """What runs between steps."""


class RankProgram(Protocol):
    """A training run on one rank."""

    weight_words: Mapping[ComponentKind, str]
    given: RankInput
    left_out: tuple[str, ...]
    unsaved: tuple[str, ...]

    @property
    def weights(self) -> list[Weight]:
        """In the order of ``named_parameters()``."""

    @property
    def off_gpu_bytes(self) -> int:
        """States of the optimizer that are not on the GPU."""

    def run(self, *, num_steps: int | None = None) -> None:
        """Load, then train."""

    def start(self) -> None:
        """Load, and fetch the first batch."""

    def settle(self, *, num_micro_batches: int) -> None:
        """Come to where every further step is like the last."""

    def train(self, step: int, *, num_micro_batches: int) -> None:
        """One step."""

    def evaluate(self, step: int) -> None:
        """What runs between steps."""

    def save(self) -> None:
        """Write a checkpoint."""

    def host_memory(self) -> HostMemory:
        """CPU RAM that the rank needs."""

    def kept_numel(self, parameter: Parameter) -> int:
        """Elements of a weight that this rank keeps between steps."""


class Steps(Protocol):
    """What is run step by step."""

    ledger: Ledger

    def run_step(self, step: int) -> None:
        """One of its steps."""


def run_steps(program: Steps, num_steps: int) -> None:
    """Run steps, up to one that all later ones are like; ``num_steps`` at most."""
    for step in range(num_steps):
        program.ledger.begin_step()
        program.run_step(step)
        if program.ledger.recurs():
            return
