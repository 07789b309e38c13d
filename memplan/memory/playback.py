"""The model's own allocations, written into a ledger pass by pass: the backward pass, and those that wait.

Every repetition is played out here too (``memplan.memory.forward_playback``), and an engine is called
where it takes part: before and after a segment, when a parameter's gradient is ready.
"""

from collections.abc import Hashable, Iterator, Sequence

from memplan.graph.core.segments import Segment
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter, Storage, Tensor
from memplan.memory.account import ComponentKind
from memplan.memory.ends import hand_back, kept_by, seed_of
from memplan.memory.forward_playback import ForwardPlayback, Frame, Name, Place, Sources
from memplan.memory.passes import BackwardPass, StepPasses
from memplan.memory.repetition import Act, ActKind, Left, Notes, Script
from memplan.memory.replaying.ledger import Block, Ledger
from memplan.memory.stops import Cut, Engine, backward_cuts, pieces
from memplan.memory.walks.walk import WORKSPACE

Parked = tuple[
    dict[Name, Frame],
    dict[Name, Sources],
    dict[Tensor, Block],
    dict[Storage, int],
    Place | None,
]
"""What a forward pass leaves to the backward one."""


class Playback(ForwardPlayback):
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
        super().__init__(tape, passes, ledger, engine, workspace_bytes=workspace_bytes)
        self.parked: dict[int, Parked] = {}
        """Micro-batches whose backward pass is to come."""
        self.flow_is_view = False
        """The gradient on its way down is a view of what a formula returned."""
        self.counted: dict[int, dict[tuple[Parameter, int], int]] = {}
        """Of lists of passes, how often each weight's gradient is computed."""
        self.sent: dict[int, tuple[list[tuple[Frame, object, int]], Block | None]] = {}
        """What of them is in CPU RAM, and what is left of a block that went in part."""

    # -- micro-batches that wait -------------------------------------------------------------------

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
        counted = self.counted.get(id(passes))
        if counted is None:
            counted = self.counted[id(passes)] = count_uses(self.tape, passes)
        self.uses = counted.copy()
        self.finished = taken_at_once
        self.waiting: dict[tuple[Parameter, int], Block] = {}

    def _seed(self) -> None:
        """The gradient that a backward pass begins with, where it is of its own."""
        self.gone: set[Storage] = set()
        seed = seed_of(self.tape)
        if seed is not None and seed.num_bytes:
            size = self.passes.stand_ins.seed if self.passes.stand_ins else seed.num_bytes
            kind, name = ComponentKind.TEMPORARIES, "gradient that comes from behind"
            self.flow = self.ledger.allocate(size, 0, kind, name)

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
            self._cut_as_before(each, cuts)
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

    def hand_outputs_over(self, name: str) -> Block:  # noqa: ARG002
        """The model's outputs, which somebody else holds from here on; everything else goes."""
        held = self.tape.outputs
        assert held is not None
        block = next(frame.pop(held) for frame in self.frames.values() if held in frame)
        self.let_go()
        return block

    def _backward(self, each: BackwardPass, repetition: int, cuts: list[list[Cut]] | None) -> None:
        segment = each.segment
        self.ledger.reach(segment, repetition)
        self.engine.before_backward(segment, repetition)
        standing = self._standing_back(segment, repetition)
        script = self.scripts.get((id(each), not repetition))
        if script is not None and script.standing == standing:
            self._backward_again(script, segment, repetition, cuts)
        else:
            self._backward_anew(each, repetition, cuts, standing)
        self.engine.after_backward(segment, repetition)

    def _standing_back(self, segment: Segment, repetition: int) -> Hashable:
        """What decides, beside the walk, what a repetition's backward pass asks for."""
        name = segment.index, repetition
        places = [
            (key, *self._seen(name, place)) for key, place in self.inputs.get(name, {}).items()
        ]
        flow = self.flow is None, self.flow_is_view
        keepers: list[tuple[int, bool]] = []
        if segment.keeps_input and not repetition:
            keepers = [(self.keepers[each], each in self.gone) for each in kept_by(segment)]
        return (
            tuple(self.frames[name]), tuple(places), flow, tuple(self.shared), len(self.transit),
            tuple(keepers),
        )  # fmt: skip

    def _given_back(self, name: Name) -> list[Block]:
        """What a repetition's backward pass finds."""
        flow = [] if self.flow is None else [self.flow]
        sources = self._blocks_at(self.inputs.get(name, {}).values())
        return [
            *self.frames[name].values(), *sources, *flow, *self.shared.values(), *self.transit
        ]  # fmt: skip

    def _backward_again(
        self, script: Script, segment: Segment, repetition: int, cuts: list[list[Cut]] | None
    ) -> None:
        """As another repetition was played."""
        name, left = (segment.index, repetition), script.left
        stops = [acts for each in cuts or () for _, acts in each]
        there = script.begun(self._given_back(name))
        for stretch in script.stretches:
            stretch.write(self.ledger, there)
            act = stretch.act
            if act.kind is ActKind.REACH:
                self.engine.reach(segment, repetition, stops[act.stop])
            elif act.parameter is not None:
                block = None if stretch.block is None else ~there[stretch.block]
                self._gradient((act.parameter, repetition if act.is_own else 0), block)
        self._take(left.taken, self.inputs.get(name, {}))
        for storage in left.unkept:
            self.keepers[storage] -= 1
        self.frames[name] = dict(script.frame(there))
        self.flow = None if left.flow is None else ~there[left.flow]
        self.flow_is_view = left.flow_is_view
        self.shared = {key: ~there[each] for key, each in left.shared.items()}
        self.transit = [~there[each] for each in left.transit]

    def _backward_anew(
        self,
        each: BackwardPass,
        repetition: int,
        cuts: list[list[Cut]] | None,
        standing: Hashable,
    ) -> None:
        """Block by block."""
        segment, ledger = each.segment, self.ledger
        name = segment.index, repetition
        frame = self.frames[name]
        sources = self.inputs.get(name, {})
        there = [key for key, place in sources.items() if self._blocks_at([place])]
        found, notes = self._given_back(name), Notes(ledger)
        notes.is_alike = not self.workspaces[False] and ledger.repeats
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
        summed = self._intervals(each, repetition, cuts, notes)
        for tensor, buffer in each.profile.left.items():
            block = frame.pop(buffer, None)
            if block is None:
                continue
            if tensor is segment.input:
                self.flow = block
                passes = segment.output is not None and buffer is each.profile.given.get(
                    segment.output
                )
                self.flow_is_view = buffer.is_view or (passes and self.flow_is_view and not summed)
            else:
                self.shared[tensor] = block
        if repetition:
            hand_back(segment, self.shared)
        self.transit = [frame.pop(key) for key in each.profile.leaving]
        notes.stop(Act(ActKind.NONE))
        left = Left(
            frame=dict(frame),
            transit=self.transit,
            taken=[key for key in there if not self._blocks_at([sources[key]])],
            flow=self.flow,
            flow_is_view=self.flow_is_view,
            shared=dict(self.shared),
            unkept=notes.unkept,
        )
        self._keep(each, repetition, notes.script(standing, found, left))

    def _intervals(
        self, each: BackwardPass, repetition: int, cuts: list[list[Cut]] | None, notes: Notes
    ) -> bool:
        """Up to each gradient, which is handed over; whether the input's was added to a view."""
        segment, ledger, profile = each.segment, self.ledger, each.profile
        name = segment.index, repetition
        frame, sources = self.frames[name], self.inputs.get(name, {})
        given = segment.input.storage if segment.input is not None else None
        begun_with, added = profile.first_sum or (None, None)
        if not self.flow_is_view:
            added = None
        summed, handed, stop = False, profile.handed, 0
        taken = set(handed.values())
        for number, interval in enumerate(each.intervals):
            for events, acts in pieces(interval.events, cuts[number] if cuts else ()):
                for key, size in events:
                    if size:
                        if key in taken and key in frame:
                            continue
                        if key in frame:
                            # Made again while the first one is still held by other segments.
                            frame[repetition, key] = frame[key]
                            notes.is_alike = False
                        frame[key] = ledger.allocate(size, profile.streams.get(key, 0))
                    elif key is WORKSPACE:
                        self.need_workspace(forward=False)
                    elif key in frame:
                        block = frame.pop(key)
                        if added is not None and key is added and begun_with in frame:
                            # Nothing is added to a view in place.
                            size = profile.sum_bytes or added.num_bytes
                            total = ledger.allocate(size, profile.streams.get(begun_with, 0))
                            ledger.free(frame[begun_with])
                            frame[begun_with] = total
                            added, summed = None, True
                        if key in handed:
                            frame[handed[key]] = block
                        else:
                            ledger.free(block)
                    elif key in sources:
                        if key is given and segment.keeps_input and not repetition:
                            self._free_shared(segment)
                            notes.unkept = kept_by(segment)
                        self._free(sources[key])
                    elif isinstance(key, Storage) and key in self.keepers:
                        self.gone.add(key)
                        self._free_any(key)
                        notes.is_alike = False
                if acts is not None:
                    stop += 1
                if acts:
                    notes.stop(Act(ActKind.REACH, stop - 1))
                    self.engine.reach(segment, repetition, acts)
                    notes.go_on()
            parameter = interval.parameter
            if parameter is None:
                continue
            made = None if interval.gradient is None else frame.pop(interval.gradient)
            is_own = parameter in segment.parameters
            notes.stop(Act(ActKind.GRADIENT, 0, parameter, is_own), made)
            self._gradient((parameter, repetition if is_own else 0), made)
            notes.go_on()
        return summed

    def _gradient(self, weight: tuple[Parameter, int], block: Block | None) -> None:
        """Hand a gradient over once autograd has added all of it up.

        A weight used twice has one node, which waits for both (torch/csrc/autograd/engine.cpp,
        ``InputBuffer``). ``block`` is the gradient so far; None: the one that waits took it up.
        """
        present, left = block, self.uses.get(weight, 0)
        if left:
            waiting = self.waiting.pop(weight, None)
            if waiting is not None and block is not None:
                self.ledger.move(block, self.engine.sum_stream)
                self.ledger.free(waiting)
            present = waiting if block is None else block
            self.uses[weight] = left - 1
        assert present is not None
        if left > 1:
            self.waiting[weight] = present
        elif self.finished is not None:
            self.finished.append((weight, present))
        else:
            self.engine.gradient_ready(weight, present)

    def _free_shared(self, segment: Segment) -> None:
        """A segment lets go of what earlier ones made; of a tuple of arguments the last one goes first."""
        for storage in reversed(kept_by(segment)):
            self.keepers[storage] -= 1
            if storage not in self.gone and not self.keepers[storage]:
                self._free_unless_kept(storage)

    def _free_unless_kept(self, storage: Storage) -> None:
        if storage not in self.leaves and not self._kept_nearby(storage):
            self._free_any(storage)


def kept_blocks(frames: dict[Name, Frame], least_bytes: int) -> Iterator[tuple[Frame, object, int]]:
    """What a forward pass has left, in blocks of at least so many bytes, in the order of its layers."""
    for frame in [*frames.values()]:
        for key in [*frame]:
            if isinstance(key, Storage) and key.num_bytes >= least_bytes:
                yield frame, key, key.num_bytes


def count_uses(tape: Tape, passes: Sequence[BackwardPass]) -> dict[tuple[Parameter, int], int]:
    """Weights whose gradient is computed more than once, and how often."""
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
    return {weight: count for weight, count in uses.items() if count > 1}
