"""``memplan doctor``."""

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from memplan.cli.taking import NO_VALUES, takes
from memplan.options.table import Option, Values

if TYPE_CHECKING:
    from memplan.hardware.gpu import GpuSpec
    from memplan.hardware.machine import CardsHere, FoundPackage, Host
    from memplan.report.lookups.doctor import Examination

WELL_KNOWN = ("llama-3.2-1b", "llama-3.1-8b", "qwen2.5-32b")
"""A model of each size that people ask about: a laptop's, a card's and a node's."""
WAYS: Mapping[str, Mapping[str, Any]] = {
    "full": {},
    "LoRA 16": {"lora": 16},
    "QLoRA 16": {"lora": 16, "quantize": "nf4"},
}
"""How each is trained, beside ``COMMON``."""
COMMON: Mapping[str, Any] = {"checkpointing": "full"}
_COMMON_WORDS = "2,048 tokens, checkpointing full"


class DoctorFormat(StrEnum):
    """How the examination is written."""

    TABLE = "table"
    JSON = "json"


FORMAT = Option(
    flag="--format", kind=DoctorFormat, default=DoctorFormat.TABLE, metavar="FORMAT", panel="",
    help_text="table, or json for scripts.",
)  # fmt: skip


@takes(FORMAT)
def doctor(values: Values = NO_VALUES) -> None:
    """Look at this machine: cards and who uses them, memory, packages, and what fits here."""
    from memplan.cli.output.terminal import say
    from memplan.report.lookups.doctor import doctor_json, print_examination

    found = examination()
    if values["format"] is DoctorFormat.JSON:
        say(doctor_json(found))
        return
    from memplan.report.terminal.console import TerminalConsole

    print_examination(TerminalConsole(), found)


def examination() -> "Examination":
    """Everything, looked at once."""
    from os import environ
    from pathlib import Path

    from memplan.cli.versions import version_line
    from memplan.sources.machine.cards import cards_here
    from memplan.sources.machine.host import host_here
    from memplan.sources.machine.packages import packages_here
    from memplan.sources.machine.settings import settings_here

    return examined(
        cards=cards_here(environ),
        host=host_here(Path.cwd()),
        packages=packages_here(),
        settings=settings_here(environ),
        version=version_line(),
        configuration=configuration_here(),
        plugins=plugins_here(),
    )


def configuration_here() -> "tuple[tuple[str, str], ...]":
    """Files of the user's own configuration, what each is for, and what is wrong with one."""
    from memplan.errors import MemplanError
    from memplan.sources.cards.organisation import all_files, defaults
    from memplan.sources.cards.prices import read_prices
    from memplan.sources.files import read_mapping
    from memplan.sources.gpu_file import read_card
    from memplan.sources.pools import read_pools

    found = []
    for path, what in all_files():
        kind = what.partition(",")[0].partition(" ")[0]
        try:
            if kind == "defaults":
                defaults()
                values = read_mapping(path)
                what = f"defaults: {', '.join(f'--{key} {value}' for key, value in values.items())}"
            elif kind == "prices":
                read_prices(str(path))
            else:
                (read_card if kind == "card" else read_pools)(path)
        except MemplanError as error:
            what = f"{what}: cannot be used: {error}"
        found.append((str(path), what))
    return tuple(found)


def plugins_here() -> "tuple[tuple[str, str, str], ...]":
    """Every plug-in, the package it came from, and what is wrong with it."""
    from memplan.sources.plugins import examined as examined_plugins

    return tuple(
        (f"{each.kind}: {each.name}", each.origin, each.trouble) for each in examined_plugins()
    )


def examined(
    *,
    cards: "CardsHere",
    host: "Host",
    packages: "tuple[FoundPackage, ...]",
    settings: Mapping[str, str],
    version: str,
    configuration: "tuple[tuple[str, str], ...]" = (),
    plugins: "tuple[tuple[str, str, str], ...]" = (),
) -> "Examination":
    """What was found, with what fits there."""
    from memplan.report.lookups.doctor import Examination
    from memplan.sources.machine.local_gpu import gpu_of

    gpus = {each.index: gpu_of(each) for each in cards.cards}
    kind = commonest(tuple(gpus.values()))
    return Examination(
        cards=cards,
        gpus=gpus,
        host=host,
        packages=packages,
        settings=settings,
        version=version,
        configuration=configuration,
        plugins=plugins,
        judged="" if kind is None else f"{kind[1]} x {kind[0].short_name} ({_COMMON_WORDS})",
        fits={} if kind is None else {model: _ways(model, *kind) for model in WELL_KNOWN},
    )


def commonest(gpus: "tuple[GpuSpec, ...]") -> "tuple[GpuSpec, int] | None":
    """The kind of card that there is most of, with what its fullest leaves, and how many there are of it."""
    kinds: dict[str, list[GpuSpec]] = {}
    for each in gpus:
        kinds.setdefault(each.gpu_id, []).append(each)
    if not kinds:
        return None
    chosen = max(kinds.values(), key=len)
    return min(chosen, key=lambda each: each.capacity_bytes), len(chosen)


def _ways(model: str, gpu: "GpuSpec", num_gpus: int) -> dict[str, str]:
    return {name: _answer(model, gpu, num_gpus, way) for name, way in WAYS.items()}


def _answer(model: str, gpu: "GpuSpec", num_gpus: int, way: Mapping[str, Any]) -> str:
    """``fits, batch <= 4``; QLoRA keeps the whole model on each card (DDP), the others share it (FSDP2)."""
    from memplan.api import estimate
    from memplan.errors import MemplanError
    from memplan.estimator import Verdict
    from memplan.report.estimates.answer import verdict_words

    engine = "ddp" if num_gpus == 1 or "quantize" in way else "fsdp"
    try:
        found = estimate(model, gpu=gpu, gpus=num_gpus, engine=engine, **COMMON, **way)
    except MemplanError as error:
        return str(error)
    words = verdict_words(found.verdict)
    largest = found.largest_batch
    return f"{words}, batch <= {largest}" if largest and found.verdict is Verdict.FITS else words
