"""The GPU catalog: from a name, a printed device name or a YAML description to a ``GpuSpec``.

Names match whole, never by prefix: ``NVIDIA A10`` begins ``NVIDIA A100``, ``L4`` begins ``L40S``,
and a MIG slice or a laptop GPU begins with the name of the card that has far more memory. Case,
punctuation and the vendor's name are forgiven.
"""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memplan.errors import GpuNotFoundError, did_you_mean, nearest
from memplan.hardware.gpu import (
    GpuSpec,
    LinkSpec,
    NodeSpec,
    PcieSpec,
    TflopsByDtype,
    Vendor,
    gpu_from_memory,
)
from memplan.hardware.managers import MemoryManager
from memplan.units import GB, GIB, MIB, is_size, parse_bytes

if TYPE_CHECKING:
    from os import PathLike

CATALOG_SCHEMA_VERSION = 1
"""The layout of ``data/gpus.json`` that this module reads."""

_DATA = Path(__file__).parents[2] / "data" / "gpus.json"
_CARD_FILE_SUFFIXES = (".yaml", ".yml")
_BRANDS = (
    "nvidia",
    "geforce",
    "quadro",
    "tesla",
    "amd",
    "instinct",
    "intel",
    "habana",
    "apple",
    "huawei",
    "google",
    "aws",
)
_PUNCTUATION = str.maketrans("", "", " \t-_/().")
_SHOWN_LENGTH = 80
_UNLISTED_KINDS = {"mig": "a slice of a GPU (MIG)", "laptop": "a laptop GPU"}
_ADVICE = (
    "`memplan gpus` (lists those known), `gpu='46GiB'` (the memory of any other card), "
    "or a .yaml file that describes one"
)


def load_gpu(name: "str | PathLike[str]") -> GpuSpec:
    """Find a GPU by catalog id, alias or printed device name, by its memory, or read its description.

    Memory is a size with its unit, such as ``46GiB``: what an unlisted card reports. Raises
    ``GpuNotFoundError`` with the nearest name, and ``ConfigError`` for a YAML description that is
    wrong (see ``memplan.sources.gpu_file``).

    >>> load_gpu("h100").gpu_id, load_gpu("NVIDIA A100 80GB PCIe").gpu_id, load_gpu("A10").gpu_id
    ('h100-sxm-80gb', 'a100-pcie-80gb', 'a10-24gb')
    """
    text = str(name).strip()
    gpu_id = _find_id(text)
    if gpu_id is not None:
        return _catalog_entry(gpu_id)
    if text.lower().endswith(_CARD_FILE_SUFFIXES):
        from memplan.sources.gpu_file import read_card

        return read_card(Path(text))
    if is_size(text):
        return gpu_from_memory(parse_bytes(text))
    own = _own_card(text)
    if own is not None:
        return own
    raise GpuNotFoundError(_not_found_message(text))


def _own_card(text: str) -> GpuSpec | None:
    """A card of the user's own configuration, or a plug-in's."""
    from memplan.sources.cards.organisation import card_file
    from memplan.sources.gpu_file import read_card
    from memplan.sources.plugins import plugged

    file = card_file(text)
    if file is not None:
        return read_card(file)
    card: GpuSpec | None = plugged("gpus", text)
    return card


def all_gpus() -> tuple[GpuSpec, ...]:
    """Return every GPU of the catalog, oldest architecture first within each vendor."""
    return tuple(_catalog_entry(gpu_id) for gpu_id in _catalog()["gpus"])


