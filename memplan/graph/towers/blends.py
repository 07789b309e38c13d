"""Words and patches in one sequence (``ViltEmbeddings`` of transformers)."""

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor
from memplan.graph.operations.convolutions import convolution
from memplan.graph.operations.elementwise import dropout
from memplan.graph.operations.lookups import embedding_lookup
from memplan.graph.towers.images import picture_size, spread
from memplan.graph.towers.state import Flow, from_batch
from memplan.graph.towers.texts import typed_tokens
from memplan.model.towers.blends import SummedBody, WordsBody, WordsPatchesBody


def words_and_patches(t: Tape, body: WordsPatchesBody, flow: Flow) -> Tensor:
    """Both embedded, a row of their kind added to each, joined."""
    words = typed_tokens(t, body.words, flow)
    flow.words = words.numel // body.words.size // flow.items
    patches = _patches(t, body, flow)
    parts = []
    for part in (words, patches):
        rows = part.numel // body.words.size
        kinds = t.tensor(rows, DType.INT64)
        t.record(OperationKind.ZEROS, (), (kinds,))
        found = embedding_lookup(t, t.parameter(f"{body.kinds}.weight"), rows, kinds)
        parts.append(t.add(part, found))
    out = t.concatenate(*parts)
    t.touch(words, patches, *parts)
    return out


def _patches(t: Tape, body: WordsPatchesBody, flow: Flow) -> Tensor:
    """``visual_embed``: all patches of pictures that are as large as one another, in random order.

    A mask of every pixel comes with them.
    """
    kind, size = body.patches, body.patches.size
    height, width = picture_size(t.options.image_size, kind)
    flow.grid = height // kind.patch[0], width // kind.patch[1]
    flow.patches = flow.grid[0] * flow.grid[1]
    count = flow.items * flow.patches
    pixels = from_batch(t, flow.items * kind.channels * height * width, DType.FP32)
    from_batch(t, flow.items * height * width, DType.INT64)
    x = convolution(t, t.cast(pixels, t.compute), kind.projection, count)
    table = t.parameter(body.positions)
    first = t.slice(table, size)
    resized = t.tensor(count * size, table.dtype)
    rest = t.slice(table, table.numel - size)
    t.record(OperationKind.RESIZE, (rest,), (resized,), gradients=(Gradient.FRESH,))
    places = t.contiguous(t.contiguous(resized))
    chosen = t.tensor(2 * count, DType.INT64)
    t.record(OperationKind.INDICES, (), (chosen,))
    picked = [_picked(t, each, chosen) for each in (x, places)]
    t.touch(x, resized, places)
    tokens = t.concatenate(spread(t, kind.tokens[0], flow.items, size), picked[0])
    begun = Tensor(flow.items * size, first.dtype, first.storage, requires_grad=first.requires_grad)
    placed = t.concatenate(begun, picked[1])
    return dropout(t, t.add(tokens, placed), kind.dropout)


def _picked(t: Tape, x: Tensor, numbers: Tensor) -> Tensor:
    out = t.tensor(x.numel, x.dtype)
    t.record(
        OperationKind.INDEX, (x, numbers), (out,), saves=(numbers,),
        gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    return out


def words_of(t: Tape, x: Tensor, body: WordsBody, flow: Flow) -> Tensor:
    """``sequence_output[:, :length]``."""
    from_batch(t, flow.items * flow.words, DType.INT64)
    return t.contiguous(t.slice(x, flow.items * flow.words * body.size))


def summed(t: Tape, x: Tensor, body: SummedBody) -> Tensor:  # noqa: ARG001
    """``outputs.sum()``."""
    t.returned.append(x)
    t.give_out(x)
    out = t.tensor(1, x.dtype)
    t.record(OperationKind.SUM, (x,), (out,), gradients=(Gradient.FRESH,))
    return out
