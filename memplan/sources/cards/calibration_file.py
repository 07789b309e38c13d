"""What a measured step says of somebody's machines, as a file: written once, read by every command."""

from pathlib import Path

from memplan.errors import ConfigError
from memplan.estimator.time.calibration import Calibration, Part
from memplan.sources.cards.catalog import load_gpu
from memplan.sources.files import read_mapping
from memplan.text import shown

_WORDS = ("gpu", "date", "driver", "torch", "setup", "code")
_OWN, _OF_CODE, _NETWORK = "own", "of_code", "network_gbit"
_GBIT = 1e9 / 8


def read_calibration(path: str | Path) -> Calibration:
    """Read one. Raises ``ConfigError`` for a file that cannot be read or says anything else, and ``GpuNotFoundError``."""
    found = read_mapping(path)
    names = (*_WORDS, *(part.value for part in Part), _NETWORK, _OF_CODE, _OWN)
    for name, value in found.items():
        if name not in names:
            msg = f"{path}: {name}: there is no such key; there are {', '.join(names)}"
            raise ConfigError(msg)
        if name not in _WORDS and (isinstance(value, bool) or not isinstance(value, int | float)):
            wanted = "Gbit/s" if name == _NETWORK else "how many times as long as said it takes"
            msg = f"{path}: {name}: expected {wanted}, got {shown(value)}"
            raise ConfigError(msg)
    if not isinstance(found.get("gpu"), str):
        msg = f"{path}: gpu: missing: the card that a step was measured on"
        raise ConfigError(msg)
    factors = {part.value: float(str(found.get(part.value, 1.0))) for part in Part}
    date, driver, torch, setup, code = (str(found.get(each, "")) for each in _WORDS[1:])
    own, of_code = (float(str(found.get(each, 1.0))) for each in (_OWN, _OF_CODE))
    gpu = load_gpu(str(found["gpu"])).gpu_id
    gbit = found.get(_NETWORK)
    between_nodes = None if gbit is None else float(str(gbit)) * _GBIT
    return Calibration(
        gpu=gpu, date=date, driver=driver, torch=torch, setup=setup, code=code, of_code=of_code,
        own=own, between_nodes=between_nodes, **factors,
    )  # fmt: skip


def calibration_text(calibration: Calibration, *, date: str) -> str:
    """One as YAML.

    >>> print(calibration_text(Calibration(gpu="h100-sxm-80gb", host=2.0), date="2026-11-26"))
    # How many times as long as memplan says each part of a step takes, by what was measured.
    gpu: h100-sxm-80gb
    date: "2026-11-26"
    host: 2.0000
    <BLANKLINE>
    """
    lines = [
        "# How many times as long as memplan says each part of a step takes, by what was measured.",
        f"gpu: {calibration.gpu}",
        f'date: "{date}"',
    ]
    told = {"driver": calibration.driver, "torch": calibration.torch}
    lines += [f'{name}: "{value}"' for name, value in told.items() if value]
    lines += [
        f"{part.value}: {calibration.factor(part):.4f}"
        for part in Part
        if calibration.factor(part) != 1.0
    ]
    if calibration.between_nodes is not None:
        lines.append(f"{_NETWORK}: {calibration.between_nodes / _GBIT:g}")
    if calibration.setup:
        lines += [
            "# The code that ran, and what setups that run it take beside; the setup that was measured, and what it alone does.",
            f'code: "{calibration.code}"',
            f"{_OF_CODE}: {calibration.of_code:.6f}",
            f'setup: "{calibration.setup}"',
            f"{_OWN}: {calibration.own:.6f}",
        ]
    return "\n".join(lines) + "\n"
