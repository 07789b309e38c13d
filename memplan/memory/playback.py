"""The model's own allocations, written into a ledger pass by pass.

The walks know one repetition of each segment. Here every repetition is played out, with the tensors
of one handed to the next, and an engine is called where it takes part: before and after a segment,
when a parameter's gradient is ready.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import Protocol

from memplan.fast_dataclass import dataclass
from memplan.graph.segments import Segment, SegmentComponent
from memplan.graph.tape import Tape
from memplan.graph.tensors import ALLOCATION_ROUNDING, Parameter, Storage, Tensor
from memplan.memory.account import ComponentKind
from memplan.memory.ledger import Block, Ledger
from memplan.memory.step import (
    BackwardPass,
    ForwardPass,
    StepPasses,
    hand_back,
    kept_by,
    lets_go,
    seed_of,
)
from memplan.memory.walk import WORKSPACE, Event

Act = tuple[int, int]
"""What an engine does at a stop; the playback hands it over as it is."""
Acts = Sequence[Act]
Cut = tuple[int, Acts]
"""How many events come before a stop, and what is done there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stops:
    """Where an engine takes part within a segment, by the number of an operation."""

    forward: Mapping[int, Acts] = field(default_factory=dict)
    """Before it runs; the number of operations: when all have run."""
    again: Mapping[int, Acts] = field(default_factory=dict)
    """The same where a checkpointed segment is run again."""
    before_backward: Mapping[int, Acts] = field(default_factory=dict)
    """Before its backward pass."""
    after_backward: Mapping[int, Acts] = field(default_factory=dict)
    """After it, its weights' gradients handed over."""
    end: Acts = ()
    """When the segment's backward pass is over."""


Frame = dict[object, Block]
"""What one repetition of a segment holds: the walks' keys and their blocks."""
Place = tuple[Frame, object]
"""Where a block is noted."""
Sources = dict[object, Place]
"""Where what a repetition is given is noted."""
_Parked = tuple[
    dict[tuple[int, int], Frame],
    dict[tuple[int, int], Sources],
    dict[Tensor, Block],
    dict[Storage, int],
    Place | None,
]
"""What a forward pass leaves to the backward one."""


class Engine(Protocol):
    """What takes part in a step beside the model."""

    is_even: bool
    """It does the same in each of a run of equal layers, but for the first and the last two, and does
    nothing within them but take gradients."""
    takes_all_at_once: bool
    """The gradients of the whole model come when one compiled graph has made them all."""
    sum_stream: int
    """Where autograd adds up a weight's gradients: the stream of the node that waits for them."""

    def before_forward(self, segment: Segment, repetition: int) -> None:
        """A segment's forward pass begins."""

    def after_forward(self, segment: Segment, repetition: int) -> None:
        """It has ended."""

    def before_backward(self, segment: Segment, repetition: int) -> None:
        """A segment's backward pass begins."""

    def after_backward(self, segment: Segment, repetition: int) -> None:
        """It has ended."""

    def gradient_ready(self, weight: tuple[Parameter, int], block: Block) -> None:
        """A gradient is finished, and the engine's."""

    def run_joined(self) -> None:
        """Passes of other models run whose results the loss takes."""

    def stops(self, segment: Segment) -> Stops | None:
        """Where it takes part within a segment; None: nowhere."""

    def reach(self, segment: Segment, repetition: int, acts: Acts) -> None:
        """The pass is at one of these stops."""


