"""NVIDIA's cards through NVML's own Python package, where somebody installed it (``nvidia-ml-py``).

Names and versions: NVML API Reference Guide, *Device Queries* and *Multi Instance GPU Management*; pynvml raises
``NVMLError`` for everything that a card does not tell.
"""

from importlib import import_module
from typing import Any

from memplan.hardware.gpu import Vendor
from memplan.hardware.machine import LocalCard, Occupant
from memplan.sources.machine.asking import CardsUnreadableError, whole_bytes

MAX_CARDS = 256
"""More than any machine has: a count beyond it is a driver's mistake."""


def nvml_cards() -> tuple[LocalCard, ...] | None:
    """Every card and slice; None where the package or the driver's library is not there.

    Raises ``CardsUnreadableError`` where a driver is there and does not answer.
    """
    try:
        nvml = import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # no driver here
        return None
    try:
        return _cards(nvml)
    except nvml.NVMLError as error:
        msg = f"NVML: {error}"
        raise CardsUnreadableError(msg) from None
    finally:
        nvml.nvmlShutdown()


def _cards(nvml: Any) -> tuple[LocalCard, ...]:
    driver = _text(_said(nvml, nvml.nvmlSystemGetDriverVersion))
    found: list[LocalCard] = []
    for index in range(min(int(nvml.nvmlDeviceGetCount()), MAX_CARDS)):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        slices = _slices(nvml, handle)
        whole = _text(nvml.nvmlDeviceGetName(handle))
        for each in slices or [handle]:
            card = _card(nvml, each, len(found), driver, parent=whole if slices else "")
            if card is not None:
                found.append(card)
    return tuple(found)


def _card(nvml: Any, handle: Any, index: int, driver: str, *, parent: str) -> LocalCard | None:
    total, used = _memory(nvml, handle)
    if not total:
        return None
    attributes = _said(nvml, nvml.nvmlDeviceGetAttributes, handle) if parent else None
    return LocalCard(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        vendor=Vendor.NVIDIA,
        total_bytes=total,
        used_bytes=used or 0,
        uuid=_text(_said(nvml, nvml.nvmlDeviceGetUUID, handle)),
        driver=driver,
        parent=parent,
        num_multiprocessors=getattr(attributes, "multiprocessorCount", None),
        occupants=_occupants(nvml, handle),
    )


def _memory(nvml: Any, handle: Any) -> tuple[int | None, int | None]:
    """What there is and what is used; the second version of the call does not count the driver's own as used."""
    second = getattr(nvml, "nvmlMemory_v2", None)
    told = _said(nvml, nvml.nvmlDeviceGetMemoryInfo, handle, second) if second else None
    if told is None:
        told = _said(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
    return whole_bytes(getattr(told, "total", None)), whole_bytes(getattr(told, "used", None))


def _slices(nvml: Any, handle: Any) -> list[Any]:
    """Handles of a card's slices; none where it is whole."""
    mode = _said(nvml, nvml.nvmlDeviceGetMigMode, handle)
    if not mode or mode[0] != getattr(nvml, "NVML_DEVICE_MIG_ENABLE", 1):
        return []
    count = _said(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0
    found = [
        _said(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
        for index in range(min(int(count), MAX_CARDS))
    ]
    return [each for each in found if each is not None]


def _occupants(nvml: Any, handle: Any) -> tuple[Occupant, ...]:
    found: dict[int, Occupant] = {}
    for question in (
        "nvmlDeviceGetComputeRunningProcesses",
        "nvmlDeviceGetGraphicsRunningProcesses",
    ):
        for process in _said(nvml, getattr(nvml, question), handle) or ():
            path = _text(_said(nvml, nvml.nvmlSystemGetProcessName, process.pid))
            found[process.pid] = Occupant(
                pid=process.pid,
                name=path.rpartition("/")[2],
                used_bytes=whole_bytes(process.usedGpuMemory),
            )
    return tuple(found.values())


def _said(nvml: Any, question: Any, *about: Any) -> Any:
    """The answer; None where the card has none."""
    try:
        return question(*about)
    except nvml.NVMLError:
        return None


def _text(value: object) -> str:
    """A name, which older versions give as bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")
