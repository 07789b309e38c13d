"""A pipeline's passes as they were played, to be written down again.

Of the passes that are told from one (``memplan.memory.programs.pipeline_plan``) the first is played block by block, and
the others ask for the same blocks: a step of hundreds of micro-batches is then written in a fraction of the time.
That holds of a pass that frees nothing but its own blocks and those of its micro-batch, and leaves nothing but what is
parked for the backward pass; any other is played each time.
"""

from collections.abc import Callable, Collection
from typing import NamedTuple

from memplan.graph.core.tensors import Storage
from memplan.memory.forward_playback import Name, Place, Sources
from memplan.memory.playback import Parked, Playback
from memplan.memory.programs.contracts import Player
from memplan.memory.repetition import Act, ActKind, Left, Notes, Script
from memplan.memory.replaying.ledger import Block, Ledger
from memplan.training.splitting.schedules import Pass, PassKind


class _Way(NamedTuple):
    """How a micro-batch was parked, but for its blocks."""

    frames: dict[Name, tuple[object, ...]]
    """The keys of each."""
    inputs: dict[Name, Sources]
    shared: tuple[object, ...]
    keepers: dict[Storage, int]
    output: Place | None

    @classmethod
    def of(cls, parked: Parked) -> "_Way":
        frames, inputs, shared, keepers, output = parked
        keys = {name: tuple(frame) for name, frame in frames.items()}
        return cls(keys, inputs, tuple(shared), dict(keepers), output)

    def parked(self, blocks: list[Block]) -> Parked:
        """One that is parked so, with these blocks."""
        left = iter(blocks)
        frames = {name: dict(zip(keys, left, strict=False)) for name, keys in self.frames.items()}
        shared = dict(zip(self.shared, left, strict=True))
        return frames, self.inputs, shared, dict(self.keepers), self.output  # type: ignore[return-value]


def _blocks(parked: Parked) -> list[Block]:
    """What a parked micro-batch holds, in an order that is the same for all of one way."""
    frames, _, shared, _, _ = parked
    held = [block for frame in frames.values() for block in frame.values()]
    return [*held, *shared.values()]


class _Parked(NamedTuple):
    """A micro-batch whose forward pass was written down as another was played."""

    way: _Way
    blocks: list[Block]


class PassesAgain:
    """The passes of one rank's pipeline, as they were played last."""

    def __init__(self, ledger: Ledger, groups: Collection[int]) -> None:
        self.ledger = ledger
        self._groups = groups
        """Those of which further passes are told."""
        self._scripts: dict[int, tuple[Script, _Way | None]] = {}
        """By the group of passes that are told from one, those that may be written again."""
        self._parked: dict[tuple[int, int], _Parked] = {}
        """By stage and micro-batch, what was written so."""

    def knows(self, group: int) -> bool:
        """Whether passes of a group may be written as the one that was played."""
        return group in self._scripts

    def write(self, group: int, each: Pass, playback: Player) -> None:
        """Write a pass down so."""
        assert isinstance(playback, Playback)
        script, way = self._scripts[group]
        given = [] if each.kind is PassKind.FORWARD else self._taken(each, playback)
        there = script.begun(given)
        for stretch in script.stretches:
            stretch.write(self.ledger, there)
        if way is not None:
            left = [block for _, block in script.frame(there)]
            self._parked[each.stage, each.micro_batch] = _Parked(way, left)

    def _taken(self, each: Pass, playback: Playback) -> list[Block]:
        """What its micro-batch holds, which goes with it."""
        found = self._parked.pop((each.stage, each.micro_batch), None)
        return _blocks(playback.parked.pop(each.micro_batch)) if found is None else found.blocks

    def play(self, group: int, each: Pass, playback: Player, run: Callable[[], None]) -> None:
        """Have a pass played, and keep how."""
        assert isinstance(playback, Playback)
        found = self._parked.pop((each.stage, each.micro_batch), None)
        if found is not None:
            playback.parked[each.micro_batch] = found.way.parked(found.blocks)
        if group not in self._groups:
            run()
            return
        given = _held(playback, each.micro_batch)
        start, notes = len(self.ledger.events), Notes(self.ledger)
        run()
        notes.stop(Act(ActKind.NONE))
        left = _held(playback, each.micro_batch)
        self._scripts.pop(group, None)
        # All that was given or made is let go, but for what is left.
        num_lasting = sum(1 if event > 0 else -1 for event in self.ledger.events[start:])
        if playback.transit or len(given) + num_lasting != len(left):
            return
        told = Left(frame=dict(enumerate(left)), transit=[], taken=())
        script = notes.script(None, given, told)
        if script is not None:
            way = _Way.of(playback.parked[each.micro_batch]) if left else None
            self._scripts[group] = script, way


def _held(playback: Playback, micro_batch: int) -> list[Block]:
    """What is parked of a micro-batch."""
    parked = playback.parked.get(micro_batch)
    return [] if parked is None else _blocks(parked)
