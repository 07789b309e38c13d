"""What ``memplan doctor`` found, for people and for scripts."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass
from memplan.report.lookups.machine_words import package_effect, setting_effect
from memplan.report.rows.written import json_text
from memplan.units import GIB

if TYPE_CHECKING:
    from memplan.hardware.gpu import GpuSpec
    from memplan.hardware.machine import CardsHere, FoundPackage, Host, LocalCard, Occupant
    from memplan.report.terminal.console import Console

DOCTOR_SCHEMA_VERSION = 1
"""Raised when a key of ``doctor_json`` changes its name or its meaning."""
LEAST_ROOM = 24
"""Characters under which a row's last cell is written below the row."""
MAX_OCCUPANTS = 3
"""Processes named for a card; the rest are counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Examination:
    """All that was looked at."""

    cards: "CardsHere"
    gpus: Mapping[int, "GpuSpec"]
    """By a card's index: as which kind of GPU it is judged."""
    host: "Host"
    packages: tuple["FoundPackage", ...]
    settings: Mapping[str, str]
    version: str
    """Of memplan, with how it replays."""
    configuration: tuple[tuple[str, str], ...] = ()
    """Files of the user's own, and what each is for."""
    plugins: tuple[tuple[str, str, str], ...] = ()
    """Kind and name, the package it came from, and what is wrong with it."""
    judged: str
    """The cards that ``fits`` is about, and how it is trained on them."""
    fits: Mapping[str, Mapping[str, str]]
    """Of well-known models: what fits here, by the way they are trained."""


def print_examination(console: "Console", found: Examination) -> None:
    """Print it all; the last lines are what fits here."""
    from rich.text import Text

    console.print(Text(_heading(found), style="bold"))
    print_rows(console, [_card_row(each, found.gpus.get(each.index)) for each in found.cards.cards])
    for title, rows in _sections(found).items():
        if rows:
            console.print(Text(title, style="bold"))
            print_rows(console, rows)


def _sections(found: Examination) -> dict[str, list[tuple[str, ...]]]:
    return {
        "Machine": _host_rows(found.host),
        "Packages": [
            (each.name, each.version or "not here", package_effect(each)) for each in found.packages
        ],
        "Environment": _setting_rows(found.settings),
        "Configuration": list(found.configuration),
        "Plug-ins": [
            (name, f"{origin}{trouble and f': left out: {trouble}'}")
            for name, origin, trouble in found.plugins
        ],
        f"What fits here, on {found.judged}": _fit_rows(found.fits),
    }


def _setting_rows(settings: Mapping[str, str]) -> list[tuple[str, ...]]:
    return [
        (name, f"{value or '(empty)'}: {setting_effect(name, value)}")
        for name, value in settings.items()
    ]


def _fit_rows(fits: Mapping[str, Mapping[str, str]]) -> list[tuple[str, ...]]:
    ways = next(iter(fits.values()), {})
    return (
        [("", *ways), *((name, *answers.values()) for name, answers in fits.items())]
        if fits
        else []
    )


def _heading(found: Examination) -> str:
    """The first line, which answers: how many cards there are, or why there is none."""
    here = found.cards
    hidden = f"; {here.hidden_by} hides {len(here.hidden)} more" if here.hidden else ""
    if not here.cards:
        return f"No card that a job here would see{hidden}{here.trouble and f': {here.trouble}'} ({found.version})"
    word = "card" if len(here.cards) == 1 else "cards"
    driver = next((f", driver {each.driver}" for each in here.cards if each.driver), "")
    return f"{len(here.cards)} {word}{driver}{hidden} ({found.version})"


def _card_row(card: "LocalCard", gpu: "GpuSpec | None") -> tuple[str, ...]:
    judged = gpu.gpu_id if gpu is not None and gpu.architecture else "known by its memory alone"
    used = f"{_gib(card.used_bytes)} of {_gib(card.total_bytes)} GiB used"
    return str(card.index), card.name, used, f"{judged}{_occupants(card.occupants)}"