class Playback:
    """Forward and backward of one micro-batch, as often as it is asked for."""

    def __init__(
        self,
        tape: Tape,
        passes: StepPasses,
        ledger: Ledger,
        engine: Engine,
        *,
        workspace_bytes: int,
    ) -> None:
        self.workspaces = {True: workspace_bytes, False: workspace_bytes}
        self.tape = tape
        self.passes = passes
        self.ledger = ledger
        self.engine = engine
        self.leaves = {leaf.storage for leaf in tape.leaves}
        self.parked: dict[int, _Parked] = {}
        """Micro-batches whose backward pass is to come."""
        self.sent: dict[int, tuple[list[tuple[Frame, object, int]], Block | None]] = {}
        """What of them is in CPU RAM, and what is left of a block that went in part."""
        self.kept = {segment: _kept(segment) for segment in tape.segments}

    def _need_workspace(self, *, forward: bool) -> None:
        """Each of the two threads has a handle with a workspace of its own, made at its first product."""
        missing = self.workspaces[forward]
        if missing:
            self.ledger.allocate(missing, 0, ComponentKind.KERNEL_SCRATCH, "cuBLAS workspace")
            self.workspaces[forward] = 0

    # -- forward ---------------------------------------------------------------------------------

    def fetch_batch(self) -> None:
        """The first batch; each one after it takes its place."""
        size = max(self.tape.inputs_bytes, ALLOCATION_ROUNDING)
        self.ledger.allocate(size, 0, ComponentKind.INPUTS, "token ids and labels")

    def forward(self) -> None:
        """Every segment's forward pass; ``return_loss`` is to follow."""
        self.frames: dict[tuple[int, int], Frame] = {}
        self.inputs: dict[tuple[int, int], Sources] = {}
        self.shared: dict[Tensor, Block] = {}
        self.flow: Block | None = None
        self.transit: list[Block] = []
        self.keepers: dict[Storage, int] = {}
        for segment in self.tape.segments:
            for storage in kept_by(segment):
                self.keepers[storage] = self.keepers.get(storage, 0) + 1
        self.casts: list[Place] = []
        self.carried: list[Place] = []
        self.output: Place | None = None
        joined_at = self.tape.joined_at
        for each in self.passes.forward:
            if joined_at == each.segment.index and not each.first:
                self.engine.run_joined()
            self._forward(each)
        self._let_go_of_carried()

    def return_loss(self) -> None:
        """The model has returned, its hooks have run: its outputs but the loss go, and casts."""
        self._release(self.tape.segments[-1])
        sent = lets_go(self.tape)
        if sent is not None:
            self._free_any(sent)
        for place in self.casts:
            self._free(place)

    def park(self, micro_batch: int) -> None:
        """Another pass is to run before this micro-batch's backward one."""
        self.parked[micro_batch] = (
            self.frames, self.inputs, self.shared, self.keepers, self.output
        )  # fmt: skip

    def resume(self, micro_batch: int) -> None:
        """Go on with it: what is in CPU RAM has come back."""
        self.frames, self.inputs, self.shared, self.keepers, self.output = self.parked.pop(
            micro_batch
        )
        self.flow = None
        sent, left = self.sent.pop(micro_batch, ((), None))
        for frame, key, size in sent:
            frame[key] = self.ledger.allocate(size)
        if left is not None:
            self.ledger.free(left)

    def send(self, micro_batch: int, num_bytes: int, least_bytes: int) -> None:
        """So much of what a parked micro-batch keeps goes to CPU RAM, what was made first goes first."""
        frames = self.parked[micro_batch][0]
        sent: list[tuple[Frame, object, int]] = []
        left: Block | None = None
        for frame, key, size in kept_blocks(frames, least_bytes):
            if num_bytes <= 0:
                break
            self.ledger.free(frame.pop(key))
            sent.append((frame, key, size))
            if size > num_bytes:
                left = self.ledger.allocate(size - num_bytes)
            num_bytes -= size
        self.sent[micro_batch] = sent, left

    def _forward(self, each: ForwardPass) -> None:
        segment = each.segment
        ledger = self.ledger
        kept = self.kept[segment]
        carried = [each for each in segment.carried if each not in kept]
        stops = self.engine.stops(segment)
        cuts = [] if stops is None else forward_cuts(each, stops)
        if each.loss:
            # The base model has returned.
            self._let_go_of_carried()
        given = segment.input.storage if segment.input is not None else None
        for repetition in each.repetitions:
            ledger.reach(segment, repetition)
            self.engine.before_forward(segment, repetition)
            frame = ledger.frame()
            self.frames[segment.index, repetition] = frame
            sources = self._sources(segment, repetition)
            self.inputs[segment.index, repetition] = sources
            frame.update(zip(each.profile.arriving, self.transit, strict=True))
            for events, acts in _pieces(each.profile.events, cuts):
                for key, size in events:
                    if size:
                        frame[key] = ledger.allocate(size)
                    elif key is WORKSPACE:
                        self._need_workspace(forward=True)
                    elif key not in carried and key in frame:
                        # An empty tensor's event has no bytes either: torch asks for nothing.
                        ledger.free(frame.pop(key))
                    elif key in sources:
                        self._free(sources[key])
                if acts:
                    self.engine.reach(segment, repetition, acts)
            self.transit = [_taken(key, frame, sources) for key in each.profile.leaving]
            self._let_go_of_carried()
            self.carried = [(frame, each) for each in carried]
            for key in frame:
                if isinstance(key, Storage) and key.weight_cast and key not in kept:
                    self.casts.append((frame, key))
            # The caller's variable holds the input until the module's hooks have run too.
            self.engine.after_forward(segment, repetition)
            for storage in segment.given:
                if storage in sources and self._drops(each, repetition, storage):
                    self._free(sources[storage])
            output = segment.output.storage if segment.output is not None else None
            if output in frame:
                self.output = (frame, output)
            elif output is not None and output is not given:
                self.output = self._place(output)
        is_done = each.repetitions.stop == segment.repeat
        if is_done and segment is not self.tape.segments[-1]:
            self._release(segment)

    def _release(self, segment: Segment) -> None:
        """Let go of what variables held until here."""
        cached = self.tape.cached_once
        for storage in segment.releases:
            if storage in cached or not (
                self.keepers.get(storage, 0) or self._kept_nearby(storage)
            ):
                self._free_any(storage)

    def _let_go_of_carried(self) -> None:
        """The model's variable is set anew, or gone."""
        for place in self.carried:
            self._free(place)
        self.carried = []

    def _sources(self, segment: Segment, repetition: int) -> Sources:
        """Where a repetition's input and its further ones are noted."""
        if not repetition:
            found = {each: self._place(each) for each in segment.given}
        else:
            before = self.frames[segment.index, repetition - 1]
            found = {given.storage: (before, after.storage) for given, after in segment.streams}
            if segment.input is not None:
                found[segment.input.storage] = self.output
        return {storage: place for storage, place in found.items() if place is not None}

    def _place(self, storage: Storage) -> Place | None:
        """Where a storage of an earlier segment is noted: its last repetition's, as a rule."""
        if storage.segment < 0:
            return None
        repeat = self.tape.segments[storage.segment].repeat
        frame = self.frames.get((storage.segment, repeat - 1))
        return None if frame is None or storage not in frame else (frame, storage)

    def _drops(self, each: ForwardPass, repetition: int, given: Storage) -> bool:
        """Whether what a repetition was given dies at its end."""
        segment = each.segment
        is_input = segment.input is not None and given is segment.input.storage
        if is_input and (segment.keeps_input or not each.profile.input_freed):
            return False
        if not is_input and given not in each.profile.further_freed:
            return False
        if repetition:
            after = segment.output if is_input else segment.becomes(given)
            return after is None or after.storage not in self.kept[segment]
        if given.held or self.keepers.get(given, 0) > 0 or given.segment < 0:
            return False
        return given not in self.kept[self.tape.segments[given.segment]]

    def _kept_nearby(self, storage: Storage) -> bool:
        for segment in self.tape.segments:
            reads = storage in segment.given
            if reads and segment.keeps_input:
                return True
            if (storage.segment == segment.index or reads) and storage in self.kept[segment]:
                return True
        return False

    def _free(self, place: Place) -> None:
        frame, key = place
        block = frame.pop(key, None)
        if block is not None:
            self.ledger.free(block)

    def _free_any(self, storage: Storage) -> None:
        """Free a storage of an earlier segment: what it returned, or of the first repetition left."""
        if storage.segment < 0:
            return
        segment = self.tape.segments[storage.segment]
        repetitions = range(segment.repeat)
        if storage in segment.returned:
            repetitions = repetitions[-1:]
        for repetition in repetitions:
            frame = self.frames.get((storage.segment, repetition))
            if frame is not None and storage in frame:
                self._free((frame, storage))
                return

    # -- backward --------------------------------------------------------------------------------

    def backward_inputs(self) -> None:
        """The backward pass of a pipeline's stage for its input's gradient alone: the graph stays."""
        self._seed()
        for each in self.passes.inputs:
            for repetition in reversed(range(each.repeats)):
                self._backward(each, repetition, None)
        for storage in self.passes.dropped:
            self._free_any(storage)
        for block in self.shared.values():
            self.ledger.free(block)
        self.shared.clear()
        if self.flow is not None:
            self.ledger.free(self.flow)
            self.flow = None

    def backward_weights(self) -> None:
        """The one for the weights' gradients, from what the first has left."""
        self._expect(self.passes.weights, taken_at_once=None)
        for each in self.passes.weights:
            for repetition in range(each.repeats):
                self._backward(each, repetition, None)

    def _expect(
        self,
        passes: Sequence[BackwardPass],
        *,
        taken_at_once: list[tuple[tuple[Parameter, int], Block]] | None,
    ) -> None:
        """These passes' gradients are to come."""
        self.uses = count_uses(self.tape, passes)
        self.finished = taken_at_once
        self.waiting: dict[tuple[Parameter, int], Block] = {}

    def _seed(self) -> None:
        """The gradient that a backward pass begins with, where it is of its own."""
        seed = seed_of(self.tape)
        # A model whose operations are not written down has a loss without bytes.
        if seed is not None and seed.num_bytes:
            kind, name = ComponentKind.LOGITS_AND_LOSS, "gradient of the loss"
            if self.tape.segments[-1].component is not SegmentComponent.LOGITS_AND_LOSS:
                kind, name = ComponentKind.TEMPORARIES, "gradient from the stage behind"
            self.flow = self.ledger.allocate(seed.num_bytes, 0, kind, name)

    def backward(self) -> None:
        """Every segment's backward pass, the last one first."""
        finished: list[tuple[tuple[Parameter, int], Block]] = []
        taken = finished if self.engine.takes_all_at_once else None
        self._expect(self.passes.backward, taken_at_once=taken)
        remaining = {segment.index: segment.repeat for segment in self.tape.segments}
        self._seed()
        for each in self.passes.backward:
            stops = self.engine.stops(each.segment)
            cuts = None if stops is None else backward_cuts(each, stops)
            for _ in range(each.repeats):
                remaining[each.segment.index] -= 1
                self._backward(each, remaining[each.segment.index], cuts)
            if not remaining[each.segment.index] and not each.segment.keeps_input:
                self._free_shared(each.segment)
        for weight, block in finished:
            self.engine.gradient_ready(weight, block)
        self.ledger.free_all(self.transit)
        self.transit = []

    def let_go(self) -> None:
        """The loss goes, and with its graph the leaves that want gradients, and these."""
        for leaf in self.tape.leaves:
            self._free_any(leaf.storage)
        for block in self.shared.values():
            self.ledger.free(block)
        if self.flow is not None:
            self.ledger.free(self.flow)
        for frame in self.frames.values():
            for block in frame.values():
                self.ledger.free(block)
        self.frames.clear()

    def _backward(self, each: BackwardPass, repetition: int, cuts: list[list[Cut]] | None) -> None:
        segment, ledger, engine = each.segment, self.ledger, self.engine
        ledger.reach(segment, repetition)
        engine.before_backward(segment, repetition)
        frame = self.frames[segment.index, repetition]
        sources = self.inputs.get((segment.index, repetition), {})
        given = segment.input.storage if segment.input is not None else None
        for tensor, buffer in each.profile.given.items():
            block = None
            if tensor is segment.output:
                block, self.flow = self.flow, None
            if block is None:
                # An output that only later segments read, as an encoder's, has a shared gradient.
                block = self.shared.pop(tensor, None)
            if block is not None:
                frame[buffer] = block
        frame.update(zip(each.profile.arriving, self.transit, strict=True))
        for number, interval in enumerate(each.intervals):
            for events, acts in _pieces(interval.events, cuts[number] if cuts else ()):
                for key, size in events:
                    if size:
                        if key in frame:
                            # Made again while the first one is still held by other segments.
                            frame[repetition, key] = frame[key]
                        frame[key] = ledger.allocate(size, each.profile.streams.get(key, 0))
                    elif key is WORKSPACE:
                        self._need_workspace(forward=False)
                    elif key in frame:
                        ledger.free(frame.pop(key))
                    elif key in sources:
                        if key is given and segment.keeps_input and not repetition:
                            self._free_shared(segment)
                        self._free(sources[key])
                if acts:
                    engine.reach(segment, repetition, acts)
            parameter = interval.parameter
            if parameter is None:
                continue
            block = None if interval.gradient is None else frame.pop(interval.gradient)
            copy = repetition if parameter in segment.parameters else 0
            self._gradient((parameter, copy), block)
        for tensor, buffer in each.profile.left.items():
            block = frame.pop(buffer, None)
            if block is None:
                continue
            if tensor is segment.input:
                self.flow = block
            else:
                self.shared[tensor] = block
        if repetition:
            hand_back(segment, self.shared)
        self.transit = [frame.pop(key) for key in each.profile.leaving]
        engine.after_backward(segment, repetition)

    def _gradient(self, weight: tuple[Parameter, int], block: Block | None) -> None:
        """Hand a gradient over once autograd has added all of it up.

        A weight used twice has one node, which waits for both (torch/csrc/autograd/engine.cpp,
        ``InputBuffer``). ``block`` is the gradient so far; None: the one that waits took it up.
        """
        waiting = self.waiting.pop(weight, None)
        if waiting is not None and block is not None:
            self.ledger.move(block, self.engine.sum_stream)
            self.ledger.free(waiting)
        present = waiting if block is None else block
        assert present is not None
        self.uses[weight] -= 1
        if self.uses[weight]:
            self.waiting[weight] = present
        elif self.finished is not None:
            self.finished.append((weight, present))
        else:
            self.engine.gradient_ready(weight, present)

    def _free_shared(self, segment: Segment) -> None:
        for storage in kept_by(segment):
            self.keepers[storage] -= 1
            if storage in self.leaves or self.keepers[storage]:
                continue
            if not self._kept_nearby(storage):
                self._free_any(storage)


