"""What a name of a GPU stands for, wherever it is known: the catalog, a description, or this machine."""

from typing import TYPE_CHECKING

from memplan.errors import GpuNotFoundError
from memplan.fast_dataclass import replace
from memplan.hardware.gpu import MIN_MEMORY_BYTES, GpuSpec
from memplan.sources.cards import catalog
from memplan.units import format_gib, parse_bytes

if TYPE_CHECKING:
    from os import PathLike

LOCAL = "local"
"""The name that stands for the cards of this machine; ``local:1`` for one of them."""
LEFT = "@"
"""Before how much of a card others leave: ``a100@60GiB``."""


def load_gpu(name: "str | PathLike[str]") -> GpuSpec:
    """Find one GPU: by a name of the catalog, its memory or a file, as ``memplan.sources.cards.catalog.load_gpu`` does, or here.

    ``a100@60GiB`` is a card of which others leave 60 GiB; ``local`` is the card of this machine, less what others have of it, and ``local:1`` one of several. Raises
    ``GpuNotFoundError`` where there is none, or several kinds, and as the catalog does.

    >>> load_gpu("h100").gpu_id
    'h100-sxm-80gb'
    """
    kinds = load_gpus(name)
    if len(kinds) > 1:
        named = ", ".join(each.name for each in kinds)
        msg = f"this machine has {len(kinds)} kinds of cards ({named}): number the one that is meant, as in local:0"
        raise GpuNotFoundError(msg)
    return kinds[0]


def load_gpus(name: "str | PathLike[str]") -> tuple[GpuSpec, ...]:
    """The GPUs that a name stands for: one, but for ``local``, which means each kind of card of this machine.

    >>> [each.gpu_id for each in load_gpus("h100")]
    ['h100-sxm-80gb']
    """
    if not is_local(str(name)):
        return (_with_left(str(name)) if LEFT in str(name) else catalog.load_gpu(name),)
    from memplan.sources.machine.local_gpu import local_gpus

    return local_gpus(str(name).partition(":")[2].strip())


def _with_left(name: str) -> GpuSpec:
    """A card of the catalog of which others have all but a size.

    Raises ``GpuNotFoundError`` where it has no more than that, or the catalog lacks it, and ``UsageError`` for no size.

    >>> load_gpu("a100-40gb@29GiB").capacity_bytes == 29 * 2**30
    True
    """
    card, _, size = name.partition(LEFT)
    whole = catalog.load_gpu(card)
    left_bytes = parse_bytes(size.strip())
    if not MIN_MEMORY_BYTES <= left_bytes <= whole.capacity_bytes:
        msg = f"{name!r}: {whole.short_name} has {format_gib(whole.capacity_bytes)} in all: say how much of it others leave"
        raise GpuNotFoundError(msg)
    return replace(whole, taken_bytes=whole.capacity_bytes - left_bytes)


def is_local(name: str) -> bool:
    """Whether a name means cards of this machine.

    >>> is_local("local"), is_local("Local:1"), is_local("localhost")
    (True, True, False)
    """
    return name.strip().lower().partition(":")[0] == LOCAL
