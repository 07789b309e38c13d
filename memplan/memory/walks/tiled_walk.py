"""What an operation asks of the allocator that runs a stretch of others tile by tile.

``memplan.graph.tiles`` says which there are. Behind the second tile each asks for what the one before
it asked for, so that those between the second and the last are not played: of them only the outputs
that wait are (DeepSpeed 0.19.8, runtime/sequence_parallel/ulysses_sp.py).
"""

from collections.abc import Collection, Iterable, Sequence

from memplan.graph.core.segments import Change, Tiles
from memplan.graph.core.tape import Tape
from memplan.graph.operations.reduction import Multiprocessors
from memplan.memory.walks.backward_walk import BackwardWalk
from memplan.memory.walks.walk import WORKSPACE, Event, ForwardWalk

PLAYED = 3
"""Tiles whose own blocks are played at most: the first, the second and the last."""


def play_tiles(tape: Tape, device: Multiprocessors | None) -> None:
    """Find what every such operation asks for, in both passes."""
    for segment in tape.segments:
        for operation in segment.operations:
            tiles = operation.tiles
            if tiles is None:
                continue
            given = operation.inputs[0]
            if tiles.forward_gradients:
                tiles.forward = _with_gradients(tiles, given.storage.num_bytes)
                continue
            tiles.forward = _forward(tiles)
            if operation.gradients:
                stages = _gradients(tiles, in_place_sums=not tape.decomposed, device=device)
                # The gradient of the input is zeroed before any tile.
                tiles.backward = [[], *stages] if given.requires_grad else stages


def _forward(tiles: Tiles) -> list[list[Change]]:
    assert tiles.segment.output is not None
    output = tiles.segment.output.storage
    player, waiting = _Player(), []
    played = min(tiles.count, PLAYED)
    for number in range(played):
        between = tiles.count - played if number == played - 2 else 0
        player.play(
            ForwardWalk(tiles.segment, keep=False).run().events, copied=output, copies=between
        )
        waiting += player.let_be()
    player.split()
    player.drop(waiting)
    return player.stages


def _with_gradients(tiles: Tiles, input_bytes: int) -> Sequence[Sequence[Change]]:
    """Those of a loss whose results are gradients: its input's is zeroed first, and its weights' are
    made by the first tile."""
    before, *behind = _gradients(tiles, in_place_sums=True, device=None)
    zeroed = object()
    first = [(zeroed, input_bytes), *before, (zeroed, -input_bytes)]
    return first, [change for stage in behind for change in stage]


def _gradients(
    tiles: Tiles, *, in_place_sums: bool, device: Multiprocessors | None
) -> list[list[Change]]:
    """Each tile with a graph of its own, and back; cut where the first one makes weights' gradients."""
    player = _Player()
    held: list[Change] = []
    for number in range(min(tiles.count, PLAYED)):
        forward = ForwardWalk(tiles.segment, keep=True)
        player.play(forward.run().events)
        player.drop(held)  # what the tile before returned
        walk = BackwardWalk(
            tiles.segment, forward.saves, in_place_sums=in_place_sums, accumulated={}, shared={},
            device=device, lent=True,
        )  # fmt: skip
        profile = walk.run()
        events = [event for interval in profile.intervals for event in interval.events]
        events += [(buffer, 0) for buffer in profile.left.values()]
        made = [each.gradient for each in profile.intervals if each.parameter is not None]
        if number:
            events = _added_up(events, made)
        player.play(events, results=() if number else made)
        held = player.let_be()
    player.drop(held)
    return player.stages


def _added_up(events: Iterable[Event], made: Collection[object]) -> list[Event]:
    """Gradients of weights that are added to those of the tiles before, as soon as they are there."""
    found: list[Event] = []
    for key, size in events:
        found.append((key, size))
        if size and key in made:
            found.append((key, 0))
    return found


class _Player:
    """Plays the events of walks over a tile, each time with blocks of their own."""

    def __init__(self) -> None:
        self.stages: list[list[Change]] = [[]]
        self.there: dict[object, Change] = {}
        """Blocks of the present tile, by the walks' keys."""

    def play(
        self,
        events: Iterable[Event],
        *,
        results: Collection[object] = (),
        copied: object = None,
        copies: int = 0,
    ) -> None:
        """Note what comes and goes; ``results`` are made elsewhere, and ``copied`` stands for several."""
        for key, size in events:
            if key is WORKSPACE:
                self.stages[-1].append((WORKSPACE, 0))
            elif size and key in results:
                self.split()
            elif size:
                self._take(key, size)
                for number in range(copies if key is copied else 0):
                    self._take((key, number), size)
            else:
                self.drop([self.there.pop(key)] if key in self.there else [])

    def _take(self, key: object, size: int) -> None:
        self.there[key] = (object(), size)
        self.stages[-1].append(self.there[key])

    def split(self) -> None:
        """What follows comes behind a result."""
        self.stages.append([])

    def let_be(self) -> list[Change]:
        """What is left of a tile, which is over."""
        left = list(self.there.values())
        self.there = {}
        return left

    def drop(self, blocks: Iterable[Change]) -> None:
        """Free blocks."""
        self.stages[-1] += [(key, -size) for key, size in blocks]