def kept_blocks(
    frames: dict[tuple[int, int], Frame], least_bytes: int
) -> Iterator[tuple[Frame, object, int]]:
    """What a forward pass has left, in blocks of at least so many bytes, in the order of its layers."""
    for frame in [*frames.values()]:
        for key in [*frame]:
            if isinstance(key, Storage) and key.num_bytes >= least_bytes:
                yield frame, key, key.num_bytes


def sendable_bytes(tape: Tape, passes: StepPasses, least_bytes: int) -> int:
    """What one micro-batch keeps in blocks of at least so many bytes, played out apart [bytes]."""
    played = Playback(tape, passes, Ledger(), _Bystander(), workspace_bytes=0)
    played.forward()
    played.return_loss()
    return sum(size for _, _, size in kept_blocks(played.frames, least_bytes))


class _Bystander:
    """An engine that does nothing."""

    is_even = True
    takes_all_at_once = False
    sum_stream = 0

    def before_forward(self, segment: Segment, repetition: int) -> None:
        """Nothing."""

    def after_forward(self, segment: Segment, repetition: int) -> None:
        """Nothing."""

    def before_backward(self, segment: Segment, repetition: int) -> None:
        """Nothing."""

    def after_backward(self, segment: Segment, repetition: int) -> None:
        """Nothing."""

    def gradient_ready(self, weight: tuple[Parameter, int], block: Block) -> None:
        """Nothing."""

    def run_joined(self) -> None:
        """Nothing."""

    def stops(self, segment: Segment) -> Stops | None:  # noqa: ARG002
        """Nowhere."""
        return None

    def reach(self, segment: Segment, repetition: int, acts: Acts) -> None:
        """Nothing."""


