"""The wheel works without the checkout: built, installed into a new environment, and run there."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = pytest.mark.wheel


def call(*command: str | Path, cwd: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def scripts(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of scripts of a new environment with the wheel in it.

    The dependencies are borrowed from this environment with a path file, so that nothing is
    fetched. The new environment's own packages come first, and an editable install's path files
    are not followed from there, so memplan itself can only come from the wheel.
    """
    folder = tmp_path_factory.mktemp("wheel")
    environment = folder / "environment"
    call(
        sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, checkout,
        cwd=folder,
    )  # fmt: skip
    (wheel,) = folder.glob("memplan-*.whl")
    call(sys.executable, "-m", "venv", "--without-pip", environment, cwd=folder)
    scripts = environment / ("Scripts" if os.name == "nt" else "bin")
    call(
        sys.executable, "-m", "pip", "--python", scripts / "python",
        "install", "--quiet", "--no-deps", "--no-index", wheel,
        cwd=folder,
    )  # fmt: skip
    own = call(
        scripts / "python", "-c", "import site; print(site.getsitepackages()[0])", cwd=folder
    )
    (Path(own.strip()) / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return scripts


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
