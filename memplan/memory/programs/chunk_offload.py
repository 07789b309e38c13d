"""Activations of whole passes that go to CPU RAM while a pipeline runs others.

As Megatron-Kwai does it (kwai/Megatron-Kwai, core/pipeline_parallel/offload.py and schedules.py): after a
forward pass the first of its tensors, up to a share of all bytes, begin to leave, and are let go when the
next forward pass is over; they come back during the pass before their backward pass, into one of two
buffers that stay.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

from memplan.graph.remembered import OF_TAPES
from memplan.memory.account import ComponentKind
from memplan.memory.rank import RankInput, Stage
from memplan.memory.replaying.ledger import Block, Ledger
from memplan.memory.sendable import sendable_bytes
from memplan.training.activation_offload import ActivationOffload
from memplan.training.splitting.schedules import Pass, PassKind, passes_of
from memplan.units import MIB, round_up

LEAST_BYTES = 1 * MIB
"""What is smaller stays."""
_BUFFER = "what came back from CPU RAM, and what comes next: two buffers"


def sent_bytes(kept_bytes: int, ratio: float) -> int:
    """How much of a pass's tensors goes, in whole MiB, and no more than there is [bytes].

    >>> sent_bytes(10 << 20, 0.25) >> 20, sent_bytes(10 << 20, 1.0) >> 20
    (3, 10)
    """
    return min(kept_bytes, round_up(int(-(-kept_bytes * ratio // 1)), MIB)) if ratio else 0


class ChunkOffload:
    """Follows a rank's passes, and lets what they keep go and come back."""

    def __init__(
        self,
        sizes: Mapping[int, int],
        buffer_bytes: int,
        passes: Sequence[Pass],
        ledger: Ledger,
        send: Callable[[Pass], None],
    ) -> None:
        self.ledger = ledger
        self.sizes = sizes
        """By the stage's number, what goes of one micro-batch."""
        self.buffer_bytes = buffer_bytes
        """Of each of the two."""
        self.send = send
        """Lets go what is in CPU RAM of a forward pass."""
        self.going = passes_that_go(passes)
        """Forward passes behind which something else runs before their backward pass."""
        self.leaving: Pass | None = None
        self.away: set[tuple[int, int]] = set()
        """Of stages and micro-batches, those that are in CPU RAM."""
        self.buffer: Block | None = None
        """The one that the backward pass at hand reads."""
        self.last = max(
            (place for place, each in enumerate(passes) if each.kind is PassKind.FORWARD),
            default=0,
        )
        self.place = 0
        """Of the pass at hand in its step."""
        self.num_passes = len(passes)

    def begin(self) -> None:
        """Both buffers stay from the first backward pass on."""
        size = self.buffer_bytes
        if size:
            self.ledger.allocate(size, 0, ComponentKind.ACTIVATIONS, _BUFFER)
            self._take()

    def after(self, each: Pass) -> None:
        """A pass is over. What left meanwhile is let go behind the next forward pass, or, where none
        comes, behind this backward pass."""
        is_forward = each.kind is PassKind.FORWARD
        if self.leaving is not None and (is_forward or self.place > self.last):
            self._let_go(self.leaving)
            self.leaving = None
        key = (each.stage, each.micro_batch)
        if is_forward and key in self.going and self.sizes[each.stage]:
            self.leaving = each
        if self.buffer is None and self.buffer_bytes:
            self._take()
        self.place = (self.place + 1) % self.num_passes

    def before(self, each: Pass) -> None:
        """A pass begins. What it reads lies in a buffer, which its walk counts piece by piece; or it
        never left, where it was on its way only now."""
        if each.kind is PassKind.FORWARD:
            return
        key = (each.stage, each.micro_batch)
        if self.leaving is not None and key == (self.leaving.stage, self.leaving.micro_batch):
            self.leaving = None
        if key in self.away:
            self.away.discard(key)
            assert self.buffer is not None
            self.ledger.free(self.buffer)
            self.buffer = None

    def _take(self) -> None:
        kind = ComponentKind.ACTIVATIONS
        self.buffer = self.ledger.allocate(self.buffer_bytes, 0, kind, _BUFFER)

    def _let_go(self, each: Pass) -> None:
        self.send(each)
        self.away.add((each.stage, each.micro_batch))


def chunk_sizes(given: RankInput, numbers: Iterable[int]) -> dict[int, int]:
    """What goes to CPU RAM of a micro-batch's forward pass through some stages; none where none does
    [bytes]."""
    setup = given.setup
    if setup.offload_activations is not ActivationOffload.CHUNKS:
        return {}
    ratio = setup.offload_activations_ratio
    return {number: sent_bytes(_sendable(given.stages[number]), ratio) for number in numbers}


@OF_TAPES.remembered(maxsize=256)
def _sendable(stage: Stage) -> int:
    return sendable_bytes(stage.tape, stage.passes, LEAST_BYTES)


def most_away_bytes(given: RankInput) -> int:
    """The most that any rank of a pipeline has in CPU RAM at a time [bytes].

    The ranks of a node are different ones: what one needs for all of them is an upper bound.
    """
    setup = given.setup
    pipeline = setup.pipeline
    assert pipeline is not None
    chunks = chunk_sizes(given, range(len(given.stages)))
    sizes = chunks or {number: stage.passes.away_bytes for number, stage in enumerate(given.stages)}
    highest = 0
    for rank in range(pipeline.degree):
        passes = passes_of(pipeline, rank)
        going = passes_that_go(passes) if chunks else None
        highest = max(highest, most_in_flight(passes, sizes, going))
    return highest


def passes_that_go(passes: Sequence[Pass]) -> set[tuple[int, int]]:
    """Stages and micro-batches whose backward pass does not follow at once."""
    return {
        (each.stage, each.micro_batch)
        for each, following in pairwise(passes)
        if each.kind is PassKind.FORWARD and not _is_its_backward(each, following)
    }


def _is_its_backward(each: Pass, following: Pass) -> bool:
    return (
        following.kind is not PassKind.FORWARD
        and following.stage == each.stage
        and following.micro_batch == each.micro_batch
    )


def most_in_flight(
    passes: Sequence[Pass], sizes: Mapping[int, int], going: set[tuple[int, int]] | None = None
) -> int:
    """The most of something that each forward pass brings and its backward pass takes [bytes]."""
    highest = alive = 0
    held: dict[tuple[int, int], int] = {}
    for each in passes:
        key = (each.stage, each.micro_batch)
        if each.kind is PassKind.FORWARD:
            if going is None or key in going:
                held[key] = sizes[each.stage]
                alive += held[key]
                highest = max(highest, alive)
        else:
            alive -= held.pop(key, 0)
    return highest
