"""A training run on one rank, written into a ledger: loading, steps, micro-batches.

``Program`` is the plain loop on one GPU; an engine overrides what it does otherwise. The order is that
of a usual loop: forward, backward, ``optimizer.step()``, ``optimizer.zero_grad(set_to_none=True)``.
"""

from collections.abc import Iterable

from memplan.graph.segments import Segment
from memplan.graph.tensors import ALLOCATION_ROUNDING, Parameter, allocated_bytes
from memplan.memory.account import ComponentKind
from memplan.memory.ledger import Block, Ledger, Part
from memplan.memory.playback import Acts, Playback, Stops
from memplan.memory.rank import RankInput
from memplan.training.optimizers import OPTIMIZERS

Weight = tuple[Parameter, int]
"""A parameter of a segment, and which of the segment's copies it is of."""

COUNTER_BYTES = ALLOCATION_ROUNDING
"""A scalar, as the allocator rounds it up."""

MAX_MICRO_BATCHES = 4
"""Of a step that are played out: the first, the last, and two of those between, which ask for the same
blocks again and again. More of them changed neither the reserved peak nor the least capacity of GPT-2
under any engine; FSDP1 needs that many."""


class Program:
    """The plain loop: nothing is sharded, every gradient stays where autograd put it."""

    sum_stream = 0
    num_steps = 4
    """Steps of a run. Two give the reserved peak of 66 of 68 runs of PyTorch's CUDA build, and the least
    capacity of fewer."""

    def __init__(self, given: RankInput, ledger: Ledger, *, workspace_bytes: int = 0) -> None:
        self.given = given
        self.ledger = ledger
        self.playback = Playback(
            given.tape, given.passes, ledger, self, workspace_bytes=workspace_bytes
        )
        self.weights: list[Weight] = list(weights_of(given))
        """In the order of ``named_parameters()``."""
        self.gradients: dict[Weight, Block] = {}

    # -- a run -----------------------------------------------------------------------------------

    def run(self, *, num_steps: int | None = None) -> None:
        """Load, then train; the optimizer's states come with the first step."""
        self.ledger.enter(Part.LOAD)
        self.load()
        self.ledger.enter(Part.FORWARD)
        inputs_bytes = max(self.given.tape.inputs_bytes, ALLOCATION_ROUNDING)
        self.ledger.allocate(inputs_bytes, 0, ComponentKind.INPUTS, "token ids and labels")
        for step in range(num_steps or self.num_steps):
            played = min(self.given.setup.gradient_accumulation_steps, MAX_MICRO_BATCHES)
            for micro_batch in range(played):
                self.micro_batch(step, first=not micro_batch, last=micro_batch == played - 1)
            self.ledger.enter(Part.STEP, step)
            self.optimizer_step(first=step == 0)
            self.zero_grad()

    def load(self) -> None:
        """Every weight, then the buffers."""
        self.load_weights()
        self.load_buffers()

    def load_weights(self) -> dict[Weight, Block]:
        """Every weight, whole, in the format it is kept in."""
        return {
            weight: self.ledger.allocate(
                weight[0].storage.num_bytes, 0, ComponentKind.PARAMETERS, weight
            )
            for weight in self.weights
        }

    def load_buffers(self) -> None:
        """Tables that the model keeps beside its weights."""
        if self.given.tape.buffers_bytes:
            size = self.given.tape.buffers_bytes
            self.ledger.allocate(size, 0, ComponentKind.BUFFERS, "tables beside the weights")

    def micro_batch(self, step: int, *, first: bool, last: bool) -> None:  # noqa: ARG002
        """Forward and backward once."""
        self.ledger.enter(Part.FORWARD, step)
        self.playback.forward()
        self.end_forward()
        self.ledger.enter(Part.BACKWARD, step)
        self.begin_backward()
        self.playback.backward()
        self.end_backward()

    def optimizer_step(self, *, first: bool) -> None:
        """States in the first step; then what the optimizer copies."""
        trained = [
            allocated_bytes(parameter.numel, self.given.formats.optimizer_states)
            for parameter, _ in self.weights
            if is_trained(parameter)
        ]
        step_optimizer(self.given, self.ledger, trained, first=first)

    def zero_grad(self) -> None:
        """Gradients go in the order of the parameters."""
        for weight in self.weights:
            block = self.gradients.pop(weight, None)
            if block is not None:
                self.ledger.free(block)

    # -- where an engine takes part --------------------------------------------------------------

    def before_forward(self, segment: Segment, repetition: int) -> None:
        """A segment's forward pass begins."""

    def after_forward(self, segment: Segment, repetition: int) -> None:
        """It has ended."""

    def end_forward(self) -> None:
        """The loss is there."""

    def begin_backward(self) -> None:
        """``loss.backward()`` is called."""

    def before_backward(self, segment: Segment, repetition: int) -> None:
        """A segment's backward pass begins."""

    def after_backward(self, segment: Segment, repetition: int) -> None:
        """It has ended."""

    def end_backward(self) -> None:
        """All gradients are there."""

    def stops(self, segment: Segment) -> Stops | None:  # noqa: ARG002
        """Where it takes part within a segment; None: nowhere."""
        return None

    def reach(self, segment: Segment, repetition: int, acts: Acts) -> None:
        """A pass is at one of these stops."""

    def gradient_ready(self, weight: Weight, block: Block) -> None:
        """Take a gradient that autograd finished; one that is there already takes it up."""
        if weight in self.gradients:
            self.ledger.free(block)
        else:
            self.gradients[weight] = block


def weights_of(given: RankInput) -> Iterable[Weight]:
    """Every parameter of every copy of its segment."""
    for segment in given.tape.segments:
        for copy in range(segment.num_copies):
            for parameter in segment.parameters:
                yield parameter, copy


def is_trained(parameter: Parameter) -> bool:
    """Whether the optimizer steps it."""
    return parameter.requires_grad and not parameter.unused


def step_optimizer(
    given: RankInput, ledger: Ledger, state_sizes: list[int], *, first: bool
) -> None:
    """One step over tensors whose states have these sizes [bytes]."""
    optimizer = OPTIMIZERS[given.setup.optimizer]
    if first:
        for size in state_sizes:
            if optimizer.has_step_counter:
                ledger.allocate(COUNTER_BYTES, 0, ComponentKind.OPTIMIZER_STATES, "step counter")
            for _ in range(optimizer.num_states):
                ledger.allocate(size, 0, ComponentKind.OPTIMIZER_STATES, "optimizer state")
    if optimizer.num_step_copies:
        copies = state_sizes * optimizer.num_step_copies
        ledger.use(*copies, kind=ComponentKind.TEMPORARIES, name="the optimizer's copy of a state")
