"""The cards that a job started here would see.

NVML is asked where its package is there, ``nvidia-smi`` otherwise; then ``amd-smi``, ``rocm-smi``, a Mac's ``sysctl``. Neither knows
``CUDA_VISIBLE_DEVICES`` and its like, by which a job is shown some of a machine's cards: that is applied here, as the CUDA C++
Programming Guide says (*CUDA Environment Variables*): numbers or the beginnings of UUIDs, up to the first that names none.
"""

from collections.abc import Callable, Mapping

from memplan.hardware.machine import CardsHere, LocalCard
from memplan.sources.machine.amd import amd_cards
from memplan.sources.machine.apple import apple_cards
from memplan.sources.machine.asking import CardsUnreadableError
from memplan.sources.machine.nvidia_smi import nvidia_smi_cards
from memplan.sources.machine.nvml import nvml_cards

ASKED: tuple[Callable[[], tuple[LocalCard, ...] | None], ...] = (
    nvml_cards,
    nvidia_smi_cards,
    amd_cards,
    apple_cards,
)
"""In this order, up to the first that answers."""
HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables by which a job is shown some of the cards."""


def cards_here(environment: Mapping[str, str]) -> CardsHere:
    """Ask the drivers, and leave out what ``environment`` hides."""
    troubles = []
    for question in ASKED:
        try:
            cards = question()
        except CardsUnreadableError as error:
            troubles.append(str(error))
            continue
        if cards:
            return _shown(cards, environment)
    return CardsHere(cards=(), trouble="; ".join(troubles))


def _shown(cards: tuple[LocalCard, ...], environment: Mapping[str, str]) -> CardsHere:
    for variable in HIDING:
        if variable in environment:
            seen = visible(cards, environment[variable])
            hidden = tuple(each for each in cards if each not in seen)
            return CardsHere(cards=seen, hidden=hidden, hidden_by=variable)
    return CardsHere(cards=cards)


def visible(cards: tuple[LocalCard, ...], said: str) -> tuple[LocalCard, ...]:
    """The cards that a variable's value leaves, in its order.

    >>> from memplan.hardware.gpu import Vendor
    >>> two = [LocalCard(index=i, name="", vendor=Vendor.NVIDIA, total_bytes=1, used_bytes=0,
    ...     uuid=f"GPU-{i}a") for i in (0, 1)]
    >>> [each.index for each in visible(tuple(two), "GPU-1,0,7,1")]
    [1, 0]
    """
    found: list[LocalCard] = []
    for word in (each.strip() for each in said.split(",")):
        named = [each for each in cards if _is_named(each, word)]
        if len(named) != 1 or named[0] in found:
            break
        found += named
    return tuple(found)


def _is_named(card: LocalCard, word: str) -> bool:
    if word.isascii() and word.isdecimal():
        return card.index == int(word[:9])
    return bool(word) and card.uuid.startswith(word)
