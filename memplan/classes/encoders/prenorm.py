"""Encoders with norms before each part: RoBERTa-PreLayerNorm, XLM-RoBERTa-XL, ESM.

(transformers 5.23: models/roberta_prelayernorm, xlm_roberta_xl, esm)
"""

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

from memplan.classes.encoders.base import (
    LAYER_NORM,
    Encoded,
    Encoder,
    EncoderLayer,
    idle,
    read_no_decoder,
    require_flag,
)
from memplan.classes.encoders.bert import RobertaModel
from memplan.classes.encoders.layers import (
    Attention,
    AttentionParts,
    Heads,
    Intermediate,
    Layer,
    Pooler,
    SelfAttention,
    SelfOutput,
    Stack,
    SummedOutput,
    SummedSelfOutput,
)
from memplan.classes.encoders.tables import (
    CountedEmbeddings,
    hold_ids,
    positions_behind_padding,
    token_rows,
)
from memplan.classes.encoders.tasks import (
    EncodedStates,
    EncoderTask,
    HeadClassification,
    MaskedLM,
    OutputMatrix,
    Tasks,
    TokenClassification,
    Transform,
)
from memplan.classes.llama import Network
from memplan.dtypes import DType
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.attention import Attended
from memplan.graph.modules.basic import Embedding, LayerNorm, Linear
from memplan.graph.modules.functional import activated, masked_fill_rows
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.masks import positions_past_padding, uncached_positions
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.rotary import RotaryEmbedding, Tables, apply_rotary_in_fp32
from memplan.model.attention import AttentionSpec, RotarySpec
from memplan.model.config import ConfigReader
from memplan.model.heads import Task
from memplan.model.layers import NormPlacement
from memplan.model.networks import Activation, FeedForwardSpec
from memplan.model.norms import NormSpec
from memplan.model.parameters import LayerBlock, ModelPart, WeightRole


class PreNormAttention(Attention):
    output_class: Callable[[ConfigReader], SelfOutput] = SummedSelfOutput
    norm = "LayerNorm"


class PreNormLayer(Layer):
    """A norm before the heads, and one before the network."""

    placement = NormPlacement.PRE
    attention_class: Callable[[ConfigReader], AttentionParts] = PreNormAttention
    output_class: Callable[[ConfigReader], Module] = SummedOutput


# --- RoBERTa-PreLayerNorm -------------------------------------------------------------------------------


class RobertaPreLayerNormIntermediate(Intermediate):
    normed = True


class RobertaPreLayerNormLayer(PreNormLayer):
    intermediate_class: Callable[[ConfigReader], Network] = RobertaPreLayerNormIntermediate


class RobertaPreLayerNormEncoder(Stack):
    layer_class: Callable[[ConfigReader], EncoderLayer] = RobertaPreLayerNormLayer


class RobertaPreLayerNormModel(RobertaModel):
    prefix = "roberta_prelayernorm"
    encoder_class: Callable[[ConfigReader], Module] = RobertaPreLayerNormEncoder
    norm = "LayerNorm"

    def last_norm(self) -> NormSpec | None:
        return LAYER_NORM


# --- XLM-RoBERTa-XL -------------------------------------------------------------------------------------


class XLMRobertaXLEmbeddings(CountedEmbeddings):
    normed = False


class XLMRobertaXLAttention(PreNormAttention):
    norm = "self_attn_layer_norm"


class XLMRobertaXLOutput(Module):
    block = LayerBlock.NETWORK

    def __init__(self, config: ConfigReader) -> None:
        inner, hidden = config.integer("intermediate_size"), config.integer("hidden_size")
        self.dense = Linear(inner, hidden, bias=True)

    def forward(self, x: Handle, input_tensor: Handle) -> Handle:
        x = self.dense(x)
        x = x + input_tensor
        return x


class XLMRobertaXLLayer(PreNormLayer):
    attention_class: Callable[[ConfigReader], AttentionParts] = XLMRobertaXLAttention
    output_class: Callable[[ConfigReader], Module] = XLMRobertaXLOutput
    normed = True

    def feed_forward_chunk(self, attention_output: Handle) -> Handle:
        intermediate_output = self.LayerNorm(attention_output)
        intermediate_output = self.intermediate(intermediate_output)
        layer_output: Handle = self.output(intermediate_output, attention_output)
        return layer_output


