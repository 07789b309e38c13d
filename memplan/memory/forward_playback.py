"""The model's own allocations of a forward pass, written into a ledger.

The walks know one repetition of each segment. Here every repetition is played out, with the tensors
of one handed to the next, and an engine is called where it takes part.
"""

from memplan.graph.segments import Segment
from memplan.graph.tape import Tape
from memplan.graph.tensors import ALLOCATION_ROUNDING, Storage, Tensor
from memplan.memory.account import ComponentKind
from memplan.memory.ledger import Block, Ledger
from memplan.memory.step import ForwardPass, StepPasses, kept_by, lets_go
from memplan.memory.stops import Engine, forward_cuts, pieces
from memplan.memory.walk import WORKSPACE

Frame = dict[object, Block]
"""What one repetition of a segment holds: the walks' keys and their blocks."""
Place = tuple[Frame, object]
"""Where a block is noted."""
Sources = dict[object, Place]
"""Where what a repetition is given is noted."""


class ForwardPlayback:
    """The forward pass of one micro-batch, as often as it is asked for."""

    def __init__(
        self,
        tape: Tape,
        passes: StepPasses,
        ledger: Ledger,
        engine: Engine,
        *,
        workspace_bytes: int,
    ) -> None:
        if passes.stand_ins and workspace_bytes:
            _, _, workspace_bytes = passes.stand_ins
        self.workspaces = {True: workspace_bytes, False: workspace_bytes}
        self.tape = tape
        self.passes = passes
        self.ledger = ledger
        self.engine = engine
        self.leaves = {leaf.storage for leaf in tape.leaves}
        self.kept = {segment: _kept(segment) for segment in tape.segments}

    def need_workspace(self, *, forward: bool) -> None:
        """Each of the two threads has a handle with a workspace of its own, made at its first product."""
        missing = self.workspaces[forward]
        if missing:
            self.ledger.allocate(missing, 0, ComponentKind.KERNEL_SCRATCH, "cuBLAS workspace")
            self.workspaces[forward] = 0

    def fetch_batch(self) -> None:
        """The first batch; each one after it takes its place."""
        size = max(self.tape.inputs_bytes, ALLOCATION_ROUNDING)
        if self.passes.stand_ins:
            size, _, _ = self.passes.stand_ins
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
            for events, acts in pieces(each.profile.events, cuts):
                for key, size in events:
                    if size:
                        frame[key] = ledger.allocate(size)
                    elif key is WORKSPACE:
                        self.need_workspace(forward=True)
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


def _taken(key: object, frame: Frame, sources: Sources) -> Block:
    """Take a block out of what a repetition holds, or its input out of where it is noted."""
    if key in frame or key not in sources:
        return frame.pop(key)
    before, noted = sources[key]
    return before.pop(noted)


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
