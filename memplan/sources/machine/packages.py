"""Packages that a training would use here, and what their presence or version changes in an estimate."""

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from memplan.fast_dataclass import dataclass
from memplan.hardware.machine import FoundPackage


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """One package as it is looked for."""

    name: str
    """As an index has it."""
    present: str
    """What it changes in an estimate where it is there; empty: nothing."""
    absent: str
    """What cannot be had without it; empty: nothing."""
    followed: tuple[int, ...] = ()
    """The version whose code memplan's figures follow; empty: no version matters."""
    older: str = ""
    """What an older one does otherwise."""


PACKAGES = (
    Package(
        name="torch", followed=(2, 13), present="", absent="nothing trains here",
        older="cuBLASLt then keeps 1 to 2 MiB more (docs/accuracy.md)",
    ),
    Package(
        name="transformers", followed=(5,), present="", absent="",
        older="--kernels hf4: logits and experts as transformers 4 has them",
    ),
    Package(name="accelerate", present="", absent=""),
    Package(
        name="deepspeed", followed=(0, 19), present="", absent="no --engine deepspeed",
        older="ZeRO-1 and -2 flatten weights on the CPU whatever the card has free",
    ),
    Package(name="peft", present="", absent="no --lora"),
    Package(name="trl", present="", absent=""),
    Package(name="bitsandbytes", present="", absent="no --quantize, no optimizer in 8 bits"),
    Package(
        name="flash-attn", present="--attention flash can be used", absent="--attention sdpa, torch's own kernels"
    ),
    Package(
        name="liger-kernel", present="--kernels liger can be used", absent="no --kernels liger: whole logits are held"
    ),
    Package(name="mamba-ssm", present="--scan package is what transformers takes", absent=""),
    Package(name="torchao", present="", absent=""),
)  # fmt: skip
"""Sources: docs/kernels.md for kernels and losses, ``memplan/memory/deepspeed`` for flattening (DeepSpeed 0.18.2 and 0.19.8,
``stage_1_and_2.py``), each with the file it was read in."""


def packages_here(version_of: Callable[[str], str] = version) -> tuple[FoundPackage, ...]:
    """Every package of the table, without importing any."""
    found = []
    for package in PACKAGES:
        try:
            there = str(version_of(package.name))
        except PackageNotFoundError:
            there = ""
        found.append(FoundPackage(name=package.name, version=there, effect=_effect(package, there)))
    return tuple(found)


def _effect(package: Package, there: str) -> str:
    if not there:
        return package.absent
    if package.followed and _numbers(there)[: len(package.followed)] < package.followed:
        followed = ".".join(map(str, package.followed))
        return f"figures follow {followed}; {package.older}"
    return package.present


def _numbers(text: str) -> tuple[int, ...]:
    """The leading numbers of a version.

    >>> _numbers("2.13.0+cu130"), _numbers("4.57.dev0"), _numbers("nightly")
    ((2, 13, 0), (4, 57), ())
    """
    found = []
    for part in text.partition("+")[0].split("."):
        if not (part.isascii() and part.isdecimal()):
            break
        found.append(int(part[:9]))
    return tuple(found)
