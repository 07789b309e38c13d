"""An organisation's own configuration: cards, prices, pools and defaults in folders.

``MEMPLAN_CONFIG`` names the folders, joined as in ``PATH``; without it there is ``memplan`` in ``XDG_CONFIG_HOME`` or
``~/.config``. An earlier folder goes before a later one; empty, it names none. Each may hold

==================  ================================================================================
``gpus/NAME.yaml``  a card, as ``memplan.sources.gpu_file`` reads it: ``--gpu NAME``
``prices.yaml``     prices by card, as ``--price`` reads them: where a run's length is asked for
``pools.yaml``      the platform's pools, of ``admit`` without ``--pools``
``pools/NAME.yaml`` others: ``--pools NAME``
``defaults.yaml``   options of the command line where they are not typed: of machines, money, output
==================  ================================================================================
"""

import os
from collections.abc import Mapping
from pathlib import Path

from memplan.errors import ConfigError, did_you_mean
from memplan.text import shown

VARIABLE = "MEMPLAN_CONFIG"
DEFAULTS = (
    "gpu", "gpu_memory", "cpu_memory", "network", "oversubscription", "in_network_reduction", "host",
    "calibration", "jobs",
)  # fmt: skip
"""Options that may have a default: what the machines are. What is trained, and how, is said where it is asked."""
MAX_NAME = 100
"""Characters of a name that is looked for as a file."""


def folders() -> tuple[Path, ...]:
    """Those that are there, first come first served."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        found = [Path(each) for each in named.split(os.pathsep) if each]
    else:
        home = os.environ.get("XDG_CONFIG_HOME") or Path("~/.config").expanduser()
        found = [Path(home) / "memplan"]
    return tuple(each for each in found if each.is_dir())


def find(*parts: str) -> Path | None:
    """The first of the folders' files of this name; None where there is none."""
    return next((path for each in folders() if (path := each.joinpath(*parts)).is_file()), None)


def card_file(name: str) -> Path | None:
    """The file of a card of this name.

    >>> card_file("../../etc/passwd") is None
    True
    """
    return find("gpus", f"{name.lower()}.yaml") if _is_plain(name) else None


def pools_file(name: str | None) -> Path | None:
    """The file of the pools of a name, or of the pools that are usual."""
    if name is None:
        return find("pools.yaml")
    return find("pools", f"{name}.yaml") if _is_plain(name) else None


def _is_plain(name: str) -> bool:
    """Whether it is a name and no path."""
    return (
        0 < len(name) <= MAX_NAME
        and all(each.isalnum() or each in "-_." for each in name)
        and name[0] != "."
    )


def defaults() -> Mapping[str, object]:
    """Values of options that are not typed, by their Python names.

    Raises ``ConfigError`` for options that may have none, and values that are none.
    """
    from memplan.sources.files import read_mapping

    found: dict[str, object] = {}
    for folder in reversed(folders()):
        path = folder / "defaults.yaml"
        if path.is_file():
            for key, value in read_mapping(path).items():
                found[_option(key, value, path)] = value
    return found


def _option(key: str, value: object, path: Path) -> str:
    name = key.replace("-", "_")
    if name not in DEFAULTS:
        hint = did_you_mean(name, DEFAULTS) or f" Options that may have one: {', '.join(DEFAULTS)}"
        msg = f"{path}: {shown(key)} has no default.{hint}"
        raise ConfigError(msg)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        msg = f"{path}: {name}: write a text or a number, not {shown(value)}"
        raise ConfigError(msg)
    return name


def all_files() -> tuple[tuple[Path, str], ...]:
    """Every file that counts, and what it is; a file that an earlier folder's stands before is said to be hidden."""
    found: list[tuple[Path, str]] = []
    seen: set[str] = set()
    for folder in folders():
        for path in sorted((*folder.glob("*.yaml"), *folder.glob("*/*.yaml"))):
            name = path.relative_to(folder).as_posix()
            kind = _kind(name)
            if not kind:
                continue
            is_hidden = name in seen and name != "defaults.yaml"
            seen.add(name)
            found.append((path, f"{kind}, hidden by an earlier folder's" if is_hidden else kind))
    return tuple(found)


def _kind(name: str) -> str:
    stem = name.removesuffix(".yaml")
    if stem in ("prices", "pools", "defaults"):
        return stem
    part, _, rest = stem.partition("/")
    return {"gpus": f"card {rest}", "pools": f"pools {rest}"}.get(part, "")
