"""Files that another file names from the folder in which a job is launched, which nothing says."""

from pathlib import Path


def launched_from(folder: Path, path: str) -> Path:
    """Where such a file lies: beside the one that names it, or in a folder above; the nearest goes first.

    Where none has it, it is said to be missing beside the file.

    >>> launched_from(Path("configs"), "no-such-file.json").as_posix()
    'configs/no-such-file.json'
    """
    beside = folder / path
    places = [beside, *(each / path for each in folder.resolve().parents)]
    return next((each for each in places if each.is_file()), beside)
