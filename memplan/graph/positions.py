"""Learned or fixed positions that a decoder adds to its token embeddings.

What stays alive differs: a name in the model's ``forward`` holds the ids and the rows that were
looked up until the last layer is done.
"""

from collections.abc import Callable

from memplan.dtypes import DType
from memplan.graph.operation_kinds import OperationKind
from memplan.graph.operations.elementwise import dropout
from memplan.graph.operations.lookups import embedding
from memplan.graph.operations.norms import norm
from memplan.graph.operations.products import linear
from memplan.graph.tape import Tape
from memplan.graph.tensors import Parameter, Tensor
from memplan.model.layers import EmbeddingSpec, PositionSource
from memplan.model.spec import ModelSpec


def decoder_embeddings(
    t: Tape,
    model: ModelSpec,
    spec: EmbeddingSpec,
    table: Parameter,
    looked_up: Tensor,
    make_masks: Callable[[], None],
) -> Tensor:
    """Looked-up tokens to the first layer's input: masks, positions, projection, sum, dropout.

    The masks come before the positions (``GPTNeoModel.forward``, ``OPTDecoder.forward`` and others of
    transformers 5.23) or behind their sum (``GPT2Model.forward``), and always before the dropout.
    """
    x = looked_up
    if spec.mask_buffer:
        t.buffer(spec.num_positions**2, DType.BOOL, before="embed_tokens")
    if spec.scaled_in_table:
        x = t.scale(x)
    t.embedded(x, table)
    if spec.position_source not in (None, PositionSource.NONE) and not spec.masked_last:
        make_masks()
    added = _POSITIONS[spec.position_source or PositionSource.NONE](t, model, spec)
    if spec.embedding_size != model.hidden_size:
        x = linear(
            t, x, "project_in", spec.embedding_size, model.hidden_size, bias=spec.projection_bias
        )
    t.hold(x)
    x = x if added is None else t.add(x, added)
    if spec.position_source is PositionSource.BUFFER:
        x = t.shift(x)
    if spec.norm is not None:
        x = norm(t, x, spec.norm, "embed_norm", model.hidden_size)
    make_masks()
    return dropout(t, x, spec.dropout, module="dropout" if spec.dropout_module else "")


def _none(t: Tape, model: ModelSpec, spec: EmbeddingSpec) -> Tensor | None:
    del t, model, spec
    return None


def _made(t: Tape, kind: OperationKind, numel: int, dtype: DType) -> Tensor:
    made = t.tensor(numel, dtype)
    t.record(kind, (), (made,))
    t.hold(made)
    return made


def _table(
    t: Tape, model: ModelSpec, spec: EmbeddingSpec, num_ids: int, ids: Tensor | None
) -> Tensor:
    rows = embedding(t, "embed_positions", spec.num_positions, model.hidden_size, num_ids, ids)
    t.hold(rows)
    return rows


def _counted(t: Tape, model: ModelSpec, spec: EmbeddingSpec) -> Tensor | None:
    """GPT-2's: ``arange``, one row of ids for all sequences."""
    ids = _made(t, OperationKind.ARANGE, t.options.seq_len, DType.INT64)
    return _table(t, model, spec, t.options.seq_len, ids)


def _summed(t: Tape, model: ModelSpec, spec: EmbeddingSpec) -> Tensor | None:
    """OPT's: the running sum of an fp32 mask of ones, of every sequence; then the offset."""
    tokens = t.options.batch_size * t.options.seq_len
    _made(t, OperationKind.ONES, tokens, DType.FP32)
    ids = _made(t, OperationKind.TO, tokens, DType.INT64)
    shifted = t.tensor(tokens, DType.INT64)
    t.record(OperationKind.ADD, (ids,), (shifted,))
    return _table(t, model, spec, tokens, shifted)


def _buffered(t: Tape, model: ModelSpec, spec: EmbeddingSpec) -> Tensor | None:
    """GPT's: ids out of a buffer."""
    ids = t.buffer(spec.num_positions, DType.INT64)
    return _table(t, model, spec, t.options.seq_len, ids)


def _sinusoids(t: Tape, model: ModelSpec, spec: EmbeddingSpec) -> Tensor | None:
    """XGLM's: rows of a buffer, which nothing holds on to; the buffer is fp32 at first."""
    t.buffer(spec.num_positions * model.hidden_size, t.compute)
    _made(t, OperationKind.ARANGE, t.options.seq_len, DType.INT64)
    rows = t.tensor(t.options.seq_len * model.hidden_size, t.compute)
    t.record(OperationKind.INDEX_SELECT, (), (rows,))
    return rows


_POSITIONS = {
    PositionSource.NONE: _none,
    PositionSource.COUNTED: _counted,
    PositionSource.MASK_SUM: _summed,
    PositionSource.BUFFER: _buffered,
    PositionSource.SINUSOIDS: _sinusoids,
}
