"""What a plan may give up to make a model fit: how it is trained, from all of it to a little.

A concession changes the goal's setup before engines, precisions and batches are tried. Adding one is
adding a row.
"""

from collections.abc import Mapping
from enum import Enum

from memplan.fast_dataclass import dataclass, replace
from memplan.training.adapters import ALL_LINEAR, Lora
from memplan.training.setup import TrainingSetup


class Concession(Enum):
    """What is given up, by the words that the command line takes; the order is that of the loss."""

    NONE = "none"
    EIGHT_BIT = "8bit"
    LORA = "lora"
    QLORA = "qlora"


PLANNED_RANK = 16
"""Rank of a plan's adapters, where the goal's setup has none of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenUp:
    """What a concession does to a setup."""

    label: str
    """In a few words."""
    trains: str
    """What is still trained."""
    fields: Mapping[str, object]
    """Fields of ``TrainingSetup`` that it sets."""


_ADAPTER = Lora(rank=PLANNED_RANK, targets=ALL_LINEAR)

CONCESSIONS: dict[Concession, GivenUp] = {
    Concession.NONE: GivenUp(label="nothing", trains="every weight", fields={}),
    Concession.EIGHT_BIT: GivenUp(
        label="8-bit optimizer states",
        trains="every weight, the optimizer's states in 8 bits",
        fields={"optimizer": "bnb-adamw-8bit"},
    ),
    Concession.LORA: GivenUp(
        label=f"LoRA of rank {PLANNED_RANK}",
        trains=f"LoRA adapters of rank {PLANNED_RANK} on all linear layers",
        fields={"adapter": _ADAPTER},
    ),
    Concession.QLORA: GivenUp(
        label=f"QLoRA of rank {PLANNED_RANK}",
        trains=f"LoRA adapters of rank {PLANNED_RANK} on all linear layers, over a base in nf4",
        fields={"adapter": _ADAPTER, "quantize": "nf4"},
    ),
}
"""Every concession."""


def conceded(base: TrainingSetup, concession: Concession) -> TrainingSetup:
    """The setup with what is given up; an adapter of its own stays.

    Raises ``SetupError`` where the setup cannot go with it.

    >>> conceded(TrainingSetup(), Concession.LORA).adapter.rank
    16
    """
    fields = dict(CONCESSIONS[concession].fields)
    if base.adapter is not None:
        fields.pop("adapter", None)
    return replace(base, **fields) if fields else base  # type: ignore[arg-type]


def order_of(concession: Concession) -> int:
    """Its place: what loses less comes first."""
    return list(Concession).index(concession)
