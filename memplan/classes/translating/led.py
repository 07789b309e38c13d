"""LED: BART for long documents, whose encoder's tokens attend as Longformer's to their neighbours.

(transformers 5.23, models/led/modeling_led.py)
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

from memplan.classes.encoders.base import Unpadding
from memplan.classes.encoders.longformer import LongformerSelfAttention, padded_length, read_windows
from memplan.classes.translating.bart import (
    BartDecoder,
    BartStack,
    Translator,
)
from memplan.classes.translating.layers import (
    AttentionModule,
    BartDecoderLayer,
    EncoderLayerParts,
    LayerParts,
    Projections,
)
from memplan.classes.translating.stacks import (
    SpanAnswering,
    Tasks,
    checked,
    projected_heads,
)
from memplan.classes.translating.tables import PositionsWithoutOffset, WordEmbedding
from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.basic import Embedding, LayerNorm, Linear, dropout
from memplan.graph.modules.functional import batched_product, softmax
from memplan.graph.modules.handles import Handle, made_by, seen_in
from memplan.graph.modules.masks import causal_mask
from memplan.graph.modules.module import Module
from memplan.graph.modules.rotary import concatenate
from memplan.model.attention import AttentionSpec
from memplan.model.config import ConfigReader
from memplan.model.heads import Task
from memplan.model.parameters import LayerBlock, ModelPart, WeightRole


class LEDEncoderAttention(AttentionModule):
    block = LayerBlock.ATTENTION

    def __init__(self, config: ConfigReader, window: int) -> None:
        hidden, key = config.integer("d_model"), "encoder_attention_heads"
        heads = config.integer(key)
        config.divide("d_model", hidden, key, heads)
        rate = config.number("attention_dropout")
        self.longformer_self_attn = LongformerSelfAttention(hidden, heads, window, rate)
        self.output = Linear(hidden, hidden, bias=True, role=WeightRole.ATTENTION_OUTPUT)

    def facts(self) -> AttentionSpec:
        """Of its heads."""
        return self.longformer_self_attn.facts()

    def forward(self, x: Handle, mask: Handle, is_index_masked: Handle) -> Handle:
        self_outputs = self.longformer_self_attn(x, mask, is_index_masked)
        attn_output: Handle = self.output(self_outputs)
        return attn_output


class LEDDecoderAttention(Projections):
    def forward(
        self, x: Handle, key_value_states: Handle | None = None, mask: Handle | None = None
    ) -> tuple[Handle, None]:
        batch, length, width = x.shape
        query_states = self.q_proj(x) * 1.0
        current_states = x if key_value_states is None else key_value_states
        heads = batch, -1, self.num_heads, self.head_dim
        key_states = self.k_proj(current_states)
        key_states = projected_heads(key_states, self.head_dim)
        value_states = self.v_proj(current_states)
        value_states = value_states.view(*heads).transpose(1, 2)
        shape = batch * self.num_heads, -1, self.head_dim
        query_states = query_states.view(*heads).transpose(1, 2)
        query_states = query_states.reshape(*shape)
        key_states = key_states.reshape(*shape)
        value_states = value_states.reshape(*shape)
        attn_weights = batched_product(query_states, key_states.transpose(1, 2))
        if mask is not None:
            attn_weights = attn_weights.view(batch, self.num_heads, length, -1) + mask
            attn_weights = attn_weights.view(batch * self.num_heads, length, -1)
        attn_weights = softmax(attn_weights)
        attn_probs = dropout(attn_weights, self.dropout)
        attn_output = batched_product(attn_probs, value_states)
        attn_output = attn_output.view(batch, self.num_heads, length, self.head_dim)
        attn_output = attn_output.transpose(1, 2).reshape(batch, length, width)
        attn_output = self.out_proj(attn_output)
        return attn_output, None


class LEDEncoderLayer(EncoderLayerParts):
    def __init__(self, config: ConfigReader, window: int) -> None:
        self.self_attn = LEDEncoderAttention(config, window)
        self.self_attn_layer_norm = LayerNorm(config.integer("d_model"))
        self.read_rates(config)
        self.add_network(config, "encoder")

    def forward(self, x: Handle, mask: Handle, is_index_masked: Handle) -> Handle:
        residual = x
        attn_outputs = self.self_attn(x, mask, is_index_masked)
        x = attn_outputs
        x = dropout(x, self.dropout)
        x = residual + x
        x = self.self_attn_layer_norm(x)
        residual = x
        x = self.activation_fn(self.fc1(x))
        x = dropout(x, self.activation_dropout)
        x = self.fc2(x)
        x = dropout(x, self.dropout)
        x = residual + x
        x = self.final_layer_norm(x)
        return checked(x)


class LEDDecoderLayer(BartDecoderLayer):
    attention_class = LEDDecoderAttention


class EncoderPositions(PositionsWithoutOffset):
    rows_key = "max_encoder_position_embeddings"


class DecoderPositions(PositionsWithoutOffset):
    rows_key = "max_decoder_position_embeddings"


class LEDEncoder(BartStack):
    table_class: type[Embedding] = WordEmbedding
    positions_class: Callable[[ConfigReader], Module] = EncoderPositions

    def __init__(self, config: ConfigReader) -> None:
        self.windows = read_windows(config, config.layers("encoder_layers"))
        super().__init__(config)
        self.unpadding = Unpadding()
        self.unpadding.segment = "encoder.unpadding", ModelPart.OTHER

    def kinds(self, config: ConfigReader, count: int) -> Sequence[Hashable]:
        """Each layer's window."""
        del config, count
        return self.windows

    def layer(self, config: ConfigReader, kind: Any) -> LayerParts:
        """One of a window."""
        return LEDEncoderLayer(config, kind)

    def forward(self, batch: int, length: int) -> Handle:
        run = self.run
        run.enter(self.name)
        inputs_embeds = self.embed_tokens((batch, length))
        attention_mask = made_by(run, OperationKind.ONES, (batch, length), DType.INT64)
        whole = padded_length(length, self.windows)
        input_ids = None
        if whole != length:
            input_ids, attention_mask, inputs_embeds = self.padded(
                attention_mask, inputs_embeds, whole
            )
        attention_mask = inverted(attention_mask, inputs_embeds.dtype)
        is_index_masked = attention_mask.apart(OperationKind.LT, dtype=DType.BOOL)
        is_index_global_attn = attention_mask.apart(OperationKind.GT, dtype=DType.BOOL)
        embed_pos = self.embed_positions((batch, whole))
        x = inputs_embeds + embed_pos
        x = self.layernorm_embedding(x)
        x = dropout(x, self.dropout)
        for encoder_layer in self.layers:
            x = encoder_layer(x, attention_mask, is_index_masked)
        del is_index_global_attn, input_ids
        return self.unpadding.of(x, length)

    def padded(self, mask: Handle, embeds: Handle, whole: int) -> tuple[Handle, Handle, Handle]:
        """``_pad_to_window_size``: ids, the mask and embeddings of so many tokens."""
        run, (batch, length) = self.run, mask.shape
        input_ids = made_by(run, OperationKind.PAD, (batch, whole), DType.INT64)
        shape = batch, whole - length
        input_ids_padding = made_by(run, OperationKind.INDICES, shape, DType.INT64)
        inputs_embeds_padding = self.embed_tokens(shape, input_ids_padding)
        inputs_embeds = concatenate(embeds, inputs_embeds_padding, dim=1)
        attention_mask = mask.apart(OperationKind.PAD, shape=(batch, whole))
        return input_ids, attention_mask, inputs_embeds


