"""The highest moment of a replay, and what it is made of."""

from memplan.fast_dataclass import dataclass
from memplan.memory.account import ComponentKind, Entry
from memplan.memory.deepspeed.timeline import Moment
from memplan.memory.step import Height


@dataclass(slots=True)
class EngineBytes:
    """What the engine itself holds at one moment, beside what it holds between steps."""

    gradients: int = 0
    buckets: int = 0
    temporaries: int = 0
    gathered: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.gradients + self.buckets + self.temporaries + self.gathered


@dataclass(slots=True)
class Peak:
    """The highest moment seen so far."""

    total_bytes: int = -1
    moment: Moment | None = None
    """In backward, where it is."""
    at_end: bool = False
    """At the end of that moment, when the engine takes the gradient."""
    engine: EngineBytes | None = None
    height: Height | None = None
    """Outside backward, what the model itself holds."""
    rank: int = 0
    """Of several ranks that are weighed at once, whose moment it is."""

    def offer(
        self,
        level_bytes: int,
        *,
        gradients: int = 0,
        buckets: int = 0,
        temporaries: int = 0,
        gathered: int = 0,
        moment: Moment | None = None,
        at_end: bool = False,
        height: Height | None = None,
        rank: int = 0,
    ) -> None:
        """Take this moment if it is higher than every one before."""
        total = level_bytes + gradients + buckets + temporaries + gathered
        if total > self.total_bytes:
            self.total_bytes = total
            self.moment = moment
            self.at_end = at_end
            self.engine = EngineBytes(gradients, buckets, temporaries, gathered)
            self.height = height
            self.rank = rank


def balanced(height: Height) -> Height:
    """The same level without negative parts.

    Backward turns what was kept into gradients on their way, which the walk counts apart: one part
    may sink below nothing while the other rises.
    """
    activations, loss = height.activations_bytes, height.loss_bytes
    temporaries = height.temporaries_bytes
    if temporaries < 0:
        activations, temporaries = activations + temporaries, 0
    if activations < 0:
        loss, activations = loss + activations, 0
    if loss < 0:
        temporaries, loss = temporaries + loss, 0
    return Height(
        activations_bytes=activations,
        loss_bytes=max(0, loss),
        gradients_bytes=height.gradients_bytes,
        temporaries_bytes=max(0, temporaries),
    )


def engine_entries(engine: EngineBytes) -> list[Entry]:
    """The engine's share of a peak."""
    return [
        Entry(ComponentKind.GRADIENTS, engine.gradients, "not reduced yet, or kept by this rank"),
        Entry(
            ComponentKind.COMMUNICATION_BUFFERS,
            engine.buckets,
            "reduce buckets, and the flat copy of a bucket while it is reduced",
        ),
        Entry(ComponentKind.TEMPORARIES, engine.temporaries, "copies that the engine makes"),
        Entry(
            ComponentKind.GATHERED_PARAMETERS,
            engine.gathered,
            "parameters gathered, and the flat buffers they come in",
        ),
    ]
