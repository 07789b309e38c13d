"""Blocks that say what they compute, written down one behind the other.

Each block is a segment with the weights that it declares; its body (``memplan.model.towers``) says which
operations read them. What a tower gives is held until the block that joins it with another has read it.
"""

from collections.abc import Sequence

from memplan.dtypes import DType
from memplan.fast_dataclass import dataclass
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Segment
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter, Tensor
from memplan.graph.counted import declare_block
from memplan.graph.stacks import cut_layers
from memplan.graph.towers.bodies import write_body
from memplan.graph.towers.state import Flow
from memplan.graph.towers.texts import output
from memplan.model.parameters import ModelPart, ParameterBlock, WeightRole
from memplan.model.towers.body import ChainBody
from memplan.model.towers.compared.pooling import PoolerBody
from memplan.model.towers.compared.queried import InstructionBody
from memplan.model.towers.gridded.nets import PixelsBody
from memplan.model.towers.layers import LayerBody
from memplan.model.towers.parts import SpareBody
from memplan.model.towers.patches import PatchesBody
from memplan.model.towers.sounds import SignalBody
from memplan.model.towers.texts import (
    OutputBody,
)
from memplan.model.towers.tiles import TilesBody


def is_written(blocks: tuple[ParameterBlock, ...]) -> bool:
    """Whether all that the blocks compute is known."""
    return bool(blocks) and all(block.body is not None for block in blocks)


def record_flow(
    t: Tape, blocks: tuple[ParameterBlock, ...], *, tied: bool, flow: Flow | None = None
) -> Tensor | None:
    """Write the blocks' operations; returns what the last one gives."""
    flow = flow or Flow(items=t.options.batch_size)
    given: dict[str, Tensor] = {}
    declared: dict[str, Parameter] = {}
    held: list[Tensor] = []
    first = len(t.segments)
    x: Tensor | None = None
    for index, block in enumerate(blocks):
        if x is not None and starts(block):
            t.hold(x)
            held.append(x)
        if isinstance(block.body, LayerBody) and block.body.memory:
            flow.memory = given[block.body.memory]
        ending = held if block is blocks[-1] else []
        if flow.returned and (starts(block) or block is blocks[-1]):
            ending, flow.returned = [*ending, *flow.returned], []
        if flow.shared and _ends_tower(blocks, index):
            ending, flow.shared = [*ending, *flow.shared], []
        if isinstance(block.body, SpareBody):
            _idle(t, block, declared, tied=tied)
            continue
        for run in _runs(t, block):
            x = _segment(t, block, run, x, flow, given, declared, ending, tied=tied)
        tower = block.name.partition(".")[0]
        assert x is not None
        if isinstance(block.body, ChainBody) and isinstance(_first(block), PatchesBody):
            # The model's own variable holds what its embedding gave (``ConvNextModel.forward``).
            t.hold(x)
            held.append(x)
        given[tower] = x
    _mark_unused(t, t.segments[first:])
    return x


def _ends_tower(blocks: tuple[ParameterBlock, ...], index: int) -> bool:
    """Whether a block's end lets go of what a tower's layers share: a norm's, or theirs behind it."""
    block = blocks[index]
    following = blocks[index + 1] if index + 1 < len(blocks) else None
    if following is not None and isinstance(following.body, PoolerBody):
        return False  # the token is picked before the tower returns
    stem = block.name.rpartition(".")[0]
    later = (each for each in blocks[index + 1 :] if each.part is ModelPart.LAYERS)
    follows = any(each.name.rpartition(".")[0] == stem for each in later)
    if block.part is ModelPart.LAYERS:
        return not follows and any(_is_norm(each, stem) for each in blocks[:index])
    if block.part is ModelPart.EMBEDDING:
        return False
    return not (follows and _is_norm(block, stem))


def _is_norm(block: ParameterBlock, stem: str) -> bool:
    return block.part is ModelPart.NORM and block.name.rpartition(".")[0] == stem


