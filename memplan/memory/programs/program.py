"""A training run on one rank, written into a ledger: loading, steps, micro-batches.

``Program`` is the plain loop on one GPU; an engine overrides what it does otherwise. The order is that
of a usual loop: forward, backward, ``optimizer.step()``, ``optimizer.zero_grad(set_to_none=True)``.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol, TypeVar

from memplan.graph.core.segments import Buffer, Segment
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import ALLOCATION_ROUNDING, Parameter
from memplan.graph.declaration import declared_parameters
from memplan.memory.account import ComponentKind, HostMemory
from memplan.memory.beside import SideLedger, When
from memplan.memory.engine_options import loads_by_device_map
from memplan.memory.graph_breaks import returns_all_at_once, unseen_of_compilation
from memplan.memory.programs.stepping import Stepper, stepped, stepped_all
from memplan.memory.rank import RankInput
from memplan.memory.replaying.ledger import Block, Ledger, Part
from memplan.memory.stops import Acts, Stops
from memplan.memory.tally import Tally, TallyPlayback
from memplan.training.activation_offload import ActivationOffload
from memplan.training.adapters import Lora
from memplan.training.choices import AllocatorKind
from memplan.training.jobs import JobKind
from memplan.training.optimizers.script import ActKind
from memplan.training.precision import Engine
from memplan.training.setup import TrainingSetup
from memplan.units import ceil_div, round_up

if TYPE_CHECKING:
    from memplan.training.splitting.schedules import PassKind

Weight = tuple[Parameter, int]
"""A parameter of a segment, and which of the segment's copies it is of."""
LoadedT = TypeVar("LoadedT")


MAX_MICRO_BATCHES = 4
"""Of a step that are played out: the first, the last, and two of those between, which ask for the same
blocks again and again. More of them changed neither the reserved peak nor the least capacity of GPT-2
under any engine; FSDP1 needs that many."""
MAX_EXPANDABLE_MICRO_BATCHES = 16
"""The same with expandable segments: on a card that is just too small pages creep on with every micro-batch.
Of an OPT with five, four had 0.56 % too little."""


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


_OF_TRL = (ActivationOffload.STREAMED, ActivationOffload.BLOCKING)


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
        tally = ledger.ledger if isinstance(ledger, SideLedger) else ledger
        if isinstance(tally, Tally):
            self.playback = TallyPlayback(given.tape, given.passes, tally, self)
        else:
            from memplan.memory.playback import Playback  # only where a run is played out

            self.playback = Playback(
                given.tape, given.passes, ledger, self, workspace_bytes=workspace_bytes
            )
        self.weights: list[Weight] = [*weights_of(given.tape)]
        """In the order of ``named_parameters()``."""
        self.gradients: dict[Weight, Block] = {}
        self.optimizer = Stepper(given, ledger)
        self.blocks: dict[Weight, Block] = {}
        """Of the weights, where they lie apart: an optimizer may move them."""
        self.has_states: set[Weight] = set()
        """Weights that were stepped within backward, and have their states."""
        self.unstepped: tuple[Weight, Block] | None = None
        """The last gradient, where it is stepped when the next one is there."""
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

    @property
    def off_gpu_bytes(self) -> int:
        """States of the optimizer that are not on the GPU."""
        return self.optimizer.off_gpu_bytes

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

    def load(self) -> None:
        """Every weight, and each buffer where its module stands among them; then what peft works out."""
        cast = self._load()
        adapter = self.given.tape.options.adapter
        if isinstance(adapter, Lora) and adapter.dora:
            from memplan.memory.programs.dora import measure_weights  # only for DoRA

            measure_weights(self.ledger, self.weights, self.playback)
        if cast:
            from memplan.memory.programs.loading import cast_adapters  # only then

            cast_adapters(self.ledger, self.blocks, cast)

    def _load(self) -> "list[Weight]":
        """All of it; returned are weights of an adapter that are to be cast yet."""
        places = buffers_before(self.given.tape)
        options = self.given.tape.options
        if options.quantization is not None:
            from memplan.memory.programs.quantized import load_quantized  # only then

            load_quantized(
                self.ledger, self.weights, places, options, by_device_map=self.loads_by_device_map
            )
            return []
        if self.loads_by_device_map:
            from memplan.memory.programs.loading import load_by_name  # only then

            self.blocks, cast = load_by_name(self.ledger, self.weights, places)
            return cast
        if not places:
            self.blocks = self.load_weights()
            return []
        self.blocks = self.load_in_order(
            lambda weight: self.ledger.allocate(
                weight[0].storage.num_bytes, 0, ComponentKind.PARAMETERS, weight
            )
        )
        return []

    def load_in_order(self, load: Callable[[Weight], LoadedT]) -> dict[Weight, LoadedT]:
        """Each weight as ``load`` brings it, and each buffer where its module stands among them (``Module.to``)."""
        places = buffers_before(self.given.tape)
        found: dict[Weight, LoadedT] = {}
        for weight in (*self.weights, None):
            for size, words in places.get(weight, ()):
                self.ledger.allocate(size, 0, ComponentKind.BUFFERS, words)
            if weight is not None:
                found[weight] = load(weight)
        return found

    @property
    def loads_by_device_map(self) -> bool:
        """Whether transformers loads the weights right onto this GPU."""
        return loads_by_device_map(self.given.setup)

    def load_model(self) -> dict[Weight, Block]:
        """Every weight, whole, and each buffer where its module stands among them (``Module.to``)."""
        if self.given.tape.options.quantization is not None:
            loaded = self.load_weights()
            self.load_buffers()
            return loaded
        cast = self._load()
        if cast:
            from memplan.memory.programs.loading import cast_adapters  # only then

            cast_adapters(self.ledger, self.blocks, cast)
        loaded, self.blocks = self.blocks, {}
        return loaded

    def load_weights(self) -> dict[Weight, Block]:
        """Every weight, whole, in the format it is kept in."""
        options = self.given.tape.options
        if options.quantization is not None:
            from memplan.memory.programs.quantized import load_quantized  # only then

            return load_quantized(
                self.ledger, self.weights, {}, options, by_device_map=self.loads_by_device_map
            )
        if self.loads_by_device_map:
            from memplan.memory.programs.loading import cast_adapters, load_by_name  # only then

            loaded, cast = load_by_name(self.ledger, self.weights, {})
            cast_adapters(self.ledger, loaded, cast)
            return loaded
        sizes = [(weight[0].storage.num_bytes, weight) for weight in self.weights]
        blocks = self.ledger.allocate_all(sizes, ComponentKind.PARAMETERS)
        return dict(zip(self.weights, blocks, strict=True))

    def load_average(self) -> None:
        """A running average of what this rank keeps of each weight, as ``AveragedModel`` copies it."""
        num_bytes = self.given.beside.averaged_bytes
        if num_bytes:
            self.ledger.allocate_all(
                [
                    (round_up(self.kept_numel(parameter) * num_bytes, ALLOCATION_ROUNDING), AVERAGE)
                    for parameter, _ in self.weights
                ],
                ComponentKind.AVERAGED_WEIGHTS,
            )

    def kept_numel(self, parameter: Parameter) -> int:
        """Elements of a weight that this rank keeps between steps."""
        return parameter.numel

    def load_buffers(self) -> None:
        """Tables that the model keeps beside its weights."""
        for each in self.given.tape.buffers:
            for _ in range(each.segment.repeat):
                self.ledger.allocate(each.num_bytes, 0, ComponentKind.BUFFERS, each.words)

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
        self.begin_backward()
        self.playback.backward()
        self.end_backward()
        self.playback.let_go()

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
        self.playback.backward_inputs()

    def weights_pass(self) -> None:
        """Backward for the weights' gradients, behind it."""
        self.playback.backward_weights()
        self.end_backward()
        self.playback.let_go()

    def make_optimizer(self) -> None:
        """Some have their states from the beginning."""
        trained = [parameter for parameter, _ in self.weights if is_trained(parameter)]
        self.optimizer.construct(stepped_all(trained), of=TRAINED)

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

    def gradient_ready(self, weight: Weight, block: Block) -> None:
        """Take a gradient that autograd finished; one that is there already takes it up."""
        if self.optimizer.in_backward:
            self._step_in_backward(weight, block)
        elif self._leaves_gpu(weight[0]) or weight in self.gradients:
            self.ledger.free(block)
        else:
            self.gradients[weight] = block


