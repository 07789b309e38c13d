"""Encoders with norms before each part: RoBERTa-PreLayerNorm, XLM-RoBERTa-XL, ESM.

(transformers 5.23: models/roberta_prelayernorm, xlm_roberta_xl, esm)
"""

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

from memplan.classes.bert import (
    LAYER_NORM,
    BertAttention,
    BertAttentionParts,
    BertEncoder,
    BertHeads,
    BertIntermediate,
    BertLayer,
    BertLayerParts,
    BertPooler,
    BertSelfOutput,
    RobertaEmbeddings,
    RobertaForSequenceClassification,
    RobertaModel,
    gathered_types,
    positions_behind_padding,
    token_rows,
)
from memplan.classes.encoders import (
    Encoded,
    EncodedStates,
    Encoder,
    EncoderLayer,
    EncoderTask,
    MaskedLM,
    OutputMatrix,
    Tasks,
    TokenClassification,
    idle,
    read_no_decoder,
    require_flag,
)
from memplan.classes.llama import Network
from memplan.dtypes import DType
from memplan.graph.modules.attention import Attended
from memplan.graph.modules.basic import Embedding, LayerNorm, Linear
from memplan.graph.modules.functional import activated, masked_fill_rows
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.masks import position_ids
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.rotary import RotaryEmbedding, Tables, rotate_half
from memplan.graph.operation_kinds import OperationKind
from memplan.model.attention import AttentionSpec, RotarySpec
from memplan.model.config import ConfigReader
from memplan.model.heads import Task
from memplan.model.layers import NormPlacement
from memplan.model.networks import Activation, FeedForwardSpec
from memplan.model.norms import NormSpec
from memplan.model.parameters import LayerBlock, ModelPart, WeightRole


class PreNormSelfOutput(BertSelfOutput):
    """A dense layer, dropout, the sum."""

    def add_norm(self, hidden: int) -> None:
        """There is none behind the sum."""

    def forward(self, x: Handle, input_tensor: Handle) -> Handle:
        x = self.dense(x)
        x = self.dropout(x)
        x = x + input_tensor
        return x


class PreNormOutput(PreNormSelfOutput):
    block = LayerBlock.NETWORK
    role = WeightRole.MATRIX

    def inner(self, config: ConfigReader) -> int:
        return config.integer("intermediate_size")


# --- RoBERTa-PreLayerNorm -------------------------------------------------------------------------------


class RobertaPreLayerNormAttention(BertAttention):
    output_class: Callable[[ConfigReader], BertSelfOutput] = PreNormSelfOutput

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.LayerNorm = LayerNorm(config.integer("hidden_size"))

    def forward(self, x: Handle, mask: Handle | None) -> Attended:
        hidden_states_pre_layer_norm = self.LayerNorm(x)
        attention_output, attn_weights = self.self(hidden_states_pre_layer_norm, mask)
        attention_output = self.output(attention_output, x)
        return attention_output, attn_weights


class RobertaPreLayerNormIntermediate(BertIntermediate):
    def __init__(self, config: ConfigReader) -> None:
        self.LayerNorm = LayerNorm(config.integer("hidden_size"))
        super().__init__(config)

    def forward(self, x: Handle) -> Handle:
        x = self.LayerNorm(x)
        x = self.dense(x)
        x = self.intermediate_act_fn(x)
        return x


class RobertaPreLayerNormLayer(BertLayer):
    placement = NormPlacement.PRE
    attention_class: Callable[[ConfigReader], BertAttentionParts] = RobertaPreLayerNormAttention
    intermediate_class: Callable[[ConfigReader], Network] = RobertaPreLayerNormIntermediate
    output_class: Callable[[ConfigReader], Module] = PreNormOutput


class RobertaPreLayerNormEncoder(BertEncoder):
    layer_class: Callable[[ConfigReader], EncoderLayer] = RobertaPreLayerNormLayer


