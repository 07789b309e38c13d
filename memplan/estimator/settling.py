"""Verdicts that bounds leave open, settled by a replay of the run through torch's allocator."""

from memplan.estimator.estimate import Estimate, Verdict
from memplan.fast_dataclass import replace
from memplan.memory.required import Replays, RunSource
from memplan.training.choices import AllocatorKind

EXPANDABLE_NOTE = (
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True makes it fit on {gpu} (allocator expandable)"
)


def settled(answer: Estimate, *, always: bool = False) -> Estimate:
    """The answer with its run replayed where bounds leave the verdict open, or ``always``.

    Where it does not fit then, expandable segments are tried, and named where they help.
    """
    if not always and answer.verdict is not Verdict.TIGHT:
        return answer
    bounded = answer.verdict
    found = replace(answer, is_replayed=True)
    if bounded is not Verdict.TIGHT:
        return found
    notes = [*found.notes]
    if found.verdict is not Verdict.FITS and _fits_expandable(found):
        notes.append(expandable_note(found))
    if found.verdict is Verdict.FITS and found.num_flushes > FEW_FLUSHES:
        notes.append(FLUSHES_NOTE.format(gpu=_gpu_of(found)))
    return replace(found, notes=tuple(notes))


def expandable_note(answer: Estimate) -> str:
    """What ``settled`` notes where the run fits on its card with expandable segments alone."""
    return EXPANDABLE_NOTE.format(gpu=_gpu_of(answer))


def without_run(answer: Estimate) -> Estimate:
    """The answer with what replays have found of its run, for another process: its verdict at least."""
    source = answer.run_source
    if not answer.is_replayed or isinstance(source, Replays):
        return answer
    _ = answer.verdict
    crowded = answer.crowded
    if crowded is not None:
        crowded = without_run(replace(crowded, is_replayed=True))
    return replace(answer, run_source=source.played.replays(source), crowded=crowded)


def _gpu_of(answer: Estimate) -> str:
    return answer.gpu.short_name if answer.gpu is not None else ""


FLUSHES_NOTE = (
    "on {gpu} the allocator gives cached memory back and takes it again in every step, which is slow: "
    "it holds what is needed, not what would be reserved"
)
FEW_FLUSHES = 2
"""Flushes of loading and of the first step, which do not recur."""


def _fits_expandable(answer: Estimate) -> bool:
    setup, source = answer.setup, answer.run_source
    if setup.allocator is AllocatorKind.EXPANDABLE or not isinstance(source, RunSource):
        return False
    other = replace(setup, allocator=AllocatorKind.EXPANDABLE)
    again = replace(source, setup=other)
    return replace(answer, setup=other, run_source=again).verdict is Verdict.FITS
