"""A training run on one rank, written into a ledger: loading, steps, micro-batches.

``Program`` is the plain loop on one GPU; an engine overrides what it does otherwise. The order is that
of a usual loop: forward, backward, ``optimizer.step()``, ``optimizer.zero_grad(set_to_none=True)``.
"""

from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, ClassVar

from memplan.graph.core.segments import Segment
from memplan.memory.account import ComponentKind, HostMemory
from memplan.memory.beside import SideLedger, When
from memplan.memory.ends import loss_of
from memplan.memory.graph_breaks import returns_all_at_once, unseen_of_compilation
from memplan.memory.programs.contracts import Company, run_steps
from memplan.memory.programs.updating import Updating
from memplan.memory.rank import RankInput
from memplan.memory.replaying.ledger import Block, Ledger, Part
from memplan.memory.stops import Acts, Stops
from memplan.memory.tally import Tally, TallyPlayback
from memplan.training.activation_offload import ActivationOffload
from memplan.training.choices import AllocatorKind
from memplan.training.jobs import JobKind
from memplan.training.precision import Engine
from memplan.training.setup import TrainingSetup
from memplan.units import ceil_div

if TYPE_CHECKING:
    from memplan.training.splitting.schedules import PassKind

MAX_MICRO_BATCHES = 4
"""Of a step that are played out: the first, the last, and two of those between, which ask for the same
blocks again and again. More of them changed neither the reserved peak nor the least capacity of GPT-2
under any engine; FSDP1 needs that many."""
MAX_EXPANDABLE_MICRO_BATCHES = 16
"""The same with expandable segments: on a card that is just too small pages creep on with every micro-batch.
Of an OPT with five, four had 0.56 % too little."""


_OF_TRL = (ActivationOffload.STREAMED, ActivationOffload.BLOCKING)


