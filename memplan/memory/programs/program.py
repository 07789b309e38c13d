"""A training run on one rank, written into a ledger: loading, steps, micro-batches.

``Program`` is the plain loop on one GPU; an engine overrides what it does otherwise. The order is that
of a usual loop: forward, backward, ``optimizer.step()``, ``optimizer.zero_grad(set_to_none=True)``.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Protocol

from memplan.dtypes import DType
from memplan.graph.declaration import declared_parameters
from memplan.graph.segments import Segment
from memplan.graph.tape import Tape
from memplan.graph.tensors import ALLOCATION_ROUNDING, Parameter, allocated_bytes
from memplan.memory.account import ComponentKind, HostMemory
from memplan.memory.graph_breaks import returns_all_at_once, unseen_of_compilation
from memplan.memory.ledger import Block, Ledger, Part
from memplan.memory.playback import Acts, Playback, Stops
from memplan.memory.rank import RankInput
from memplan.memory.tally import Tally, TallyPlayback
from memplan.training.optimizers import OPTIMIZERS, StatesOf
from memplan.units import ceil_div

Shape = tuple[int, ...]
"""Of a tensor that an optimizer steps."""
Weight = tuple[Parameter, int]
"""A parameter of a segment, and which of the segment's copies it is of."""

COUNTER_BYTES = ALLOCATION_ROUNDING
"""A scalar, as the allocator rounds it up."""

MAX_MICRO_BATCHES = 4
"""Of a step that are played out: the first, the last, and two of those between, which ask for the same
blocks again and again. More of them changed neither the reserved peak nor the least capacity of GPT-2
under any engine; FSDP1 needs that many."""


class Player(Protocol):
    """Who writes the model's own blocks into a ledger, pass by pass."""

    def fetch_batch(self) -> None:
        """The first batch comes to the GPU."""

    def forward(self) -> None:
        """Every segment's forward pass."""

    def return_loss(self) -> None:
        """The model has returned: its outputs but the loss go."""

    def backward(self) -> None:
        """Every segment's backward pass."""

    def let_go(self) -> None:
        """The loss goes, and what its graph still holds."""


class Program:
    """The plain loop: nothing is sharded, every gradient stays where autograd put it."""

    weight_words: Mapping[ComponentKind, str] = {
        ComponentKind.PARAMETERS: "every weight once",
        ComponentKind.MASTER_WEIGHTS: "an fp32 copy of each trained parameter",
        ComponentKind.GRADIENTS: "one for each trained parameter",
        ComponentKind.GATHERED_PARAMETERS: "whole parameters of the units in use",
    }
    """What blocks of single weights are, in words."""
    is_even = True
    sum_stream = 0
    num_steps = 4
    """Steps of a run. Two give the reserved peak of 66 of 68 runs of PyTorch's CUDA build, and the least
    capacity of fewer."""

    def __init__(self, given: RankInput, ledger: Ledger, *, workspace_bytes: int = 0) -> None:
        self.given = given
        self.ledger = ledger
        self.takes_all_at_once = returns_all_at_once(given.setup)
        self.playback: Player
        if isinstance(ledger, Tally):
            self.playback = TallyPlayback(given.tape, given.passes, ledger, self)
        else:
            self.playback = Playback(
                given.tape, given.passes, ledger, self, workspace_bytes=workspace_bytes
            )
        self.weights: list[Weight] = list(weights_of(given))
        """In the order of ``named_parameters()``."""
        self.gradients: dict[Weight, Block] = {}
        self.left_out: tuple[str, ...] = unseen_of_compilation(given.setup, given.tape)
        """What is not modelled, in words."""
        self.unsaved: tuple[str, ...] = ()
        """Settings that save memory and are not modelled, in words."""

    # -- a run -----------------------------------------------------------------------------------

    def run(self, *, num_steps: int | None = None) -> None:
        """Load, then train; the optimizer's states come with the first step."""
        self.start()
        for step in range(num_steps or self.num_steps):
            steps = self.given.setup.gradient_accumulation_steps
            self.train(step, num_micro_batches=min(steps, MAX_MICRO_BATCHES))

    def start(self) -> None:
        """Load, and fetch the first batch."""
        self.ledger.enter(Part.LOAD)
        self.load()
        self.ledger.enter(Part.FORWARD)
        self.playback.fetch_batch()

    def settle(self, *, num_micro_batches: int) -> None:  # noqa: ARG002
        """Come to where every further step is like the last: here, to where there are states."""
        self.ledger.enter(Part.STEP)
        self.optimizer_step(first=True)

    def train(self, step: int, *, num_micro_batches: int) -> None:
        """One step: every micro-batch, and the update."""
        for micro_batch in range(num_micro_batches):
            last = micro_batch == num_micro_batches - 1
            self.micro_batch(step, first=not micro_batch, last=last)
        self.ledger.enter(Part.STEP, step)
        self.optimizer_step(first=step == 0)
        self.zero_grad()

    def load(self) -> None:
        """Every weight, and each buffer where its module stands among them."""
        places = buffers_before(self.given.tape)
        options = self.given.tape.options
        if options.quantization is not None:
            from memplan.memory.programs.quantized import load_quantized  # only then

            load_quantized(self.ledger, self.weights, places, options)
            return
        if not places:
            self.load_weights()
            return
        for weight in (*self.weights, None):
            for size, words in places.get(weight, ()):
                self.ledger.allocate(size, 0, ComponentKind.BUFFERS, words)
            if weight is not None:
                size = weight[0].storage.num_bytes
                self.ledger.allocate(size, 0, ComponentKind.PARAMETERS, weight)

    def load_weights(self) -> dict[Weight, Block]:
        """Every weight, whole, in the format it is kept in."""
        sizes = [(weight[0].storage.num_bytes, weight) for weight in self.weights]
        blocks = self.ledger.allocate_all(sizes, ComponentKind.PARAMETERS)
        return dict(zip(self.weights, blocks, strict=True))

    def load_buffers(self) -> None:
        """Tables that the model keeps beside its weights."""
        for each in self.given.tape.buffers:
            for _ in range(each.segment.repeat):
                self.ledger.allocate(each.num_bytes, 0, ComponentKind.BUFFERS, each.words)

    def micro_batch(self, step: int, *, first: bool, last: bool) -> None:  # noqa: ARG002
        """Forward and backward once."""
        self.ledger.enter(Part.FORWARD, step)
        self.playback.forward()
        self.end_forward()
        self.playback.return_loss()
        self.ledger.enter(Part.BACKWARD, step)
        self.begin_backward()
        self.playback.backward()
        self.end_backward()
        self.playback.let_go()

    def optimizer_step(self, *, first: bool) -> None:
        """States in the first step; then what the optimizer copies."""
        stepped: dict[DType, list[Shape]] = {}
        for parameter, _ in self.weights:
            if is_trained(parameter):
                stepped.setdefault(parameter.dtype, []).append(parameter.shape)
        for dtype, shapes in stepped.items():
            step_optimizer(
                self.given, self.ledger, shapes, dtype, of="every trained parameter", first=first
            )

    def zero_grad(self) -> None:
        """Gradients go in the order of the parameters."""
        if self.gradients:
            found = [self.gradients[each] for each in self.weights if each in self.gradients]
            self.ledger.free_all(found)
            self.gradients.clear()

    def save(self) -> None:
        """Write a checkpoint: what passes through the GPU on its way."""

    def host_memory(self) -> HostMemory:
        """CPU RAM: the model while it is loaded, and its share of what one rank writes for all."""
        whole = sum(weight[0].storage.num_bytes for weight in self.weights)
        share = ceil_div(whole, self.given.setup.gpus_per_node)
        return HostMemory(load_bytes=whole, save_bytes=share)

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
    """Every parameter of every copy of its segment, in the order of ``named_parameters()``."""
    for segment, parameters in declared_parameters(given.tape):
        for copy in range(segment.num_copies):
            for parameter in parameters:
                yield parameter, copy


