"""What is held between steps where nothing is sharded, and what a moment of the step adds."""

from memplan.graph.tape import Tape
from memplan.graph.tensors import allocated_bytes
from memplan.memory.account import ComponentKind, Entry
from memplan.memory.rank import RankInput
from memplan.memory.step import Height
from memplan.training.optimizers import OPTIMIZERS


def load_entries(given: RankInput) -> list[Entry]:
    """What is there once the model is on the GPU."""
    return [
        Entry(ComponentKind.PARAMETERS, parameter_bytes(given.tape), "every weight once"),
        buffer_entry(given.tape),
    ]


def buffer_entry(tape: Tape) -> Entry:
    """Tables that the model keeps beside its weights."""
    return Entry(ComponentKind.BUFFERS, tape.buffers_bytes, "masks and position tables")


def state_entries(given: RankInput) -> list[Entry]:
    """What is held between steps, unsharded."""
    optimizer = OPTIMIZERS[given.setup.optimizer]
    counters = 0
    if optimizer.has_step_counter:
        counters = allocated_bytes(1, given.formats.optimizer_states) * trained_tensors(given.tape)
    states = optimizer.num_states * trainable_state_bytes(given) + counters
    return [
        Entry(ComponentKind.PARAMETERS, parameter_bytes(given.tape), "every weight once"),
        Entry(
            ComponentKind.OPTIMIZER_STATES,
            states,
            f"{optimizer.num_states} x {given.formats.optimizer_states.label} per trained parameter",
        ),
        buffer_entry(given.tape),
        Entry(ComponentKind.INPUTS, given.tape.inputs_bytes, "token ids and labels"),
    ]


def height_entries(height: Height) -> list[Entry]:
    """What one moment of the step adds to the states."""
    return [
        Entry(ComponentKind.GRADIENTS, height.gradients_bytes, "gradients finished so far"),
        Entry(ComponentKind.ACTIVATIONS, height.activations_bytes, "kept for the backward pass"),
        Entry(ComponentKind.LOGITS_AND_LOSS, height.loss_bytes, "the head and its loss"),
        Entry(ComponentKind.TEMPORARIES, height.temporaries_bytes, "inside or between operations"),
    ]


def parameter_bytes(tape: Tape) -> int:
    """Every parameter as the tape holds it, each rounded up to the allocator's block [bytes]."""
    return sum(
        parameter.storage.num_bytes * segment.num_copies
        for segment in tape.segments
        for parameter in segment.parameters
    )


def trainable_state_bytes(given: RankInput) -> int:
    """One optimizer state for every trained parameter [bytes]."""
    dtype = given.formats.optimizer_states
    return sum(
        allocated_bytes(parameter.numel, dtype) * segment.num_copies
        for segment in given.tape.segments
        for parameter in segment.parameters
        if parameter.requires_grad and not parameter.unused
    )


def trained_tensors(tape: Tape) -> int:
    """How many tensors the optimizer steps."""
    return sum(
        segment.num_copies
        for segment in tape.segments
        for parameter in segment.parameters
        if parameter.requires_grad and not parameter.unused
    )
