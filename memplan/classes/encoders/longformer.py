"""Longformer: RoBERTa whose tokens attend to their neighbours, in chunks that overlap by half.

Queries and keys are cut into chunks whose scores are copied to where their diagonals belong; values are cut
into chunks of three halves. What is cut is a view that overlaps itself, so that a product copies it.
(transformers 5.23: models/longformer/modeling_longformer.py, which models/led copies)
"""

from collections.abc import Callable
from typing import ClassVar

from memplan.classes.encoders.base import Encoded, Unpadding
from memplan.classes.encoders.bert import RobertaModel
from memplan.classes.encoders.layers import (
    Attention,
    Heads,
    Intermediate,
    Layer,
    Output,
    SelfOutput,
    StackParts,
)
from memplan.classes.encoders.tables import CountedEmbeddings, TypesLast, zero_ids
from memplan.classes.encoders.tasks import (
    HeadClassification,
    PooledMultipleChoice,
    QuestionAnswering,
    Tasks,
)
from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.attention import Attended
from memplan.graph.modules.basic import Linear, dropout, spare
from memplan.graph.modules.contractions import einsum
from memplan.graph.modules.functional import (
    add_to_view,
    as_strided,
    filled_where,
    masked_fill,
    padded,
    scaled_in_place,
    softmax,
    strided,
    write,
)
from memplan.graph.modules.handles import Handle, made_by, seen_in
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.masks import written_mask
from memplan.graph.modules.module import Module
from memplan.graph.modules.rotary import Tables
from memplan.model.config import ConfigReader
from memplan.model.heads import Task
from memplan.model.parameters import WeightRole
from memplan.units import round_up