def _occupants(occupants: Sequence["Occupant"]) -> str:
    """Who has most of it."""
    by_use = sorted(occupants, key=lambda each: -(each.used_bytes or 0))
    named = [
        f"{each.name or 'a process'} ({each.pid})"
        + (f" has {_gib(each.used_bytes)} GiB" if each.used_bytes is not None else "")
        for each in by_use[:MAX_OCCUPANTS]
    ]
    rest = len(occupants) - MAX_OCCUPANTS
    return "".join(f"; {each}" for each in (*named, *([f"{rest} more"] if rest > 0 else [])))


def _host_rows(host: "Host") -> list[tuple[str, ...]]:
    limit = (
        ""
        if host.limit_bytes is None
        else f"{_gib(host.limit_bytes)} GiB of it for this container or group"
    )
    rows = [
        ("CPU RAM", _size(host.memory_bytes), limit),
        ("processors", str(host.num_cores), ""),
        (
            "/dev/shm",
            _size(host.shared_bytes),
            "data loaders hand batches over through it, NCCL speaks through it",
        ),
        ("disk", _size(host.disk_bytes), "free here, for checkpoints"),
    ]
    return [row for row in rows if row[1]]


def _size(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{_gib(num_bytes)} GiB"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.1f}"


def print_rows(console: "Console", rows: Sequence[tuple[str, ...]]) -> None:
    """Print rows under one another; where the last cell has no room beside the others it goes below them."""
    from rich.text import Text

    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    for *cells, last in rows:
        start = " " + "".join(
            f"{cell:{width}}  " for cell, width in zip(cells, widths, strict=True)
        )
        for line in _lines(start, last, console.width):
            console.print(Text(line.rstrip()))


def _lines(start: str, last: str, width: int) -> list[str]:
    """The lines of one row.

    >>> _lines(" a  ", "some words", 40), _lines(" a" * 10, "some words that go on", 30)
    ([' a  some words'], [' a a a a a a a a a a', '    some words that go on'])
    """
    from textwrap import wrap

    room = width - len(start)
    if len(last) <= room:
        return [start + last]
    if room < LEAST_ROOM:
        inner = " " * 4
        return [start, *wrap(last, width, initial_indent=inner, subsequent_indent=inner)]
    return wrap(last, width, initial_indent=start, subsequent_indent=" " * len(start))


def doctor_json(found: Examination) -> str:
    """``{"schema_version", "cards", "hidden", "host", "packages", "environment", "fits"}``; bytes are integers."""
    here, host = found.cards, found.host
    return json_text(
        {
            "schema_version": DOCTOR_SCHEMA_VERSION,
            "cards": [_card_dict(each, found.gpus.get(each.index)) for each in here.cards],
            "hidden": [_card_dict(each, None) for each in here.hidden],
            "hidden_by": here.hidden_by or None,
            "trouble": here.trouble or None,
            "host": {
                "memory_bytes": host.memory_bytes,
                "limit_bytes": host.limit_bytes,
                "usable_bytes": host.usable_bytes,
                "num_cores": host.num_cores,
                "shared_bytes": host.shared_bytes,
                "disk_bytes": host.disk_bytes,
            },
            "packages": {each.name: each.version or None for each in found.packages},
            "environment": dict(found.settings),
            "configuration": dict(found.configuration),
            "plugins": [
                {"name": name, "package": origin, "trouble": trouble or None}
                for name, origin, trouble in found.plugins
            ],
            "fits": {name: dict(ways) for name, ways in found.fits.items()},
        },
        indent=2,
    )


def _card_dict(card: "LocalCard", gpu: "GpuSpec | None") -> dict[str, object]:
    return {
        "index": card.index,
        "name": card.name,
        "vendor": card.vendor.value,
        "uuid": card.uuid or None,
        "driver": card.driver or None,
        "slice_of": card.parent or None,
        "total_bytes": card.total_bytes,
        "used_bytes": card.used_bytes,
        "gpu_id": gpu.gpu_id if gpu else None,
        "capacity_bytes": gpu.capacity_bytes if gpu else None,
        "processes": [
            {"pid": each.pid, "name": each.name, "used_bytes": each.used_bytes}
            for each in card.occupants
        ],
    }
