"""What a block's body says, as operations: each kind of body in the module of its field."""

from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.activations import activation
from memplan.graph.operations.elementwise import dropout
from memplan.graph.operations.norms import norm
from memplan.graph.operations.products import linear
from memplan.graph.towers.compared.pooling import write_pooling
from memplan.graph.towers.compared.projecting import write_projecting
from memplan.graph.towers.compared.queried import with_instruction, write_queried
from memplan.graph.towers.gridded.davit import write_davit
from memplan.graph.towers.gridded.nets import pixels, write_branches, write_net
from memplan.graph.towers.gridded.segmenting import write_segmenting
from memplan.graph.towers.images import image_patches
from memplan.graph.towers.layers import tower_layer
from memplan.graph.towers.pairs import write_pairs
from memplan.graph.towers.sounds import signal, write_sound
from memplan.graph.towers.state import Flow
from memplan.graph.towers.tiles import tiles, write_tiles
from memplan.model.towers.body import BranchBody, ChainBody, TowerBody
from memplan.model.towers.compared.pooling import PoolingBody
from memplan.model.towers.compared.projecting import ProjectingBody
from memplan.model.towers.compared.queried import InstructionBody, QueriedBody
from memplan.model.towers.gridded.davit import DavitBody
from memplan.model.towers.gridded.nets import NetBody, PixelsBody
from memplan.model.towers.gridded.segmenting import SegmentingBody
from memplan.model.towers.layers import LayerBody
from memplan.model.towers.pairs import PairBody
from memplan.model.towers.parts import (
    ActivationBody,
    GatedBody,
    LinearBody,
    NormBody,
    PartBody,
    SpareBody,
)
from memplan.model.towers.patches import PatchesBody
from memplan.model.towers.sounds import SignalBody, SoundBody
from memplan.model.towers.tiles import TileBody, TilesBody


def write_body(
    t: Tape, x: Tensor | None, body: TowerBody | None, flow: Flow, given: dict[str, Tensor]
) -> Tensor:
    """The operations of one body; ``x`` is what the block before it gave."""
    if not isinstance(body, ChainBody):
        return _write_one(t, x, body, flow, given)
    for part in body.parts:
        x = write_body(t, x, part, flow, given)
    assert x is not None
    return x


def _write_one(
    t: Tape, x: Tensor | None, body: object, flow: Flow, given: dict[str, Tensor]
) -> Tensor:
    """Any body; of the union of all of them mypy would take half of its time to tell one from the others."""
    match body:
        case PatchesBody():
            return image_patches(t, body, flow)
        case TilesBody():
            return tiles(t, body, flow)
        case PixelsBody():
            return pixels(t, body, flow)
        case InstructionBody():
            return with_instruction(t, body, flow)
        case SignalBody():
            return signal(t, x, body, flow)
        case _:
            assert x is not None, body
            return _read_on(t, x, body, flow, given)


def _read_on(t: Tape, x: Tensor, body: object, flow: Flow, given: dict[str, Tensor]) -> Tensor:
    """A body that reads what was computed before it."""
    if isinstance(body, LayerBody):
        return tower_layer(t, x, body, flow)
    if isinstance(body, PartBody):
        return _part(t, x, body)
    if isinstance(body, NetBody):
        return write_net(t, x, body, flow)
    if isinstance(body, BranchBody):

        def write(read: Tensor, part: TowerBody) -> Tensor:
            return write_body(t, read, part, flow, given)

        return write_branches(t, x, body, write)
    if isinstance(body, SoundBody):
        return write_sound(t, x, body, flow)
    if isinstance(body, SegmentingBody):
        return write_segmenting(t, x, body, flow)
    if isinstance(body, PoolingBody):
        return write_pooling(t, x, body, flow)
    if isinstance(body, ProjectingBody):
        return write_projecting(t, x, body, flow)
    if isinstance(body, PairBody):
        return write_pairs(t, x, body, flow, given)
    if isinstance(body, DavitBody):
        return write_davit(t, x, body, flow)
    if isinstance(body, QueriedBody):
        return write_queried(t, x, body, flow, given)
    assert isinstance(body, TileBody), body
    return write_tiles(t, x, body, flow)


def _part(t: Tape, x: Tensor, body: PartBody) -> Tensor:
    match body:
        case NormBody():
            out = norm(t, x, body.norm, body.module, body.size)
            t.let_input_go()
            return dropout(t, out, body.dropout)
        case LinearBody():
            return linear(t, x, body.module, body.inputs, body.outputs, bias=body.bias)
        case ActivationBody():
            out = activation(t, x, body.activation)
            t.touch(x)
            return out
        case GatedBody():
            return gated(t, x, body)
        case SpareBody():
            return x


def gated(t: Tape, x: Tensor, body: GatedBody) -> Tensor:
    """``down(act(gate(x)) * up(x))``."""
    name, inner = f"{body.module}." if body.module else "", body.inner
    gate = linear(t, x, f"{name}gate_proj", body.inputs, inner, bias=body.bias)
    active = activation(t, gate, body.activation)
    raised = linear(t, x, f"{name}fc1", body.inputs, inner, bias=body.bias)
    middle = t.mul(active, raised)
    t.touch(gate, active, raised)
    out = linear(t, middle, f"{name}fc2", inner, body.outputs, bias=body.bias)
    t.touch(x)
    return out
