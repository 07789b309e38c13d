"""Steps and micro-batches of stage 3 as they were played, to be written down again.

What finds the same trace and as much gathered as the one before asks for the same blocks: its events are that one's, with
the blocks that it found in the place of those.
"""

from collections.abc import Sequence
from typing import NamedTuple

from memplan.memory.repetition import Left, Notes, Script
from memplan.memory.replaying.ledger import Block, Ledger, Part


class Stood(NamedTuple):
    """What a step finds."""

    sizes: dict[int, int]
    """Of what is gathered, by the parameter's number [elements]."""
    blocks: dict[int, Block]
    """Of what stays gathered, and of the norm that the step before left."""
    num_recorded: int
    """Modules of the trace."""

    def is_like(self, other: "Stood") -> bool:
        """Whether it is the same but for which blocks these are."""
        mine, others = (self.sizes, [*self.blocks]), (other.sizes, [*other.blocks])
        return mine == others and self.num_recorded == other.num_recorded

    def begun(self, script: Script) -> list[int]:
        """What a script's events are taken from where this stands."""
        return script.begun([*self.blocks.values()])

    def left_by(self, script: Script, there: list[int]) -> dict[int, Block]:
        """What stands behind a script that was written."""
        return {
            number: block
            for number, (_, block) in zip(self.blocks, script.frame(there), strict=True)
        }


class _Batch(NamedTuple):
    """A micro-batch in the ledger."""

    stood: Stood
    start: int
    """The number of its first event."""
    turned: int
    """Of the first one of its backward pass."""
    script: Script | None = None
    """By which it was written; None: it was played."""


class StepsAgain:
    """The last step and the last micro-batch of one rank."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.batch: _Batch | None = None
        """What was played or written last; None: what it found does not tell it."""
        self.stood: Stood | None = None
        """What stood when the step before began; None: that does not tell it."""

    def step(self, now: Stood | None) -> dict[int, Block] | None:
        """Write a step as the one before it; what it leaves. None where it has to be played."""
        before, self.stood = self.stood, now
        if before is None or now is None or not before.is_like(now):
            return None
        script = self._script([range(*self.ledger.steps[-2:])], before, now)
        if script is None:
            return None
        there = now.begun(script)
        script.stretches[0].write(self.ledger, there)
        return now.left_by(script, there)

    def micro_batch(
        self, now: Stood | None, step: int, *, does_more: bool
    ) -> dict[int, Block] | None:
        """The same of a micro-batch; one that does more than others is played."""
        before, start = self.batch, len(self.ledger.events)
        self.batch = None if now is None else _Batch(now, start, start)
        if does_more or before is None or now is None or not before.stood.is_like(now):
            return None
        passes = [range(before.start, before.turned), range(before.turned, start)]
        script = before.script or self._script(passes, before.stood, now)
        return None if script is None else self._written(script, now, step)

    def _script(self, spans: Sequence[range], before: Stood, now: Stood) -> Script | None:
        """Of what began at one place and ended at the other."""
        left = Left(frame=dict[object, Block](now.blocks.items()), transit=[], taken=())
        return Notes.of(self.ledger, spans).script(None, [*before.blocks.values()], left)

    def _written(self, script: Script, now: Stood, step: int) -> dict[int, Block]:
        ledger, there = self.ledger, now.begun(script)
        forward, backward = script.stretches
        start = len(ledger.events)
        ledger.enter(Part.FORWARD, step)
        forward.write(ledger, there)
        self.batch = _Batch(now, start, len(ledger.events), script)
        ledger.enter(Part.BACKWARD, step)
        backward.write(ledger, there)
        return now.left_by(script, there)

    def turn(self) -> None:
        """The backward pass of the micro-batch that is played begins."""
        if self.batch is not None:
            self.batch = self.batch._replace(turned=len(self.ledger.events))
