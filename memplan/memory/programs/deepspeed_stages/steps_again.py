"""Steps and micro-batches of stage 3 as they were played, to be written down again.

What finds the same trace and as much gathered as the one before asks for the same blocks: its events are that one's, with
the blocks that it found in the place of those.
"""

from typing import NamedTuple

from memplan.memory.replaying.ledger import (
    Block,
    Ledger,
    Part,
    may_be_written_again,
    write_again,
)


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

    def moved_to(self, other: "Stood") -> dict[Block, Block]:
        """Its blocks, by those in their place."""
        return {block: other.blocks[number] for number, block in self.blocks.items()}

    def left_by(self, span: range) -> dict[int, Block]:
        """What is there after so many events were written for it as these, in the place of what they left."""
        return {
            number: block + len(span) if block >= span.start else block
            for number, block in self.blocks.items()
        }


class _Batch(NamedTuple):
    """A micro-batch in the ledger."""

    stood: Stood
    start: int
    """The number of its first event."""
    turned: int
    """Of the first one of its backward pass."""


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
        span = range(*self.ledger.steps[-2:])
        moved = before.moved_to(now)
        if not may_be_written_again(self.ledger, span, moved):
            return None
        write_again(self.ledger, span, span.start, moved)
        return now.left_by(span)

    def micro_batch(
        self, now: Stood | None, step: int, *, does_more: bool
    ) -> dict[int, Block] | None:
        """The same of a micro-batch; one that does more than others is played."""
        before, start = self.batch, len(self.ledger.events)
        self.batch = None if now is None else _Batch(now, start, start)
        if does_more or before is None or now is None or not before.stood.is_like(now):
            return None
        return self._written(before, now, step)

    def _written(self, before: _Batch, now: Stood, step: int) -> dict[int, Block] | None:
        ledger, moved = self.ledger, before.stood.moved_to(now)
        end = len(ledger.events)
        span = range(before.start, end)
        if not may_be_written_again(ledger, span, moved):
            return None
        ledger.enter(Part.FORWARD, step)
        write_again(ledger, range(before.start, before.turned), before.start, moved)
        self.batch = _Batch(now, end, len(ledger.events))
        ledger.enter(Part.BACKWARD, step)
        write_again(ledger, range(before.turned, end), before.start, moved)
        return now.left_by(span)

    def turn(self) -> None:
        """The backward pass of the micro-batch that is played begins."""
        if self.batch is not None:
            self.batch = self.batch._replace(turned=len(self.ledger.events))