class RobertaPreLayerNormModel(RobertaModel):
    prefix = "roberta_prelayernorm"

    def __init__(self, config: ConfigReader, *, pooled: bool = True) -> None:
        read_no_decoder(config)
        self.embeddings = RobertaEmbeddings(config)
        self.encoder = RobertaPreLayerNormEncoder(config)
        self.LayerNorm = LayerNorm(config.integer("hidden_size"))
        self.LayerNorm.segment = "encoder.norm", ModelPart.NORM
        self.pooler = BertPooler(config) if pooled else None

    def last_norm(self) -> NormSpec | None:
        return LAYER_NORM

    def forward(self, batch: int, length: int) -> Encoded:
        embedding_output = self.embeddings(batch, length)
        sequence_output = self.encoder(embedding_output, None)
        sequence_output = self.LayerNorm(sequence_output)
        pooled_output = self.pooler(sequence_output) if self.pooler is not None else None
        return Encoded(sequence_output, pooled_output)


# --- XLM-RoBERTa-XL -------------------------------------------------------------------------------------


class XLMRobertaXLEmbeddings(RobertaEmbeddings):
    """Without a norm."""

    def add_norm(self, width: int) -> None:
        """There is none."""

    def forward(self, batch: int, length: int) -> Handle:
        position_ids = made_by(self.run, OperationKind.INDICES, (batch, length), DType.INT64)
        token_type_ids = gathered_types(self, batch, length)
        inputs_embeds = token_rows(self.word_embeddings, batch, length)
        token_type_embeddings = self.token_type_embeddings((batch, length), token_type_ids)
        embeddings = inputs_embeds + token_type_embeddings
        position_embeddings = self.position_embeddings((batch, length), position_ids)
        embeddings = embeddings + position_embeddings
        embeddings = self.dropout(embeddings)
        return embeddings


class XLMRobertaXLAttention(BertAttention):
    output_class: Callable[[ConfigReader], BertSelfOutput] = PreNormSelfOutput

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.self_attn_layer_norm = LayerNorm(config.integer("hidden_size"))

    def forward(self, x: Handle, mask: Handle | None) -> Attended:
        intermediate = self.self_attn_layer_norm(x)
        attention_output, attn_weights = self.self(intermediate, mask)
        attention_output = self.output(attention_output, x)
        return attention_output, attn_weights


class XLMRobertaXLOutput(Module):
    block = LayerBlock.NETWORK

    def __init__(self, config: ConfigReader) -> None:
        inner, hidden = config.integer("intermediate_size"), config.integer("hidden_size")
        self.dense = Linear(inner, hidden, bias=True)

    def forward(self, x: Handle, input_tensor: Handle) -> Handle:
        x = self.dense(x)
        x = x + input_tensor
        return x


class NormedNetworkLayer(BertLayerParts):
    """A norm of the layer's own stands before its network."""

    placement = NormPlacement.PRE

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.LayerNorm = LayerNorm(config.integer("hidden_size"))


class XLMRobertaXLLayer(NormedNetworkLayer, BertLayer):
    attention_class: Callable[[ConfigReader], BertAttentionParts] = XLMRobertaXLAttention
    output_class: Callable[[ConfigReader], Module] = XLMRobertaXLOutput

    def feed_forward_chunk(self, attention_output: Handle) -> Handle:
        intermediate_output = self.LayerNorm(attention_output)
        intermediate_output = self.intermediate(intermediate_output)
        layer_output = self.output(intermediate_output, attention_output)
        return layer_output


class XLMRobertaXLEncoder(BertEncoder):
    layer_class: Callable[[ConfigReader], EncoderLayer] = XLMRobertaXLLayer

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.LayerNorm = LayerNorm(config.integer("hidden_size"))
        self.LayerNorm.segment = "encoder.norm", ModelPart.NORM

    def forward(self, x: Handle, mask: Handle | None) -> Handle:
        for layer in self.layer:
            x = layer(x, mask)
        x = self.LayerNorm(x)
        return x


class XLMRobertaXLModel(RobertaModel):
    embeddings_class: Callable[[ConfigReader], Module] = XLMRobertaXLEmbeddings
    encoder_class: Callable[[ConfigReader], Module] = XLMRobertaXLEncoder

    def last_norm(self) -> NormSpec | None:
        return LAYER_NORM


# --- ESM ------------------------------------------------------------------------------------------------


