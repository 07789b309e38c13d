"""Blocks that say what they compute, written down one behind the other.

Each block is a segment with the weights that it declares; its body (``memplan.model.towers``) says which
operations read them. What a tower gives is held until the block that joins it with another has read it.
"""

from memplan.fast_dataclass import dataclass
from memplan.graph.counted import declare_block
from memplan.graph.operations import norm
from memplan.graph.stacks import cut_layers
from memplan.graph.tape import Tape
from memplan.graph.tensors import Parameter, Tensor
from memplan.graph.towers.contrast import contrast
from memplan.graph.towers.images import image_patches
from memplan.graph.towers.layers import tower_layer
from memplan.graph.towers.pooling import attention_pooler, classify, pooler
from memplan.graph.towers.state import Flow
from memplan.graph.towers.texts import text_tokens
from memplan.model.parameters import ModelPart, ParameterBlock
from memplan.model.towers import (
    AttentionPooler,
    ClassifierBody,
    ContrastBody,
    ImagePatches,
    Spare,
    TextTokens,
    TowerLayer,
    TowerNorm,
    TowerPooler,
)


def is_written(blocks: tuple[ParameterBlock, ...]) -> bool:
    """Whether all that the blocks compute is known."""
    return bool(blocks) and all(block.body is not None for block in blocks)


def record_flow(t: Tape, blocks: tuple[ParameterBlock, ...], *, tied: bool) -> Tensor | None:
    """Write the blocks' operations; returns what the last one gives."""
    flow = Flow(items=t.options.batch_size)
    given: dict[str, Tensor] = {}
    declared: dict[str, Parameter] = {}
    x: Tensor | None = None
    for block in blocks:
        if isinstance(block.body, ImagePatches | TextTokens) and x is not None:
            t.hold(x)
        for run in _runs(t, block):
            x = _segment(t, block, run, x, flow, given, declared, tied=tied)
        tower = block.name.partition(".")[0]
        assert x is not None
        given[tower] = x
    _mark_unused(t)
    return x


@dataclass(frozen=True, slots=True)
class _Run:
    """Repetitions of a block that are trained alike."""

    count: int
    checkpointed: bool
    frozen: bool


def _runs(t: Tape, block: ParameterBlock) -> list[_Run]:
    freeze = t.options.freeze
    whole = {
        ModelPart.EMBEDDING: freeze.embeddings, ModelPart.NORM: freeze.norm, ModelPart.HEAD: freeze.head,
    }.get(block.part, False)  # fmt: skip
    if block.beside:
        return [
            _Run(high - low, checkpointed, frozen=False)
            for low, high, checkpointed, _ in cut_layers(t.options, block.count)
        ] if block.part is ModelPart.LAYERS else [_Run(block.count, checkpointed=False, frozen=False)]
    if block.part is not ModelPart.LAYERS:
        return [_Run(block.count, checkpointed=False, frozen=whole)]
    return [
        _Run(high - low, checkpointed, frozen)
        for low, high, checkpointed, frozen in cut_layers(t.options, block.count)
    ]


def _segment(
    t: Tape,
    block: ParameterBlock,
    run: _Run,
    x: Tensor | None,
    flow: Flow,
    given: dict[str, Tensor],
    declared: dict[str, Parameter],
    *,
    tied: bool,
) -> Tensor:
    """The segments of a run: one, or more where the first repetition gives another dtype."""
    remaining = run.count
    starts = isinstance(block.body, ImagePatches | TextTokens)
    while remaining:
        before = None if starts else x
        t.begin(
            block.name, part=block.part, repeat=remaining, checkpointed=run.checkpointed,
            frozen=run.frozen, x=before,
        )  # fmt: skip
        t.segment.beside = block.beside
        declare_block(t, block, declared, tied=tied)
        with t.declared_weights():
            x = write_body(t, before, block, flow, given)
        t.end(x)
        if before is not None and (
            x.dtype is not before.dtype or x.requires_grad is not before.requires_grad
        ):
            t.segment.repeat = 1
        remaining -= t.segment.repeat
    assert x is not None
    return x


def write_body(
    t: Tape, x: Tensor | None, block: ParameterBlock, flow: Flow, given: dict[str, Tensor]
) -> Tensor:
    """The operations of one block."""
    body = block.body
    match body:
        case ImagePatches():
            return image_patches(t, body, flow)
        case TextTokens():
            return text_tokens(t, body, flow)
        case ContrastBody():
            return contrast(t, body, given)
        case _:
            assert x is not None, block.name
    match body:
        case Spare():
            return x
        case TowerLayer():
            return tower_layer(t, x, body, flow)
        case TowerNorm():
            return norm(t, x, body.norm, body.module, body.size)
        case TowerPooler():
            return pooler(t, x, body, flow)
        case AttentionPooler():
            return attention_pooler(t, x, body, flow)
        case ClassifierBody():
            return classify(t, x, body, flow)
        case _:
            msg = f"{block.name} is only counted"
            raise ValueError(msg)


def _mark_unused(t: Tape) -> None:
    """No loss reaches what no operation reads."""
    read = {
        tensor
        for segment in t.segments
        for operation in segment.operations
        for tensor in operation.inputs
        if isinstance(tensor, Parameter)
    }
    for segment in t.segments:
        for weight in segment.parameters:
            if weight not in read:
                weight.unused = True
