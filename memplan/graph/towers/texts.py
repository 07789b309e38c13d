"""How a tower reads token ids."""

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter, Tensor
from memplan.graph.operations.elementwise import dropout
from memplan.graph.operations.lookups import embedding_lookup
from memplan.graph.operations.losses import cross_entropy
from memplan.graph.operations.norms import layer_norm
from memplan.graph.operations.products import linear, matmul_weight
from memplan.graph.towers.state import Flow, from_batch
from memplan.model.towers.texts import DecodedTokensBody, OutputBody


def decoded_tokens(t: Tape, body: DecodedTokensBody, flow: Flow) -> Tensor:
    """``PPFormulaNetTextModel``: its variable holds what the table gave until it returns."""
    length = min(t.options.seq_len, body.num_positions)
    flow.items = t.options.batch_size
    rows = flow.items * length
    ids = from_batch(t, rows, DType.INT64)
    flow.labels = from_batch(t, rows, DType.INT64)
    tokens = t.scale(embedding_lookup(t, t.parameter(f"{body.tokens}.weight"), rows, ids))
    t.hold(tokens)
    flow.named.append(tokens)
    flow.hold_mask(t, length)
    numbers = t.tensor(length, DType.INT64)
    t.record(OperationKind.ARANGE, (), (numbers,))
    places = embedding_lookup(t, t.parameter(f"{body.positions}.weight"), length, numbers)
    normed = layer_norm(t, t.add(tokens, places), body.norm, body.size)
    return dropout(t, normed, body.dropout)


def output(
    t: Tape, x: Tensor, body: OutputBody, flow: Flow, declared: dict[str, Parameter], *, tied: bool
) -> Tensor:
    """Logits over the vocabulary, and their cross-entropy as they are."""
    if tied and body.table:
        bias = t.parameter(f"{body.module}.bias") if body.bias else None
        logits = matmul_weight(t, x, declared[body.table], bias, module=body.module)
    else:
        logits = linear(t, x, body.module, body.size, body.rows, bias=body.bias)
    t.returned.append(logits)
    t.give_out(logits)
    full = t.cast(logits, DType.FP32) if body.upcast else logits
    return cross_entropy(t, full, flow.labels)