class EsmEmbeddings(Module):
    """Masked tokens' rows are zeroed, the others scaled by how many there are."""

    def __init__(self, config: ConfigReader, *, rotary: bool) -> None:
        hidden = config.integer("hidden_size")
        rows, role = config.integer("vocab_size"), WeightRole.TOKEN_TABLE
        self.word_embeddings = Embedding(rows, hidden, role=role)
        self.layer_norm = LayerNorm(hidden) if config.flag("emb_layer_norm_before") else None
        self.position_embeddings: Embedding | None = None
        if not rotary:
            positions = config.integer("max_position_embeddings")
            self.position_embeddings = Embedding(positions, hidden)
        self.token_dropout = config.flag("token_dropout")

    def forward(self, batch: int, length: int) -> Handle:
        run = self.run
        position_ids = made_by(run, OperationKind.INDICES, (batch, length), DType.INT64)
        inputs_embeds = token_rows(self.word_embeddings, batch, length)
        embeddings = inputs_embeds
        if self.token_dropout:
            is_mask = made_by(run, OperationKind.EQ, (batch, length), DType.BOOL)
            embeddings = masked_fill_rows(embeddings, is_mask)
            del is_mask
            mask_ratio_observed = made_by(run, OperationKind.MEAN, (batch, 1, 1), DType.FP32)
            embeddings = (embeddings * (1 - 0.12) * mask_ratio_observed).to(embeddings.dtype)
        if self.position_embeddings is not None:
            position_embeddings = self.position_embeddings((batch, length), position_ids)
            embeddings = embeddings + position_embeddings
        if self.layer_norm is not None:
            embeddings = self.layer_norm(embeddings)
        return embeddings


def apply_rotary_in_fp32(query: Handle, key: Handle, cos: Handle, sin: Handle) -> Tables:
    """Of copies in fp32, cast back."""
    dtype = query.dtype
    cos = cos.unsqueeze(1)
    sin = sin.unsqueeze(1)
    q_embed = (query.float() * cos) + (rotate_half(query.float()) * sin)
    k_embed = (key.float() * cos) + (rotate_half(key.float()) * sin)
    return q_embed.to(dtype), k_embed.to(dtype)