def _taken(key: object, frame: Frame, sources: Sources) -> Block:
    """Take a block out of what a repetition holds, or its input out of where it is noted."""
    if key in frame or key not in sources:
        return frame.pop(key)
    before, noted = sources[key]
    return before.pop(noted)


def count_uses(tape: Tape, passes: Sequence[BackwardPass]) -> dict[tuple[Parameter, int], int]:
    """How often each weight's gradient is computed."""
    uses: dict[tuple[Parameter, int], int] = {}
    remaining = {segment.index: segment.repeat for segment in tape.segments}
    for each in passes:
        own = each.segment.parameters
        for _ in range(each.repeats):
            remaining[each.segment.index] -= 1
            for interval in each.intervals:
                parameter = interval.parameter
                if parameter is not None:
                    copy = remaining[each.segment.index] if parameter in own else 0
                    uses[parameter, copy] = uses.get((parameter, copy), 0) + 1
    return uses


def _pieces(events: list[Event], cuts: Sequence[Cut]) -> Iterator[tuple[list[Event], Acts | None]]:
    """Events up to each cut with what is done there, then the rest."""
    done = 0
    for position, acts in cuts:
        yield events[done:position], acts
        done = position
    yield (events[done:] if done else events), None


def forward_cuts(each: ForwardPass, stops: Stops) -> list[Cut]:
    """Where its events are cut."""
    starts = each.profile.starts
    return [(starts[number], stops.forward[number]) for number in sorted(stops.forward)]


