"""NVIDIA's cards as ``nvidia-smi -q -x`` writes them down.

Elements: the tool's own ``nvsmi_device_v12.dtd``. Under ``fb_memory_usage``, *used* does not count *reserved*, which the driver
keeps for itself (since driver 510; before, there is no such element and *used* counts it).
"""

from typing import TYPE_CHECKING

from memplan.hardware.gpu import Vendor
from memplan.hardware.machine import LocalCard, Occupant
from memplan.sources.machine.asking import CardsUnreadableError, answer_of, whole_bytes
from memplan.units import MIB

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

COMMAND = ("nvidia-smi", "-q", "-x")


def nvidia_smi_cards() -> tuple[LocalCard, ...] | None:
    """Every card and slice; None where there is no ``nvidia-smi``. Raises ``CardsUnreadableError``."""
    said = answer_of(COMMAND)
    return None if said is None else cards_from_xml(said)


def cards_from_xml(text: str) -> tuple[LocalCard, ...]:
    """The cards of one answer. Raises ``CardsUnreadableError`` where it is none."""
    from xml.etree import ElementTree

    if "<!ENTITY" in text:  # the tool writes none, and a few lines of them fill any memory
        msg = "`nvidia-smi -q -x` printed what it never prints (an entity)"
        raise CardsUnreadableError(msg)
    try:
        log = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        msg = f"`nvidia-smi -q -x` printed no XML: {error}"
        raise CardsUnreadableError(msg) from None
    driver = _text(log, "driver_version")
    found: list[LocalCard] = []
    for gpu in log.iter("gpu"):
        slices = list(gpu.iter("mig_device"))
        whole = _text(gpu, "product_name")
        for part in slices or [gpu]:
            card = _card(part, gpu, len(found), driver, parent=whole if slices else "")
            if card is not None:
                found.append(card)
    return tuple(found)


def _card(
    part: "Element", gpu: "Element", index: int, driver: str, *, parent: str
) -> LocalCard | None:
    total = _memory(part, "fb_memory_usage/total")
    if not total:
        return None
    name = _text(gpu, "product_name")
    counted = whole_bytes(part.findtext("device_attributes/shared/multiprocessor_count"))
    return LocalCard(
        index=index,
        name=f"{name} MIG {total / MIB / 1024:.0f}gb" if parent else name,
        vendor=Vendor.NVIDIA,
        total_bytes=total,
        used_bytes=_memory(part, "fb_memory_usage/used") or 0,
        uuid=_text(part, "uuid"),
        driver=driver,
        parent=parent,
        num_multiprocessors=counted if parent else None,
        occupants=_occupants(part, gpu),
    )


def _occupants(part: "Element", gpu: "Element") -> tuple[Occupant, ...]:
    """The processes of a card, or of one slice: those that name the slice's instance."""
    instance = part.findtext("gpu_instance_id") if part is not gpu else None
    found = []
    for process in gpu.iterfind("processes/process_info"):
        pid = whole_bytes(process.findtext("pid"))
        if pid is None or (
            instance is not None and process.findtext("gpu_instance_id") != instance
        ):
            continue
        name = _text(process, "process_name").split(" ")[0]
        used = _memory(process, "used_memory")
        found.append(Occupant(pid=pid, name=name.rpartition("/")[2], used_bytes=used))
    return tuple(found)


def _text(element: "Element", path: str) -> str:
    return (element.findtext(path) or "").strip()


def _memory(element: "Element", path: str) -> int | None:
    return whole_bytes(element.findtext(path), MIB)
