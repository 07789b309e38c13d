"""A machine's memory and processors, with the limits of groups; packages and settings."""

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from memplan.report.lookups.machine_words import PACKAGES, SETTINGS, package_effect, setting_effect
from memplan.sources.machine.host import host_here, limit_bytes, quotas
from memplan.sources.machine.packages import packages_here
from memplan.sources.machine.settings import VARIABLES, settings_here
from memplan.units import GIB


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_least_limit_of_a_group_and_those_above_it(tmp_path: Path) -> None:
    write(tmp_path / "pod" / "memory.max", f"{16 * GIB}\n")
    write(tmp_path / "pod" / "job" / "memory.max", "max\n")
    write(tmp_path / "pod" / "cpu.max", "350000 100000\n")
    write(tmp_path / "pod" / "job" / "cpu.max", "max 100000\n")
    assert limit_bytes("0::/pod/job\n", tmp_path) == 16 * GIB
    assert quotas(tmp_path, "/pod/job") == [3]
    assert limit_bytes("0::/other\n", tmp_path) is None
    # A container's own group is the root that it sees.
    write(tmp_path / "memory.max", f"{8 * GIB}\n")
    assert limit_bytes("0::/../../pod\n", tmp_path) == 8 * GIB


def test_limits_of_the_first_version(tmp_path: Path) -> None:
    write(tmp_path / "memory" / "docker" / "memory.limit_in_bytes", f"{4 * GIB}\n")
    write(tmp_path / "memory" / "memory.limit_in_bytes", "9223372036854771712\n")
    assert limit_bytes("5:memory:/docker\n3:cpu,cpuacct:/docker\n", tmp_path) == 4 * GIB
    assert limit_bytes("5:memory:/\n", tmp_path) is None


@pytest.mark.parametrize("text", ["", "\n", "x", "::::", "0::", "0::/\x00", "-1\n" * 3])
def test_odd_groups(tmp_path: Path, text: str) -> None:
    write(tmp_path / "memory.max", "twelve\n")
    write(tmp_path / "cpu.max", "0 0\n")
    assert limit_bytes(text, tmp_path) is None
    assert quotas(tmp_path, "/") == []


def test_this_machine(tmp_path: Path) -> None:
    here = host_here(tmp_path)
    assert here.num_cores >= 1
    assert here.memory_bytes is not None
    assert here.usable_bytes is not None
    assert 2**27 < here.usable_bytes <= here.memory_bytes
    assert host_here(tmp_path / "missing").disk_bytes is None


def test_packages_say_what_they_change() -> None:
    versions = {
        "torch": "2.9.1+cu128",
        "transformers": "5.23.0",
        "deepspeed": "0.18.2",
        "flash-attn": "2.8",
    }

    def version_of(name: str) -> str:
        if name not in versions:
            raise PackageNotFoundError(name)
        return versions[name]

    found = packages_here(version_of)
    assert set(PACKAGES) <= {each.name for each in found}
    effects = {each.name: package_effect(each) for each in found}
    assert effects["torch"].startswith("figures follow 2.13; cuBLASLt")
    assert effects["transformers"] == effects["trl"] == ""
    assert "flatten weights on the CPU" in effects["deepspeed"]
    assert effects["flash-attn"] == "--attention flash can be used"
    assert effects["peft"] == "no --lora"


def test_settings_that_move_bytes() -> None:
    found = settings_here(
        {"PYTORCH_ALLOC_CONF": "expandable_segments:False", "NCCL_BUFFSIZE": "1", "HOME": "/"}
    )
    assert found == {"PYTORCH_ALLOC_CONF": "expandable_segments:False", "NCCL_BUFFSIZE": "1"}
    assert setting_effect("PYTORCH_ALLOC_CONF", "expandable_segments:False") == "as the default"
    assert setting_effect("PYTORCH_ALLOC_CONF", ",,:") == "as the default"
    assert "buffers" in setting_effect("NCCL_BUFFSIZE", "1")
    assert set(SETTINGS) <= set(VARIABLES)