def gpus_like(text: str) -> tuple[GpuSpec, ...]:
    """The GPUs that a text picks: with as much memory on the box or more, its maker's, its architecture's, or with it as a part of their ids.

    None where it is a GPU's own name, or picks nothing.

    >>> [each.gpu_id for each in gpus_like("rtx40")], gpus_like("h100"), len(gpus_like("256GB")) > 1
    (['rtx4090-24gb', 'rtx4080-16gb', 'rtx4070ti-12gb'], (), True)
    >>> {each.architecture for each in gpus_like("hopper")}, len(gpus_like("amd")) > 1
    ({'Hopper'}, True)
    """
    named = text.strip().lower()
    if _find_id(named) is not None:
        return ()
    if is_size(named):
        least_gb = round(parse_bytes(named) / (GB if named.endswith("gb") else GIB), 2)
        return tuple(each for each in all_gpus() if each.memory_nominal_gb >= least_gb)
    return tuple(
        each
        for each in all_gpus()
        if named
        and (
            named in each.gpu_id or named in (each.vendor.value.lower(), each.architecture.lower())
        )
    )


def gpu_names() -> tuple[str, ...]:
    """Every id and alias of the catalog, in order.

    >>> "h100" in gpu_names(), "h100-sxm-80gb" in gpu_names()
    (True, True)
    """
    catalog = _catalog()
    return tuple(sorted({*catalog["gpus"], *catalog["aliases"]}))


def _find_id(text: str) -> str | None:
    """Return the catalog id that a name stands for, quickest way first."""
    catalog = _catalog()
    lowered = text.lower()
    if lowered in catalog["gpus"]:
        return lowered
    alias: str | None = catalog["aliases"].get(lowered)
    return alias or _names().get(_bare(lowered))


@cache
def _catalog() -> dict[str, Any]:
    import json

    catalog: dict[str, Any] = json.loads(_DATA.read_bytes())
    return catalog


@cache
def _names() -> dict[str, str]:
    """Map every bare name to the id it stands for."""
    catalog = _catalog()
    names = {_bare(alias): gpu_id for alias, gpu_id in catalog["aliases"].items()}
    for gpu_id, entry in catalog["gpus"].items():
        for name in (gpu_id, entry["name"], *entry["device_names"]):
            names[_bare(name.lower())] = gpu_id
    for alias, gpu_id in catalog["aliases"].items():
        # With its memory, as reports head columns (H100-80) and as people write (t4-16gb).
        sized = _bare(alias.removesuffix("gb"))
        memory = f"{catalog['gpus'][gpu_id]['memory_nominal_gb']:g}"
        plain = sized if sized.endswith(memory) else sized + memory
        names.setdefault(plain, gpu_id)
        names.setdefault(f"{plain}gb", gpu_id)
    return names


def _bare(lowered: str) -> str:
    """Drop what people write differently: the vendor's name and punctuation.

    >>> _bare("nvidia a100-sxm4-80gb"), _bare("rtx 4090")
    ('a100sxm480gb', 'rtx4090')
    """
    for brand in _BRANDS:
        lowered = lowered.replace(brand, "")
    return lowered.translate(_PUNCTUATION)


_COUNTED = (
    r"(?P<name>.+?)\s*[x*:]\s*(?P<count>\d+)",
    r"(?P<count>\d+)\s*[x*]?\s*(?P<name>\D.*)",
)
"""A card with a number of them behind or before it: ``h100x8``, ``8xA100``."""


def _counted(text: str) -> tuple[str, str] | None:
    """The card and how many there are, where one word says both."""
    import re

    for pattern in _COUNTED:
        found = re.fullmatch(pattern, text.strip(), flags=re.IGNORECASE)
        if found is not None and _find_id(found["name"]) is not None:
            return found["name"], found["count"]
    return None


def _not_found_message(text: str) -> str:
    shown = text if len(text) <= _SHOWN_LENGTH else f"{text[:_SHOWN_LENGTH]}..."
    for word, kind in _UNLISTED_KINDS.items():
        if word in text.lower():
            return f"{shown!r} is {kind}, which the GPU catalog does not list. Try: {_ADVICE}"
    if text.isdecimal():
        return f"{shown!r} names no GPU; if it is how many there are, say so: `num_gpus={shown}`"
    counted = _counted(text)
    if counted is not None:
        name, count = counted
        return f"{shown!r} is a GPU and how many there are: name {name!r}, and `num_gpus={count}`"
    return f"the GPU catalog has no {shown!r}.{_suggestion(shown)} Try: {_ADVICE}"


