"""The model's own allocations of a forward pass, written into a ledger.

The walks know one repetition of each segment. Here every repetition is played out, with the tensors
of one handed to the next, and an engine is called where it takes part. Where one finds what another did, it
is written down as that was (``memplan.memory.repetition``).
"""

from collections.abc import Hashable, Iterable, Sequence
from weakref import proxy

from memplan.graph.core.segments import Segment
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Storage, Tensor
from memplan.memory.account import ComponentKind
from memplan.memory.ends import batch_of, kept_by, lets_go
from memplan.memory.passes import BackwardPass, ForwardPass, StepPasses
from memplan.memory.repetition import Act, ActKind, Left, Notes, Script
from memplan.memory.replaying.ledger import Block, Ledger
from memplan.memory.stops import Cut, Engine, forward_cuts, pieces
from memplan.memory.walks.walk import WORKSPACE

Frame = dict[object, Block]
"""What one repetition of a segment holds: the walks' keys and their blocks."""
Name = tuple[int, int]
"""A repetition of a segment: its index, and which."""
Place = tuple[Name, object]
"""Where a block is noted: in the frame of a repetition, under a key."""
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
            workspace_bytes = passes.stand_ins.workspace
        self.workspaces = {True: workspace_bytes, False: workspace_bytes}
        self.tape = tape
        self.passes = passes
        self.ledger = ledger
        self.engine: Engine = proxy(engine)
        """It has the playback: neither may keep the other."""
        self.leaves = {leaf.storage for leaf in tape.leaves}
        self.kept = {segment: _kept(segment) for segment in tape.segments}
        self.frames: dict[Name, Frame] = {}
        self.scripts: dict[tuple[int, bool], Script] = {}
        """Of passes, of the first repetition and of later ones, as they were played last."""
        self.cuts: dict[int, object] = {}
        """Where these passes were cut."""

    def need_workspace(self, *, forward: bool) -> None:
        """Each of the two threads has a handle with a workspace of its own, made at its first product."""
        missing = self.workspaces[forward]
        if missing:
            self.ledger.allocate(missing, 0, ComponentKind.KERNEL_SCRATCH, "cuBLAS workspace")
            self.workspaces[forward] = 0

    def fetch_batch(self) -> None:
        """The first batch; each one after it takes its place."""
        stand_ins = self.passes.stand_ins
        for size in stand_ins.batch if stand_ins else batch_of(self.tape):
            self.ledger.allocate(size, 0, ComponentKind.INPUTS, "token ids and labels")

    def forward(self) -> None:
        """Every segment's forward pass, the hooks behind the model's own included; ``return_loss`` is to follow."""
        self.frames = {}
        self.inputs: dict[Name, Sources] = {}
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
        returned_at, joined_at = self.tape.returned_at, self.tape.joined_at
        for each in self.passes.forward:
            if returned_at == each.segment.index and not each.first:
                self.engine.end_forward()
            if joined_at == each.segment.index and not each.first:
                self.engine.run_joined()
            self._forward(each)
        self._let_go_of_carried()
        if returned_at is None:
            self.engine.end_forward()

    def return_loss(self) -> None:
        """The model has returned, its hooks have run: its outputs but the loss go, and casts."""
        self._release(self.passes.forward[-1])
        sent = lets_go(self.tape)
        if sent is not None:
            self._free_any(sent)
        for place in self.casts:
            self._free(place)

    def _forward(self, each: ForwardPass) -> None:
        segment, engine = each.segment, self.engine
        stops = engine.stops(segment)
        cuts = [] if stops is None else forward_cuts(each, stops)
        self._cut_as_before(each, cuts)
        if each.loss:
            # The base model has returned.
            self._let_go_of_carried()
        for repetition in each.repetitions:
            self.ledger.reach(segment, repetition)
            engine.before_forward(segment, repetition)
            name = segment.index, repetition
            frame = self.frames[name] = self.ledger.frame()
            sources = self.inputs[name] = self._sources(segment, repetition)
            standing = self._standing(name, sources)
            script = self.scripts.get((id(each), not repetition))
            if script is not None and script.standing == standing:
                self._forward_again(script, segment, repetition, cuts)
            else:
                self._forward_anew(each, repetition, cuts, standing)
            output = segment.output.storage if segment.output is not None else None
            given = segment.input.storage if segment.input is not None else None
            if output in frame:
                self.output = (name, output)
            elif output is not None and output is not given:
                self.output = self._place(output)
        is_done = each.repetitions.stop == segment.repeat
        if is_done and segment is not self.tape.segments[-1]:
            self._release(each)

    def _cut_as_before(self, each: ForwardPass | BackwardPass, cuts: object) -> None:
        """Forget how a pass was played whose engine stops elsewhere now."""
        key = id(each)
        if self.cuts.get(key) != cuts:
            self.cuts[key] = cuts
            self.scripts.pop((key, True), None)
            self.scripts.pop((key, False), None)

    def _standing(self, name: Name, sources: Sources) -> Hashable:
        """What decides, beside the walk, what a repetition's forward pass asks for."""
        places = [(key, *self._seen(name, place)) for key, place in sources.items()]
        carried = [self._seen(name, place) for place in self.carried]
        return tuple(places), tuple(carried), len(self.transit)

    def _seen(self, name: Name, place: Place) -> tuple[int, int, object, bool]:
        """A place as it is seen from a repetition, and whether anything is there."""
        (index, repetition), key = place
        frame = self.frames.get(place[0])
        if index == name[0]:
            repetition -= name[1]
        return index, repetition, key, frame is not None and key in frame

    def _blocks_at(self, places: Iterable[Place]) -> list[Block]:
        """What is there."""
        frames = ((self.frames.get(name, {}), key) for name, key in places)
        return [frame[key] for frame, key in frames if key in frame]

    def _given(self, sources: Sources) -> list[Block]:
        """What a repetition's forward pass finds; a variable may hold what it is given."""
        places = dict.fromkeys([*sources.values(), *self.carried])
        return [*self._blocks_at(places), *self.transit]

    def _forward_again(
        self, script: Script, segment: Segment, repetition: int, cuts: Sequence[Cut]
    ) -> None:
        """As another repetition was played."""
        engine, ledger, name = self.engine, self.ledger, (segment.index, repetition)
        sources, left = self.inputs[name], script.left
        there = script.begun(self._given(sources))
        for stretch in script.stretches:
            stretch.write(ledger, there)
            act = stretch.act
            if act.kind is ActKind.REACH:
                engine.reach(segment, repetition, cuts[act.stop][1])
            elif act.kind is ActKind.AFTER:
                engine.after_forward(segment, repetition)
        self._take(left.taken, sources)
        for place in self.carried:
            self.frames[place[0]].pop(place[1], None)
        self.frames[name].update(script.frame(there))
        self.transit = [~there[each] for each in left.transit]
        self._carry(segment, name, left.casts)

    def _take(self, taken: Sequence[object], sources: Sources) -> None:
        """These blocks are gone, or somebody else's."""
        for each in taken:
            name, key = sources[each]
            del self.frames[name][key]

    def _carry(self, segment: Segment, name: Name, casts: Sequence[object]) -> None:
        """What the model's variable, and autocast's cache, hold of a repetition."""
        kept = self.kept[segment]
        self.carried = [(name, each) for each in segment.carried if each not in kept]
        self.casts += [(name, each) for each in casts]

    def _casts_in(self, segment: Segment, frame: Frame) -> list[object]:
        """What autocast's cache alone holds of what is there."""
        kept = self.kept[segment]
        return [
            key for key in frame if isinstance(key, Storage) and key.weight_cast and key not in kept
        ]

    def _forward_anew(
        self, each: ForwardPass, repetition: int, cuts: Sequence[Cut], standing: Hashable
    ) -> None:
        """Block by block."""
        segment, ledger, engine = each.segment, self.ledger, self.engine
        name = segment.index, repetition
        frame, sources = self.frames[name], self.inputs[name]
        kept = self.kept[segment]
        carried = [each for each in segment.carried if each not in kept]
        there = [key for key, place in sources.items() if self._blocks_at([place])]
        given, notes = self._given(sources), Notes(ledger)
        notes.is_alike = not self.workspaces[True] and ledger.repeats
        frame.update(zip(each.profile.arriving, self.transit, strict=True))
        for number, (events, acts) in enumerate(pieces(each.profile.events, cuts)):
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
                elif key in each.profile.released:
                    assert isinstance(key, Storage)
                    self._free_any(key)
                    notes.is_alike = False
            if acts:
                notes.stop(Act(ActKind.REACH, number))
                engine.reach(segment, repetition, acts)
                notes.go_on()
        self.transit = [self._taken(key, frame, sources) for key in each.profile.leaving]
        if engine.renew(segment):
            notes.is_alike = False
        self._let_go_of_carried()
        casts = self._casts_in(segment, frame)
        self._carry(segment, name, casts)
        # The caller's variable holds the input until the module's hooks have run too.
        notes.stop(Act(ActKind.AFTER))
        engine.after_forward(segment, repetition)
        notes.go_on()
        for storage in segment.given:
            if storage in sources and self._drops(each, repetition, storage):
                self._free(sources[storage])
        notes.stop(Act(ActKind.NONE))
        taken = [key for key in there if not self._blocks_at([sources[key]])]
        left = Left(frame=dict(frame), transit=self.transit, taken=taken, casts=casts)
        self._keep(each, repetition, notes.script(standing, given, left))

    def _keep(
        self, each: ForwardPass | BackwardPass, repetition: int, script: Script | None
    ) -> None:
        if script is not None:
            self.scripts[id(each), not repetition] = script

    def _release(self, each: ForwardPass) -> None:
        """Let go of what variables held until here."""
        cached = self.tape.cached_once
        for storage in each.segment.releases:
            if storage in each.profile.released:
                continue
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
            before = segment.index, repetition - 1
            found = {given.storage: (before, after.storage) for given, after in segment.streams}
            if segment.input is not None:
                found[segment.input.storage] = self.output
        return {storage: place for storage, place in found.items() if place is not None}

    def _place(self, storage: Storage) -> Place | None:
        """Where a storage of an earlier segment is noted: its last repetition's, as a rule."""
        if storage.segment < 0:
            return None
        name = storage.segment, self.tape.segments[storage.segment].repeat - 1
        return (name, storage) if storage in self.frames.get(name, ()) else None

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
        name, key = place
        block = self.frames[name].pop(key, None)
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
                self._free(((storage.segment, repetition), storage))
                return

    def _taken(self, key: object, frame: Frame, sources: Sources) -> Block:
        """Take a block out of what a repetition holds, or its input out of where it is noted."""
        if key in frame or key not in sources:
            return frame.pop(key)
        name, noted = sources[key]
        return self.frames[name].pop(noted)


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
