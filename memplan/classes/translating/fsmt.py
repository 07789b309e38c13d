"""FSMT: an older translation model of two vocabularies, whose tokens come before sequences inside.

Layers that ``layerdrop`` may skip are counted as run. The class cannot checkpoint.
(transformers 5.23, models/fsmt/modeling_fsmt.py)
"""

from collections.abc import Callable, Hashable, Sequence
from typing import ClassVar

from memplan.classes.translating.bart import BartStack
from memplan.classes.translating.layers import (
    BartAttention,
    BartDecoderLayer,
    BartEncoderLayer,
    LayerParts,
)
from memplan.classes.translating.stacks import (
    Decoded,
    DecodedStates,
    Tasks,
    TwoStacks,
    shifted,
)
from memplan.classes.translating.tables import WordEmbedding
from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.tensors import Tensor
from memplan.graph.losses.tasks import copy_outputs
from memplan.graph.modules.attention import Attended
from memplan.graph.modules.basic import Embedding, Linear, dropout
from memplan.graph.modules.functional import batched_product, softmax
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.module import Module
from memplan.graph.operations.losses import cross_entropy
from memplan.model.config import ConfigReader
from memplan.model.heads import Task
from memplan.model.parameters import ModelPart, WeightRole


class Positions(Embedding):
    """``SinusoidalPositionalEmbedding``: rows for padding, and for every position of every sequence."""

    def __init__(self, config: ConfigReader) -> None:
        skipped = config.integer("pad_token_id", default=1, minimum=0) + 1
        rows = config.integer("max_position_embeddings") + skipped
        super().__init__(rows, config.integer("d_model"))

    def forward(self, shape: tuple[int, ...], ids: Handle | None = None) -> Handle:
        del ids
        positions = made_by(self.run, OperationKind.CUMSUM, shape, DType.INT64)
        return super().forward(shape, positions)


class Attention(BartAttention):
    """Its input is (tokens, batch, width); all heads of all sequences are one batch of products."""

    def forward(
        self, x: Handle, key_value_states: Handle | None = None, mask: Handle | None = None
    ) -> Attended:
        tgt_len, bsz, embed_dim = x.shape
        current_states = x if key_value_states is None else key_value_states
        key_states = self.k_proj(current_states)
        # Its own view stands behind the values' projection: see ``projected_heads``.
        key_states = key_states.view(-1, bsz, self.num_heads, self.head_dim).permute(1, 2, 0, 3)
        value_states = self.v_proj(current_states)
        value_states = value_states.view(-1, bsz, self.num_heads, self.head_dim)
        value_states = value_states.permute(1, 2, 0, 3)
        query_states = self.q_proj(x) * 1.0
        heads = bsz * self.num_heads
        query_states = query_states.view(tgt_len, bsz, -1, self.head_dim)
        query_states = query_states.reshape(tgt_len, heads, self.head_dim).transpose(0, 1)
        key_states = key_states.reshape(heads, -1, self.head_dim)
        value_states = value_states.reshape(heads, -1, self.head_dim)
        attn_weights = batched_product(query_states, key_states.transpose(1, 2))
        if mask is not None:
            attn_weights = attn_weights.view(bsz, self.num_heads, tgt_len, -1) + mask
            attn_weights = attn_weights.view(heads, tgt_len, -1)
        attn_weights = softmax(attn_weights)
        attn_probs = dropout(attn_weights, self.dropout)
        attn_output = batched_product(attn_probs, value_states)
        attn_output = attn_output.transpose(0, 1).contiguous().view(tgt_len, bsz, embed_dim)
        attn_output = self.out_proj(attn_output)
        return attn_output, None


class EncoderLayer(BartEncoderLayer):
    attention_class = Attention


class DecoderLayer(BartDecoderLayer):
    attention_class = Attention


class FSMTStack(BartStack):
    table_class: type[Embedding] = WordEmbedding
    positions_class: Callable[[ConfigReader], Module] = Positions
    norms_embedding = False

    def kinds(self, config: ConfigReader, count: int) -> Sequence[Hashable]:
        """The first one is given what lies the other way round."""
        del config
        return [number == 0 for number in range(count)]


