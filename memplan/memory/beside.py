"""What a job holds and runs beside the model that is trained: other models, their passes, shares of the card.

Another model is a tape, its walk and a program of its own, written into the same ledger: under a plain
loop its weights lie there whole, under an engine that shards they are sharded and gathered as it does
with frozen ones. A pass of the trained model itself without gradients (its adapter switched off,
evaluation) is one of these too, with no weights of its own.
"""

from collections.abc import Iterable
from enum import Enum
from typing import TypeVar

from memplan.fast_dataclass import dataclass, replace
from memplan.graph.core.segments import Segment
from memplan.graph.core.tape import Tape
from memplan.memory.account import ComponentKind
from memplan.memory.passes import BackwardPass, ForwardPass, Height, StepPasses
from memplan.memory.replaying.ledger import Block, Ledger, Part
from memplan.training.evaluation import Evaluation
from memplan.training.jobs import ROLES
from memplan.training.setup import TrainingSetup
from memplan.training.splitting.exchange import ALONE as ALONE_RANKS
from memplan.training.splitting.exchange import ExchangeKind, Hiding, Ranks


class When(Enum):
    """Where in a step a model's pass runs."""

    ROLLOUT = "rollout"
    """Before the first micro-batch: completions are generated and scored."""
    FIRST = "first"
    """Before each forward pass of the trained model."""
    JOINED = "joined"
    """Between that and its loss, on top of all that it keeps."""
    OWN_STEP = "own step"
    """Before the trained model's part of a step, with a step of its own."""
    EVALUATION = "evaluation"
    """Between steps."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SideModel:
    """Another model, or a pass of the trained one without gradients."""

    role: str
    """What it is to the job, in words."""
    tape: Tape
    passes: StepPasses
    """Its heights are those of the whole rank: what the trained model keeps meanwhile included."""
    setup: TrainingSetup
    """Its engine's and its formats."""
    when: When
    owns_weights: bool
    """Else it runs with the trained model's."""
    is_sharded: bool = False
    """By the engine, as the trained one is."""
    is_one_unit: bool = False
    """Where it is: gathered all at once."""
    of_evaluation: bool = False
    """It runs with evaluation's passes in place of a step's, and ``when`` says where in these."""
    kept_bytes: int = 0
    """What stays of it while it runs: a cache of keys and values, logits of earlier batches."""
    kept_words: str = ""
    evaluation: Evaluation | None = None
    """Of a pass between steps: how many batches, and what of them stays."""

    @property
    def is_trained(self) -> bool:
        """It has a step of its own."""
        return self.when is When.OWN_STEP


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """A share of the card that something else in the process takes."""

    num_bytes: int
    words: str
    only_in: Part | None = None
    """The only part of a step in which it is there; None: always."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Beside:
    """All that a job has beside the trained model."""

    models: tuple[SideModel, ...] = ()
    shares: tuple[Share, ...] = ()
    averaged_bytes: int = 0
    """Of each element of an average of the weights that lies on the GPU; 0: there is none."""
    averaged_host_bytes: int = 0
    """The same on the CPU."""

    @property
    def structure(self) -> tuple[object, ...]:
        """What an outline depends on, but for the models' tapes."""
        return (
            *((each.role, each.when, each.owns_weights, each.is_sharded, each.is_one_unit, each.of_evaluation, each.setup, each.kept_bytes, each.evaluation)
              for each in self.models),
            self.shares, self.averaged_bytes, self.averaged_host_bytes,
        )  # fmt: skip


ALONE = Beside()
"""Nothing."""


def raised(passes: StepPasses, base: Height) -> StepPasses:
    """The same passes where something else is alive already."""
    if not base.total_bytes:
        return passes

    def lift(height: Height) -> Height:
        return Height(
            activations_bytes=height.activations_bytes + base.activations_bytes,
            loss_bytes=height.loss_bytes + base.loss_bytes,
            temporaries_bytes=height.temporaries_bytes + base.temporaries_bytes,
        )

    return StepPasses(
        forward=[_lifted(each, lift(each.start)) for each in passes.forward],
        at_return=lift(passes.at_return),
        after_forward=lift(passes.after_forward),
        backward=[_lifted(each, lift(each.start)) for each in passes.backward],
        after_backward=lift(passes.after_backward),
    )


