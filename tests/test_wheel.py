"""The wheel works without the checkout: built, installed into a new environment, and run there."""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [pytest.mark.wheel, pytest.mark.long]

COMPILER = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
HEADER = Path(sysconfig.get_path("include")) / "Python.h"
COMPILES = pytest.mark.skipif(
    shutil.which(COMPILER) is None or not HEADER.exists(), reason=f"no {COMPILER}, or no {HEADER}"
)
STABLE_ABI = pytest.mark.skipif(
    bool(sysconfig.get_config_var("Py_GIL_DISABLED")), reason="free-threaded: no stable ABI"
)
COMPILED = (".pyc", ".so", ".pyd")
NOT_CARRIED = {"memplan/memory/_replay.c"}
"""Of the package's files: what is only compiled."""


def call(*command: str | Path, cwd: Path, **settings: str) -> str:
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in ("PYTHONPATH", "MEMPLAN_PURE_PYTHON")
    }
    done = subprocess.run(
        command, cwd=cwd, env={**environment, **settings},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@dataclass(frozen=True)
class Installed:
    """A new environment with a wheel in it."""

    wheel: Path
    scripts: Path

    @property
    def names(self) -> set[str]:
        """Files of the wheel that are imported or read."""
        with zipfile.ZipFile(self.wheel) as archive:
            return {name for name in archive.namelist() if name.startswith("memplan/")}


BUILD = (sys.executable, "-m", "build", "--no-isolation", "--outdir")
NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv*", "__pycache__", "*.so", "dist", "build", "site", "node_modules", "*.egg-info"
)


def package_in(checkout: Path, folder: Path) -> Path:
    """A copy of what the package is built from, because a build leaves files beside its sources."""
    copy = folder / "sources"
    shutil.copytree(checkout / "memplan", copy / "memplan", ignore=NOT_COPIED)
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy2(checkout / name, copy / name)
    return copy


def source_distribution(checkout: Path, folder: Path) -> Path:
    """What a source distribution of the checkout unpacks to."""
    copy = folder / "checkout"
    shutil.copytree(checkout, copy, ignore=NOT_COPIED, symlinks=True)
    call(*BUILD, folder, "--sdist", copy, cwd=folder)
    (archive,) = folder.glob("memplan-*.tar.gz")
    shutil.unpack_archive(archive, folder / "unpacked", filter="data")
    (sources,) = (folder / "unpacked").iterdir()
    return sources


def installed(sources: Path, folder: Path, **settings: str) -> Installed:
    """Build the wheel and install it.

    The dependencies are borrowed from this environment with a path file, so that nothing is
    fetched. The new environment's own packages come first, and an editable install's path files
    are not followed from there, so memplan itself can only come from the wheel. What is compiled
    here is not waited for to be fast.
    """
    environment = folder / "environment"
    call(*BUILD, folder, "--wheel", sources, cwd=folder, **{"CFLAGS": "-O0", **settings})
    (wheel,) = folder.glob("memplan-*.whl")
    call(sys.executable, "-m", "venv", "--without-pip", environment, cwd=folder)
    scripts = environment / ("Scripts" if os.name == "nt" else "bin")
    call(
        sys.executable, "-m", "pip", "--python", scripts / "python",
        "install", "--quiet", "--no-compile", "--no-deps", "--no-index", wheel,
        cwd=folder,
    )  # fmt: skip
    own = call(
        scripts / "python", "-c", "import site; print(site.getsitepackages()[0])", cwd=folder
    )
    (Path(own.strip()) / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return Installed(wheel, scripts)


@pytest.fixture(scope="module")
def unpacked(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return source_distribution(checkout, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def usual(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Built from the source distribution, whose package has to be the checkout's."""
    return installed(unpacked, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def scripts(usual: Installed) -> Path:
    """The folder of scripts of the environment with the usual wheel."""
    return usual.scripts


def replay_in_use(scripts: Path, folder: Path) -> str:
    printed = call(scripts / "memplan", "--version", "--verbose", cwd=folder)
    return next(line for line in printed.splitlines() if line.startswith("replay: "))


@COMPILES
@STABLE_ABI
def test_the_wheel_has_the_compiled_core_and_uses_it(usual: Installed, tmp_path: Path) -> None:
    assert usual.wheel.name.split("-")[2:4] == ["cp311", "abi3"]
    suffix = ".pyd" if os.name == "nt" else ".abi3.so"
    assert f"memplan/memory/_replay{suffix}" in usual.names
    assert replay_in_use(usual.scripts, tmp_path) == "replay: compiled"


def test_the_wheel_has_every_file_of_the_package(usual: Installed, checkout: Path) -> None:
    files = {
        path.relative_to(checkout).as_posix()
        for path in (checkout / "memplan").rglob("*")
        if path.is_file() and path.suffix not in COMPILED
    }
    assert {
        name for name in usual.names if Path(name).suffix not in COMPILED
    } == files - NOT_CARRIED


def test_without_a_compiler_it_is_installed_without_it(checkout: Path, tmp_path: Path) -> None:
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    sources = package_in(checkout, tmp_path)
    found = installed(sources, tmp_path, CC=str(nothing / "cc"), PATH=str(nothing))
    assert not {name for name in found.names if name.startswith("memplan/memory/_replay.")}
    assert replay_in_use(found.scripts, tmp_path) == "replay: in Python (nothing was compiled)"
    printed = call(found.scripts / "memplan", "estimate", "t5-small", cwd=tmp_path)
    assert "t5-small (seq2seq-lm)" in printed


def test_memplan_comes_from_the_wheel(scripts: Path, tmp_path: Path) -> None:
    found = call(scripts / "python", "-c", "import memplan; print(memplan.__file__)", cwd=tmp_path)
    assert Path(found.strip()).is_relative_to(scripts.parent)


def test_the_script_shows_its_help(scripts: Path, tmp_path: Path) -> None:
    assert "Usage: memplan" in call(scripts / "memplan", "--help", cwd=tmp_path)


def test_the_main_job_works_without_the_checkout(scripts: Path, tmp_path: Path) -> None:
    printed = call(scripts / "memplan", "estimate", "t5-3b", "--gpus", "8", cwd=tmp_path)
    assert "t5-3b" in printed
    assert "ZeRO-3" in printed


def test_type_checkers_are_told_of_its_types(scripts: Path, tmp_path: Path) -> None:
    code = "from importlib.resources import files; print((files('memplan') / 'py.typed').is_file())"
    assert call(scripts / "python", "-c", code, cwd=tmp_path) == "True\n"


SMALL = 3 * 2**20
"""Bytes that the wheel stays below; ``benchmarks/package.py`` has the bar."""


def test_the_wheel_has_what_it_says(usual: Installed) -> None:
    assert usual.wheel.stat().st_size < SMALL
    with zipfile.ZipFile(usual.wheel) as archive:
        names = archive.namelist()
        tops = {name.partition("/")[0].partition("-")[0] for name in names}
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        text = archive.read(metadata).decode()
    assert tops == {"memplan"}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    for line in ("Name: memplan", "License-Expression: Apache-2.0", "Requires-Python: >=3.11"):
        assert f"\n{line}\n" in text
    assert "Typing :: Typed" in text
    assert "Project-URL: Changelog" in text


def test_the_source_distribution_has_what_is_read_and_run(unpacked: Path) -> None:
    """That it builds the package is what every test of the usual wheel sees."""
    for name in ("LICENSE", "CHANGELOG.md", "README.md", "tests/test_wheel.py", "docs/python.md"):
        assert (unpacked / name).is_file(), name