class Program(Updating):
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
        super().__init__(given, ledger)
        self.takes_all_at_once = returns_all_at_once(given.setup)
        tally = ledger.ledger if isinstance(ledger, SideLedger) else ledger
        if isinstance(tally, Tally):
            self.playback = TallyPlayback(given.tape, given.passes, tally, self)
        else:
            from memplan.memory.playback import Playback  # only where a run is played out

            self.playback = Playback(
                given.tape, given.passes, ledger, self, workspace_bytes=workspace_bytes
            )
        self.left_out: tuple[str, ...] = unseen_of_compilation(given.setup, given.tape)
        """What is not modelled, in words."""
        self.unsaved: tuple[str, ...] = ()
        """Settings that save memory and are not modelled, in words."""
        self.holds_gradients = given.setup.gradients_held
        """Those of the last step, until the first forward pass of this one is over."""
        self.empties_cache = False
        """Before every micro-batch."""
        if given.setup.offload_activations in _OF_TRL:
            self.empties_cache = loads_bitsandbytes(given.setup)
        self.company: Company | None = None
        """The job's other models; None: there are none."""

    # -- a run -----------------------------------------------------------------------------------

    def run(self, *, num_steps: int | None = None) -> None:
        """Load, then train; the optimizer's states come with the first step."""
        self.start()
        run_steps(self, num_steps or self.num_steps)

    def run_step(self, step: int) -> None:
        """One step, and what follows it."""
        setup = self.given.setup
        expands = setup.allocator is AllocatorKind.EXPANDABLE
        most = MAX_EXPANDABLE_MICRO_BATCHES if expands else MAX_MICRO_BATCHES
        self.train(step, num_micro_batches=min(setup.gradient_accumulation_steps, most))
        self.evaluate(step)

    def start(self) -> None:
        """Load, and fetch the first batch."""
        self.ledger.enter(Part.LOAD)
        if self.company is not None and self.loads_others_first:
            self.company.load()
        self.load()
        self.make_optimizer()
        if self.company is not None:
            if not self.loads_others_first:
                self.company.load()
            self.load_average()
        self.ledger.enter(Part.FORWARD)
        self.playback.fetch_batch()

    @property
    def loads_others_first(self) -> bool:
        """Whether a job's other models are on the card before the engine takes the trained one.

        Trainers prepare them when they are made, and the Trainer's engine the model when training begins
        (TRL 1.16, ``dpo_trainer.py``, ``kto_trainer.py``, ``grpo_trainer.py``); a plain loop's has been moved
        there by then. PPO's prepares the model first (TRL 0.19, ``ppo_trainer.py``: newer ones have none).
        """
        setup = self.given.setup
        return setup.chosen_engine is not Engine.DDP and setup.job.kind is not JobKind.PPO

    def settle(self, *, num_micro_batches: int) -> None:
        """Come to where every further step is like the last: to where there are states, and gradients that stay."""
        if self.company is not None:
            self.company.settle(num_micro_batches=num_micro_batches)
        if self.holds_gradients:
            self.train(0, num_micro_batches=1)
            return
        self.tables.renew_all()
        self.ledger.enter(Part.STEP)
        self.optimizer_step(first=True)

    def evaluate(self, step: int) -> None:
        """What runs between steps."""
        if self.company is not None:
            self.company.evaluate(step)

    def train(self, step: int, *, num_micro_batches: int) -> None:
        """One step: every micro-batch, and the update."""
        if self.company is not None:
            self.company.before_step(step, num_micro_batches=num_micro_batches)
        for micro_batch in range(num_micro_batches):
            last = micro_batch == num_micro_batches - 1
            if self.empties_cache:
                self.ledger.empty_cache()
            self.micro_batch(step, first=not micro_batch, last=last)
        self.ledger.enter(Part.STEP, step)
        self.optimizer_step(first=step == 0)
        if not self.holds_gradients:
            self.zero_grad()

    def micro_batch(self, step: int, *, first: bool, last: bool) -> None:  # noqa: ARG002
        """Forward and backward once."""
        self.ledger.enter(Part.FORWARD, step)
        if self.company is not None:
            self.company.run(When.FIRST)
        self.forward_pass()
        if first and self.holds_gradients:
            self.zero_grad()
        self.ledger.enter(Part.BACKWARD, step)
        self.backward_pass()

    def forward_pass(self) -> None:
        """Forward once."""
        self.playback.forward()
        self.playback.return_loss()

    def backward_pass(self) -> None:
        """Backward once."""
        gradient = self._hold_loss_gradient()
        self.begin_backward()
        self.playback.backward()
        self.end_backward()
        self.ledger.free_all(gradient)
        self.playback.let_go()

    scaled_losses: ClassVar[tuple[str, ...]] = ()
    """What the loss is made into before ``backward`` is called, one of the other, and held as its gradient is."""

    def _hold_loss_gradient(self) -> list[Block]:
        """The loss's own, which ``torch.autograd.backward`` holds until it returns (``_make_grads``)."""
        loss = loss_of(self.given.tape)
        if loss is None or not loss.num_bytes:
            return []
        names = *self.scaled_losses, "gradient of the loss"
        kind = ComponentKind.LOGITS_AND_LOSS
        return [self.ledger.allocate(loss.num_bytes, 0, kind, name) for name in names]

    def prepare_forward(self) -> None:
        """A micro-batch's forward pass through a pipeline's stage is next."""

    def prepare_backward(self, *, last: bool) -> None:
        """One of its backward passes is; after the ``last`` of a step gradients are reduced."""

    def unshard(self) -> None:
        """A pipeline's schedule wants the stage's weights soon."""

    def reshard(self) -> None:
        """It does not want them for the present."""

    def reduce_gradients(self) -> None:
        """The last backward pass of a step through a pipeline's stage is over."""

    def pass_over(self, kind: "PassKind") -> None:
        """What a backward pass that is not played out changes of what is held: here, nothing."""

    def inputs_pass(self) -> None:
        """Backward for the gradient of a stage's input alone."""
        gradient = self._hold_loss_gradient()
        self.playback.backward_inputs()
        self.ledger.free_all(gradient)

    def weights_pass(self) -> None:
        """Backward for the weights' gradients, behind it."""
        self.playback.backward_weights()
        self.end_backward()
        self.playback.let_go()

    def save(self) -> None:
        """Write a checkpoint: what passes through the GPU on its way."""

    def host_memory(self) -> HostMemory:
        """CPU RAM: the model while it is loaded, and its share of what one rank writes for all."""
        whole = sum(each.storage.num_bytes * each.ranks for each, _ in self.weights)
        share = ceil_div(whole, self.given.setup.gpus_per_node)
        return HostMemory(load_bytes=whole, save_bytes=share)

    def share(self, first: "Program") -> None:
        """Take what a process has once from the program of its first stage."""

    # -- where an engine takes part --------------------------------------------------------------

    def before_forward(self, segment: Segment, repetition: int) -> None:
        """A segment's forward pass begins."""

    def renew(self, segment: Segment) -> bool:
        """Its operations have run: tables that they make anew take the place of those loaded."""
        return self.tables.renew(segment)

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
        """All gradients are there; the last one may still wait for its step."""
        if self.unstepped is not None:
            waiting, self.unstepped = self.unstepped, None
            self._step_alone(*waiting)

    def run_joined(self) -> None:
        """Passes of other models whose results the loss takes."""
        if self.company is not None:
            self.company.run(When.JOINED)

    def begin_pass(self) -> None:
        """A pass without gradients begins."""

    def end_pass(self) -> None:
        """It has ended."""

    def take_over(self, other: "Program") -> None:
        """What another pass over the same weights left gathered: here, nothing is."""

    def stops(self, segment: Segment) -> Stops | None:  # noqa: ARG002
        """Where it takes part within a segment; None: nowhere."""
        return None

    def reach(self, segment: Segment, repetition: int, acts: Acts) -> None:
        """A pass is at one of these stops."""

    def standing_at(self, segment: Segment, copy: int) -> Hashable:  # noqa: ARG002
        """What decides in a repetition what it does; None: that is not told."""
        return None

    def skip_turns(self, segment: Segment, copy: int, turn: int, times: int) -> int:  # noqa: ARG002
        """Stand as after so many more turns; of what does not tell how it stands, none."""
        return 0


def loads_bitsandbytes(setup: TrainingSetup) -> bool:
    """Whether a run imports bitsandbytes, for whose sake TRL's hooks empty the cache before each
    micro-batch (TRL 1.16, models/activation_offloading.py, ``__enter__``)."""
    from memplan.training.optimizers.bitsandbytes import ROWS  # only where activations go
    from memplan.training.quantization import Quantization, QuantizationKind

    kinds = (QuantizationKind.NF4, QuantizationKind.FP4, QuantizationKind.INT8)
    quantized = isinstance(setup.quantize, Quantization) and setup.quantize.kind in kinds
    return quantized or setup.optimizer in ROWS