class LongformerSelfAttention(Heads):
    def __init__(self, hidden: int, heads: int, window: int, rate: float) -> None:
        self.num_heads, self.head_dim = heads, hidden // heads
        self.overlap, self.rate = window // 2, rate
        role = WeightRole.QUERY_KEY
        self.query = Linear(hidden, hidden, bias=True, role=role)
        self.key = Linear(hidden, hidden, bias=True, role=role)
        self.value = Linear(hidden, hidden, bias=True)
        self.query_global = Linear(hidden, hidden, bias=True)
        self.key_global = Linear(hidden, hidden, bias=True)
        self.value_global = Linear(hidden, hidden, bias=True)

    @property
    def probability(self) -> float:
        """Of dropping a weight."""
        return self.rate

    def forward(self, x: Handle, mask: Handle, is_index_masked: Handle) -> Handle:
        x = x.seen_as(*x.shape).transpose(0, 1)
        query_vectors = self.query(x)
        key_vectors = self.key(x)
        value_vectors = self.value(x)
        self.declare_global()
        length, batch, width = x.shape
        # Of rows the layer gives a view (``_flatten_nd_linear``), of others what it added its bias to.
        query_vectors = scaled_in_place(query_vectors, of_view=x.is_contiguous)
        heads = length, batch, self.num_heads, self.head_dim
        query_vectors = query_vectors.view(*heads).transpose(0, 1)
        key_vectors = key_vectors.view(*heads).transpose(0, 1)
        laid, attn_scores = self.query_key(query_vectors, key_vectors)
        removed = mask.apart(OperationKind.NE, dtype=DType.BOOL).unsqueeze(-1).unsqueeze(-1)
        float_mask = removed.apart(OperationKind.TO, dtype=query_vectors.dtype)
        float_mask = float_mask.apart(OperationKind.MASKED_FILL, removed)
        ones = made_by(self.run, OperationKind.ONES, float_mask.shape, float_mask.dtype)
        _, diagonal_mask = self.query_key(ones, float_mask)
        del ones
        laid = add_to_view(laid, diagonal_mask)
        attn_scores = strided(laid, attn_scores)
        attn_probs = softmax(attn_scores, dtype=DType.FP32)
        attn_probs = masked_fill(attn_probs, is_index_masked)
        attn_probs = attn_probs.to(attn_scores.dtype)
        del attn_scores, laid
        attn_probs = dropout(attn_probs, self.rate)
        value_vectors = value_vectors.view(*heads).transpose(0, 1)
        attn_output = self.probabilities_value(attn_probs, value_vectors)
        attn_output = attn_output.transpose(0, 1).reshape(length, batch, width)
        return attn_output.transpose(0, 1)

    def declare_global(self) -> None:
        """No token attends to all of them, so that what these would project serves nothing."""
        for name in ("query_global", "key_global", "value_global"):
            spare(self.children[name])

    def chunk(self, x: Handle, *, turned: bool = False) -> Handle:
        """Chunks of two halves each, which overlap by one; the gradient of one that is ``turned`` comes so."""
        rows, length, width = x.shape
        w, (outer, step, inner) = self.overlap, x.strides
        shape, strides = (rows, length // w - 1, 2 * w, width), (outer, step * w, step, inner)
        return as_strided(x, shape, strides, turned=turned)

    def query_key(self, query: Handle, key: Handle) -> tuple[Handle, Handle]:
        """``_sliding_chunks_query_key_matmul``: what is laid out, and how it is seen."""
        batch, length, heads, width = query.shape
        w, chunks = self.overlap, length // self.overlap - 1
        query = query.transpose(1, 2).reshape(batch * heads, length, width)
        key = key.transpose(1, 2).reshape(batch * heads, length, width)
        query = self.chunk(query)
        key = self.chunk(key, turned=True)
        scores = products(query, key)
        scores = padded(scores, (batch * heads, chunks, 2 * w + 1, 2 * w))
        scores = scores.view(batch * heads, chunks, 2 * w, 2 * w + 1)
        laid = made_by(
            self.run, OperationKind.ZEROS, (batch * heads, chunks + 1, w, 2 * w + 1), scores.dtype
        )
        laid = write(laid, scores.narrow(w, dim=2).narrow(w + 1))
        laid = write(laid, scores.select(1).narrow(w, dim=1).narrow(w + 1))
        laid = write(laid, scores.narrow(w, dim=2).narrow(w))
        laid = write(laid, scores.select(1).narrow(w - 1, dim=1).narrow(w - 1))
        seen = laid.view(batch, heads, length, 2 * w + 1).transpose(2, 1)
        return self.without_edges(laid, seen)

    def without_edges(self, laid: Handle, x: Handle) -> tuple[Handle, Handle]:
        """``_mask_invalid_locations``: in place, through what is seen of it."""
        w, kinds = self.overlap, OperationKind
        ones = made_by(self.run, kinds.ONES, (w, w + 1), x.dtype)
        lower = ones.apart(kinds.TRIL)
        del ones
        beginning_mask = lower.apart(kinds.FLIP)
        del lower
        beginning_mask = beginning_mask.unsqueeze(0).unsqueeze(2)
        ending_mask = beginning_mask.apart(kinds.FLIP)
        beginning_input = x.narrow(w, dim=1).narrow(w + 1)
        laid = write(laid, filled_where(beginning_input, beginning_mask))
        x = strided(laid, x)
        ending_input = x.narrow(w, dim=1).narrow(w + 1)
        laid = write(laid, filled_where(ending_input, ending_mask))
        return laid, strided(laid, x)

    def probabilities_value(self, probs: Handle, value: Handle) -> Handle:
        """``_sliding_chunks_matmul_attn_probs_value``."""
        batch, length, heads, width = value.shape
        w, rows = self.overlap, batch * heads
        blocks = length // w
        chunked_probs = probs.transpose(1, 2).reshape(rows, blocks, w, 2 * w + 1)
        value = value.transpose(1, 2).reshape(rows, length, width)
        padded_value = padded(value, (rows, length + 2 * w, width))
        outer, step, inner = padded_value.strides
        chunked_value = as_strided(
            padded_value, (rows, blocks, 3 * w, width), (outer, w * step, step, inner)
        )
        chunked_probs = padded(chunked_probs, (rows, blocks, w, 3 * w + 2))
        chunked_probs = chunked_probs.view(rows, blocks, w * (3 * w + 2))
        chunked_probs = chunked_probs.narrow(w * (3 * w + 1))
        chunked_probs = chunked_probs.view(rows, blocks, w, 3 * w + 1)
        chunked_probs = chunked_probs.narrow(3 * w)
        context = einsum("bcwd,bcdh->bcwh", chunked_probs, chunked_value)
        return context.view(batch, heads, length, width).transpose(1, 2)


def products(query: Handle, key: Handle) -> Handle:
    """``einsum("bcxd,bcyd->bcxy", query, key)``: of vectors of one element it is no matrix product."""
    if query.shape[-1] > 1:
        return einsum("bcxd,bcyd->bcxy", query, key)
    return query.apart(OperationKind.MUL, key.transpose(2, 3))


class LongformerAttention(Attention):
    def __init__(self, config: ConfigReader, window: int) -> None:
        hidden, key = config.integer("hidden_size"), "num_attention_heads"
        heads, rate = config.integer(key), config.number("attention_probs_dropout_prob")
        config.divide("hidden_size", hidden, key, heads)
        self.self = LongformerSelfAttention(hidden, heads, window, rate)
        self.output = SelfOutput(config)

    def forward(self, x: Handle, *beside: Handle | Tables | None) -> Attended:
        self_outputs = self.self(x, *beside)
        attn_output = self.output(self_outputs, x)
        return attn_output, None


class LongformerLayer(Layer):
    def __init__(self, config: ConfigReader, window: int) -> None:
        self.attention = LongformerAttention(config, window)
        self.intermediate = Intermediate(config)
        self.output = Output(config)


class LongformerEncoder(StackParts):
    def __init__(self, config: ConfigReader) -> None:
        self.windows = read_windows(config, config.layers("num_hidden_layers"))
        self.layer = LayerList(
            "encoder.layers", self.windows, lambda window: LongformerLayer(config, window)
        )

    def forward(self, x: Handle, mask: Handle) -> Handle:
        is_index_masked = mask.apart(OperationKind.LT, dtype=DType.BOOL)
        is_index_global_attn = mask.apart(OperationKind.GT, dtype=DType.BOOL)
        for layer_module in self.layer:
            x = layer_module(x, mask, is_index_masked)
        del is_index_global_attn
        return x


class LongformerEmbeddings(TypesLast, CountedEmbeddings):
    num_buffers = 0
    cached = False


class LongformerForSequenceClassification(HeadClassification):
    """It gives tokens global attention by itself, as the next two do."""

    is_counted = True


class LongformerForQuestionAnswering(QuestionAnswering):
    is_counted = True


class LongformerForMultipleChoice(PooledMultipleChoice):
    is_counted = True


class LongformerModel(RobertaModel):
    prefix = "longformer"
    eager_only = True
    tasks: ClassVar[Tasks] = {
        **RobertaModel.tasks,
        Task.SEQUENCE_CLASSIFICATION: LongformerForSequenceClassification,
        Task.QUESTION_ANSWERING: LongformerForQuestionAnswering,
        Task.MULTIPLE_CHOICE: LongformerForMultipleChoice,
    }
    classifier_dropout_key = "hidden_dropout_prob"
    embeddings_class: Callable[[ConfigReader], Module] = LongformerEmbeddings
    encoder_class: Callable[[ConfigReader], Module] = LongformerEncoder
    encoder: LongformerEncoder

    def __init__(self, config: ConfigReader, *, pooled: bool = True) -> None:
        super().__init__(config, pooled=pooled)
        self.unpadding = Unpadding()

    def forward(self, batch: int, length: int) -> Encoded:
        sequence_output = self.encoded(batch, length)
        sequence_output = self.unpadding.of(sequence_output, length)
        return Encoded(sequence_output, self.pooled(sequence_output))

    def encoded(self, batch: int, length: int) -> Handle:
        """What the encoder makes of all tokens, those that pad them too."""
        run, kinds = self.run, OperationKind
        input_ids = None
        attention_mask = made_by(run, kinds.ONES, (batch, length), DType.FP32)
        token_type_ids = zero_ids(self, batch, length)
        whole = batch, padded_length(length, self.encoder.windows)
        if whole[1] != length:
            input_ids = made_by(run, kinds.PAD, whole, DType.INT64)
            attention_mask = attention_mask.apart(kinds.PAD, shape=whole)
            token_type_ids = token_type_ids.apart(kinds.PAD, shape=whole)
        embedding_output = self.embeddings(*whole, token_type_ids, input_ids)
        pairs = written_mask(attention_mask, embedding_output, is_asked=False)
        extended_attention_mask = seen_in(run, pairs.record, whole)
        del pairs
        made: Handle = self.encoder(embedding_output, extended_attention_mask)
        return made


def read_windows(config: ConfigReader, count: int) -> list[int]:
    """``attention_window``: one for all layers, or one for each; all even."""
    key = "attention_window"
    listed = isinstance(config.raw(key), list)
    windows = config.integers(key) if listed else [config.integer(key)] * count
    if len(windows) < count:
        error = config.fail(key, f"names {len(windows)} layers of {count}")
        raise error
    for window in windows:
        if window < 1 or window % 2:
            error = config.fail(key, f"{window} is not an even number above 0")
            raise error
    return windows[:count]


def padded_length(length: int, windows: list[int]) -> int:
    """``_pad_to_window_size``: a multiple of the widest window."""
    return round_up(length, max(windows))