class FSMTEncoder(FSMTStack):
    layer_class: Callable[[ConfigReader], LayerParts] = EncoderLayer
    rows_key = "src_vocab_size"

    def forward(self, batch: int, length: int) -> Handle:
        self.run.enter(self.name)
        inputs_embeds = self.embed_tokens((batch, length)) * 1.0
        embed_pos = self.embed_positions((batch, length))
        x = inputs_embeds + embed_pos
        x = dropout(x, self.dropout)
        x = x.transpose(0, 1)
        for encoder_layer in self.layers:
            x = encoder_layer(x, None)
        return x.transpose(0, 1)


class FSMTDecoder(FSMTStack):
    name = "decoder"
    layer_class: Callable[[ConfigReader], LayerParts] = DecoderLayer
    rows_key = "tgt_vocab_size"

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        rows, hidden = self.embed_tokens.weight.shape
        self.output_projection = Linear(hidden, rows, role=WeightRole.OUTPUT)
        self.output_projection.segment = "head", ModelPart.HEAD

    def forward(
        self, batch: int, length: int, ids: Handle, memory: Handle, causal_mask: Handle
    ) -> Handle:
        self.run.enter(self.name)
        positions = self.embed_positions((batch, length))
        x = self.embed_tokens((batch, length), ids) * 1.0
        x += positions
        x = dropout(x, self.dropout)
        x = x.transpose(0, 1)
        memory = memory.transpose(0, 1)
        for decoder_layer in self.layers:
            x = decoder_layer(x, causal_mask, memory)
        x = x.transpose(0, 1)
        memory = memory.transpose(0, 1)
        x = self.output_projection(x)
        return x


def fill_with_neg_inf(t: Handle) -> Handle:
    """In fp32, and cast back."""
    full = t.float()
    return full.to(t.dtype)


class FSMTLogits(DecodedStates):
    """The decoder gives logits, whatever the task."""

    def add_head(self, config: ConfigReader) -> None:  # noqa: ARG002
        """The matrix is the decoder's own, or its table."""
        decoder = self.two.decoder
        assert isinstance(decoder, FSMTDecoder)
        if self.spec.head.tied:
            decoder.output_projection.weight = decoder.embed_tokens.weight

    def begin_head(self, x: Handle) -> None:
        """It has begun in the decoder."""


class FSMTForConditionalGeneration(FSMTLogits):
    is_base = False

    def loss_of(self, outputs: Decoded) -> Tensor:
        """Cross entropy."""
        lm_logits = outputs.last_hidden_state
        loss = cross_entropy(self.run, lm_logits.record)
        self.run.returned.append(lm_logits.record)
        copy_outputs(self.run, lm_logits.record)
        return loss


class FSMTModel(TwoStacks):
    eager_only = True
    recomputes = False
    tasks: ClassVar[Tasks] = {
        Task.SEQ2SEQ_LM: FSMTForConditionalGeneration,
        Task.BASE: FSMTLogits,
    }

    def __init__(self, config: ConfigReader) -> None:
        self.is_tied = config.flag("tie_word_embeddings")
        source, target = "src_vocab_size", "tgt_vocab_size"
        if self.is_tied and config.integer(source) != config.integer(target):
            problem = f"cannot tie unequal {source} and {target}"
            error = config.fail("tie_word_embeddings", problem)
            raise error
        self.encoder: FSMTEncoder = FSMTEncoder(config)
        self.decoder: FSMTDecoder = FSMTDecoder(config)
        if self.is_tied:
            self.decoder.embed_tokens.weight = self.encoder.embed_tokens.weight

    @property
    def vocabulary(self) -> Embedding:
        """The decoder's own."""
        return self.decoder.embed_tokens

    def forward(self, batch: int, ids: Handle | None) -> Decoded:
        """What the decoder reads, and its mask, are made before the encoder runs."""
        run = self.run
        decoder_input_ids = shifted(self, batch) if ids is None else ids
        causal_mask = self.causal_mask(decoder_input_ids.shape[-1])
        encoded = self.encoder(batch, run.options.seq_len)
        self.begin_decoder(encoded)
        shape = decoder_input_ids.shape
        decoded = self.decoder(*shape, decoder_input_ids, encoded, causal_mask)
        return Decoded(decoded, encoded, decoder_input_ids)

    def causal_mask(self, length: int) -> Handle:
        """``torch.triu(fill_with_neg_inf(torch.zeros(...)))`` in the weights' format."""
        shape, dtype = (length, length), self.run.options.weights
        zeros = made_by(self.run, OperationKind.ZEROS, shape, dtype)
        filled = fill_with_neg_inf(zeros)
        del zeros
        return filled.apart(OperationKind.TRIU)