class XLMRobertaXLEncoder(Stack):
    layer_class: Callable[[ConfigReader], EncoderLayer] = XLMRobertaXLLayer
    norm = "LayerNorm"


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
        self.num_positions = config.integer("max_position_embeddings")
        self.word_embeddings = Embedding(rows, hidden, role=role)
        self.layer_norm = LayerNorm(hidden) if config.flag("emb_layer_norm_before") else None
        self.position_embeddings: Embedding | None = None
        if not rotary:
            positions = config.integer("max_position_embeddings")
            self.position_embeddings = Embedding(positions, hidden)
        self.token_dropout = config.flag("token_dropout")

    def forward(self, batch: int, length: int) -> Handle:
        run = self.run
        position_ids = positions_past_padding(self.run, (batch, length), cached=False)
        inputs_embeds = token_rows(self.word_embeddings, batch, length)
        embeddings = inputs_embeds
        if self.token_dropout:
            is_mask = made_by(run, OperationKind.EQ, (batch, length), DType.BOOL)
            embeddings = masked_fill_rows(embeddings, is_mask)
            del is_mask
            mask_ratio_observed = self.masked_share(batch, length)
            scaled = embeddings * (1 - 0.12)
            embeddings = (scaled * mask_ratio_observed.apart(OperationKind.SUB)).to(
                embeddings.dtype
            )
            del scaled
        if self.position_embeddings is not None:
            position_embeddings = self.position_embeddings((batch, length), position_ids)
            embeddings = embeddings + position_embeddings
        if self.layer_norm is not None:
            embeddings = self.layer_norm(embeddings)
        hold_ids(run, self.num_positions)
        return embeddings

    def masked_share(self, batch: int, length: int) -> Handle:
        """How many of a sequence's tokens are masked, over how many there are."""
        kinds = OperationKind
        is_mask = made_by(self.run, kinds.EQ, (batch, length), DType.BOOL)
        count = made_by(self.run, kinds.SUM, (batch, 1, 1), DType.INT64)
        is_mask.apart(kinds.TO, dtype=DType.INT64)  # what the sum reads
        del is_mask
        count = count.apart(kinds.TO, dtype=DType.FP32)
        return count.apart(kinds.DIV)


class EsmRotaryEmbedding(RotaryEmbedding):
    """It stands before the layers, and has one set of frequencies."""

    def hold_frequencies(self, width: int) -> None:
        if not self.run.decomposed:
            self.run.buffer(width // 2, DType.FP32)


class EsmSelfAttention(SelfAttention):
    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.is_rotary = is_rotary(config)

    def facts(self) -> AttentionSpec:
        found = super().facts()
        return replace(found, rotary=RotarySpec(dim=self.head_dim)) if self.is_rotary else found

    def forward(self, x: Handle, mask: Handle | None, tables: Tables | None = None) -> Attended:
        query_layer, key_layer, value_layer = self.heads(x)
        query_layer = query_layer * self.head_dim**-0.5
        if tables is not None:
            query_layer, key_layer = apply_rotary_in_fp32(query_layer, key_layer, *tables)
        out, weights = self.attend(query_layer, key_layer, value_layer, mask)
        out = out.reshape(*x.shape[:2], -1)
        return out, weights


class EsmAttention(PreNormAttention):
    self_class: Callable[[ConfigReader], Heads] = EsmSelfAttention
    hands_on_weights = False


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


class EsmLayer(PreNormLayer):
    attention_class: Callable[[ConfigReader], AttentionParts] = EsmAttention
    intermediate_class: Callable[[ConfigReader], Network] = EsmIntermediate
    normed = True


class EsmEncoder(Stack):
    layer_class: Callable[[ConfigReader], EncoderLayer] = EsmLayer
    norm = "emb_layer_norm_after"


class EsmContactPredictionHead(Module):
    """It is asked by itself; no loss reads it."""

    segment = "head", ModelPart.HEAD

    def __init__(self, features: int) -> None:
        self.regression = Linear(features, 1, bias=True)


class EsmLMHead(Transform):
    activation = Activation.GELU_PYTHON
    norm_name = "layer_norm"

    def __init__(self, config: ConfigReader, task: EncoderTask) -> None:  # noqa: ARG002
        hidden = task.spec.hidden_size
        self.dense = Linear(hidden, hidden, bias=True)
        self.layer_norm = LayerNorm(hidden)
        self.decoder = OutputMatrix(task.spec, hidden, bias=False)
        self.decoder.tie(task)
        self.bias = Weight(task.spec.num_outputs)

    def forward(self, x: Handle) -> Handle:
        x = super().forward(x)
        return self.decoder(x) + self.operand(self.bias)


class EsmForMaskedLM(MaskedLM):
    named_head = "lm_head", EsmLMHead


def is_rotary(config: ConfigReader) -> bool:
    """Whether positions turn the heads, and stand in no table."""
    key, known = "position_embedding_type", ("absolute", "rotary")
    return config.choice(key, config.text(key), known) == "rotary"


class EsmModel(Encoder):
    prefix = "esm"
    tasks: ClassVar[Tasks] = {
        Task.MASKED_LM: EsmForMaskedLM,
        Task.BASE: EncodedStates,
        Task.SEQUENCE_CLASSIFICATION: HeadClassification,
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
        self.rotary_embeddings = EsmRotaryEmbedding(hidden // heads) if rotary else None
        self.encoder = EsmEncoder(config)
        self.pooler = Pooler(config) if pooled else None
        self.contact_head = EsmContactPredictionHead(config.layers("num_hidden_layers") * heads)

    def last_norm(self) -> NormSpec | None:
        return LAYER_NORM

    def context_length(self, config: ConfigReader) -> int:
        return positions_behind_padding(config)

    def forward(self, batch: int, length: int) -> Encoded:
        inputs_embeds = self.embeddings(batch, length)
        tables: Tables | None = None
        if self.rotary_embeddings is not None:
            position_ids = uncached_positions(self.run, batch, length)
            tables = self.rotary_embeddings(inputs_embeds, position_ids)
        sequence_output = self.encoder(inputs_embeds, None, tables)
        pooled_output = self.pooler(sequence_output) if self.pooler is not None else None
        return Encoded(sequence_output, pooled_output)

    def leave_unread(self, sequence_output: Handle) -> list[Handle]:  # noqa: ARG002
        idle(self.contact_head)
        return []
