"""Stretches of operations that run tile by tile, as one ``autograd.Function`` (ALST).

DeepSpeed 0.19.8, runtime/sequence_parallel/ulysses_sp.py: ``TiledMLP``, ``sequence_tiled_compute`` and
``TiledFusedLogitsLoss``. Each cuts its input along the tokens, runs a function over one tile after the
other without a graph, and keeps the input alone; in backward it runs each tile again with a graph of
its own, or it did that in the forward pass and kept the gradients. What a tile does is recorded once,
as operations; ``memplan.memory.walks.tiled_walk`` runs them.
"""

from collections.abc import Callable

from memplan.errors import SetupError
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient, Operation, Segment, Tiles
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter, Storage, Tensor, allocated_bytes
from memplan.model.spec import ModelSpec
from memplan.units import ceil_div


def tile_rows(rows: int, count: int) -> tuple[int, int]:
    """Rows of a tile and how many tiles there are then (``torch.chunk``).

    >>> tile_rows(10, 4)
    (3, 4)
    >>> tile_rows(4, 3)
    (2, 2)
    """
    each = ceil_div(rows, count)
    return each, ceil_div(rows, each)


def run_in_tiles(
    t: Tape,
    kind: OperationKind,
    x: Tensor,
    width: int,
    count: int,
    write: Callable[[Tensor], Tensor],
    *,
    joined: bool,
    forward_gradients: bool = False,
) -> Tensor:
    """Record ``write``, a function of rows of ``width`` elements, as one operation over tiles of ``x``.

    Parameters that it declares are those of the present segment.
    """
    rows, count = tile_rows(x.numel // width, count)
    tile = _record_tile(t, x, rows * width, write)
    assert tile.output is not None
    made = tile.output
    weights = _weights(tile)
    out = t.tensor(x.numel * made.numel // (rows * width) if joined else 1, made.dtype)
    tiles = Tiles(tile, count, joined=joined, forward_gradients=forward_gradients)
    outputs, saves, gradients = [out], [x], [Gradient.FRESH]
    gradients += [Gradient.FRESH if each.requires_grad else Gradient.NONE for each in weights]
    if forward_gradients:
        graded = [each for each in (x, *weights) if each.requires_grad]
        saves = [t.tensor(each.numel, each.dtype) for each in graded]
        outputs += saves
        gradients = [
            Gradient.SAVED if each.requires_grad else Gradient.NONE for each in (x, *weights)
        ]
    flops = sum(each.flops for each in tile.operations) * x.numel // (rows * width)
    t.record(
        kind, (x, *weights), outputs, saves=saves, gradients=gradients,
        flops=flops * (3 if forward_gradients else 1), in_python=True, tiles=tiles,
        pins=() if joined or forward_gradients else (x,),  # ``ctx.kwargs_to_shard``
    )  # fmt: skip
    for each in outputs[1:]:
        each.requires_grad = False
    return out


def check_tiled(model: ModelSpec, tape: Tape) -> None:
    """Refuse models of whose layers some have no network that runs in tiles.

    Raises ``SetupError``.
    """
    for segment in tape.segments:
        if segment.is_layer and all(each.tiles is None for each in segment.operations):
            msg = (
                f"mlp_tiles: is modelled for plain feed-forward networks, and not all layers of {model.name} "
                f"({model.family}) have one: leave it out, or take checkpointing full"
            )
            raise SetupError(msg)


def _record_tile(t: Tape, x: Tensor, numel: int, write: Callable[[Tensor], Tensor]) -> Segment:
    """One tile's operations, on a segment of their own; what modules it has is noted in the present one."""
    around, hooks = t.segment, t.hooks
    tile = Segment(around.name, around.index, repeat=1, checkpointed=False, part=around.part)
    tile.layer, tile.parameters = around.layer, around.parameters
    tile.sealed, tile.unmade, tile.tied = around.sealed, around.unmade, around.tied
    tile.unhooked = around.unhooked
    storage = Storage(allocated_bytes(numel, x.dtype), around.index - 1, 0)
    given = Tensor(numel, x.dtype, storage, requires_grad=x.requires_grad)
    given.is_flat = True
    tile.input = given
    t.segment, t.hooks = tile, None
    tile.output = write(given)
    t.touch(*tile.lingering)
    t.segment, t.hooks = around, hooks
    at = len(around.operations)
    around.entered += [(at, name) for _, name in tile.entered]
    around.left += [(at + 1, name) for _, name in tile.left]
    around.reads += [(at, who, what) for _, who, what in tile.reads]
    fresh = [each for each in tile.external_reads if each not in around.external_reads]
    around.external_reads += fresh
    return tile


def _weights(tile: Segment) -> list[Parameter]:
    """What it reads of the model, in the order in which a backward pass over it comes to them."""
    found: dict[Parameter, None] = {}
    for operation in reversed(tile.operations):
        pairs = operation.backward_order() if operation.gradients else _ungraded(operation)
        found |= {tensor: None for tensor, _ in pairs if isinstance(tensor, Parameter)}
    return list(found)


def _ungraded(operation: Operation) -> list[tuple[Tensor, int]]:
    return [(tensor, Gradient.NONE) for tensor in operation.inputs]
