"""A GPU described in YAML: a card, or a slice of one, that the catalog does not list.

``configs/gpus/mig-3g-40gb.yaml`` is an example to copy. Keys, of which one of the three memory
figures is needed:

==================  ===========================================================================
name                what the tables call it; by default the file's name
torch_total_mib     ``torch.cuda.get_device_properties(0).total_memory / 2**20``: the capacity
driver_total_mib    the total of ``nvidia-smi``; the capacity is 1 % less
memory_gib          usable memory; the capacity where neither of the two above is given
vendor              NVIDIA, AMD, Intel, Apple, Huawei, Google or AWS
allocator           who hands its memory out: cuda (also AMD's), xpu, npu, hpu, mps, xla or neuron; by default cuda
architecture        such as Hopper
compute_capability  CUDA's, such as 9.0: decides which attention kernels run
bf16                whether it multiplies bf16 in hardware; by default from compute capability 8.0
bandwidth_gb_s      of the memory, 10^9 bytes per second
dense_tflops        rates without sparsity: a mapping of fp32, tf32, fp16, bf16, fp8, fp4
link                a mapping: kind, gb_s (one direction, one GPU), pair_gb_s, topology
pcie_generation     3 to 6
notes               what a reader should know
sources             a list: where the figures come from
==================  ===========================================================================
"""

from collections.abc import Mapping
from pathlib import Path

from memplan.errors import ConfigError, did_you_mean
from memplan.hardware.gpu import (
    BF16_COMPUTE_CAPABILITY,
    MAX_MEMORY_BYTES,
    MIN_MEMORY_BYTES,
    GpuSpec,
    LinkSpec,
    PcieSpec,
    TflopsByDtype,
    Vendor,
)
from memplan.hardware.managers import MemoryManager
from memplan.units import GB, GIB, MIB

_KEYS = (
    "name", "torch_total_mib", "driver_total_mib", "memory_gib", "vendor", "architecture",
    "compute_capability", "bf16", "bandwidth_gb_s", "dense_tflops", "link", "pcie_generation",
    "notes", "sources", "allocator",
)  # fmt: skip
_RATE_KEYS = ("fp32", "tf32", "fp16", "bf16", "fp8", "fp4")
_LINK_KEYS = ("kind", "gb_s", "pair_gb_s", "topology")

PCIE_BYTES_PER_S = {3: 15_750_000_000, 4: 31_500_000_000, 5: 63_000_000_000, 6: 121_000_000_000}
"""Nominal rate of 16 lanes by generation, one direction, as the catalog has it."""

_MAX_RATE = 10.0**9
_SHOWN_LENGTH = 60
_SHOWN_BITS = 64


def read_card(path: Path) -> GpuSpec:
    """Read a card's description from a YAML file.

    Raises ``ConfigError`` when the file cannot be read or a key is unknown, missing or wrong.
    """
    from memplan.sources.files import read_mapping

    return card_from_mapping(read_mapping(path), source=str(path))


def card_from_mapping(card: Mapping[str, object], *, source: str) -> GpuSpec:
    """Build a ``GpuSpec`` from a description; ``source`` names it in errors.

    >>> card_from_mapping({"name": "half an H100", "memory_gib": 39.5}, source="half.yaml").gpu_id
    'half an H100'
    """
    reader = _Reader(card, source=source, keys=_KEYS)
    capability = reader.version("compute_capability")
    torch_total, driver_total, nominal_bytes = _memory(reader)
    name = reader.text("name") or Path(source).stem
    return GpuSpec(
        gpu_id=name,
        name=name,
        vendor=_vendor(reader, capability),
        manager=_manager(reader),
        architecture=reader.text("architecture"),
        compute_capability=capability,
        memory_nominal_gb=round(nominal_bytes / GIB, 2),
        driver_total_bytes=driver_total,
        torch_total_bytes=torch_total,
        bandwidth_bytes_per_s=reader.rate("bandwidth_gb_s", unit=GB),
        dense_tflops=_rates(reader),
        link=_link(reader),
        pcie=_pcie(reader),
        has_bf16=reader.flag("bf16", default=_has_bf16(capability)),
        sources=(f"described in {source}", *reader.texts("sources")),
        notes=reader.text("notes"),
    )


