"""What a job runs on, as it is named on the command line: GPUs, and a node's CPU RAM."""

from typing import TYPE_CHECKING

from memplan.cli.terminal import remark

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memplan.hardware.gpu import GpuSpec

DEFAULT_GPUS = ("v100-32gb", "a100-80gb", "h100-80gb")
"""What a run is judged by when no GPU is named."""


def chosen_gpus(
    names: "Iterable[str] | None", memory: str | None, *, attention: str = ""
) -> "list[GpuSpec]":
    """The GPUs to judge by; of the usual ones, those that run the ``attention`` asked for.

    Names may be joined by commas.
    """
    from memplan.sources.catalog import load_gpu

    parts = gpu_names(names)
    chosen = [load_gpu(name) for name in parts]
    if memory is not None:
        from memplan.hardware.gpu import gpu_from_memory
        from memplan.units import parse_bytes

        chosen.append(gpu_from_memory(parse_bytes(memory)))
    if parts or memory is not None:
        from memplan.units import decimal_note

        for text in (*parts, memory or ""):
            if note := decimal_note(text):
                remark(note)
    usual = [load_gpu(name) for name in DEFAULT_GPUS] if not chosen else []
    for each in usual:
        if attention == "flash" and not each.supports_flash_attention:
            remark(f"{each.gpu_id} is left out: it has no flash attention")
        else:
            chosen.append(each)
    return chosen


def node_memory(text: str) -> int:
    """CPU RAM of one node [bytes]. Raises ``UsageError`` for what is no size."""
    from memplan.errors import UsageError
    from memplan.units import parse_bytes

    try:
        return parse_bytes(text)
    except UsageError as error:
        msg = f"--cpu-memory: {error}"
        raise UsageError(msg) from None


def gpu_names(names: "Iterable[str] | None") -> list[str]:
    """The names typed, of which some may be joined by commas."""
    return [part.strip() for name in names or () for part in name.split(",") if part.strip()]
