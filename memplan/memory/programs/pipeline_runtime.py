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
_EVALUATED = "outputs of an evaluation, kept until the next step"
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
        received = 0 if place.is_first else sum(map(_bytes, tape.leaves))
        return cls.between(tape, received)

    @classmethod
    def between(cls, tape: Tape, received_bytes: int) -> "StageLink":
        """Of a stage that is sent so much."""
        place = tape.options.stage
        assert place is not None
        last = tape.segments[-1]
        assert last.output is not None
        sent = sum(map(_bytes, (last.output, *last.further_outputs)))
        returned = logits_bytes(tape) if place.is_last else sent
        return cls(
            received_bytes=received_bytes,
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
        self.holds_nothing = type(self) is Runtime
        """Beside the passes."""
        self.evaluated: Block | None = None
        """What an evaluation's forward pass sent last."""

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

    # -- evaluation, with links of its own ---------------------------------------------------------

    def rest(self) -> None:
        """Hold what is held behind a step that nobody played here."""
        self.begin()

    def close(self) -> None:
        """Let go of everything."""

    def begin_evaluation(self, links: Mapping[int, StageLink]) -> None:
        """Forward passes alone are next."""

    def before_evaluated(self, each: Pass, link: StageLink) -> None:
        """One of them begins."""

    def after_evaluated(self, each: Pass, link: StageLink) -> None:  # noqa: ARG002
        """It is over. The loop's variable names what was sent last until the next output is there.

        (megatron/core/pipeline_parallel/schedules.py, ``output_tensor`` under ``forward_only``)
        """
        made = None
        if not link.is_last:
            made = self.ledger.allocate(link.returned_bytes, 0, _BUFFERS, _SENT)
        self._drop(self.evaluated)
        self.evaluated = made

    def end_evaluation(self, links: Mapping[int, StageLink], num_micro_batches: int) -> None:  # noqa: ARG002
        """All of them are over."""
        self._drop(self.evaluated)
        self.evaluated = None

    def resume(self) -> None:
        """The next step begins."""

    def _drop(self, block: Block | None) -> None:
        if block is not None:
            self.ledger.free(block)


class TorchRuntime(Runtime):
    """``torch.distributed.pipelining`` (torch 2.13, stage.py and schedules.py).

    Receive buffers are made for all micro-batches before the first step, and stay
    (``_setup_forward_recv_info``, ``_create_grad_recv_info``). 1F1B holds what it sent last in variables.
    Whoever turns from training to evaluation, or back, has them made anew (``_initialize_pp_stages``).
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
        self.received: dict[tuple[int, int], Block] = {}
        """Buffers by stage and micro-batch, where they are none of the stage before's outputs."""
        self.gradients: dict[tuple[int, int], Block] = {}
        """The same for what comes back."""
        self.losses: list[Block] = []
        """Of micro-batches whose backward pass is over."""
        self.is_evaluating = False
        """Its buffers were made for an evaluation."""

    def begin(self) -> None:
        """Receive buffers, for activations stage by stage, then for gradients, the last stage first."""
        self._make_received(self.links)
        count = self.pipeline.num_micro_batches
        for number, link in reversed([*self.links.items()]):
            size = link.returned_bytes
            for batch in range(0 if link.is_last else count):
                self._renew(self.gradients, (number, batch), size, _GRADIENTS)

    def _make_received(self, links: Mapping[int, StageLink]) -> None:
        for number, link in links.items():
            size = link.received_bytes
            for batch in range(0 if link.is_first else self.pipeline.num_micro_batches):
                self._renew(self.received, (number, batch), size, _RECEIVED)

    def _renew(
        self, blocks: dict[tuple[int, int], Block], key: tuple[int, int], size: int, name: str
    ) -> None:
        """A buffer is made, and takes the place of the one before."""
        made = self.ledger.allocate(size, 0, _BUFFERS, name)
        self._drop(blocks.get(key))
        blocks[key] = made

    def begin_step(self) -> None:
        """``clear_runtime_states``."""
        self.ledger.free_all(self.kept)
        self.kept.clear()

    def after_forward(self, each: Pass) -> None:
        """The loop's variable holds the new output now; the next stage's buffer, if that is here, too
        (``set_local_fwd_input``)."""
        if each.stage == self.turn:
            self.ledger.free(self.received.pop((each.stage + 1, each.micro_batch)))
        self._drop(self.output)
        self.output = None

    def after_backward(self, each: Pass) -> None:
        """What is sent stays until the next gradient is; logits until the next forward pass is over."""
        link = self.links[each.stage]
        if each.stage == self.turn and each.kind is not PassKind.INPUT:
            # The output outlives its graph, as the next stage's buffer.
            block = self.ledger.allocate(link.returned_bytes, 0, _BUFFERS, _RECEIVED)
            self.received[each.stage + 1, each.micro_batch] = block
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

    def close(self) -> None:
        """No buffer is left."""
        self.ledger.free_all([*self.received.values(), *self.gradients.values()])
        self.received.clear()
        self.gradients.clear()

    def begin_evaluation(self, links: Mapping[int, StageLink]) -> None:
        """``_PipelineSchedule.eval``: the schedule of training, whose backward passes do nothing."""
        self.begin_step()
        self._make_received(links)
        self.is_evaluating = True

    def after_evaluated(self, each: Pass, link: StageLink) -> None:
        """``fwd_cache`` keeps the output; of a stage whose next one is here it is that one's buffer."""
        if each.stage == self.turn:
            self.ledger.free(self.received.pop((each.stage + 1, each.micro_batch)))
        if not link.is_last:
            self.kept.append(self.ledger.allocate(link.returned_bytes, 0, _BUFFERS, _EVALUATED))
            return
        kind = ComponentKind.LOGITS_AND_LOSS
        self.kept.append(self.ledger.allocate(link.returned_bytes, 0, kind, _EVALUATED))
        size = ALLOCATION_ROUNDING
        self.losses.append(self.ledger.allocate(size, 0, kind, "losses of an evaluation"))

    def end_evaluation(self, links: Mapping[int, StageLink], num_micro_batches: int) -> None:
        """The last stage's logits are joined, whether the caller wants them or not (``_merge_outputs``)."""
        last = next((link for link in links.values() if link.is_last), None)
        if last is not None:
            kind, name = ComponentKind.LOGITS_AND_LOSS, "the logits of an evaluation, joined"
            self.ledger.use(num_micro_batches * last.returned_bytes, kind=kind, name=name)
        self.ledger.free_all(self.losses)
        self.losses.clear()

    def resume(self) -> None:
        """``clear_runtime_states``; then buffers for training take the place of the others."""
        if self.is_evaluating:
            self.begin_step()
            self.begin()
            self.is_evaluating = False


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
        self.buffer: Block | None = None
        """The one that receives."""
        self.slots: dict[int, list[Block]] = {}
        """Of the last stage, or of an evaluation, the output left in each."""
        self.inputs: dict[int, list[Block]] = {}
        """What it was made from, and its gradient where there is one."""
        self.losses: list[Block] = []
        """Of a step, until the next one begins (``fwd_outputs``)."""

    def begin(self) -> None:
        """The buffer, made when something is received first."""
        link = self.link
        size = link.received_bytes or (0 if link.is_last else link.returned_bytes)
        self.buffer = self.ledger.allocate(size, 0, _BUFFERS, _SHARED)

    def rest(self) -> None:
        """The last stage's slots are full."""
        super().rest()
        if self.link.is_last:
            for number in range(min(NUM_SLOTS, self.pipeline.num_micro_batches)):
                self._fill(number)

    def close(self) -> None:
        """Neither buffer nor slots are left."""
        self._drop(self.buffer)
        self.buffer = None
        for slots in (self.slots, self.inputs):
            for blocks in slots.values():
                self.ledger.free_all(blocks)
            slots.clear()

    def begin_step(self) -> None:
        """``fwd_outputs`` is a new list."""
        self.ledger.free_all(self.losses)
        self.losses.clear()

    def before_forward(self, each: Pass) -> None:
        """Its slot's content goes: when logits take its place, before the loss of these is computed.

        Of stages before the last one it is what an evaluation left.
        """
        for slots in (self.slots, self.inputs):
            self.ledger.free_all(slots.pop(each.micro_batch % NUM_SLOTS, ()))

    def after_backward(self, each: Pass) -> None:
        """The slot keeps what it has; other stages send the gradient and let go of both at once."""
        link = self.link
        if not link.is_last:
            return
        kind, size = ComponentKind.LOGITS_AND_LOSS, ALLOCATION_ROUNDING
        self.losses.append(self.ledger.allocate(size, 0, kind, "losses of the step"))
        self._fill(each.micro_batch % NUM_SLOTS)

    def _fill(self, slot: int) -> None:
        """With logits, what they were made from, and its gradient."""
        kind, link = ComponentKind.LOGITS_AND_LOSS, self.link
        self.slots[slot] = [self.ledger.allocate(link.returned_bytes, 0, kind, _IN_SLOTS)]
        self.inputs[slot] = [self._copy_received(link), self._copy_received(link)]

    def _copy_received(self, link: StageLink) -> Block:
        return self.ledger.allocate(link.received_bytes, 0, _BUFFERS, _RECEIVED_IN_SLOTS)

    def before_evaluated(self, each: Pass, link: StageLink) -> None:
        """What is received is copied into its slot, in the place of what was there."""
        if not link.is_first:
            slot, copied = each.micro_batch % NUM_SLOTS, self._copy_received(link)
            self.ledger.free_all(self.inputs.pop(slot, ()))
            self.inputs[slot] = [copied]

    def after_evaluated(self, each: Pass, link: StageLink) -> None:
        """So is the output, which no one takes out (``InferenceSchedule``)."""
        slot, size = each.micro_batch % NUM_SLOTS, link.returned_bytes
        kind = ComponentKind.LOGITS_AND_LOSS if link.is_last else _BUFFERS
        made = self.ledger.allocate(size, 0, kind, _IN_SLOTS)
        self.ledger.free_all(self.slots.pop(slot, ()))
        self.slots[slot] = [made]


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
