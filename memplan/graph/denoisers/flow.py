"""A denoiser's blocks, written down one behind the other.

Layers of a kind are repeated, as those of other models; a prompt's stream goes beside the picture's.
"""

from collections.abc import Callable, Sequence
from typing import Any

from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.counted import declare_block
from memplan.graph.denoisers.clips import cross_layer, expert_layer
from memplan.graph.denoisers.complex import double_layer
from memplan.graph.denoisers.ending import denoised
from memplan.graph.denoisers.entries import (
    clip_entry,
    complex_entry,
    conditioned_entry,
    image_entry,
    joined_entry,
    packed_entry,
)
from memplan.graph.denoisers.joint import joint_layer, single_layer
from memplan.graph.denoisers.state import Denoising
from memplan.graph.denoisers.tables import table_layer
from memplan.graph.stacks import cut_layers
from memplan.model.denoisers import (
    ClipEntryBody,
    ComplexEntryBody,
    ConditionedEntryBody,
    CrossLayerBody,
    DenoisedBody,
    DoubleLayerBody,
    ExpertLayerBody,
    ImageEntryBody,
    JoinedEntryBody,
    JointLayerBody,
    PackedEntryBody,
    SingleLayerBody,
    TableLayerBody,
)
from memplan.model.parameters import ModelPart, ParameterBlock


def record_denoiser(t: Tape, blocks: tuple[ParameterBlock, ...]) -> None:
    """Write the training step of a denoiser."""
    options = t.options
    d = Denoising(batch=options.batch_size, prompt_tokens=options.seq_len)
    depth = sum(block.count for block in blocks if block.part is ModelPart.LAYERS)
    runs = cut_layers(options, depth)
    x: Tensor | None = None
    done = 0
    for block in blocks:
        if block.part is not ModelPart.LAYERS:
            head = block.part is ModelPart.HEAD
            frozen = options.freeze.head if head else options.freeze.embeddings
            x = _segment(t, block, x, d, count=1, checkpointed=False, frozen=frozen)
            continue
        end = done + block.count
        while done < end:
            _, last, checkpointed, frozen = next(run for run in runs if run[0] <= done < run[1])
            x = _segment(
                t, block, x, d, count=min(end, last) - done, checkpointed=checkpointed, frozen=frozen
            )  # fmt: skip
            done += t.segment.repeat


def _segment(
    t: Tape,
    block: ParameterBlock,
    x: Tensor | None,
    d: Denoising,
    *,
    count: int,
    checkpointed: bool,
    frozen: bool,
) -> Tensor:
    """One segment of a block: as many repetitions as do the same."""
    if block.part is ModelPart.HEAD and d.prompt is not None:
        # It is not read any more, but a variable of the model's.
        d.share(t, d.prompt)
        d.prompt = None
    given = () if d.prompt is None else (d.prompt,)
    t.begin(
        block.name, part=block.part, repeat=count, checkpointed=checkpointed, frozen=frozen, x=x,
        further=given,
    )  # fmt: skip
    declare_block(t, block, {}, tied=False)
    with t.declared_weights():
        out = _write(t, x, block.body, d)
    if block.part is ModelPart.HEAD:
        for each in d.shared:
            t.release(each)
    returned = () if d.prompt is None else (d.prompt,)
    t.end(out, returned)
    if x is not None and not _alike((x, *given), (out, *returned)):
        t.segment.repeat = 1
    return out


def _alike(given: Sequence[Tensor], returned: Sequence[Tensor]) -> bool:
    """Whether a layer gives what another of its kind can be given."""
    return len(given) == len(returned) and all(
        before.numel == after.numel
        and before.dtype is after.dtype
        and before.requires_grad is after.requires_grad
        for before, after in zip(given, returned, strict=True)
    )


_Entry = Callable[[Tape, Any, Denoising], Tensor]
_Layer = Callable[[Tape, Tensor, Any, Denoising], Tensor]
ENTRIES: dict[type, _Entry] = {
    ClipEntryBody: clip_entry,
    ComplexEntryBody: complex_entry,
    ConditionedEntryBody: conditioned_entry,
    ImageEntryBody: image_entry,
    JoinedEntryBody: joined_entry,
    PackedEntryBody: packed_entry,
}
LAYERS: dict[type, _Layer] = {
    CrossLayerBody: cross_layer,
    DenoisedBody: denoised,
    DoubleLayerBody: double_layer,
    ExpertLayerBody: expert_layer,
    JointLayerBody: joint_layer,
    SingleLayerBody: single_layer,
    TableLayerBody: table_layer,
}


def _write(t: Tape, x: Tensor | None, body: object, d: Denoising) -> Tensor:
    if x is None:
        return ENTRIES[type(body)](t, body, d)
    return LAYERS[type(body)](t, x, body, d)
