"""What a task adds to an encoder: masked-LM heads, classification heads, their losses."""

from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.core.tape import Tape
from memplan.graph.core.tensors import Parameter, Tensor
from memplan.graph.counted import idle_linear
from memplan.graph.operations.activations import activation
from memplan.graph.operations.elementwise import dropout
from memplan.graph.operations.losses import cross_entropy
from memplan.graph.operations.norms import norm
from memplan.graph.operations.products import linear, matmul_weight
from memplan.graph.written.losses import copy_outputs
from memplan.model.heads import (
    DECODER_CLASSIFIER,
    WHOLE_SEQUENCES,
    ClassifierSpec,
    HeadSpec,
    Pooling,
)
from memplan.model.networks import Activation
from memplan.model.spec import ModelSpec, Task


def masked_lm(t: Tape, model: ModelSpec, x: Tensor, table: Parameter) -> Tensor:
    """A dense layer, activation and norm, then logits for every token; returns the loss."""
    spec = model.head
    width = table.shape[-1]
    around = _around(spec)
    if spec.transform is not None:
        width = spec.transform.intermediate_size
        x = linear(t, x, f"{around}transform.dense", model.hidden_size, width, bias=True)
        x = activation(t, x, spec.transform.activation)
    if spec.transform_norm is not None:
        x = norm(t, x, spec.transform_norm, f"{around}transform.norm", width)
    logits = _decoder(t, model, spec, x, table, width)
    loss = cross_entropy(t, t.cast(logits, DType.FP32) if spec.loss_upcast else logits)
    t.returned.append(logits)
    if not copy_outputs(t, logits):
        t.give_out(logits)
    return loss


def _around(spec: HeadSpec) -> str:
    """The module around the whole head, where it owns the output matrix's bias (BERT's and RoBERTa's)."""
    return "predictions." if spec.tied and spec.spare_bias and not spec.bias_added else ""


def _decoder(
    t: Tape, model: ModelSpec, spec: HeadSpec, x: Tensor, table: Parameter, width: int
) -> Tensor:
    """Logits, through the token table where it is tied."""
    vocab_size = model.vocab_size
    around = _around(spec)
    if spec.tied:
        weight = table
        t.tie(table, f"{around}decoder")
    else:
        weight = t.parameter("decoder.weight", vocab_size, width)
        if spec.spare_bias:
            t.parameter("predictions.bias", vocab_size).unused = True
    if spec.bias_added:
        added = t.parameter("predictions.bias", vocab_size)
        return t.add(matmul_weight(t, x, weight), added)
    bias = t.parameter(f"{around or 'decoder.'}bias", vocab_size) if spec.bias else None
    if around and bias is not None:
        t.tie(bias, f"{around}decoder")
    return matmul_weight(t, x, weight, bias)


def pool(t: Tape, model: ModelSpec, x: Tensor) -> Tensor:
    """BERT's pooler: a dense layer and a tanh on the first token."""
    hidden = model.hidden_size
    first = t.slice(x, t.options.batch_size * hidden)
    pooled = linear(t, first, "pooler.dense", hidden, hidden, bias=True)
    return activation(t, pooled, Activation.TANH)


def base_parts(t: Tape, model: ModelSpec, x: Tensor) -> Tensor | None:
    """What the base model owns behind its last layer; returns the pooled first token, if any.

    Of parts that no loss reaches only autocast's copies are kept to the end of the forward pass.
    """
    spec = model.head
    if model.task not in spec.pooler_tasks:
        return None
    if model.task in (Task.BASE, Task.PRETRAINING) or (
        model.task is Task.SEQUENCE_CLASSIFICATION
        and spec.classifier is not None
        and spec.classifier.pooling is Pooling.POOLER
    ):
        return pool(t, model, x)
    hidden = model.hidden_size
    weight = t.parameter("pooler.dense.weight", hidden, hidden)
    for parameter in (weight, t.parameter("pooler.dense.bias", hidden)):
        parameter.unused = True
        t.cast_weight(parameter)
    idle_linear(t, weight)
    return None