def starts(block: ParameterBlock) -> bool:
    """Whether a block reads the batch, and nothing that was computed."""
    body = _first(block)
    if isinstance(body, SignalBody):
        return body.channels > 0
    return isinstance(
        body,
        PatchesBody | PixelsBody | TilesBody | InstructionBody,
    )


def _first(block: ParameterBlock) -> object:
    """What a block computes first: any of the bodies, which mypy tells sooner from anything than from all of the others."""
    body = block.body
    return next(iter(body.parts), None) if isinstance(body, ChainBody) else body


@dataclass(frozen=True, slots=True)
class _Run:
    """Repetitions of a block that are trained alike."""

    count: int
    checkpointed: bool
    frozen: bool


def _runs(t: Tape, block: ParameterBlock) -> list[_Run]:
    freeze, options = t.options.freeze, t.options
    owner = bool(block.owner and getattr(freeze, block.owner))
    # Parts of a language model are none of the towers beside it.
    own = not block.beside
    if block.part is ModelPart.LAYERS:
        again = getattr(block.body, "recomputed", True)
        return [
            _Run(high - low, checkpointed and again, owner or (frozen and own))
            for low, high, checkpointed, frozen in cut_layers(options, block.count)
        ]
    part = {
        ModelPart.EMBEDDING: freeze.embeddings, ModelPart.NORM: freeze.norm, ModelPart.HEAD: freeze.head,
    }.get(block.part, False)  # fmt: skip
    return [_Run(block.count, checkpointed=False, frozen=owner or (part and own))]


def _segment(
    t: Tape,
    block: ParameterBlock,
    run: _Run,
    x: Tensor | None,
    flow: Flow,
    given: dict[str, Tensor],
    declared: dict[str, Parameter],
    ending: list[Tensor],
    *,
    tied: bool,
) -> Tensor:
    """The segments of a run: one, or more where a repetition gives another dtype or size."""
    remaining = run.count
    while remaining:
        before = None if starts(block) else x
        t.begin(
            block.name, part=block.part, repeat=remaining, checkpointed=run.checkpointed,
            frozen=run.frozen, x=before,
        )  # fmt: skip
        declare_block(t, block, declared, tied=tied)
        with t.declared_weights():
            if isinstance(block.body, OutputBody) and before is not None:
                x = output(t, before, block.body, flow, declared, tied=tied)
            else:
                x = write_body(t, before, block.body, flow, given)
        for each in ending:
            t.release(each)
        t.end(x)
        if before is not None and (
            x.dtype is not before.dtype
            or x.requires_grad is not before.requires_grad
            or x.numel != before.numel
            # Its gradient has another source, which those of the later ones have not.
            or before is flow.tapped
        ):
            t.segment.repeat = 1
        if flow.collected is not None and block.part is ModelPart.LAYERS:
            t.segment.repeat = 1
            t.hold(x)
            flow.collected.append(x)
        remaining -= t.segment.repeat
    assert x is not None
    return x


def _idle(t: Tape, block: ParameterBlock, declared: dict[str, Parameter], *, tied: bool) -> None:
    """A block that nothing runs through: its weights alone."""
    frozen = bool(block.owner and getattr(t.options.freeze, block.owner))
    t.begin(block.name, part=block.part, repeat=block.count, frozen=frozen)
    declare_block(t, block, declared, tied=tied)
    if (
        isinstance(block.body, SpareBody)
        and block.body.runs
        and t.autocast is not None
        and not frozen
    ):
        for weight in t.segment.parameters:
            if weight.role is not WeightRole.NORM:
                copy = t.tensor(weight.numel, t.autocast)
                copy.storage.weight_cast = True
                t.record(OperationKind.TO, (), (copy,))
    t.end(t.tensor(0, DType.FP32))


def _mark_unused(t: Tape, segments: Sequence[Segment]) -> None:
    """No loss reaches what no operation reads."""
    read = {
        tensor
        for segment in t.segments
        for operation in segment.operations
        for tensor in operation.inputs
        if isinstance(tensor, Parameter)
    }
    for segment in segments:
        for weight in segment.parameters:
            if weight not in read:
                weight.unused = True
