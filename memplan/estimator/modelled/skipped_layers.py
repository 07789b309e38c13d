"""Layers that a step leaves out by chance (LayerDrop, arXiv:1909.11556), in words.

transformers' stacks draw a number for each layer of each forward pass, and skip it where that is below
``layerdrop`` (models/m2m_100, ``M2M100Decoder.forward``). A skipped layer keeps nothing for backward.
"""

from memplan.graph.core.segments import Segment
from memplan.graph.core.tape import Tape
from memplan.memory.passes import StepPasses
from memplan.model.spec import ModelSpec
from memplan.units import format_gib

RARELY = 0.001
"""The share of steps beyond which nothing is said."""


def skipped_words(model: ModelSpec, tape: Tape, passes: StepPasses) -> tuple[str, ...]:
    """What of the figures is there by chance: they are of a step in which every layer runs."""
    if not model.layerdrop:
        return ()
    chances, least_bytes = [], 0
    for each in passes.forward:
        chance = _chance(model, each.segment)
        if each.segment.is_layer and chance:
            chances += [chance] * each.repeats
            kept = max(0, each.later_bytes if each.repeats > 1 else each.first_bytes)
            least_bytes = min(least_bytes or kept, kept)
    if not chances or tape.options.without_gradients:
        return ()
    most, all_run = _most_skipped(chances)
    drop = ", ".join(f"{value:g}" for value in dict.fromkeys(value for _, value in model.layerdrop))
    words = (
        f"layerdrop {drop}: a step leaves each of {len(chances)} layers out with that chance. The figures are "
        f"of steps in which all run ({all_run:.0%} of them); 999 of 1000 steps leave out at most {most}, "
        f"and need up to {format_gib(most * least_bytes)} less for activations"
    )
    return (words,)


def _chance(model: ModelSpec, segment: Segment) -> float:
    """That a layer of a segment is skipped."""
    return next((value for part, value in model.layerdrop if part in segment.name), 0.0)


def _most_skipped(chances: list[float]) -> tuple[int, float]:
    """How many layers a step skips but rarely more of, and how likely it is that it skips none."""
    exactly = [1.0]
    for chance in chances:
        kept = [each * (1 - chance) for each in exactly] + [0.0]
        skipped = [0.0] + [each * chance for each in exactly]
        exactly = [one + other for one, other in zip(kept, skipped, strict=True)]
    total = 0.0
    for number, likely in enumerate(exactly):
        total += likely
        if total >= 1 - RARELY:
            return number, exactly[0]
    return len(chances), exactly[0]
