"""Embeddings made in a module of their own, as BERT and its relatives do.

The module's variables (the looked-up rows, their sum, the norm's result) live until it returns; the
model holds what it returned until the encoder is done.
"""

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter, Tensor
from memplan.graph.operations.elementwise import add_in_place, dropout
from memplan.graph.operations.lookups import embedding, embedding_lookup
from memplan.graph.operations.norms import norm
from memplan.graph.operations.products import linear
from memplan.model.layers import EmbeddingSpec, RegionsSpec
from memplan.model.parameters import WeightRole
from memplan.model.spec import ModelSpec


def module_embeddings(t: Tape, model: ModelSpec, spec: EmbeddingSpec) -> tuple[Tensor, Parameter]:
    """Tokens, types, positions and boxes, their sum, norm and dropout; the token table beside it."""
    width = spec.embedding_size
    length = t.options.seq_len - (spec.regions.count if spec.regions is not None else 0)
    tokens = t.options.batch_size * length
    table = t.parameter(
        "word_embeddings.weight", model.vocab_size, width, role=WeightRole.TOKEN_TABLE
    )
    x = embedding_lookup(t, table, tokens)
    t.embedded(x, table)
    held = [x]
    if spec.num_token_types:
        x = t.add(x, _token_types(t, spec, tokens, held))
    if spec.num_positions:
        added = embedding(t, "position_embeddings", spec.num_positions, width, length)
        held.append(added)
        x = add_in_place(t, x, added) if spec.positions_in_place else t.add(x, added)
    if spec.regions is not None:
        x = _with_regions(t, spec.regions, x, width, held)
    module = "dropout" if spec.dropout_module else ""
    if spec.norm is not None:
        x = norm(t, x, spec.norm, "norm", width)
    x = dropout(t, x, spec.dropout, module=module)
    t.touch(*held)
    x = project(t, model, spec, x)
    t.hold(x)
    return x, table


def project(t: Tape, model: ModelSpec, spec: EmbeddingSpec, x: Tensor) -> Tensor:
    """To the hidden size, where the embeddings are narrower (Funnel)."""
    width, hidden = spec.embedding_size, model.hidden_size
    if width == hidden:
        return x
    return linear(t, x, "projection", width, hidden, bias=True)


def _made(t: Tape, num_ids: int, *, hold: bool) -> Tensor:
    """Integer indices that the model makes itself."""
    ids = t.tensor(num_ids, DType.INT64)
    t.record(OperationKind.INDICES, (), (ids,))
    if hold:
        t.hold(ids)
    return ids


def _token_types(t: Tape, spec: EmbeddingSpec, tokens: int, held: list[Tensor]) -> Tensor:
    """Rows of the token-type table, for types that are all zero."""
    ids = _made(t, tokens, hold=False)
    rows = embedding(
        t, "token_type_embeddings", spec.num_token_types, spec.embedding_size, tokens, ids
    )
    held.append(rows)
    return rows


def _with_regions(t: Tape, spec: RegionsSpec, x: Tensor, width: int, held: list[Tensor]) -> Tensor:
    """VisualBERT's: features of a picture's regions, projected, with positions and types of their own."""
    from memplan.graph.towers.state import from_batch  # only then

    count = t.options.batch_size * spec.count
    features = from_batch(t, count * spec.num_features, t.compute)
    types = _made(t, count, hold=False)
    projected = linear(t, features, "visual_projection", spec.num_features, width, bias=True)
    names = ("visual_token_type_embeddings", "visual_position_embeddings")
    kinds = embedding(t, names[0], spec.num_types, width, count, types)
    places = embedding(t, names[1], spec.num_positions, width, count, _made(t, count, hold=False))
    summed = t.add(t.add(projected, places), kinds)
    held += [projected, kinds, places, summed]
    return t.concatenate(x, summed)