class _Reader:
    """Takes values out of a mapping, and refuses wrong ones with their file and key."""

    def __init__(
        self, card: Mapping[str, object], *, source: str, keys: tuple[str, ...], section: str = ""
    ) -> None:
        self._card = card
        self._source = source
        self._section = section
        for key in card:
            if key not in keys:
                hint = did_you_mean(_shown(key).strip("'"), keys) or f" Known: {', '.join(keys)}"
                msg = f"{source}: unknown key {section}{_shown(key)}.{hint}"
                raise ConfigError(msg)

    def require_one_of(self, *keys: str) -> None:
        """Refuse a mapping that has none of these keys."""
        if all(self._card.get(key) is None for key in keys):
            named = " or ".join(f"{self._section}{key}" for key in keys)
            msg = f"{self._source}: {named} is missing"
            raise ConfigError(msg)

    def text(self, key: str) -> str:
        """Return a text on one line, empty where the key is absent."""
        value = self._card.get(key)
        if value is None:
            return ""
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise self._wrong(key, "a text")
        return " ".join(_plain(value).split())

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of texts, empty where the key is absent."""
        value = self._card.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, "a list of texts")
        return tuple(value)

    def flag(self, key: str, *, default: bool) -> bool:
        """Return true or false."""
        value = self._card.get(key, default)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def number(self, key: str, *, minimum: float = 0, maximum: float = _MAX_RATE) -> float | None:
        """Return a positive number, or None where the key is absent."""
        value = self._card.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number")
        if not (minimum <= value <= maximum and value > 0):
            raise self._wrong(key, f"a number above {minimum:.3g} and up to {maximum:.3g}")
        return value

    def rate(self, key: str, *, unit: int) -> int | None:
        """Return a rate in bytes per second, from a number of ``unit`` bytes per second."""
        value = self.number(key)
        return None if value is None else round(value * unit)

    def memory(self, key: str, *, unit: int) -> int | None:
        """Return a size in bytes, from a number of ``unit`` bytes."""
        value = self.number(key, minimum=MIN_MEMORY_BYTES / unit, maximum=MAX_MEMORY_BYTES / unit)
        return None if value is None else int(value * unit)

    def choice(self, key: str, known: tuple[str, ...]) -> str | None:
        """Return one of the known words, whatever its case; None where the key is absent."""
        text = self.text(key)
        for word in known:
            if word.lower() == text.lower():
                return word
        if text:
            raise self._wrong(key, f"one of {', '.join(known)}")
        return None

    def version(self, key: str) -> tuple[int, int] | None:
        """Return a number such as 9.0 as its two parts."""
        text = self.text(key)
        major, _, minor = text.partition(".")
        digits = major + minor
        if not text:
            return None
        if not (major and digits.isascii() and digits.isdecimal() and len(digits) <= 4):
            raise self._wrong(key, "a version such as 9.0")
        return int(major), int(minor or 0)

    def section(self, key: str, *, keys: tuple[str, ...]) -> "_Reader | None":
        """Return a reader of a mapping inside the mapping; None where the key is absent."""
        value = self._card.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self._wrong(key, f"a mapping of {', '.join(keys)}")
        return _Reader(value, source=self._source, keys=keys, section=f"{key}.")

    def _wrong(self, key: str, wanted: str) -> ConfigError:
        where = f"{self._source}: {self._section}{key}"
        return ConfigError(f"{where}: write {wanted}, not {_shown(self._card[key])}")


def _memory(reader: _Reader) -> tuple[int | None, int | None, int]:
    """Return torch's total, the driver's and the nominal memory [bytes]."""
    reader.require_one_of("torch_total_mib", "driver_total_mib", "memory_gib")
    torch_total = reader.memory("torch_total_mib", unit=MIB)
    driver_total = reader.memory("driver_total_mib", unit=MIB)
    given = reader.memory("memory_gib", unit=GIB)
    if torch_total is None and driver_total is None:
        torch_total = given
    return torch_total, driver_total, given or torch_total or driver_total or 0


def _manager(reader: _Reader) -> MemoryManager:
    word = reader.choice("allocator", tuple(each.value for each in MemoryManager))
    return MemoryManager.CUDA if word is None else MemoryManager(word)


def _vendor(reader: _Reader, capability: tuple[int, int] | None) -> Vendor:
    """Only NVIDIA's cards have a compute capability."""
    word = reader.choice("vendor", tuple(vendor.value for vendor in Vendor))
    if word is None:
        return Vendor.UNKNOWN if capability is None else Vendor.NVIDIA
    return Vendor(word)


def _has_bf16(capability: tuple[int, int] | None) -> bool:
    """Whether bf16 is to be expected: a card whose age is not said is taken for a recent one."""
    return capability is None or capability >= BF16_COMPUTE_CAPABILITY


def _rates(reader: _Reader) -> TflopsByDtype:
    rates = reader.section("dense_tflops", keys=_RATE_KEYS)
    if rates is None:
        return TflopsByDtype()
    return TflopsByDtype(**{key: rates.number(key) for key in _RATE_KEYS})


def _link(reader: _Reader) -> LinkSpec | None:
    link = reader.section("link", keys=_LINK_KEYS)
    if link is None:
        return None
    link.require_one_of("gb_s")
    return LinkSpec(
        kind=link.text("kind") or "link",
        bytes_per_s=link.rate("gb_s", unit=GB) or 0,
        pair_bytes_per_s=link.rate("pair_gb_s", unit=GB),
        topology=link.text("topology"),
    )


def _pcie(reader: _Reader) -> PcieSpec | None:
    word = reader.choice("pcie_generation", tuple(str(known) for known in PCIE_BYTES_PER_S))
    if word is None:
        return None
    return PcieSpec(generation=int(word), bytes_per_s=PCIE_BYTES_PER_S[int(word)])


def _plain(value: object) -> str:
    """Return a value as text; Python refuses to print integers of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:
        return "a number of more than 19 digits"
    return str(value)


def _shown(value: object) -> str:
    """Return a value as an error message shows it, shortened."""
    if isinstance(value, int):
        return _plain(value)
    text = repr(value) if isinstance(value, str | float) else f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN_LENGTH else f"{text[:_SHOWN_LENGTH]}..."
