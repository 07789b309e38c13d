"""What towers give, on its way into a language model: projectors' parts, and the embeddings written over.

``get_image_features`` and ``forward`` of transformers' vision-language models.
"""

from dataclasses import replace

from memplan.dtypes import DType
from memplan.errors import SetupError
from memplan.graph.attended_loss import picked_rows
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import RESULT, Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Tensor, allocated_bytes
from memplan.graph.towers.flow import record_flow
from memplan.graph.towers.state import Flow
from memplan.model.parameters import ParameterBlock
from memplan.model.spec import ModelSpec
from memplan.model.towers.compared.joining import Joining, TowerJoin
from memplan.model.towers.parts import SpareBody

MERGE = "merge"
"""The segment that writes what towers give over the embeddings of the tokens that stand for it."""


def tokens_seen(t: Tape, model: ModelSpec) -> int:
    """Tokens of each sequence that stand for what a model sees or hears."""
    features = next(each.input for each in t.segments if each.name == MERGE)
    assert features is not None
    return features.numel // model.hidden_size // t.options.batch_size


def shown_nothing(model: ModelSpec) -> ModelSpec:
    """A model that is given text alone: what sees and hears is there, and nothing runs through it.

    transformers' vision-language models call their towers where ``pixel_values`` are given
    (``if pixel_values is not None``), so that no gradient reaches the towers otherwise.
    Raises ``SetupError`` for a model whose layers attend to a picture.
    """
    if len(model.stacks) != 1 or (model.join is not None and model.join.joining is Joining.CROSSED):
        msg = (
            f"images_per_sample: {model.name} given text alone is not modelled: its layers attend to what it "
            "sees; give 1 or more"
        )
        raise SetupError(msg)
    base = None if model.base_tables is None else _spare(model.base_tables)
    unseen = TowerJoin(joining=Joining.UNSEEN)
    return replace(model, tables=_spare(model.tables), base_tables=base, join=unseen)


def _spare(blocks: tuple[ParameterBlock, ...]) -> tuple[ParameterBlock, ...]:
    """The blocks with nothing that runs through them."""
    return tuple(replace(block, body=SpareBody()) for block in blocks)


def joined_embeddings(
    t: Tape, model: ModelSpec, blocks: tuple[ParameterBlock, ...], embedded: Tensor, join: TowerJoin
) -> Tensor:
    """Run the towers behind the embedding of the tokens, and write what they give over it."""
    t.end(embedded)
    t.hold(embedded)
    flow = Flow(items=t.options.batch_size * t.options.images_per_sample)
    features = record_flow(t, blocks, tied=False, flow=flow)
    assert features is not None
    _check_room(t, model, features)
    t.begin(MERGE, x=features)
    if join.joining is Joining.PICKED:
        features = picked_rows(t, features, features.numel // model.hidden_size)
    if join.joining is Joining.COLLECTED:
        features = t.concatenate(features)
    features = t.cast(features, embedded.dtype)
    rows = t.options.batch_size * t.options.seq_len
    if join.returned:
        t.cache(features)
    mask = t.tensor(rows, DType.BOOL)
    t.record(OperationKind.EQ, (), (mask,))
    out = t.tensor(embedded.numel, embedded.dtype)
    places = () if t.decomposed else (allocated_bytes(embedded.numel, DType.INT64), RESULT)
    given = (embedded, features)
    t.record(
        OperationKind.SCATTER, given, (out,), saves=(mask,),
        gradients=(Gradient.FRESH,) * len(given), forward_scratch_bytes=places,
    )  # fmt: skip
    t.release(embedded)
    t.hold(out)
    return out


def _check_room(t: Tape, model: ModelSpec, features: Tensor) -> None:
    """Refuse pictures or sound that a sequence has no room for."""
    tokens = features.numel // model.hidden_size // t.options.batch_size
    group, length = t.options.context_parallel, t.options.seq_len
    if (
        group is not None and group.in_classes
    ):  # which write over whole sequences, then take their shares
        length *= group.degree
    # Of a single token there is no sequence: its parts are asked for, not what a step holds.
    if t.options.seq_len > 1 and tokens > length:
        msg = (
            f"seq_len: {length} tokens have no room for what {model.name} sees or hears in a "
            f"sample, {tokens} tokens: a sequence is its text with these; give more, or images_per_sample "
            "or image_size less"
        )
        raise SetupError(msg)
