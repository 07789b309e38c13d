"""What packages and settings of a machine change in an estimate, in words.

Sources: docs/kernels.md for kernels and losses, ``memplan/memory/deepspeed`` for flattening (DeepSpeed 0.18.2 and 0.19.8,
``stage_1_and_2.py``), each with the file it was read in; for the allocator ``memplan/sources/machine/settings.py``.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from memplan.fast_dataclass import dataclass

if TYPE_CHECKING:
    from memplan.hardware.machine import FoundPackage


@dataclass(frozen=True, kw_only=True, slots=True)
class PackageWords:
    """Of one package."""

    present: str = ""
    """What it changes in an estimate where it is there; empty: nothing."""
    absent: str = ""
    """What cannot be had without it; empty: nothing."""
    followed: tuple[int, ...] = ()
    """The version whose code memplan's figures follow; empty: no version matters."""
    older: str = ""
    """What an older one does otherwise."""


PACKAGES: Mapping[str, PackageWords] = {
    "torch": PackageWords(
        followed=(2, 13), absent="nothing trains here",
        older="cuBLASLt then keeps 1 to 2 MiB more (docs/accuracy.md)",
    ),
    "transformers": PackageWords(
        followed=(5,), older="--kernels hf4: logits and experts as transformers 4 has them"
    ),
    "deepspeed": PackageWords(
        followed=(0, 19), absent="no --engine deepspeed",
        older="ZeRO-1 and -2 flatten weights on the CPU whatever the card has free",
    ),
    "peft": PackageWords(absent="no --lora"),
    "bitsandbytes": PackageWords(absent="no --quantize, no optimizer in 8 bits"),
    "flash-attn": PackageWords(
        present="--attention flash can be used", absent="--attention sdpa, torch's own kernels"
    ),
    "liger-kernel": PackageWords(
        present="--kernels liger can be used", absent="no --kernels liger: whole logits are held"
    ),
    "mamba-ssm": PackageWords(present="--scan package is what transformers takes"),
}  # fmt: skip
SETTINGS = {
    "CUDA_MODULE_LOADING": "how soon kernels' code takes memory: inside the context's range",
    "NCCL_BUFFSIZE": "the size of NCCL's buffers, which the range of NCCL takes at their default",
    "CUBLAS_WORKSPACE_CONFIG": "cuBLAS' workspaces, which are counted at their default",
}
"""Variables that move bytes of a card, and which; all others but the allocator's say which cards a job sees."""
_EXPANDABLE = "expandable_segments"


def package_effect(package: "FoundPackage") -> str:
    """What it changes that a package is there, of an older version, or not there."""
    words = PACKAGES.get(package.name, PackageWords())
    if not package.version:
        return words.absent
    if words.followed and _numbers(package.version)[: len(words.followed)] < words.followed:
        return f"figures follow {'.'.join(map(str, words.followed))}; {words.older}"
    return words.present


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


def setting_effect(name: str, value: str) -> str:
    """What a variable of the environment means for an estimate.

    >>> setting_effect("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    'say --allocator expandable'
    >>> setting_effect("CUDA_VISIBLE_DEVICES", "0")
    'which cards a job sees'
    """
    if name.endswith("ALLOC_CONF"):
        return _allocator_effect(value)
    return SETTINGS.get(name, "which cards a job sees")


def _allocator_effect(said: str) -> str:
    """The same of the allocator's own settings.

    >>> _allocator_effect("max_split_size_mb:128")
    'max_split_size_mb is not modelled'
    """
    pairs = [each.partition(":") for each in said.split(",") if each.strip(" :")]
    given = {key.strip().lower(): value.strip().lower() for key, _, value in pairs}
    words = ["say --allocator expandable"] if given.pop(_EXPANDABLE, "") == "true" else []
    words += [f"{key} is not modelled" for key in given]
    return ", ".join(words) or "as the default"