def buffers_before(tape: Tape) -> dict[Weight | None, list[tuple[int, str]]]:
    """The buffers that stand before each weight, their bytes and words; None: behind all of them."""
    found: dict[Weight | None, list[tuple[int, str]]] = {}
    for each in tape.buffers:
        segment = each.segment
        for copy in range(segment.repeat):
            anchor = _next_weight(tape, segment, copy, each.position)
            found.setdefault(anchor, []).append((each.num_bytes, each.words))
    return found


def _next_weight(tape: Tape, segment: Segment, copy: int, position: int) -> Weight | None:
    """The weight declared next: of this copy, of the next one, or of a later segment."""
    if position < len(segment.parameters):
        return segment.parameters[position], copy
    if segment.parameters and copy + 1 < segment.repeat:
        return segment.parameters[0], copy + 1
    later = (each.parameters for each in tape.segments[segment.index + 1 :] if each.parameters)
    parameters = next(later, None)
    return None if parameters is None else (parameters[0], 0)


def is_trained(parameter: Parameter) -> bool:
    """Whether the optimizer steps it."""
    return parameter.requires_grad and not parameter.unused


def step_optimizer(
    given: RankInput,
    ledger: Ledger,
    stepped: Sequence[Shape],
    dtype: DType,
    *,
    of: str,
    first: bool,
) -> None:
    """One step over tensors of these shapes; states have a dtype, and are ``of`` something, in words."""
    row = OPTIMIZERS[given.setup.optimizer]
    if first:
        states = f"{row.num_states} x {dtype.label} of {of}"
        ledger.allocate_all(
            [
                (
                    size,
                    COUNTER
                    if size == COUNTER_BYTES and number == 0 and row.has_step_counter
                    else states,
                )
                for shape in stepped
                for number, size in enumerate(sizes_of(row.states, shape, dtype))
                if size
            ],
            ComponentKind.OPTIMIZER_STATES,
        )
    copies = [size for shape in stepped for size in sizes_of(row.step_copies, shape, dtype) if size]
    if copies:
        ledger.use(
            *copies, kind=ComponentKind.TEMPORARIES, name="copies the optimizer makes of a state"
        )


COUNTER = "a step counter for each tensor"


@lru_cache(maxsize=1024)
def sizes_of(made: StatesOf, shape: Shape, dtype: DType) -> tuple[int, ...]:
    """What an optimizer makes of one tensor, as the allocator rounds it up [bytes]."""
    return tuple(allocated_bytes(numel, each) for numel, each in made(shape, dtype))
