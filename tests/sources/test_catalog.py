"""The GPU catalog: names that resolve, names that must not, and the data behind them."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.errors import ConfigError, GpuNotFoundError
from memplan.hardware.gpu import BF16_COMPUTE_CAPABILITY, GpuSpec, Vendor
from memplan.hardware.managers import MemoryManager
from memplan.sources import gpu_file
from memplan.sources.cards import catalog
from memplan.sources.cards.catalog import all_gpus, load_gpu
from memplan.sources.gpu_file import card_from_mapping
from memplan.units import GB, GIB, MIB

DATA = json.loads((Path(catalog.__file__).parents[2] / "data" / "gpus.json").read_text("utf-8"))
GPUS = all_gpus()
EVERY_GPU = [pytest.param(gpu, id=gpu.gpu_id) for gpu in GPUS]


@pytest.mark.parametrize("spell", [str, str.upper, str.lower], ids=["as is", "upper", "lower"])
def test_every_name_in_the_catalog_resolves(spell: Any) -> None:
    for gpu in GPUS:
        for name in (gpu.gpu_id, gpu.name, *gpu.aliases, *gpu.device_names):
            assert load_gpu(spell(name)).gpu_id == gpu.gpu_id, name


def test_no_two_gpus_share_a_name() -> None:
    owners: dict[str, set[str]] = {}
    for gpu in GPUS:
        for name in (gpu.gpu_id, gpu.name, *gpu.aliases, *gpu.device_names):
            owners.setdefault(catalog._bare(name.lower()), set()).add(gpu.gpu_id)
    assert {name: ids for name, ids in owners.items() if len(ids) > 1} == {}


@pytest.mark.parametrize(
    ("name", "gpu_id"),
    [
        # The design's aliases.
        ("a100", "a100-sxm4-80gb"),
        ("a100-80gb", "a100-sxm4-80gb"),
        ("a100-40gb", "a100-sxm4-40gb"),
        ("h100", "h100-sxm-80gb"),
        ("h100-80gb", "h100-sxm-80gb"),
        ("v100", "v100-sxm2-32gb"),
        ("v100-32gb", "v100-sxm2-32gb"),
        ("v100-16gb", "v100-sxm2-16gb"),
        # Families.
        ("h200", "h200-sxm-141gb"),
        ("b200", "b200-180gb"),
        ("l4", "l4-24gb"),
        ("t4", "t4-16gb"),
        ("a10g", "a10g-24gb"),
        ("l40s", "l40s-48gb"),
        ("mi300x", "mi300x-192gb"),
        ("rtx4090", "rtx4090-24gb"),
        ("4090", "rtx4090-24gb"),
        # What torch and nvidia-smi print, and names that begin other names.
        ("NVIDIA H100 80GB HBM3", "h100-sxm-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie-80gb"),
        ("NVIDIA H100 NVL", "h100-nvl-94gb"),
        ("NVIDIA GH200 480GB", "gh200-96gb"),
        ("NVIDIA H20", "h20-96gb"),
        ("NVIDIA H200", "h200-sxm-141gb"),
        ("NVIDIA A10", "a10-24gb"),
        ("NVIDIA A10G", "a10g-24gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA L4", "l4-24gb"),
        ("NVIDIA L40", "l40-48gb"),
        ("NVIDIA L40S", "l40s-48gb"),
        ("Tesla V100-SXM2-32GB", "v100-sxm2-32gb"),
        ("Tesla T4", "t4-16gb"),
        ("NVIDIA GeForce RTX 3090 Ti", "rtx3090ti-24gb"),
        ("NVIDIA GB200", "gb200-186gb"),
        ("AMD Instinct MI250X / MI250", "mi250x-gcd-64gb"),
        # Case, punctuation and the vendor are forgiven.
        ("rtx 4090", "rtx4090-24gb"),
        ("GeForce RTX 4090", "rtx4090-24gb"),
        ("nvidia_a100_80gb", "a100-sxm4-80gb"),
        ("tesla-v100", "v100-sxm2-32gb"),
        ("  H100  ", "h100-sxm-80gb"),
    ],
)
def test_names_that_people_use(name: str, gpu_id: str) -> None:
    assert load_gpu(name).gpu_id == gpu_id


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h1000", "no 'h1000'. Did you mean 'h100'?"),
        ("a100-80g", "Did you mean 'a100-80gb'?"),
        ("NVIDIA H100 80GB HMB3", "Did you mean 'h100-sxm-80gb'?"),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "a slice of a GPU (MIG)"),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "a slice of a GPU (MIG)"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "a laptop GPU"),
        ("NVIDIA GeForce RTX 3080 Ti", "has no 'NVIDIA GeForce RTX 3080 Ti'"),
        ("NVIDIA A100X", "has no 'NVIDIA A100X'"),
        ("abacus", "has no 'abacus'. Try:"),
        ("", "has no ''"),
        ("nvidia", "has no 'nvidia'"),
        ("x" * 10_000, "xxx...'. Try:"),
    ],
    ids=lambda value: value[:34],
)
def test_names_that_are_not_listed(name: str, message: str) -> None:
    with pytest.raises(GpuNotFoundError) as refused:
        load_gpu(name)
    text = str(refused.value)
    assert message in text
    assert "memplan gpus" in text
    assert "gpu='46GiB'" in text
    assert "\n" not in text
    assert len(text) < 400


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("h100x8", "name 'h100', and `num_gpus=8`"),
        ("8xA100", "name 'A100', and `num_gpus=8`"),
        ("4 x rtx4090", "name 'rtx4090', and `num_gpus=4`"),
        ("h100:2", "name 'h100', and `num_gpus=2`"),
    ],
)
def test_a_card_and_how_many_there_are(name: str, words: str) -> None:
    with pytest.raises(GpuNotFoundError, match=re.escape(words)):
        load_gpu(name)


@given(st.text(max_size=40))
def test_no_name_does_worse_than_not_being_found(name: str) -> None:
    try:
        gpu = load_gpu(name)
    except (GpuNotFoundError, ConfigError):
        return
    assert gpu in GPUS


NO_BANDWIDTH_FOUND = {"max1100-48gb", "ascend-910b-64gb"}
SLOTTED = {Vendor.NVIDIA, Vendor.AMD, Vendor.INTEL}


@pytest.mark.parametrize("gpu", EVERY_GPU)
def test_figures_hold_together(gpu: GpuSpec) -> None:
    nominal_bytes = gpu.memory_nominal_gb * GIB
    # T4 shows least of its nominal memory: 14909 of 16384 MiB, as ECC takes a sixteenth.
    # Metal recommends two thirds of up to 32 GB and three quarters of more for its share of what the CPU has too.
    least = 0.66 if gpu.manager is MemoryManager.MPS else 0.905
    assert least * nominal_bytes < gpu.capacity_bytes <= nominal_bytes
    if gpu.driver_total_bytes is not None:
        assert 0.94 * gpu.driver_total_bytes < gpu.capacity_bytes <= gpu.driver_total_bytes
    assert gpu.sources
    assert gpu.device_names
    if gpu.manager.is_replayed or gpu.gpu_id not in NO_BANDWIDTH_FOUND:
        assert gpu.bandwidth_bytes_per_s is not None
        assert 100 * GB < gpu.bandwidth_bytes_per_s < 20_000 * GB
    assert gpu.pcie is not None or gpu.vendor not in SLOTTED
    if gpu.manager is not MemoryManager.MPS:  # Apple tells no rate of 16 bits
        assert (gpu.dense_tflops.bf16 is not None) == gpu.has_bf16
    for dtype in ("bf16", "fp8"):  # no measured rate beats the data sheet
        measured = getattr(gpu.measured_tflops, dtype)
        assert measured is None or measured < getattr(gpu.dense_tflops, dtype)
    if gpu.vendor is Vendor.NVIDIA:
        assert gpu.compute_capability is not None
        assert gpu.has_bf16 == (gpu.compute_capability >= BF16_COMPUTE_CAPABILITY)
    else:
        assert gpu.compute_capability is None
        assert gpu.has_bf16


def test_the_data_is_the_version_that_is_read() -> None:
    assert DATA["schema_version"] == catalog.CATALOG_SCHEMA_VERSION


def test_all_keys_of_the_data_are_read() -> None:
    read = {
        "name", "vendor", "architecture", "compute_capability", "form_factor", "year",
        "num_multiprocessors", "allocator", "memory_nominal_gb", "memory_type", "driver_total_mib",
        "torch_total_mib", "bandwidth_gb_s", "bf16", "dense_tflops", "measured_tflops", "link",
        "pcie_generation", "pcie_gb_s", "device_names", "sources", "notes", "unverified",
    }  # fmt: skip
    assert {key for entry in DATA["gpus"].values() for key in entry} == read


def test_unverified_names_keys_of_the_data() -> None:
    for gpu_id, entry in DATA["gpus"].items():
        for name in entry.get("unverified", ()):
            key, _, dtype = name.partition(".")
            assert key in entry, gpu_id
            assert not dtype or dtype in entry[key], gpu_id


def test_the_catalog_is_not_read_when_it_is_imported() -> None:
    script = (
        "import sys, memplan.sources.cards.catalog as catalog\n"
        "heavy = {'json', 'yaml', 'rich', 'typer', 'difflib', 'memplan.sources.gpu_file'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "assert catalog._catalog.cache_info().currsize == 0\n"
    )
    checkout = Path(catalog.__file__).parents[3]
    subprocess.run([sys.executable, "-c", script], check=True, cwd=checkout)


# A card described in YAML.


def test_the_example_is_read(checkout: Path) -> None:
    gpu = load_gpu(checkout / "configs" / "gpus" / "mig-3g-40gb.yaml")
    assert gpu.name == "A100 80GB, MIG 3g.40gb"
    assert gpu.capacity_bytes == 40192 * MIB
    assert gpu.compute_capability == (8, 0)
    assert gpu.supports_flash_attention
    assert gpu.bandwidth_bytes_per_s == 1020 * GB
    assert gpu.dense_tflops.bf16 == 133.7


def test_every_example_is_read(checkout: Path) -> None:
    examples = sorted((checkout / "configs" / "gpus").iterdir())
    assert examples
    for path in examples:
        assert load_gpu(path).sources[0] == f"described in {path}"


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"card\.yaml"):
        load_gpu(str(tmp_path / "card.yaml"))


@pytest.mark.parametrize(
    ("figures", "capacity_bytes"),
    [
        ({"memory_gib": 39.5}, int(39.5 * GIB)),
        ({"memory_gib": 40, "torch_total_mib": 40192}, 40192 * MIB),
        ({"memory_gib": 40, "driver_total_mib": 40320}, 40320 * MIB * 99 // 100),
    ],
    ids=["memory alone", "torch's figure", "driver's figure"],
)
def test_capacity_of_a_described_card(figures: dict[str, float], capacity_bytes: int) -> None:
    assert card_from_mapping(figures, source="card.yaml").capacity_bytes == capacity_bytes


def test_a_described_card_with_everything() -> None:
    gpu = card_from_mapping(
        {
            "name": "X1",
            "memory_gib": 20,
            "vendor": "nvidia",
            "architecture": "Turing",
            "compute_capability": 7.5,
            "bandwidth_gb_s": 320,
            "dense_tflops": {"fp16": 65},
            "link": {"kind": "NVLink", "gb_s": 50, "pair_gb_s": 25},
            "pcie_generation": 3,
            "notes": "two\nlines",
            "sources": ["a log"],
        },
        source="x1.yaml",
    )
    assert gpu.vendor is Vendor.NVIDIA
    assert not gpu.has_bf16
    assert not gpu.supports_flash_attention
    assert gpu.link is not None
    assert (gpu.link.bytes_per_s, gpu.link.pair_bytes_per_s) == (50 * GB, 25 * GB)
    assert gpu.pcie is not None
    assert gpu.pcie.bytes_per_s == 15_750_000_000
    assert gpu.notes == "two lines"
    assert gpu.sources == ("described in x1.yaml", "a log")


def test_a_described_card_is_named_after_its_file() -> None:
    assert card_from_mapping({"memory_gib": 8}, source="cards/tiny.yaml").name == "tiny"


@pytest.mark.parametrize(
    ("card", "message"),
    [
        ({}, "torch_total_mib or driver_total_mib or memory_gib is missing"),
        ({"memory_gb": 40}, "unknown key 'memory_gb'. Did you mean 'memory_gib'?"),
        ({"zzz": 40}, "unknown key 'zzz'. Known: name, "),
        ({5: 40}, "unknown key 5."),
        ({"memory_gib": "40"}, "memory_gib: write a number, not '40'"),
        ({"memory_gib": True}, "memory_gib: write a number"),
        ({"memory_gib": -1}, "memory_gib: write a number above"),
        ({"memory_gib": 0}, "memory_gib: write a number above"),
        ({"memory_gib": float("nan")}, "memory_gib: write a number above"),
        ({"memory_gib": float("inf")}, "memory_gib: write a number above"),
        ({"memory_gib": 1 << 100_000}, "a number of more than 19 digits"),
        ({"memory_gib": 8, "name": ["x"]}, "name: write a text, not a list"),
        ({"memory_gib": 8, "bf16": "yes"}, "bf16: write true or false, not 'yes'"),
        ({"memory_gib": 8, "vendor": "Acme"}, "vendor: write one of NVIDIA, AMD"),
        ({"memory_gib": 8, "compute_capability": "sm_90"}, "write a version such as 9.0"),
        ({"memory_gib": 8, "compute_capability": "²"}, "write a version such as 9.0"),
        ({"memory_gib": 8, "dense_tflops": 100}, "dense_tflops: write a mapping of fp32,"),
        ({"memory_gib": 8, "dense_tflops": {"fp17": 1}}, "unknown key dense_tflops.'fp17'"),
        ({"memory_gib": 8, "dense_tflops": {"fp16": -1}}, "dense_tflops.fp16: write a number"),
        ({"memory_gib": 8, "link": {"kind": "NVLink"}}, "link.gb_s is missing"),
        ({"memory_gib": 8, "pcie_generation": 9}, "pcie_generation: write one of 3, 4, 5, 6"),
        ({"memory_gib": 8, "sources": "a log"}, "sources: write a list of texts"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_descriptions_that_are_refused(card: dict[Any, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        card_from_mapping(card, source="card.yaml")
    assert str(refused.value).startswith("card.yaml: ")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from(gpu_file._KEYS), _ANYTHING))
def test_a_description_is_read_or_refused(card: dict[str, object]) -> None:
    try:
        gpu = card_from_mapping(card, source="card.yaml")
    except ConfigError:
        return
    assert gpu.capacity_bytes > 0


# Against the figures that the catalog was made from, where they lie beside the checkout.

_RENAMED = {
    "memory": "memory_nominal_gb",
    "memory.driver_total_mib": "driver_total_mib",
    "memory.torch_total_mib": "torch_total_mib",
    "interconnect": "link",
    "pcie_gen": "pcie_generation",
}


@pytest.fixture(scope="module")
def facts(reference_dir: Path) -> dict[str, Any]:
    path = reference_dir.parent / "facts" / "gpus.json"
    if not path.is_file():
        pytest.skip("there is no ../shared/facts/gpus.json beside this checkout")
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return found


@pytest.mark.reference
def test_every_entry_of_the_facts_is_there(facts: dict[str, Any]) -> None:
    listed = [entry["id"] for entry in facts["gpus"]]
    assert listed == [gpu.gpu_id for gpu in GPUS][: len(listed)]
    assert set(facts["sources"]) <= set(DATA["sources"])


@pytest.mark.reference
def test_every_figure_of_the_facts_is_there(facts: dict[str, Any]) -> None:
    for entry in facts["gpus"]:
        gpu = load_gpu(entry["id"])
        assert _figures(gpu) == _expected(entry), gpu.gpu_id
        assert tuple(source.split(":")[0] for source in gpu.sources) == tuple(entry["sources"])
        renamed = tuple(_RENAMED.get(name, name) for name in entry["unverified_fields"])
        assert gpu.unverified == renamed
        if len(entry["notes"]) > len("smi (24564); torch 24138."):
            assert gpu.notes, gpu.gpu_id


@pytest.mark.reference
def test_every_name_of_the_facts_resolves(facts: dict[str, Any]) -> None:
    for entry in facts["gpus"]:
        for name in entry["device_name_match"]:
            assert load_gpu(name).gpu_id == entry["id"], name


def _figures(gpu: GpuSpec) -> dict[str, object]:
    link = gpu.link
    rates = gpu.dense_tflops
    assert gpu.pcie is not None
    return {
        "name": gpu.name,
        "vendor": gpu.vendor.value,
        "compute_capability": gpu.compute_capability,
        "form_factor": gpu.form_factor,
        "year": gpu.year,
        "num_multiprocessors": gpu.num_multiprocessors,
        "memory": (gpu.memory_nominal_gb, gpu.memory_type),
        "driver": gpu.driver_total_bytes,
        "torch": gpu.torch_total_bytes,
        "bandwidth": gpu.bandwidth_bytes_per_s,
        "rates": [rates.fp32, rates.tf32, rates.fp16, rates.bf16, rates.fp8, rates.fp4],
        "link": (link.kind, link.bytes_per_s, link.pair_bytes_per_s) if link else None,
        "pcie": (gpu.pcie.generation, gpu.pcie.bytes_per_s),
        "bf16": gpu.has_bf16,
    }


def _expected(entry: dict[str, Any]) -> dict[str, object]:
    memory, link, capability = entry["memory"], entry["interconnect"], entry["compute_capability"]
    pair = link["p2p_gb_s_one_direction"]
    in_bytes = {key: memory[key] and memory[key] * MIB for key in memory if key.endswith("mib")}
    return {
        "name": entry["name"],
        "vendor": entry["vendor"],
        "compute_capability": tuple(int(part) for part in capability.split("."))
        if capability[0].isdigit()
        else None,
        "form_factor": entry["form_factor"],
        "year": entry["year"],
        "num_multiprocessors": entry["sm_or_cu"],
        "memory": (memory["nominal_gb"], memory["type"]),
        "driver": in_bytes["driver_total_mib"],
        "torch": in_bytes["torch_total_mib"],
        "bandwidth": entry["bandwidth_gb_s"] * GB,
        "rates": [
            entry["dense_tflops"][key] for key in ("fp32", "tf32", "fp16", "bf16", "fp8", "fp4")
        ],
        "link": None
        if link["type"] == "none"
        else (
            link["type"],
            round(link["gb_s_per_gpu_one_direction"] * GB),
            pair and round(pair * GB),
        ),
        "pcie": (entry["pcie_gen"], round(entry["pcie_gb_s_one_direction"] * GB)),
        "bf16": entry["bf16_tensor_core"],
    }