_PassT = TypeVar("_PassT", ForwardPass, BackwardPass)


def _lifted(each: _PassT, start: Height) -> _PassT:
    return replace(each, start=start)


STREAMS_OF_ENGINE = 5
"""The main one, which all share, and what an engine's communication has of its own."""


class SideLedger(Ledger):
    """The ledger as another model's program sees it: its blocks are that model's.

    An engine that takes another model makes streams of its own for it (FSDP2's ``FSDPCommContext``, stage 3's
    ``DeepSpeedZeRoOffload``): blocks of one do not serve the other.
    """

    __slots__ = ("first_stream", "ledger", "role")

    def __init__(self, ledger: Ledger, role: str) -> None:
        super().__init__()
        self.ledger = ledger
        self.role = role
        self.first_stream = STREAMS_OF_ENGINE * (ROLES.index(role) + 1) if role in ROLES else 0

    def _stream(self, stream: int) -> int:
        return stream + self.first_stream if stream else 0

    def allocate(
        self,
        num_bytes: int,
        stream: int = 0,
        kind: ComponentKind | None = None,
        name: object = None,
    ) -> Block:
        """Ask for a block; what it is for, is said with whose it is."""
        stream = self._stream(stream)
        if kind is None:
            return self.ledger.allocate(num_bytes, stream)
        if kind in _OWN:
            return self.ledger.allocate(
                num_bytes, stream, ComponentKind.OTHER_MODELS, f"{self.role}: {_WORDS[kind]}"
            )
        words = name if isinstance(name, str) else kind.label.replace("_", " ")
        return self.ledger.allocate(num_bytes, stream, kind, f"{self.role}: {words}")

    def enter(self, part: Part, step: int = 0) -> None:
        """A part of the run begins."""
        self.ledger.enter(part, step)

    def begin_aside(self, part: Part) -> None:
        """What only some runs do."""
        self.ledger.begin_aside(part)

    def end_aside(self) -> None:
        """All of them go on."""
        self.ledger.end_aside()

    def reach(self, segment: Segment, repetition: int) -> None:
        """A segment of the model is reached."""
        self.ledger.reach(segment, repetition)

    def frame(self) -> dict[object, Block]:
        """Where a walk's keys and their blocks are kept."""
        return self.ledger.frame()

    def move(self, block: Block, stream: int) -> None:
        """Let a block be of another stream."""
        self.ledger.move(block, self._stream(stream))

    def free(self, block: Block) -> None:
        """Give a block back."""
        self.ledger.free(block)

    def free_all(self, blocks: Iterable[Block]) -> None:
        """Give blocks back."""
        self.ledger.free_all(blocks)

    def empty_cache(self) -> None:
        """``torch.cuda.empty_cache()``."""
        self.ledger.empty_cache()

    def exchange(
        self,
        kind: ExchangeKind,
        num_bytes: int,
        ranks: Ranks = ALONE_RANKS,
        hiding: Hiding = Hiding.NONE,
    ) -> None:
        """Something is sent, fetched or copied."""
        self.ledger.exchange(kind, num_bytes, ranks, hiding)

    @property
    def shares_formats(self) -> bool:
        """As the ledger itself."""
        return self.ledger.shares_formats


_WORDS = {
    ComponentKind.PARAMETERS: "weights",
    ComponentKind.BUFFERS: "tables beside its weights",
    ComponentKind.MASTER_WEIGHTS: "master weights",
    ComponentKind.OPTIMIZER_STATES: "optimizer states",
    ComponentKind.GRADIENTS: "gradients",
}
_OWN = frozenset(_WORDS)
