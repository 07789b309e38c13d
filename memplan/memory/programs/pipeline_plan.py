"""Which passes of a pipeline's step tell all: where sums are kept, the others need not be walked.

Between its first passes and its last one a stage's program is after each pass where it was before. Of
the passes of one kind through a stage, with the same gathered and the same gradients there, the one
beside which most is in flight is then the fullest.
"""

from collections.abc import Mapping, Sequence

from memplan.fast_dataclass import dataclass
from memplan.memory.account import ComponentKind
from memplan.memory.ledger import Block, Ledger
from memplan.memory.programs.pipeline_runtime import StageLink, runtime_of
from memplan.memory.rank import Stage
from memplan.training.parallelism import PipelineParallel
from memplan.training.schedules import Pass, PassKind

ALWAYS_PLAYED = 2
"""First passes of a kind through a stage: the second finds what the first has made."""


@dataclass(slots=True)
class Crowd:
    """How much is beside the passes of a step, by their kind and the place of their stage."""

    ever: dict[tuple[PassKind, int], int]
    """The most at any time [bytes]."""
    settled: dict[tuple[PassKind, int], int]
    """The most once each kind of pass has run, when the stages' own programs hold most [bytes]."""

    def outweighs(self, other: "Crowd") -> bool:
        """Whether another rank with stages like these cannot be fuller."""
        return all(self.settled.get(key, -1) >= most for key, most in other.ever.items())


@dataclass(frozen=True, slots=True)
class Followed:
    """What following a step's passes, without walking any, has found."""

    played: frozenset[int]
    """Numbers of the passes that have to be played for its fullest moments."""
    crowd: Crowd


def followed(
    passes: Sequence[Pass],
    wanted: Sequence[tuple[int, ...]],
    stages: Mapping[int, Stage],
    pipeline: PipelineParallel,
    links: Mapping[int, StageLink],
) -> Followed:
    """Follow a step by its sums alone.

    ``wanted``: before each pass, the stages that are gathered by then, where the schedule says so.
    """
    ledger = _Sum()
    flight = _Flight(stages, links, ledger)
    runtime = runtime_of(pipeline, links, ledger)
    runtime.begin()
    runtime.begin_step()
    seen: dict[tuple[PassKind, int], int] = {}
    fullest: dict[tuple[object, ...], tuple[int, int]] = {}
    played = set({each.stage: number for number, each in enumerate(passes)}.values())
    num_done = 0
    alone: frozenset[int] = frozenset()
    """Stages whose last backward pass was one for weights alone."""
    copied: frozenset[int] = frozenset()
    gathered: frozenset[int] = frozenset()
    crowd = Crowd({}, {})
    order = {stage: position for position, stage in enumerate(stages)}
    num_kinds = len({(each.kind, each.stage) for each in passes}) * ALWAYS_PLAYED
    for number, each in enumerate(passes):
        kind, stage, _ = each
        if wanted:
            gathered = frozenset(wanted[number])
            copied &= gathered
        flight.begin(each)
        key = (kind, stage, num_done, gathered, copied, alone)
        if ledger.total > fullest.get(key, (-1, 0))[0]:
            fullest[key] = ledger.total, number
        spot = kind, order[stage]
        crowd.ever[spot] = max(crowd.ever.get(spot, 0), ledger.total)
        if num_done >= num_kinds:
            crowd.settled[spot] = max(crowd.settled.get(spot, 0), ledger.total)
        count = seen[kind, stage] = seen.get((kind, stage), 0) + 1
        if count <= ALWAYS_PLAYED:
            played.add(number)
            num_done += 1
        if stage not in copied:
            copied |= {stage}
        if kind is PassKind.WEIGHT:
            alone |= {stage}
        elif kind is not PassKind.FORWARD:
            alone -= {stage}
        flight.end(each)
        if each.kind is PassKind.FORWARD:
            runtime.after_forward(each)
        elif not flight.waits(each):
            runtime.after_backward(each)
    all_played = frozenset(played | {number for _, number in fullest.values()})
    return Followed(all_played, crowd)


class _Flight:
    """What micro-batches hold between their passes, as one sum."""

    def __init__(
        self, stages: Mapping[int, Stage], links: Mapping[int, StageLink], ledger: "_Sum"
    ) -> None:
        self.after_forward = {
            number: stage.passes.after_forward.total_bytes for number, stage in stages.items()
        }
        self.after_inputs = {
            number: stage.passes.after_inputs.total_bytes for number, stage in stages.items()
        }
        self.links = links
        self.ledger = ledger
        self.parked: dict[tuple[int, int], Block] = {}

    def waits(self, each: Pass) -> bool:
        """Whether nothing is computed: the first stage's input wants no gradient."""
        return each.kind is PassKind.INPUT and self.links[each.stage].is_first

    def begin(self, each: Pass) -> None:
        """The pass's own micro-batch is none of the others."""
        if each.kind is not PassKind.FORWARD and not self.waits(each):
            self.ledger.free(self.parked.pop((each.stage, each.micro_batch)))

    def end(self, each: Pass) -> None:
        """It waits for its next pass."""
        if self.waits(each) or each.kind in (PassKind.BACKWARD, PassKind.WEIGHT):
            return
        table = self.after_forward if each.kind is PassKind.FORWARD else self.after_inputs
        block = self.ledger.allocate(table[each.stage])
        self.parked[each.stage, each.micro_batch] = block


class _Sum(Ledger):
    """A ledger of nothing but the sum."""

    __slots__ = ("total",)

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def allocate(
        self,
        num_bytes: int,
        stream: int = 0,  # noqa: ARG002
        kind: ComponentKind | None = None,  # noqa: ARG002
        name: object = None,  # noqa: ARG002
    ) -> Block:
        """Ask for a block."""
        self.total += num_bytes
        return num_bytes

    def free(self, block: Block) -> None:
        """Give it back."""
        self.total -= block
