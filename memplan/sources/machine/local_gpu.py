"""``--gpu local``: the cards of this machine as kinds of GPU, less what other processes have of them."""

from memplan.errors import GpuNotFoundError
from memplan.fast_dataclass import replace
from memplan.hardware.gpu import GpuSpec, Vendor, gpu_from_memory
from memplan.hardware.machine import CardsHere, LocalCard
from memplan.hardware.managers import MemoryManager
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.machine.cards import cards_here
from memplan.units import format_gib

SAME_TOTAL_PER_MILLE = 20
"""How far a card's total may lie from the catalog's and still be taken for it. An assumption: what drivers' versions and ECC do to
a total was not looked up; beyond it the total that is read counts, not the catalog's."""


def local_gpus(number: str) -> tuple[GpuSpec, ...]:
    """Each kind of card that a job here sees, with what the fullest one of it leaves; or the one of this number.

    Raises ``GpuNotFoundError`` where there is none, none of that number, or the driver does not tell.
    """
    from os import environ

    here = cards_here(environ)
    if not here.cards:
        raise GpuNotFoundError(_none_message(here))
    kinds: dict[tuple[str, int], GpuSpec] = {}
    for card in _numbered(here.cards, number):
        found = gpu_of(card)
        key = (card.name, card.total_bytes)
        if key not in kinds or found.taken_bytes > kinds[key].taken_bytes:
            kinds[key] = found
    return tuple(kinds.values())


def gpu_of(card: LocalCard) -> GpuSpec:
    """The catalog's entry of a card with the memory that is really there; its memory alone where it has none.

    >>> from memplan.hardware.gpu import Vendor
    >>> card = LocalCard(index=0, name="NVIDIA H100 80GB HBM3", vendor=Vendor.NVIDIA,
    ...     total_bytes=81559 * 2**20, used_bytes=2**30)
    >>> found = gpu_of(card)
    >>> found.gpu_id, found.taken_bytes == 2**30
    ('h100-sxm-80gb', True)
    """
    try:
        whole = load_gpu(card.parent or card.name)
    except GpuNotFoundError:
        whole = None
    return replace(_unloaded(card, whole), taken_bytes=min(card.used_bytes, card.total_bytes))


def _unloaded(card: LocalCard, whole: GpuSpec | None) -> GpuSpec:
    """The card as if nobody had any of it."""
    bare = gpu_from_memory(card.total_bytes)
    if card.vendor is Vendor.APPLE:
        return replace(
            whole or replace(bare, name=card.name, vendor=card.vendor, manager=MemoryManager.MPS),
            torch_total_bytes=card.total_bytes,
        )  # what Metal recommends is what a process may have
    if whole is None:
        return replace(
            bare, name=card.name, vendor=card.vendor, torch_total_bytes=None,
            driver_total_bytes=card.total_bytes,
        )  # fmt: skip
    if card.is_slice:
        return _slice_of(whole, card, bare)
    known = whole.driver_total_bytes
    if known and abs(card.total_bytes - known) * 1000 <= known * SAME_TOTAL_PER_MILLE:
        return whole
    return replace(whole, torch_total_bytes=None, driver_total_bytes=card.total_bytes)


def _slice_of(whole: GpuSpec, card: LocalCard, bare: GpuSpec) -> GpuSpec:
    """A slice has its share of the memory's rate with its memory, and of the products with its multiprocessors.

    NVIDIA Multi-Instance GPU User Guide, *GPU Instance Profiles*; no NVLink goes to a slice (*Application Considerations*).
    """
    memory_share = card.total_bytes / (whole.driver_total_bytes or whole.capacity_bytes)
    count, of_all = card.num_multiprocessors, whole.num_multiprocessors
    share = count / of_all if count and of_all else memory_share
    rate = whole.bandwidth_bytes_per_s
    return replace(
        whole,
        gpu_id=f"{whole.gpu_id}-mig-{round(bare.memory_nominal_gb)}",
        name=card.name,
        aliases=(f"MIG-{round(bare.memory_nominal_gb)}",),
        memory_nominal_gb=bare.memory_nominal_gb,
        num_multiprocessors=count or (of_all and max(1, round(of_all * share))),
        torch_total_bytes=None,
        driver_total_bytes=card.total_bytes,
        bandwidth_bytes_per_s=rate and round(rate * memory_share),
        dense_tflops=whole.dense_tflops.scaled(share),
        measured_tflops=whole.measured_tflops.scaled(share),
        link=None,
        node=None,
        device_names=(),
        notes=f"A slice (MIG) of {whole.name}: rates are its share of the whole card's, not measured.",
    )


def _numbered(cards: tuple[LocalCard, ...], number: str) -> tuple[LocalCard, ...]:
    if not number:
        return cards
    chosen = tuple(each for each in cards if str(each.index) == number)
    if not chosen:
        there = ", ".join(f"local:{each.index} ({each.name})" for each in cards)
        msg = f"this machine has no card {number!r}; there are: {there}"
        raise GpuNotFoundError(msg)
    return chosen


def _none_message(here: CardsHere) -> str:
    if here.hidden:
        msg = f"{here.hidden_by} hides all {len(here.hidden)} cards of this machine from jobs; unset it"
    elif here.trouble:
        msg = f"the cards of this machine cannot be read: {here.trouble}"
    else:
        msg = "this machine has no GPU that NVML, nvidia-smi, amd-smi or rocm-smi tells of"
    return f"{msg}; name a card instead, such as `gpu='h100'` (`memplan gpus` lists them)"


def taken_note(gpu: GpuSpec) -> str:
    """What others have of a card of this machine; empty where it is nothing.

    >>> taken_note(gpu_from_memory(2**34))
    ''
    """
    if not gpu.taken_bytes:
        return ""
    return f"{gpu.name} here: other processes have {format_gib(gpu.taken_bytes)} of it (memplan doctor says which)"
