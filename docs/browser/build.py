"""Put what the browser page runs beside it: Pyodide, memplan's wheel and the packages it imports.

    python docs/browser/build.py site

Pyodide is the npm registry's package, of one version whose digest is written here; the packages are those
of the environment that runs this, and all of them are plain Python. Needs ``npm`` and ``build``.
"""

import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYODIDE = "314.0.7"
DIGEST = "66b7949e5a0cba2250b586d7e368bf12fb482800748d182c4618254b685ffaa0"
"""SHA-256 of the package as the registry serves it."""
RUNTIME = (
    "pyodide.mjs",
    "pyodide.asm.mjs",
    "pyodide.asm.wasm",
    "python_stdlib.zip",
    "pyodide-lock.json",
)
PACKAGES = ("typer", "rich", "PyYAML", "shellingham", "annotated-doc", "markdown-it-py", "mdurl")
"""What the command line imports. The hub's client is left out: a page asks no hub."""
CACHE = ROOT / ".venv" / "browser"


def pyodide_package(cache: Path = CACHE) -> Path:
    """The package's file, fetched once.

    Raises ``SystemExit`` where it cannot be had, or is another than the one meant.
    """
    path = cache / f"pyodide-{PYODIDE}.tgz"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            ["npm", "pack", "--silent", "--pack-destination", str(cache), f"pyodide@{PYODIDE}"],
            check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != DIGEST:
        path.unlink()
        msg = f"pyodide {PYODIDE} has the digest {found}, not {DIGEST}"
        raise SystemExit(msg)
    return path


def write_runtime(folder: Path) -> None:
    """Unpack of Pyodide what a page loads."""
    with tarfile.open(pyodide_package()) as package:
        for name in RUNTIME:
            file = package.extractfile(f"package/{name}")
            assert file is not None, name
            (folder / name).write_bytes(file.read())


SOURCES = ("memplan", "pyproject.toml", "setup.py", "README.md", "LICENSE")
"""What the wheel is made of."""


def build_wheel(folder: Path) -> Path:
    """memplan's own wheel without the compiled core, which is another machine's code there.

    It is built in a copy: a build leaves files beside its sources.
    """
    copy = folder / "sources"
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            copy.mkdir(exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)],
        cwd=copy, env={**os.environ, "MEMPLAN_PURE_PYTHON": "1"}, check=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    return next(folder.glob("memplan-*-py3-none-any.whl"))


def write_packages(path: Path) -> None:
    """One archive of everything that Python imports."""
    with (
        tempfile.TemporaryDirectory() as folder,
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive,
    ):
        with zipfile.ZipFile(build_wheel(Path(folder))) as wheel:
            for name in wheel.namelist():
                archive.writestr(name, wheel.read(name))
        for package in PACKAGES:
            for file in importlib.metadata.files(package) or ():
                if file.suffix == ".py" or file.name == "METADATA":
                    archive.write(file.locate(), str(file))
        archive.write(Path(__file__).parent / "answering.py", "answering.py")


def main(site: Path) -> None:
    """Fill ``SITE/browser/runtime``."""
    folder = site / "browser" / "runtime"
    folder.mkdir(parents=True, exist_ok=True)
    write_runtime(folder)
    write_packages(folder / "packages.zip")
    size = sum(each.stat().st_size for each in folder.iterdir())
    print(f"{folder}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