def classification(t: Tape, model: ModelSpec, x: Tensor, pooled: Tensor | None) -> Tensor:
    """Classes of each sequence or of each token; returns the loss."""
    spec = model.head.classifier or DECODER_CLASSIFIER
    if model.task in WHOLE_SEQUENCES:
        return cross_entropy(t, _sequence_logits(t, model, spec, x, pooled))
    if model.task is Task.TOKEN_CLASSIFICATION:
        x = dropout(t, x, spec.token_dropout)
        logits = _classify(t, model, x, bias=True)
        return cross_entropy(t, t.cast(logits, DType.FP32) if spec.upcast_tokens else logits)
    return span_loss(t, _classify(t, model, x, bias=True), model.num_labels)


def next_sentence(t: Tape, model: ModelSpec, loss: Tensor, pooled: Tensor | None) -> Tensor:
    """BERT's second task, whether one sentence follows another, added to the first one's loss."""
    assert pooled is not None
    logits = linear(t, pooled, "seq_relationship", model.hidden_size, 2, bias=True)
    t.give_out(logits)
    return t.add(loss, cross_entropy(t, logits))


def replaced_tokens(t: Tape, model: ModelSpec, x: Tensor) -> Tensor:
    """ELECTRA's discriminator: one logit a token, and a binary cross-entropy."""
    hidden = model.hidden_size
    x = linear(t, x, "discriminator.dense", hidden, hidden, bias=True)
    if model.head.discriminator is not None:
        x = activation(t, x, model.head.discriminator)
    logits = linear(t, x, "discriminator.dense_prediction", hidden, 1, bias=True)
    if t.autocast is not None:
        logits = t.cast(logits, DType.FP32)
    labels = t.tensor(logits.numel, DType.FP32)
    t.record(OperationKind.TO, (), (labels,))
    loss = t.tensor(1, logits.dtype)
    t.record(
        OperationKind.BINARY_CROSS_ENTROPY_WITH_LOGITS, (logits, labels), (loss,),
        saves=(logits, labels), gradients=(Gradient.FRESH, Gradient.NONE),
    )  # fmt: skip
    t.give_out(logits)
    return loss


def _sequence_logits(
    t: Tape, model: ModelSpec, spec: ClassifierSpec, x: Tensor, pooled: Tensor | None
) -> Tensor:
    hidden, batch = model.hidden_size, t.options.batch_size
    if spec.pooling is Pooling.LAST_LOGITS:
        # OPT-350m's decoder ends in the width of its token table.
        width = x.numel // (batch * t.options.seq_len)
        logits = linear(t, x, "classifier", width, model.num_labels)
        return t.slice(logits, batch * model.num_labels)
    if spec.pooling is Pooling.FIRST:
        x = t.slice(x, batch * hidden)
    elif pooled is not None:
        x = pooled
    x = _dense(t, model, spec, x)
    return _classify(t, model, dropout(t, x, spec.dropout), bias=True)


def _dense(t: Tape, model: ModelSpec, spec: ClassifierSpec, x: Tensor) -> Tensor:
    """The dense layer before the classes, where there is one, and its activation."""
    hidden = model.hidden_size
    if spec.dense is not None:
        x = linear(t, x, "classifier.dense", hidden, hidden, bias=True)
        x = activation(t, x, spec.dense)
    return x


def _classify(t: Tape, model: ModelSpec, x: Tensor, *, bias: bool) -> Tensor:
    return linear(t, x, "classifier", model.hidden_size, model.num_labels, bias=bias)


def span_loss(t: Tape, logits: Tensor, num_labels: int) -> Tensor:
    """Question answering: start and end scores copied apart, a cross-entropy of each, their mean."""
    tokens = logits.numel // num_labels
    start, end = t.split(logits, tokens, tokens)
    first = t.elementwise(OperationKind.CLONE, start)
    last = t.elementwise(OperationKind.CLONE, end)
    loss = t.scale(t.add(cross_entropy(t, first), cross_entropy(t, last)))
    t.give_out(logits)
    return loss
