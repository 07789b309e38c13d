"""Pictures as tokens (``*Embeddings`` of transformers' vision models)."""

from memplan.dtypes import DType
from memplan.graph.operation_kinds import OperationKind
from memplan.graph.operations import dropout, embedding_lookup
from memplan.graph.segments import Gradient
from memplan.graph.tape import Tape
from memplan.graph.tensors import Tensor, allocated_bytes
from memplan.graph.towers.convolutions import convolution
from memplan.graph.towers.state import Flow, from_batch
from memplan.model.towers import PatchesBody, Positions


def image_patches(t: Tape, body: PatchesBody, flow: Flow) -> Tensor:
    """A convolution, tokens before its vectors, positions added."""
    height, width = body.image
    pictures = from_batch(t, flow.items * body.channels * height * width, DType.FP32)
    x = pictures
    if body.casts_pictures:
        x = t.cast(x, t.compute)
    patches = (height // body.patch[0]) * (width // body.patch[1])
    x = convolution(t, x, body.projection, flow.items * patches, bias=body.bias)
    if body.tokens:
        before = [_spread(t, name, flow.items, body.size) for name in body.tokens]
        x = t.concatenate(*before, x)
    if body.positions is not Positions.NONE:
        x = t.add(x, _positions(t, body, patches + len(body.tokens)))
    if body.num_registers:
        first = t.slice(x, flow.items * body.size)
        rest = t.slice(x, x.numel - flow.items * body.size)
        x = t.concatenate(first, _spread(t, body.registers, flow.items, 0), rest)
    return dropout(t, x, body.dropout)


def _spread(t: Tape, name: str, items: int, size: int) -> Tensor:
    """A weight seen once for each picture (``expand``); its gradient is summed over them."""
    weight = t.parameter(name)
    out = Tensor((size or weight.numel) * items, weight.dtype, weight.storage)
    t.record(OperationKind.EXPAND, (weight,), (out,), gradients=(Gradient.FRESH,))
    return out


def _positions(t: Tape, body: PatchesBody, count: int) -> Tensor:
    if body.positions is Positions.PARAMETER:
        return t.parameter(body.position_module)
    t.hold_buffer(allocated_bytes(count, DType.INT64))
    return embedding_lookup(t, t.parameter(f"{body.position_module}.weight"), count)
