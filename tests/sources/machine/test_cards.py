"""The cards of a machine, as tools and libraries that are not there would tell of them."""

import json
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.cli import doctor
from memplan.errors import GpuNotFoundError
from memplan.hardware.gpu import Vendor
from memplan.hardware.machine import LocalCard
from memplan.sources.gpus import load_gpu, load_gpus
from memplan.sources.machine import amd, asking, cards, nvidia_smi, nvml
from memplan.sources.machine.asking import CardsUnreadableError, whole_bytes
from memplan.sources.machine.cards import cards_here, visible
from memplan.sources.machine.local_gpu import gpu_of
from memplan.units import GIB, MIB
from tests.conftest import Outcome

ANSWER = Path(__file__).parents[2] / "data" / "machine" / "nvidia-smi.xml"
"""Two H100s, one of them in use, and an A100 in two slices."""

Run = Callable[..., Outcome]


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Puts a tool of this name into an otherwise empty path; the text is its shell script."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    for variable in cards.HIDING:
        monkeypatch.delenv(variable, raising=False)

    def put(name: str, script: str) -> None:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    return put


@pytest.fixture
def three_cards(tools: Callable[[str, str], None]) -> None:
    tools("nvidia-smi", f"while read -r line; do echo \"$line\"; done < '{ANSWER}'")