def _suggestion(shown: str) -> str:
    """Suggest the nearest alias or id, or else the id of the nearest printed name."""
    catalog = _catalog()
    guess = did_you_mean(shown, (*catalog["aliases"], *catalog["gpus"]))
    if guess:
        return guess
    names = _names()
    close = nearest(_bare(shown.lower()), tuple(names))
    return f" Did you mean {names[close]!r}?" if close else ""


@cache
def _catalog_entry(gpu_id: str) -> GpuSpec:
    catalog = _catalog()
    entry: dict[str, Any] = catalog["gpus"][gpu_id]
    return GpuSpec(
        gpu_id=gpu_id,
        name=entry["name"],
        vendor=Vendor(entry["vendor"]),
        manager=MemoryManager(entry.get("allocator", "cuda")),
        architecture=entry["architecture"],
        compute_capability=_compute_capability(entry.get("compute_capability")),
        form_factor=entry["form_factor"],
        year=entry["year"],
        num_multiprocessors=entry.get("num_multiprocessors"),
        memory_nominal_gb=entry["memory_nominal_gb"],
        memory_type=entry["memory_type"],
        driver_total_bytes=_mib(entry.get("driver_total_mib")),
        torch_total_bytes=_mib(entry.get("torch_total_mib")),
        bandwidth_bytes_per_s=_bytes_per_s(entry["bandwidth_gb_s"])
        if "bandwidth_gb_s" in entry
        else None,
        dense_tflops=TflopsByDtype(**entry["dense_tflops"]),
        measured_tflops=TflopsByDtype(**entry.get("measured_tflops", {})),
        link=_link(entry.get("link")),
        pcie=_pcie(entry),
        node=_node(gpu_id),
        has_bf16=entry["bf16"],
        device_names=tuple(entry["device_names"]),
        aliases=tuple(alias for alias, known in catalog["aliases"].items() if known == gpu_id),
        sources=tuple(f"{key}: {catalog['sources'][key]}" for key in entry["sources"]),
        notes=entry.get("notes", ""),
        unverified=tuple(entry.get("unverified", ())),
    )


def _node(gpu_id: str) -> NodeSpec | None:
    catalog = _catalog()
    for row in catalog["nodes"]:
        if gpu_id in row["gpus"]:
            return NodeSpec(
                name=row["name"],
                memory_bytes=row["memory_gib"] * GIB,
                num_gpus=row["num_gpus"],
                source=catalog["node_sources"][row["source"]],
                memory_bytes_per_s=_bytes_per_s(row["memory_gb_s"])
                if "memory_gb_s" in row
                else None,
            )
    return None


def _pcie(entry: dict[str, Any]) -> PcieSpec | None:
    if "pcie_generation" not in entry:
        return None
    rate = _bytes_per_s(entry["pcie_gb_s"])
    return PcieSpec(generation=entry["pcie_generation"], bytes_per_s=rate)


def _link(entry: dict[str, Any] | None) -> LinkSpec | None:
    if entry is None:
        return None
    pair = entry.get("pair_gb_s")
    return LinkSpec(
        kind=entry["kind"],
        bytes_per_s=_bytes_per_s(entry["gb_s"]),
        pair_bytes_per_s=None if pair is None else _bytes_per_s(pair),
        topology=entry.get("topology", ""),
    )


def _compute_capability(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    major, minor = text.split(".")
    return int(major), int(minor)


def _mib(mebibytes: int | None) -> int | None:
    return None if mebibytes is None else mebibytes * MIB


def _bytes_per_s(gigabytes_per_s: float) -> int:
    return round(gigabytes_per_s * GB)
