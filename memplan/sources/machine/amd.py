"""AMD's cards as ``amd-smi`` writes them down, or ``rocm-smi`` before it.

Keys as either tool's ``--json`` is remembered to name them, not compared with a machine or ROCm's documentation: the first
sorts by card, in newer releases under ``gpu_data``; the second has a mapping of ``card0``, ``card1``, ... and ``system``. What
is not so is said to be unreadable.
"""

import json
from collections.abc import Mapping

from memplan.hardware.gpu import Vendor
from memplan.hardware.machine import LocalCard
from memplan.sources.machine.asking import CardsUnreadableError, answer_of, whole_bytes
from memplan.units import MIB

STATIC = ("amd-smi", "static", "--asic", "--vram", "--driver", "--json")
USED = ("amd-smi", "metric", "--mem-usage", "--json")
ROCM = (
    "rocm-smi",
    "--showproductname",
    "--showmeminfo",
    "vram",
    "--showdriverversion",
    "--showuniqueid",
    "--json",
)
_TOTAL, _USED = "VRAM Total Memory (B)", "VRAM Total Used Memory (B)"
_NAMES = ("Card Series", "Card series", "Device Name", "Card Model", "Card model")


def amd_cards() -> tuple[LocalCard, ...] | None:
    """Every card; None where neither tool is there. Raises ``CardsUnreadableError``."""
    static = answer_of(STATIC)
    if static is not None:
        return cards_from_amd_smi(static, answer_of(USED) or "[]")
    said = answer_of(ROCM)
    return None if said is None else cards_from_rocm_smi(said)


def cards_from_amd_smi(static: str, used: str) -> tuple[LocalCard, ...]:
    """The cards of ``amd-smi static`` with the use that ``amd-smi metric`` tells."""
    use = {str(row.get("gpu")): _mebibytes(row, "mem_usage", "used_vram") for row in _rows(used)}
    found: list[LocalCard] = []
    for row in _rows(static):
        total = _mebibytes(row, "vram", "size")
        if total:
            found.append(
                LocalCard(
                    index=len(found),
                    name=_text(row, "asic", "market_name"),
                    vendor=Vendor.AMD,
                    total_bytes=total,
                    used_bytes=use.get(str(row.get("gpu"))) or 0,
                    uuid=_text(row, "asic", "asic_serial"),
                    driver=_text(row, "driver", "version"),
                )
            )
    return tuple(found)


def cards_from_rocm_smi(said: str) -> tuple[LocalCard, ...]:
    """The cards of one answer of ``rocm-smi --json``."""
    document = _json(said, "rocm-smi")
    if not isinstance(document, Mapping):
        msg = "`rocm-smi --json` printed no mapping"
        raise CardsUnreadableError(msg)
    system = document.get("system")
    driver = system.get("Driver version") if isinstance(system, Mapping) else ""
    found: list[LocalCard] = []
    for key, row in document.items():
        total = whole_bytes(row.get(_TOTAL)) if isinstance(row, Mapping) else None
        if total:
            found.append(
                LocalCard(
                    index=len(found),
                    name=next((str(row[name]) for name in _NAMES if row.get(name)), str(key)),
                    vendor=Vendor.AMD,
                    total_bytes=total,
                    used_bytes=whole_bytes(row.get(_USED)) or 0,
                    uuid=str(row.get("Unique ID") or ""),
                    driver=str(driver or ""),
                )
            )
    return tuple(found)


def _rows(text: str) -> list[Mapping[str, object]]:
    document = _json(text, "amd-smi")
    if isinstance(document, Mapping):
        document = document.get("gpu_data")
    if not isinstance(document, list):
        msg = "`amd-smi --json` printed no list of cards"
        raise CardsUnreadableError(msg)
    return [row for row in document if isinstance(row, Mapping)]


def _json(text: str, tool: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        msg = f"`{tool} --json` printed no JSON"
        raise CardsUnreadableError(msg) from None


def _at(row: Mapping[str, object], part: str, key: str) -> object:
    inner = row.get(part)
    return inner.get(key) if isinstance(inner, Mapping) else None


def _mebibytes(row: Mapping[str, object], part: str, key: str) -> int | None:
    """A size, as a number of MB (which the tool means as MiB) or as ``{"value", "unit"}``."""
    value = _at(row, part, key)
    return whole_bytes(value.get("value") if isinstance(value, Mapping) else value, MIB)


def _text(row: Mapping[str, object], part: str, key: str) -> str:
    value = _at(row, part, key)
    return "" if value is None or value == "N/A" else str(value)