def inverted(mask: Handle, dtype: DType) -> Handle:
    """``_prepare_4d_attention_mask_inverted(...)[:, 0, 0, :]``: a row of the mask of all pairs, which it holds."""
    run, (batch, length) = mask.run, mask.shape
    pairs = batch, 1, length, length
    expanded_mask = mask.unsqueeze(1).unsqueeze(1).apart(OperationKind.TO, dtype=dtype, shape=pairs)
    inverted_mask = expanded_mask.apart(OperationKind.SUB)
    expanded_attention_mask = inverted_mask.apart(
        OperationKind.MASKED_FILL, inverted_mask.apart(OperationKind.TO, dtype=DType.BOOL)
    )
    expanded_attention_mask = expanded_attention_mask.apart(OperationKind.MUL, inverted_mask)
    return seen_in(run, expanded_attention_mask.record, (batch, length))


class LEDDecoder(BartDecoder):
    counts = pads = False
    table_class: type[Embedding] = WordEmbedding
    layer_class: Callable[[ConfigReader], LayerParts] = LEDDecoderLayer
    positions_class: Callable[[ConfigReader], Module] = DecoderPositions

    def mask(self, batch: int, length: int) -> Handle | None:
        """Of pairs before one another."""
        return causal_mask(self.run, batch, length)


class LEDModel(Translator):
    tasks: ClassVar[Tasks] = {**Translator.tasks, Task.QUESTION_ANSWERING: SpanAnswering}
    eager_only = True
    context_keys = ("max_encoder_position_embeddings",)
    encoder_class: Callable[[ConfigReader], BartStack] = LEDEncoder
    decoder_class: Callable[[ConfigReader], BartStack] = LEDDecoder
    table_class: type[Embedding] = WordEmbedding
