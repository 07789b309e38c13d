"""Packages that a training would use here, by their versions; none is imported."""

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from memplan.hardware.machine import FoundPackage

NAMES = (
    "torch", "transformers", "accelerate", "deepspeed", "peft", "trl", "bitsandbytes", "flash-attn", "liger-kernel", "mamba-ssm",
    "torchao",
)  # fmt: skip
"""As an index has them."""


def packages_here(version_of: Callable[[str], str] = version) -> tuple[FoundPackage, ...]:
    """Every one of them, there or not."""
    found = []
    for name in NAMES:
        try:
            there = str(version_of(name))
        except PackageNotFoundError:
            there = ""
        found.append(FoundPackage(name=name, version=there))
    return tuple(found)
