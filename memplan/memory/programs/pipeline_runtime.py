"""What holds the tensors that go from one pipeline stage to the next, beside the passes themselves."""

from collections.abc import Mapping

from memplan.fast_dataclass import dataclass
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import ALLOCATION_ROUNDING, Tensor, allocated_bytes
from memplan.memory.account import ComponentKind
from memplan.memory.replaying.ledger import Block, Ledger
from memplan.training.splitting.parallelism import (
    PipelineParallel,
    PipelineRuntime,
    PipelineSchedule,
)
from memplan.training.splitting.schedules import Pass, PassKind

_BUFFERS = ComponentKind.COMMUNICATION_BUFFERS
_RECEIVED = "received activations, a buffer for each micro-batch"
_GRADIENTS = "received gradients, a buffer for each micro-batch"
_KEPT = "gradients of received activations, kept until the next step"
_SENT = "what was sent last"
_SHARED = "a buffer that receives activations and gradients"
_IN_SLOTS = "logits of earlier micro-batches, in the pipeline's slots"
_RECEIVED_IN_SLOTS = "what they were made from, and its gradient, kept by their graph"


@dataclass(frozen=True, kw_only=True, slots=True)
class StageLink:
    """What a stage receives and returns."""

    received_bytes: int
    """Of the stage before; 0 on the first one."""
    returned_bytes: int
    """To the stage behind, or the logits of the last one."""
    is_first: bool
    is_last: bool

    @classmethod
    def of(cls, tape: Tape) -> "StageLink":
        """Read off a stage's tape."""
        place = tape.options.stage
        assert place is not None
        received = 0 if place.is_first else _bytes(tape.leaves[0])
        output = tape.segments[-1].output
        assert output is not None
        returned = logits_bytes(tape) if place.is_last else _bytes(output)
        return cls(
            received_bytes=received,
            returned_bytes=returned,
            is_first=place.is_first,
            is_last=place.is_last,
        )


def _bytes(tensor: Tensor) -> int:
    return allocated_bytes(tensor.numel, tensor.dtype)


def logits_bytes(tape: Tape) -> int:
    """What the last stage returns to its loop [bytes]; 0 where no logits are made as a whole."""
    held = [
        tensor.storage.num_bytes
        for operation in tape.segments[-1].operations
        for tensor in operation.outputs
        if tensor.storage.held
    ]
    return max(held, default=0)


class Runtime:
    """Holds nothing of its own: buffers come with the passes, and go with them (Megatron-core)."""

    def __init__(
        self, pipeline: PipelineParallel, links: Mapping[int, StageLink], ledger: Ledger
    ) -> None:
        self.pipeline = pipeline
        self.links = links
        self.ledger = ledger

    def begin(self) -> None:
        """Before the first step."""

    def begin_step(self) -> None:
        """A step begins."""

    def before_forward(self, each: Pass) -> None:
        """A forward pass begins."""

    def after_forward(self, each: Pass) -> None:
        """A forward pass is over, and what it returned is on its way."""

    def after_backward(self, each: Pass) -> None:
        """A backward pass, or that of the inputs or the weights alone, is over."""

    def end_step(self) -> None:
        """All passes are over, the optimizer has not run."""