class EsmSelfAttention(BertHeads):
    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.is_rotary = is_rotary(config)

    def facts(self) -> AttentionSpec:
        found = super().facts()
        return replace(found, rotary=RotarySpec(dim=self.head_dim)) if self.is_rotary else found

    def forward(self, x: Handle, mask: Handle | None, tables: Tables | None) -> Attended:
        batch, length, _ = x.shape
        query_layer = self.query(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        current_states = x
        key_layer = self.key(current_states).view(batch, length, -1, self.head_dim).transpose(1, 2)
        value_layer = (
            self.value(current_states).view(batch, length, -1, self.head_dim).transpose(1, 2)
        )
        query_layer = query_layer * self.head_dim**-0.5
        if tables is not None:
            cos, sin = tables
            query_layer, key_layer = apply_rotary_in_fp32(query_layer, key_layer, cos, sin)
        out, weights = self.attend(query_layer, key_layer, value_layer, mask)
        out = out.reshape(batch, length, -1)
        return out, weights


class EsmAttention(BertAttentionParts):
    self_class: Callable[[ConfigReader], BertHeads] = EsmSelfAttention
    output_class: Callable[[ConfigReader], BertSelfOutput] = PreNormSelfOutput

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.LayerNorm = LayerNorm(config.integer("hidden_size"))

    def forward(self, x: Handle, mask: Handle | None, tables: Tables | None) -> Handle:
        hidden_states_ln = self.LayerNorm(x)
        attn_output, _ = self.self(hidden_states_ln, mask, tables)
        attn_output = self.output(attn_output, x)
        return attn_output


class EsmIntermediate(Network):
    block = LayerBlock.NETWORK

    def __init__(self, config: ConfigReader) -> None:
        hidden, inner = config.integer("hidden_size"), config.integer("intermediate_size")
        self.dense = Linear(hidden, inner, bias=True)

    def facts(self) -> FeedForwardSpec:
        inner = self.dense.out_features
        return FeedForwardSpec(
            intermediate_size=inner, activation=Activation.GELU_PYTHON, bias=True
        )

    def forward(self, x: Handle) -> Handle:
        x = self.dense(x)
        x = activated(x, Activation.GELU_PYTHON)
        return x


class EsmLayer(NormedNetworkLayer):
    attention_class: Callable[[ConfigReader], BertAttentionParts] = EsmAttention
    intermediate_class: Callable[[ConfigReader], Network] = EsmIntermediate
    output_class: Callable[[ConfigReader], Module] = PreNormOutput

    def forward(self, x: Handle, mask: Handle | None, tables: Tables | None) -> Handle:
        attention_output = self.attention(x, mask, tables)
        layer_output = self.feed_forward_chunk(attention_output)
        return layer_output

    def feed_forward_chunk(self, attention_output: Handle) -> Handle:
        attention_output_ln = self.LayerNorm(attention_output)
        intermediate_output = self.intermediate(attention_output_ln)
        layer_output = self.output(intermediate_output, attention_output)
        return layer_output


class EsmEncoder(Module):
    def __init__(self, config: ConfigReader) -> None:
        kinds = [None] * config.layers("num_hidden_layers")
        self.layer = LayerList("encoder.layers", kinds, lambda _: EsmLayer(config))
        self.emb_layer_norm_after = LayerNorm(config.integer("hidden_size"))
        self.emb_layer_norm_after.segment = "encoder.norm", ModelPart.NORM

    def forward(self, x: Handle, mask: Handle | None, tables: Tables | None) -> Handle:
        for layer in self.layer:
            x = layer(x, mask, tables)
        x = self.emb_layer_norm_after(x)
        return x


class EsmContactPredictionHead(Module):
    """It is asked by itself; no loss reads it."""

    segment = "head", ModelPart.HEAD

    def __init__(self, features: int) -> None:
        self.regression = Linear(features, 1, bias=True)

    def forward(self, x: Handle) -> None:  # noqa: ARG002
        idle(self.regression)


class EsmLMHead(Module):
    def __init__(self, task: EncoderTask) -> None:
        hidden = task.spec.hidden_size
        self.dense = Linear(hidden, hidden, bias=True)
        self.layer_norm = LayerNorm(hidden)
        self.decoder = OutputMatrix(task.spec, hidden, bias=False)
        self.decoder.tie(task)
        self.bias = Weight(task.spec.num_outputs)

    def forward(self, features: Handle) -> Handle:
        x = self.dense(features)
        x = activated(x, Activation.GELU_PYTHON)
        x = self.layer_norm(x)
        x = self.decoder(x) + self.operand(self.bias)
        return x


class EsmForMaskedLM(MaskedLM):
    def add_head(self, config: ConfigReader) -> None:  # noqa: ARG002
        self.lm_head = EsmLMHead(self)

    def scores(self, x: Handle) -> Handle:
        return self.lm_head(x)


def is_rotary(config: ConfigReader) -> bool:
    """Whether positions turn the heads, and stand in no table."""
    key, known = "position_embedding_type", ("absolute", "rotary")
    return config.choice(key, config.text(key), known) == "rotary"


class EsmModel(Encoder):
    prefix = "esm"
    tasks: ClassVar[Tasks] = {
        Task.MASKED_LM: EsmForMaskedLM,
        Task.BASE: EncodedStates,
        Task.SEQUENCE_CLASSIFICATION: RobertaForSequenceClassification,
        Task.TOKEN_CLASSIFICATION: TokenClassification,
    }
    classifier_dropout_key = "hidden_dropout_prob"

    def __init__(self, config: ConfigReader, *, pooled: bool = True) -> None:
        read_no_decoder(config)
        require_flag(
            config, "is_folding_model", value=False, problem="the folding trunk is not supported"
        )
        hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
        rotary = is_rotary(config)
        self.embeddings = EsmEmbeddings(config, rotary=rotary)
        self.rotary_embeddings = RotaryEmbedding(hidden // heads) if rotary else None
        self.encoder = EsmEncoder(config)
        self.pooler = BertPooler(config) if pooled else None
        self.contact_head = EsmContactPredictionHead(config.layers("num_hidden_layers") * heads)

    def last_norm(self) -> NormSpec | None:
        return LAYER_NORM

    def context_length(self, config: ConfigReader) -> int:
        return positions_behind_padding(config)

    def forward(self, batch: int, length: int) -> Encoded:
        inputs_embeds = self.embeddings(batch, length)
        tables: Tables | None = None
        if self.rotary_embeddings is not None:
            tables = self.rotary_embeddings(inputs_embeds, position_ids(self.run, batch, length))
        sequence_output = self.encoder(inputs_embeds, None, tables)
        pooled_output = self.pooler(sequence_output) if self.pooler is not None else None
        self.contact_head(sequence_output)
        return Encoded(sequence_output, pooled_output)
