"""What segments and whole tapes begin with, and what they leave behind them."""

from collections.abc import Collection
from typing import TypeVar

from memplan.graph.core.segments import Operation, Segment, SegmentComponent
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import ALLOCATION_ROUNDING, Storage, Tensor

_Noted = TypeVar("_Noted")


def hand_back(segment: Segment, gradients: dict[Tensor, _Noted]) -> None:
    """What one repetition leaves of its further inputs' gradients is what the one before it is given."""
    for before, after in segment.streams:
        if before in gradients:
            gradients[after] = gradients.pop(before)


def behind_weights(tape: Tape, captured: Collection[Operation]) -> list[Storage]:
    """What only operations keep that no weight's gradient comes behind: the graph lets them go.

    Of the last segment, which has weights: behind them are the loss, and on the way to it the logits.
    """
    last = tape.segments[-1]
    if last.checkpointed:
        return []
    needed: set[Tensor] = set()
    kept: set[Storage] = set()
    found: dict[Storage, None] = {}
    for operation in reversed(last.operations):
        if operation in captured or not needed.isdisjoint(operation.outputs):
            needed.update(operation.inputs)
            kept.update(operation.held)
            continue
        found.update(dict.fromkeys(operation.held))
        if last.component is SegmentComponent.LOGITS_AND_LOSS:
            made = (tensor.storage for tensor in operation.outputs)
            found.update(dict.fromkeys(each for each in made if each.held))
    if last.component is SegmentComponent.LOGITS_AND_LOSS:
        logits = {each.storage for operation in captured for each in operation.outputs}
        found.update(dict.fromkeys(each for each in logits if each.held))
        if last.output is not None:
            found[last.output.storage] = None
    return [each for each in found if each not in kept and each.segment == last.index]


def pinned_away_bytes(tape: Tape) -> int:
    """CPU RAM that a forward pass fills with what it keeps [bytes]."""
    return sum(
        segment.repeat * away.pinned_bytes
        for segment in tape.segments
        for handed in (*(each.handed for each in segment.operations), (segment.input_away,))
        for away in handed
        if away is not None
    )


def batch_of(tape: Tape) -> list[int]:
    """The blocks of a batch [bytes]: a model that is given none still has one, be it of a single number."""
    return [each for each in tape.inputs if each] or [ALLOCATION_ROUNDING]


def gradient_stays(tape: Tape) -> bool:
    """Whether the gradient of what the tape returns lies in a pipeline's buffer, which is not its own."""
    stage = tape.options.stage
    return stage is not None and not stage.is_last and stage.runtime.keeps_gradients


def seed_of(tape: Tape) -> Storage | None:
    """As large as the gradient that a pipeline's stage begins its backward pass with, where that is of its own;
    a loss's is held by who calls ``backward`` (``loss_of``)."""
    output = tape.segments[-1].output
    return None if output is None or is_lent(tape) else output.storage


def is_lent(tape: Tape) -> bool:
    """Whether somebody else holds the gradient that a backward pass begins with until that is over."""
    return gradient_stays(tape) or loss_of(tape) is not None


def loss_of(tape: Tape) -> Storage | None:
    """The number that ``backward`` is called of; None: another stage has it, it is made of what the model returns, or
    its operations are not written down."""
    last = tape.segments[-1]
    is_loss = last.component is SegmentComponent.LOGITS_AND_LOSS
    if not is_loss or last.output is None or last.output.numel > 1:
        return None
    return last.output.storage


def lets_go(tape: Tape) -> Storage | None:
    """What a stage returns, where it is let go once it is sent (``deallocate_output_tensor``)."""
    stage, last = tape.options.stage, tape.segments[-1]
    if stage is None or stage.is_last or not stage.runtime.lets_outputs_go or last.output is None:
        return None
    storage = last.output.storage
    kept = storage.held or any(storage in each.held for each in last.operations)
    return None if kept else storage


def kept_by(segment: Segment) -> list[Storage]:
    """Storages of earlier segments that a segment keeps, its input left out.

    What is checkpointed keeps all that it reads, but where no gradient comes to it nothing.
    """
    output = segment.output
    runs_again = segment.checkpointed and (output is None or output.requires_grad)
    return segment.external_reads if runs_again else segment.external_saves