class TorchRuntime(Runtime):
    """``torch.distributed.pipelining`` (torch 2.13, stage.py and schedules.py).

    Receive buffers are made for all micro-batches before the first step, and stay
    (``_setup_forward_recv_info``, ``_create_grad_recv_info``). 1F1B holds what it sent last in variables.
    """

    def __init__(
        self, pipeline: PipelineParallel, links: Mapping[int, StageLink], ledger: Ledger
    ) -> None:
        super().__init__(pipeline, links, ledger)
        self.has_variables = pipeline.schedule is PipelineSchedule.ONE_F_ONE_B
        self.output: Block | None = None
        """The last stage's logits of the forward pass before, once its backward pass is over."""
        self.sent: Block | None = None
        """The gradient that was sent last."""
        self.kept: list[Block] = []
        """Until the next step begins."""
        self.turn = next((number for number in links if number + 1 in links), None)
        """A stage whose next one is on this rank too: what goes between them is handed over as it is."""
        self.handed: dict[int, Block] = {}
        """Buffers of that next one, by micro-batch, where they are none of the stage's outputs."""
        self.losses: list[Block] = []
        """Of micro-batches whose backward pass is over."""

    def begin(self) -> None:
        """Receive buffers, for activations stage by stage, then for gradients, the last stage first."""
        count = self.pipeline.num_micro_batches
        for number, link in self.links.items():
            for batch in range(0 if link.is_first else count):
                block = self.ledger.allocate(link.received_bytes, 0, _BUFFERS, _RECEIVED)
                if self.turn is not None and number == self.turn + 1:
                    self.handed[batch] = block
        for link in reversed([*self.links.values()]):
            for _ in range(0 if link.is_last else count):
                self.ledger.allocate(link.returned_bytes, 0, _BUFFERS, _GRADIENTS)

    def begin_step(self) -> None:
        """``clear_runtime_states``."""
        self.ledger.free_all(self.kept)
        self.kept.clear()

    def after_forward(self, each: Pass) -> None:
        """The loop's variable holds the new output now; the next stage's buffer, if that is here, too
        (``set_local_fwd_input``)."""
        if each.stage == self.turn:
            self.ledger.free(self.handed.pop(each.micro_batch))
        self._drop(self.output)
        self.output = None

    def after_backward(self, each: Pass) -> None:
        """What is sent stays until the next gradient is; logits until the next forward pass is over."""
        link = self.links[each.stage]
        if each.stage == self.turn and each.kind is not PassKind.INPUT:
            # The output outlives its graph, as the next stage's buffer.
            block = self.ledger.allocate(link.returned_bytes, 0, _BUFFERS, _RECEIVED)
            self.handed[each.micro_batch] = block
        if each.kind is PassKind.WEIGHT:
            return
        # Of a stage whose previous one is here the gradient is that one's buffer.
        is_handed = self.turn is not None and each.stage == self.turn + 1
        if each.kind is PassKind.INPUT and not link.is_first and not is_handed:
            self.kept.append(self.ledger.allocate(link.received_bytes, 0, _BUFFERS, _KEPT))
        if link.is_last:
            self._keep_loss(link)
        if not self.has_variables:
            return
        if not link.is_first:
            made = self.ledger.allocate(link.received_bytes, 0, _BUFFERS, _SENT)
            self._drop(self.sent)
            self.sent = made
        if link.is_last and link.returned_bytes and not self.pipeline.returns_outputs:
            kind = ComponentKind.LOGITS_AND_LOSS
            self.output = self.ledger.allocate(link.returned_bytes, 0, kind, "the logits before")

    def _keep_loss(self, link: StageLink) -> None:
        """The schedule holds every loss until its step is over (``_internal_losses``)."""
        kind = ComponentKind.LOGITS_AND_LOSS
        size = ALLOCATION_ROUNDING
        self.losses.append(self.ledger.allocate(size, 0, kind, "losses of the step"))
        if self.pipeline.returns_outputs:
            name = "logits of all micro-batches (return_outputs)"
            self.kept.append(self.ledger.allocate(link.returned_bytes, 0, kind, name))

    def _drop(self, block: Block | None) -> None:
        if block is not None:
            self.ledger.free(block)

    def end_step(self) -> None:
        """The schedule's function returns, and its variables go."""
        for block in (self.output, self.sent):
            self._drop(block)
        self.output = self.sent = None
        self.ledger.free_all(self.losses)
        self.losses.clear()
        last = next((link for link in self.links.values() if link.is_last), None)
        if self.pipeline.returns_outputs and last is not None:
            whole = self.pipeline.num_micro_batches * last.returned_bytes
            kind, name = ComponentKind.LOGITS_AND_LOSS, "the logits joined (return_outputs)"
            self.ledger.use(whole, kind=kind, name=name)


class DeepSpeedRuntime(Runtime):
    """``PipelineEngine`` (DeepSpeed 0.19.8, runtime/pipe/engine.py).

    One buffer receives activations and gradients alike (``_allocate_or_extend_buffers``). On the last
    stage a slot keeps the logits of the micro-batch that used it last, and their graph what was received
    and its gradient, until another one's logits take the slot, in the next step too.
    """

    def __init__(
        self, pipeline: PipelineParallel, links: Mapping[int, StageLink], ledger: Ledger
    ) -> None:
        super().__init__(pipeline, links, ledger)
        (self.link,) = links.values()
        self.slots: dict[int, list[Block]] = {}
        """Of the last stage, what is left in each."""
        self.losses: list[Block] = []
        """Of a step, until the next one begins (``fwd_outputs``)."""

    def begin(self) -> None:
        """The buffer, made when something is received first."""
        link = self.link
        size = link.received_bytes or (0 if link.is_last else link.returned_bytes)
        self.ledger.allocate(size, 0, _BUFFERS, _SHARED)

    def begin_step(self) -> None:
        """``fwd_outputs`` is a new list."""
        self.ledger.free_all(self.losses)
        self.losses.clear()

    def before_forward(self, each: Pass) -> None:
        """Its slot's content goes: when logits take its place, before the loss of these is computed."""
        if self.link.is_last:
            self.ledger.free_all(self.slots.pop(each.micro_batch % NUM_SLOTS, ()))

    def after_backward(self, each: Pass) -> None:
        """The slot keeps what it has; other stages send the gradient and let go of both at once."""
        link = self.link
        if not link.is_last:
            return
        kind, size = ComponentKind.LOGITS_AND_LOSS, ALLOCATION_ROUNDING
        self.losses.append(self.ledger.allocate(size, 0, kind, "losses of the step"))
        self.slots[each.micro_batch % NUM_SLOTS] = [
            self.ledger.allocate(link.returned_bytes, 0, kind, _IN_SLOTS),
            self.ledger.allocate(link.received_bytes, 0, _BUFFERS, _RECEIVED_IN_SLOTS),
            self.ledger.allocate(link.received_bytes, 0, _BUFFERS, _RECEIVED_IN_SLOTS),
        ]


NUM_SLOTS = 2
"""Of the last stage (``num_pipe_buffers``)."""

_KINDS = {
    PipelineRuntime.TORCH: TorchRuntime,
    PipelineRuntime.MEGATRON: Runtime,
    PipelineRuntime.DEEPSPEED: DeepSpeedRuntime,
}


def runtime_of(
    pipeline: PipelineParallel, links: Mapping[int, StageLink], ledger: Ledger
) -> Runtime:
    """The runtime of a pipeline's engine, over a rank's own stages by their numbers."""
    return _KINDS[pipeline.runtime](pipeline, links, ledger)
