"""What modules hold beside their weights: loaded among them, and some of it made anew by the first forward pass.

``Module.to`` takes a module's children, then its parameters, then its buffers (torch 2.13, ``Module._apply``).
"""

from collections.abc import Iterable

from memplan.graph.core.segments import Buffer, Segment
from memplan.graph.core.tape import Tape
from memplan.memory.account import ComponentKind
from memplan.memory.programs.weights import Places, buffers_before
from memplan.memory.replaying.ledger import Block, Ledger


class Tables:
    """A rank's: a program loads them, and its playback says when a segment has first run."""

    def __init__(self, tape: Tape, ledger: Ledger) -> None:
        self._tape = tape
        self._ledger = ledger
        self._made_anew: dict[int, list[tuple[Buffer, Block | None]]] = {}
        """By their segment, with what was loaded of them."""

    @property
    def places(self) -> Places:
        """Those that stand before each weight; None: behind all of them."""
        return buffers_before(self._tape)

    def load(self, table: Buffer) -> None:
        """It comes to the GPU, where there is anything of it yet."""
        block = None
        if table.num_bytes:
            block = self._ledger.allocate(table.num_bytes, 0, ComponentKind.BUFFERS, table.words)
        if table.made_bytes:
            self._made_anew.setdefault(table.segment.index, []).append((table, block))

    def load_each(self, tables: Iterable[Buffer]) -> None:
        """Several, one after another."""
        for each in tables:
            self.load(each)

    def load_all(self) -> None:
        """One after another, apart from the weights."""
        for each in self._tape.buffers:
            for _ in range(each.segment.repeat):
                self.load(each)

    def renew(self, segment: Segment) -> bool:
        """A segment has run: what it makes anew takes the place of what was loaded. Whether it did so now."""
        if not self._made_anew:
            return False
        found = self._made_anew.pop(segment.index, ())
        for table, loaded in found:
            self._ledger.allocate(table.made_bytes, 0, ComponentKind.BUFFERS, table.words)
            if loaded is not None:
                self._ledger.free(loaded)
        return bool(found)

    def renew_all(self) -> None:
        """The same of every segment."""
        for segment in self._tape.segments:
            self.renew(segment)