def forward_acts(stops: Stops) -> Acts:
    """All that an engine does in a forward pass, in order."""
    return [act for number in sorted(stops.forward) for act in stops.forward[number]]


def backward_acts(each: BackwardPass, stops: Stops) -> Acts:
    """All that it does in a backward pass, in order."""
    return [act for cuts in backward_cuts(each, stops) for _, acts in cuts for act in acts]


def backward_cuts(each: BackwardPass, stops: Stops) -> list[list[Cut]]:
    """For each interval, where its events are cut."""
    made: list[list[Cut]] = []
    done: Acts = ()
    for interval in each.intervals:
        cuts: list[Cut] = []
        for position, number in interval.marks:
            if number < 0:
                acts = stops.again.get(~number, ())
            else:
                acts = [*done, *stops.before_backward.get(number, ())]
                done = stops.after_backward.get(number, ())
            if acts:
                cuts.append((position, acts))
        made.append(cuts)
    last = each.intervals[-1]
    made[-1].append((len(last.events), [*done, *stops.end]))
    return made


def _saved(segment: Segment) -> frozenset[Storage]:
    given = (storage for region in segment.regions for storage in region.given)
    held = (storage for operation in segment.operations for storage in operation.held)
    return frozenset((*held, *given))


def _kept(segment: Segment) -> frozenset[Storage]:
    """Storages that stay from a segment's forward pass to its backward pass."""
    if segment.checkpointed:
        return segment.kept_outputs | segment.handed_in | segment.pinned
    dropped = {storage for region in segment.regions for storage in region.dropped}
    return _saved(segment) - dropped
