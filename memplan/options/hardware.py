"""What a job runs on, as it is named on the command line: GPUs, and a node's CPU RAM."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from memplan.hardware.gpu import GpuSpec
    from memplan.training.setup import TrainingSetup

DEFAULT_GPUS = ("v100-32gb", "a100-80gb", "h100-80gb")
"""What a run is judged by when no GPU is named."""


def chosen_gpus(
    names: "Iterable[str | GpuSpec] | None",
    memory: str | None,
    *,
    attention: str = "",
    setup: "TrainingSetup | None" = None,
    remark: "Callable[[str], None]",
) -> "list[GpuSpec]":
    """The GPUs to judge by; of the usual ones, those that run the ``attention`` and setup asked for.

    Names may be joined by commas. ``remark`` is given what should be said of them.
    """
    from memplan.sources.gpus import is_local, load_gpus

    parts = gpu_names(names)
    chosen = [
        gpu for each in parts for gpu in (load_gpus(each) if isinstance(each, str) else (each,))
    ]
    for gpu in chosen:
        if gpu.taken_bytes and any(is_local(each) for each in parts if isinstance(each, str)):
            from memplan.sources.machine.local_gpu import taken_note

            remark(taken_note(gpu))
    if memory is not None:
        from memplan.hardware.gpu import gpu_from_memory
        from memplan.units import parse_bytes

        chosen.append(gpu_from_memory(parse_bytes(memory)))
    if parts or memory is not None:
        from memplan.units import decimal_note

        for text in (*parts, memory):
            if isinstance(text, str) and (note := decimal_note(text)):
                remark(note)
    return chosen or _usual(attention, setup, remark)


def _usual(
    attention: str, setup: "TrainingSetup | None", remark: "Callable[[str], None]"
) -> "list[GpuSpec]":
    """Of the usual cards those that run it.

    Raises ``UsageError`` where none does.
    """
    from memplan.sources.gpus import load_gpu

    usual = [load_gpu(name) for name in DEFAULT_GPUS]
    reasons = {each.gpu_id: _unfit(each, attention, setup) for each in usual}
    if all(reasons.values()):
        from memplan.errors import UsageError

        told = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        msg = f"no usual GPU runs this; name one with --gpu, such as b200 ({told})"
        raise UsageError(msg)
    for name, reason in reasons.items():
        if reason:
            remark(f"{name} is left out: {reason}")
    return [each for each in usual if not reasons[each.gpu_id]]


HOPPER = (9, 0)


def _unfit(gpu: "GpuSpec", attention: str, setup: "TrainingSetup | None") -> str:
    """Why a usual card cannot run what is asked for; empty where it can."""
    capability = gpu.compute_capability or (0, 0)
    if attention == "flash" and not gpu.supports_flash_attention:
        return "it has no flash attention"
    if attention == "flash3" and capability < HOPPER:
        return "it has no flash attention 3"
    if setup is None:
        return ""
    if setup.context_parallel > 1 and not gpu.supports_flash_attention:
        return "it has no flash attention, which shared sequences go through"
    if setup.expert_parallel > 1 and not gpu.has_bf16:
        return "it has no bf16, in which experts spread over ranks are multiplied"
    from memplan.training.optimizers.table import row_of

    if setup.fp8.value != "none":
        from memplan.training.choices_of_kernels.fp8 import FP8_RECIPES

        if capability < FP8_RECIPES[setup.fp8].least_capability:
            return f"it cannot multiply in {setup.fp8.value}"
    if capability < row_of(setup.optimizer).least_capability:
        return f"the compiled step of {setup.optimizer.value} comes apart on it"
    if not gpu.has_bf16:
        from memplan.errors import SetupError

        try:
            setup.resolve(has_bf16=False)
        except SetupError as error:
            return f"it has no bf16, and {str(error).partition(': ')[2].partition(';')[0]}"
    return ""


def node_memory(memory: str | int) -> int:
    """CPU RAM of one node [bytes]. Raises ``UsageError`` for what is no size."""
    from memplan.errors import UsageError
    from memplan.units import parse_bytes

    if isinstance(memory, int):
        return memory
    try:
        return parse_bytes(memory)
    except UsageError as error:
        msg = f"--cpu-memory: {error}"
        raise UsageError(msg) from None


def gpu_names(names: "Iterable[str | GpuSpec] | None") -> "list[str | GpuSpec]":
    """The GPUs named, of which some may be joined by commas."""
    found: list[str | GpuSpec] = []
    for name in names or ():
        if isinstance(name, str):
            found += [part.strip() for part in name.split(",") if part.strip()]
        else:
            found.append(name)
    return found