@pytest.mark.usefixtures("three_cards")
def test_each_card_and_slice_with_what_is_used_of_it() -> None:
    found = cards_here({}).cards
    assert [(each.index, each.name, each.used_bytes // MIB) for each in found] == [
        (0, "NVIDIA H100 80GB HBM3", 2048),
        (1, "NVIDIA H100 80GB HBM3", 0),
        (2, "NVIDIA A100-SXM4-80GB MIG 39gb", 37),
        (3, "NVIDIA A100-SXM4-80GB MIG 39gb", 12288),
    ]
    assert {each.driver for each in found} == {"580.65.06"}
    users = [
        [(each.pid, each.name, (each.used_bytes or 0) // MIB) for each in card.occupants]
        for card in found
    ]
    assert users == [[(4321, "python", 2040)], [], [], [(77, "ollama", 12251)]]


@pytest.mark.usefixtures("three_cards")
def test_what_others_have_is_not_there_to_be_used() -> None:
    whole = load_gpu("h100")
    taken, free, empty_slice, used_slice = (gpu_of(each) for each in cards_here({}).cards)
    assert free == whole
    assert taken.gpu_id == whole.gpu_id
    assert taken.capacity_bytes == whole.capacity_bytes - 2 * GIB
    assert "less 2.00 GiB that others have" in taken.capacity_note
    assert empty_slice.capacity_bytes - used_slice.capacity_bytes == (12288 - 37) * MIB
    a100 = load_gpu("a100-80gb")
    assert a100.dense_tflops.bf16 is not None
    assert empty_slice.dense_tflops.bf16 == pytest.approx(a100.dense_tflops.bf16 * 42 / 108)
    assert empty_slice.link is None
    assert empty_slice.compute_capability == a100.compute_capability


@pytest.mark.usefixtures("three_cards")
def test_local_is_each_kind_once_by_its_fullest_card() -> None:
    kinds = load_gpus("local")
    assert [each.gpu_id for each in kinds] == ["h100-sxm-80gb", "a100-sxm4-80gb-mig-39"]
    assert [each.taken_bytes // MIB for each in kinds] == [2048, 12288]
    assert load_gpu("local:1").taken_bytes == 0
    with pytest.raises(GpuNotFoundError, match=r"2 kinds of cards .* as in local:0"):
        load_gpu("local")
    with pytest.raises(GpuNotFoundError, match=r"no card '9'; there are: local:0 \(NVIDIA H100"):
        load_gpu("local:9")


@pytest.mark.parametrize(
    ("value", "seen"),
    [
        ("0", [0]),
        ("3,1", [3, 1]),
        ("GPU-1", [1]),
        ("", []),
        ("-1", []),
        ("1,x,0", [1]),
        ("1,1,0", [1]),
        ("99999999999999999999", []),
        ("GPU-", []),  # the beginning of two
        ("NoDevFiles", []),
    ],
)
@pytest.mark.usefixtures("three_cards")
def test_a_job_sees_what_the_variable_says(value: str, seen: list[int]) -> None:
    here = cards_here({"CUDA_VISIBLE_DEVICES": value})
    assert [each.index for each in here.cards] == seen
    assert len(here.cards) + len(here.hidden) == 4
    assert here.hidden_by == "CUDA_VISIBLE_DEVICES"


@pytest.mark.usefixtures("three_cards")
def test_all_cards_hidden_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(GpuNotFoundError, match="CUDA_VISIBLE_DEVICES hides all 4 cards"):
        load_gpu("local")


@pytest.mark.usefixtures("three_cards")
def test_an_estimate_for_this_machine(run: Run) -> None:
    outcome = run("estimate", "gpt2", "--gpu", "local")
    assert outcome.exit_code == 0
    assert [line.split()[:2] for line in outcome.stdout.splitlines()[:2]] == [
        ["H100-80", "fits"],
        ["MIG-39", "fits"],
    ]
    assert "H100 SXM5 80GB here: other processes have 2.00 GiB of it" in outcome.stderr


@pytest.mark.usefixtures("three_cards")
def test_the_examination(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:128")
    monkeypatch.setattr(doctor, "examination", cache(doctor.examination))
    document = json.loads(run("doctor", "--format", "json").stdout)
    assert [each["gpu_id"] for each in document["cards"]][1:3] == [
        "h100-sxm-80gb",
        "a100-sxm4-80gb-mig-39",
    ]
    conf = "expandable_segments:True,max_split_size_mb:128"
    assert document["environment"] == {"PYTORCH_CUDA_ALLOC_CONF": conf}
    outcome = run("doctor")
    assert "say --allocator expandable" in " ".join(outcome.stdout.split())
    lines = outcome.stdout.splitlines()
    assert lines[0].startswith("4 cards, driver 580.65.06 (memplan ")
    assert [line.split()[0] for line in lines[-3:]] == list(document["fits"])
    for name, ways in document["fits"].items():
        (line,) = [each for each in lines if each.split()[0] == name]
        assert all(answer in line for answer in ways.values())
        # The same as anybody would be told who asks for it.
        asked = run(
            "estimate",
            name,
            "--gpu",
            "local:0",
            "--gpus",
            "2",
            "--engine",
            "fsdp",
            "--checkpointing",
            "full",
        )
        assert ways["full"].split(",")[0] in asked.stdout.splitlines()[0]


@pytest.mark.usefixtures("tools")
def test_without_a_card(run: Run) -> None:
    outcome = run("estimate", "gpt2", "--gpu", "local")
    assert outcome.exit_code == 3
    assert outcome.stderr.count("\n") == 1
    assert "no GPU that NVML, nvidia-smi, amd-smi or rocm-smi tells of" in outcome.stderr
    assert run("doctor").stdout.startswith("No card that a job here would see (memplan ")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            "echo 'NVIDIA-SMI has failed because it could not talk to the driver'; exit 9",
            "has failed because",
        ),
        ("exit 9", "exit code 9"),
        ("echo no xml", "printed no XML"),
        ("echo '<!DOCTYPE a [<!ENTITY b \"c\">]><a>&b;</a>'", "an entity"),
    ],
)
def test_a_tool_that_fails_is_named(
    tools: Callable[[str, str], None], run: Run, script: str, said: str
) -> None:
    tools("nvidia-smi", script)
    outcome = run("estimate", "gpt2", "--gpu", "local")
    assert (outcome.exit_code, outcome.stderr.count("\n")) == (3, 1)
    assert said in outcome.stderr
    assert said in run("doctor").stdout.splitlines()[0]


def test_a_tool_that_hangs_is_not_waited_for(
    tools: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "PATIENCE_S", 0.2)
    tools("nvidia-smi", "exec /bin/sleep 30")
    assert "did not answer in 0.2 s" in cards_here(os.environ).trouble


AMD_STATIC = {"gpu_data": [{
    "gpu": 0,
    "asic": {"market_name": "AMD Instinct MI300X", "asic_serial": "0xAB"},
    "vram": {"type": "HBM3", "size": {"value": 196592, "unit": "MB"}},
    "driver": {"name": "amdgpu", "version": "6.12.12"},
}]}  # fmt: skip
AMD_USED = [{"gpu": 0, "mem_usage": {"total_vram": {"value": 196592}, "used_vram": {"value": 300}}}]
ROCM = {
    "card0": {
        "Card Series": "AMD Instinct MI250X", "VRAM Total Memory (B)": "68702699520",
        "VRAM Total Used Memory (B)": "10960896", "Unique ID": "0x1",
    },
    "system": {"Driver version": "6.2.4"},
}  # fmt: skip


def test_amd_cards_by_either_tool(tools: Callable[[str, str], None]) -> None:
    tools("rocm-smi", f"echo '{json.dumps(ROCM)}'")
    (older,) = cards_here({}).cards
    assert (older.name, older.total_bytes, older.used_bytes) == (
        "AMD Instinct MI250X",
        68702699520,
        10960896,
    )
    tools(
        "amd-smi",
        f"case $1 in static) echo '{json.dumps(AMD_STATIC)}';; *) echo '{json.dumps(AMD_USED)}';; esac",
    )
    (newer,) = cards_here({}).cards
    assert (newer.total_bytes, newer.used_bytes, newer.driver) == (
        196592 * MIB,
        300 * MIB,
        "6.12.12",
    )
    assert gpu_of(newer).gpu_id == "mi300x-192gb"
    assert gpu_of(newer).vendor is Vendor.AMD


def fake_nvml(**changed: Any) -> ModuleType:
    """``pynvml`` over one H100 in a slice of half, and one whole."""

    class NVMLError(Exception):
        pass

    def refuse(*_: object) -> None:
        raise NVMLError

    handles = {"whole": 81559, "slice": 40448}
    module = ModuleType("pynvml")
    vars(module).update(
        NVMLError=NVMLError,
        nvmlMemory_v2=2,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: b"580.1",
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: ("parent", "whole")[index],
        nvmlDeviceGetName=lambda handle: (
            b"NVIDIA H100 80GB HBM3" + (b" MIG 3g.40gb" if handle == "slice" else b"")
        ),
        nvmlDeviceGetUUID=lambda handle: f"GPU-{handle}",
        nvmlDeviceGetMemoryInfo=lambda handle, version=None: SimpleNamespace(
            total=handles[handle] * MIB, used=(512 if version else 1063) * MIB
        ),
        nvmlDeviceGetMigMode=lambda handle: (int(handle == "parent"), 0),
        nvmlDeviceGetMaxMigDeviceCount=lambda _: 7,
        nvmlDeviceGetMigDeviceHandleByIndex=lambda _, index: "slice" if index == 0 else refuse(),
        nvmlDeviceGetAttributes=lambda _: SimpleNamespace(multiprocessorCount=60),
        nvmlDeviceGetComputeRunningProcesses=lambda _: [SimpleNamespace(pid=5, usedGpuMemory=None)],
        nvmlDeviceGetGraphicsRunningProcesses=refuse,
        nvmlSystemGetProcessName=lambda _: "/usr/lib/xorg/Xorg",
    )
    vars(module).update(changed)
    return module


@pytest.mark.usefixtures("three_cards")
def test_nvml_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    part, whole = cards_here({}).cards
    assert (part.name, part.parent) == (
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "NVIDIA H100 80GB HBM3",
    )
    assert (part.total_bytes, part.used_bytes) == (40448 * MIB, 512 * MIB)
    assert (whole.index, whole.parent, whole.driver) == (1, "", "580.1")
    assert [(each.pid, each.name, each.used_bytes) for each in whole.occupants] == [
        (5, "Xorg", None)
    ]
    assert gpu_of(part).num_multiprocessors == 60


@pytest.mark.usefixtures("three_cards")
def test_nvml_without_a_driver_leaves_it_to_the_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    module = fake_nvml()

    def refuse() -> None:
        raise module.NVMLError

    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr(module, "nvmlInit", refuse)
    assert len(cards_here({}).cards) == 4


@given(
    total=st.one_of(st.integers(), st.floats(), st.none(), st.text(max_size=5)),
    used=st.one_of(st.integers(), st.floats(), st.none()),
    count=st.integers(0, 2**40),
)
def test_nvml_with_odd_answers(total: object, used: object, count: int) -> None:
    module = fake_nvml(
        nvmlDeviceGetCount=lambda: count,
        nvmlDeviceGetHandleByIndex=lambda _: "whole",
        nvmlDeviceGetMemoryInfo=lambda *_: SimpleNamespace(total=total, used=used),
        nvmlDeviceGetMaxMigDeviceCount=lambda _: count,
    )
    for each in nvml._cards(module):
        assert each.total_bytes > 0
        assert each.used_bytes >= 0


@given(st.data())
def test_answers_cut_or_mangled_are_read_or_refused(data: st.DataObject) -> None:
    text = ANSWER.read_text("utf-8")
    start = data.draw(st.integers(0, len(text)))
    length = data.draw(st.integers(0, 200))
    mangled = text[:start] + data.draw(st.text(max_size=8)) + text[start + length :]
    try:
        found = nvidia_smi.cards_from_xml(mangled)
    except CardsUnreadableError:
        return
    assert all(each.total_bytes > 0 and each.used_bytes >= 0 for each in found)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["gpu", "gpu_data", "vram", "size", "value", "asic", "system", "card0", amd._TOTAL]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(JSON, JSON)
def test_odd_json_of_amd_tools(static: object, used: object) -> None:
    for read in (
        lambda: amd.cards_from_amd_smi(json.dumps(static), json.dumps(used)),
        lambda: amd.cards_from_rocm_smi(json.dumps(static)),
    ):
        try:
            found = read()
        except CardsUnreadableError:
            continue
        assert all(each.total_bytes > 0 for each in found)


@pytest.mark.parametrize(
    "value", ["[N/A]", "", "nan", "inf", "-3 MiB", "1e400", None, True, [], "9" * 400]
)
def test_what_is_no_size(value: object) -> None:
    assert whole_bytes(value, MIB) is None


def test_a_card_that_the_catalog_lacks_is_known_by_its_memory() -> None:
    card = LocalCard(
        index=0,
        name="NVIDIA Future 9000",
        vendor=Vendor.NVIDIA,
        total_bytes=46 * GIB,
        used_bytes=50 * GIB,
    )
    found = gpu_of(card)
    assert (found.name, found.driver_total_bytes, found.capacity_bytes) == (card.name, 46 * GIB, 0)


def test_a_card_of_another_memory_than_the_catalog_says() -> None:
    card = LocalCard(
        index=0,
        name="NVIDIA H100 80GB HBM3",
        vendor=Vendor.NVIDIA,
        total_bytes=94 * GIB,
        used_bytes=0,
    )
    assert gpu_of(card).capacity_bytes == 94 * GIB * 99 // 100


def test_a_value_names_cards_in_its_order() -> None:
    assert visible((), "0") == ()