@lru_cache(maxsize=8)
def weights_of(tape: Tape) -> tuple[Weight, ...]:
    """Every parameter of every copy of its segment, in the order of ``named_parameters()``."""
    return tuple(
        (parameter, copy)
        for segment, parameters in declared_parameters(tape)
        for copy in range(segment.num_copies)
        for parameter in parameters
    )


def buffers_before(tape: Tape) -> dict[Weight | None, list[tuple[int, str]]]:
    """The buffers that stand before each weight, their bytes and words; None: behind all of them."""
    found: dict[Weight | None, list[tuple[int, str]]] = {}
    declared: dict[Segment, list[Parameter]] = {}
    for segment, parameters in declared_parameters(tape):
        declared.setdefault(segment, []).extend(parameters)
    for each in tape.buffers:
        for copy in range(each.segment.repeat):
            anchor = _next_weight(tape, each, copy, declared)
            found.setdefault(anchor, []).append((each.num_bytes, each.words))
    return found


def _next_weight(
    tape: Tape, buffer: Buffer, copy: int, declared: dict[Segment, list[Parameter]]
) -> Weight | None:
    """The weight declared next: of its module, of this copy, of the next one, or of a later segment."""
    segment, position = buffer.segment, buffer.position
    if buffer.behind:
        return None
    if buffer.before:
        named = (
            each
            for parameters in (declared[segment], *declared.values())
            for each in parameters
            if each.name.startswith(f"{buffer.before}.")
        )
        return next(named), copy
    if position < len(segment.parameters):
        return segment.parameters[position], copy
    if segment.parameters and copy + 1 < segment.repeat:
        return declared[segment][0], copy + 1
    later = (declared[each] for each in tape.segments[segment.index + 1 :] if declared.get(each))
    parameters = next(later, None)
    return None if parameters is None else (parameters[0], 0)


def is_trained(parameter: Parameter) -> bool:
    """Whether the optimizer steps it."""
    return parameter.requires_grad and not parameter.unused


def loads_bitsandbytes(setup: TrainingSetup) -> bool:
    """Whether a run imports bitsandbytes, for whose sake TRL's hooks empty the cache before each
    micro-batch (TRL 1.16, models/activation_offloading.py, ``__enter__``)."""
    from memplan.training.optimizers.bitsandbytes import ROWS  # only where activations go
    from memplan.training.quantization import Quantization, QuantizationKind

    kinds = (QuantizationKind.NF4, QuantizationKind.FP4, QuantizationKind.INT8)
    quantized = isinstance(setup.quantize, Quantization) and setup.quantize.kind in kinds
    return quantized or setup.optimizer in ROWS


AVERAGE = "a copy of each weight"
TRAINED = "every trained parameter"
