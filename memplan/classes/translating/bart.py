"""BART and its kin: layer norms, biases everywhere, position tables, a buffer on the logits.

Layers that ``layerdrop`` may skip are counted as run. (transformers 5.23: models/bart, plbart, mbart, pegasus,
marian, blenderbot, blenderbot_small, m2m_100)
"""

from collections.abc import Callable
from typing import ClassVar

from memplan.classes.base import joined
from memplan.classes.translating.stacks import (
    ConditionalGeneration,
    DecodedStates,
    LastTokenClassification,
    Stack,
    StackLayer,
    Tasks,
    TwoStacks,
    clamped,
    projected_heads,
    shifted,
)
from memplan.dtypes import DType, promote
from memplan.families.llama import named_activation
from memplan.graph.modules.attention import Attended, attention_function, unwidened_attention
from memplan.graph.modules.basic import ActivationModule, Embedding, LayerNorm, Linear, dropout
from memplan.graph.modules.functional import made_from
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.masks import padded_mask
from memplan.graph.modules.module import Module, Weight
from memplan.graph.operation_kinds import OperationKind
from memplan.graph.segments import Gradient
from memplan.graph.tensors import Parameter, allocated_bytes
from memplan.model.attention import AttentionSpec
from memplan.model.config import ConfigReader
from memplan.model.heads import Task
from memplan.model.layers import EmbeddingSpec, LayerSpec, NormPlacement
from memplan.model.networks import FeedForwardSpec
from memplan.model.norms import NormKind, NormSpec
from memplan.model.parameters import LayerBlock, ModelPart, WeightRole

LAYER_NORM = NormSpec(kind=NormKind.LAYER, bias=True)
"""What others read of ``torch.nn.LayerNorm``."""
DROPOUT = 0.1
"""What every class of this module fills in."""


# --- tables -------------------------------------------------------------------------------------------


class WordEmbedding(Embedding):
    """``torch.nn.Embedding``, of whose rows an adapter may want a gradient."""

    def forward(self, shape: tuple[int, ...], ids: Handle | None = None) -> Handle:
        made = super().forward(shape, ids)
        self.run.embedded(made.record, self.run.parameters[self.weight])
        return made


class ScaledWordEmbedding(Embedding):
    """``BartScaledWordEmbedding``."""

    def forward(self, shape: tuple[int, ...], ids: Handle | None = None) -> Handle:
        made = super().forward(shape, ids) * 1.0
        self.run.embedded(made.record, self.run.parameters[self.weight])
        return made


class LearnedPositions(Embedding):
    """``BartLearnedPositionalEmbedding``: rows for positions, which begin behind an offset."""

    offset = 2

    def __init__(self, config: ConfigReader) -> None:
        rows = config.integer("max_position_embeddings") + self.offset
        super().__init__(rows, config.integer("d_model"))

    def forward(self, shape: tuple[int, ...], ids: Handle | None = None) -> Handle:
        """Of each sequence of the batch; where there is one, of all."""
        ids = made_by(self.run, OperationKind.ARANGE, shape, DType.INT64)
        return super().forward(shape, ids)


class PositionsWithoutOffset(LearnedPositions):
    """Blenderbot's, which take the positions of one sequence."""

    offset = 0

    def forward(self, shape: tuple[int, ...], ids: Handle | None = None) -> Handle:
        """One row for all sequences."""
        return super().forward((1, shape[-1]), ids)


class FixedPositions(PositionsWithoutOffset):
    """``PegasusSinusoidalPositionalEmbedding``: a table that is not trained."""

    def declare(self, name: str, weight: Weight) -> Parameter:
        """Put it on the tape."""
        return self.run.parameter(name, *weight.shape, trainable=False, role=weight.role)


class PositionBuffer(Module):
    """``M2M100SinusoidalPositionalEmbedding``: rows of a buffer, for every sequence of the batch."""

    offset = 2

    def __init__(self, config: ConfigReader) -> None:
        self.rows = config.integer("max_position_embeddings") + self.offset
        self.width = config.integer("d_model")

    def forward(self, shape: tuple[int, ...]) -> Handle:
        """Of each sequence."""
        run = self.run
        position_ids = made_by(run, OperationKind.ARANGE, shape, DType.INT64)
        run.hold_buffer(allocated_bytes(self.rows * self.width, run.options.weights))
        return made_from(
            OperationKind.INDEX_SELECT, (*shape, self.width), run.compute, position_ids
        )


# --- layers -------------------------------------------------------------------------------------------


class BartAttention(Module):
    """Of a stack's states to themselves, or to those of the other one."""

    block = LayerBlock.ATTENTION

    def __init__(
        self, config: ConfigReader, stack: str, *, causal: bool = False, cross: bool = False
    ) -> None:
        hidden, key = config.integer("d_model"), f"{stack}_attention_heads"
        self.num_heads = config.integer(key)
        self.head_dim = config.divide("d_model", hidden, key, self.num_heads)
        self.causal, self.dropout = causal, config.number("attention_dropout")
        if cross:
            self.block = LayerBlock.CROSS_ATTENTION
        role = WeightRole.QUERY_KEY
        self.k_proj = Linear(hidden, hidden, bias=True, role=role)
        self.v_proj = Linear(hidden, hidden, bias=True)
        self.q_proj = Linear(hidden, hidden, bias=True, role=role)
        self.out_proj = Linear(hidden, hidden, bias=True, role=WeightRole.ATTENTION_OUTPUT)

    def facts(self) -> AttentionSpec:
        """What others read of it."""
        return AttentionSpec(
            num_heads=self.num_heads, num_kv_heads=self.num_heads, head_dim=self.head_dim,
            query_bias=True, key_bias=True, value_bias=True, output_bias=True, causal=self.causal,
            dropout=self.dropout,
        )  # fmt: skip

    def forward(
        self, x: Handle, key_value_states: Handle | None = None, mask: Handle | None = None
    ) -> Attended:
        batch, length, _ = x.shape
        query_states = self.q_proj(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        current_states = x if key_value_states is None else key_value_states
        keys = current_states.shape[1]
        key_states = self.k_proj(current_states)
        key_states = projected_heads(key_states, self.head_dim)
        value_states = self.v_proj(current_states)
        value_states = value_states.view(batch, keys, -1, self.head_dim).transpose(1, 2)
        attend = attention_function(self.run, unwidened_attention, causal=self.causal)
        attn_output, attn_weights = attend(
            query_states, key_states, value_states, mask, self.dropout
        )
        attn_output = attn_output.reshape(batch, length, -1)
        attn_output = self.out_proj(attn_output)
        return attn_output, attn_weights


class LayerParts(StackLayer):
    """What layers of both stacks have."""

    placement = NormPlacement.POST
    self_attn: BartAttention

    def add_network(self, config: ConfigReader, stack: str) -> None:
        """Declare two linear layers, and the norm of what they give or take."""
        hidden, inner = config.integer("d_model"), config.integer(f"{stack}_ffn_dim")
        self.fc1, self.fc2 = Linear(hidden, inner, bias=True), Linear(inner, hidden, bias=True)
        self.final_layer_norm = LayerNorm(hidden)

    def read_rates(self, config: ConfigReader) -> None:
        """What is dropped, and the nonlinearity between both."""
        self.dropout = config.number("dropout", default=DROPOUT)
        self.activation_dropout = config.number("activation_dropout")
        key = "activation_function"
        kind = named_activation(config, key, config.text(key, default="gelu"))
        self.activation_fn = ActivationModule(kind)

    def facts(self) -> LayerSpec:
        """Its heads, widths, norms and dropouts."""
        crossing = self.children.get("encoder_attn")
        return LayerSpec(
            attention=self.self_attn.facts(),
            cross_attention=crossing.facts() if isinstance(crossing, BartAttention) else None,
            feed_forward=FeedForwardSpec(
                intermediate_size=self.fc1.out_features, activation=self.activation_fn.kind,
                bias=True, activation_dropout=self.activation_dropout,
            ),
            norm=LAYER_NORM, placement=self.placement, dropout=self.dropout,
        )  # fmt: skip


class EncoderLayerParts(LayerParts):
    def __init__(self, config: ConfigReader) -> None:
        self.self_attn = BartAttention(config, "encoder")
        self.self_attn_layer_norm = LayerNorm(config.integer("d_model"))
        self.read_rates(config)
        self.add_network(config, "encoder")


class DecoderLayerParts(LayerParts):
    def __init__(self, config: ConfigReader) -> None:
        hidden = config.integer("d_model")
        self.self_attn = BartAttention(config, "decoder", causal=True)
        self.read_rates(config)
        self.self_attn_layer_norm = LayerNorm(hidden)
        self.encoder_attn = BartAttention(config, "decoder", cross=True)
        self.encoder_attn_layer_norm = LayerNorm(hidden)
        self.add_network(config, "decoder")


class BartEncoderLayer(EncoderLayerParts):
    def forward(self, x: Handle, mask: Handle | None) -> Handle:
        residual = x
        x, _ = self.self_attn(x, None, mask)
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
        return x


class BartDecoderLayer(DecoderLayerParts):
    def forward(self, x: Handle, mask: Handle | None, memory: Handle) -> Handle:
        residual = x
        x, _ = self.self_attn(x, None, mask)
        x = dropout(x, self.dropout)
        x = residual + x
        x = self.self_attn_layer_norm(x)
        residual = x
        x, _ = self.encoder_attn(x, memory)
        x = dropout(x, self.dropout)
        x = residual + x
        x = self.encoder_attn_layer_norm(x)
        residual = x
        x = self.activation_fn(self.fc1(x))
        x = dropout(x, self.activation_dropout)
        x = self.fc2(x)
        x = dropout(x, self.dropout)
        x = residual + x
        x = self.final_layer_norm(x)
        return x


class MBartEncoderLayer(EncoderLayerParts):
    """Norms before each part; half precision is clamped."""

    placement = NormPlacement.PRE

    def forward(self, x: Handle, mask: Handle | None) -> Handle:
        residual = x
        x = self.self_attn_layer_norm(x)
        x, _ = self.self_attn(x, None, mask)
        x = dropout(x, self.dropout)
        x = residual + x
        residual = x
        x = self.final_layer_norm(x)
        x = self.activation_fn(self.fc1(x))
        x = dropout(x, self.activation_dropout)
        x = self.fc2(x)
        x = dropout(x, self.dropout)
        x = residual + x
        x = clamped(x)
        return x


class MBartDecoderLayer(DecoderLayerParts):
    placement = NormPlacement.PRE

    def forward(self, x: Handle, mask: Handle | None, memory: Handle) -> Handle:
        residual = x
        x = self.self_attn_layer_norm(x)
        x, _ = self.self_attn(x, None, mask)
        x = dropout(x, self.dropout)
        x = residual + x
        residual = x
        x = self.encoder_attn_layer_norm(x)
        x, _ = self.encoder_attn(x, memory)
        x = dropout(x, self.dropout)
        x = residual + x
        residual = x
        x = self.final_layer_norm(x)
        x = self.activation_fn(self.fc1(x))
        x = dropout(x, self.activation_dropout)
        x = self.fc2(x)
        x = dropout(x, self.dropout)
        x = residual + x
        return x


# --- stacks -------------------------------------------------------------------------------------------


class BartStack(Stack):
    """Tables, layers, and norms where the class has some."""

    name = "encoder"
    layer_class: Callable[[ConfigReader], LayerParts]
    table_class: type[Embedding] = ScaledWordEmbedding
    positions_class: Callable[[ConfigReader], Module] = LearnedPositions
    norms_embedding = True
    """It has a norm behind the sum of its tables."""
    norms_last = False
    """It has one behind its layers."""

    def __init__(self, config: ConfigReader) -> None:
        hidden = config.integer("d_model")
        self.dropout = config.number("dropout", default=DROPOUT)
        self.embed_tokens = self.table_class(config.integer("vocab_size"), hidden)
        self.embed_positions = self.positions_class(config)
        kinds = [None] * config.layers(f"{self.name}_layers")
        self.layers = LayerList(f"{self.name}.layers", kinds, lambda _: self.layer_class(config))
        if self.norms_embedding:
            self.layernorm_embedding = LayerNorm(hidden)
        if self.norms_last:
            self.layer_norm = LayerNorm(hidden)
            self.layer_norm.segment = f"{self.name}.norm", ModelPart.NORM

    def embedding_facts(self) -> EmbeddingSpec:
        """What others read of its tables."""
        positions = self.embed_positions
        rows = positions.weight.shape[0] if isinstance(positions, Embedding) else 0
        return EmbeddingSpec(
            embedding_size=self.embed_tokens.width, num_positions=rows, dropout=self.dropout
        )

    def norm_facts(self) -> NormSpec | None:
        """The norm behind its layers, where it has one."""
        return LAYER_NORM if self.norms_last else None

    def closed(self, x: Handle) -> Handle:
        """What it returns of what its last layer did."""
        if self.norms_last:
            x = self.layer_norm(x)
            self.returned()
        return x


class BartEncoder(BartStack):
    layer_class: Callable[[ConfigReader], LayerParts] = BartEncoderLayer

    def forward(self, batch: int, length: int) -> Handle:
        self.run.enter(self.name)
        inputs_embeds = self.embed_tokens((batch, length))
        (inputs_embeds,) = joined(inputs_embeds, self.beside)
        embed_pos = self.embed_positions((batch, length))
        x = inputs_embeds + embed_pos
        if self.norms_embedding:
            x = self.layernorm_embedding(x)
        x = dropout(x, self.dropout)
        for encoder_layer in self.layers:
            x = encoder_layer(x, None)
        return self.closed(x)


class BartDecoder(BartStack):
    name = "decoder"
    layer_class: Callable[[ConfigReader], LayerParts] = BartDecoderLayer

    def forward(self, batch: int, length: int, ids: Handle, memory: Handle) -> Handle:
        self.run.enter(self.name)
        inputs_embeds = self.embed_tokens((batch, length), ids)
        mask = padded_mask(self.run, batch, length)
        positions = self.positions(batch, length)
        x = inputs_embeds + positions
        if self.norms_embedding:
            x = self.layernorm_embedding(x)
        x = dropout(x, self.dropout)
        for decoder_layer in self.layers:
            x = decoder_layer(x, mask, memory)
        return self.closed(x)

    def positions(self, batch: int, length: int) -> Handle:
        """Rows of the table: it is told the positions, which are those of all sequences."""
        del batch
        found: Handle = self.embed_positions((1, length))
        return found


# --- models and tasks -----------------------------------------------------------------------------------


class BartForConditionalGeneration(ConditionalGeneration):
    """With a bias on the logits, which is a buffer."""

    def decoder_ids(self, batch: int) -> Handle:
        """The labels, shifted before the base model is called."""
        return shifted(self, batch)

    def adjusted(self, logits: Handle) -> Handle:
        """``final_logits_bias`` in the model's format: fp32 logits under autocast.

        A model around BART has its own head, without it (``Florence2ForConditionalGeneration``).
        """
        run = self.run
        if self.spec.tables:
            return logits
        dtype = promote(logits.dtype, run.options.weights)
        run.hold_buffer(allocated_bytes(self.spec.num_outputs, run.options.weights))
        made = run.tensor(logits.numel, dtype)
        gradient = Gradient.ALIAS if dtype is logits.dtype else Gradient.FRESH
        run.record(OperationKind.ADD_BUFFER, (logits.record,), (made,), gradients=(gradient,))
        return logits.like(made)


class BartModel(TwoStacks):
    tasks: ClassVar[Tasks] = {
        Task.SEQ2SEQ_LM: BartForConditionalGeneration,
        Task.BASE: DecodedStates,
        Task.SEQUENCE_CLASSIFICATION: LastTokenClassification,
    }
    default_labels = 3
    encoder_class: Callable[[ConfigReader], BartStack] = BartEncoder
    decoder_class: Callable[[ConfigReader], BartStack] = BartDecoder
    table_class: type[Embedding] = ScaledWordEmbedding

    def __init__(self, config: ConfigReader) -> None:
        rows, hidden = config.integer("vocab_size"), config.integer("d_model")
        self.add_table(config, self.table_class(rows, hidden))
        self.encoder = self.encoder_class(config)
        self.decoder = self.decoder_class(config)
        self.share_table()


class PLBartModel(BartModel):
    default_labels = 2


class MBartEncoder(BartEncoder):
    layer_class: Callable[[ConfigReader], LayerParts] = MBartEncoderLayer
    norms_last = True


class MBartDecoder(BartDecoder):
    layer_class: Callable[[ConfigReader], LayerParts] = MBartDecoderLayer
    norms_last = True


class MBartModel(BartModel):
    default_labels = 2
    encoder_class: Callable[[ConfigReader], BartStack] = MBartEncoder
    decoder_class: Callable[[ConfigReader], BartStack] = MBartDecoder


class Translator(BartModel):
    """One that has no class for sequences."""

    default_labels = 2
    tasks: ClassVar[Tasks] = {
        Task.SEQ2SEQ_LM: BartForConditionalGeneration,
        Task.BASE: DecodedStates,
    }


class BlenderbotEncoder(MBartEncoder):
    positions_class: Callable[[ConfigReader], Module] = PositionsWithoutOffset
    norms_embedding = False


class BlenderbotDecoder(MBartDecoder):
    positions_class: Callable[[ConfigReader], Module] = PositionsWithoutOffset
    norms_embedding = False


class BlenderbotModel(Translator):
    encoder_class: Callable[[ConfigReader], BartStack] = BlenderbotEncoder
    decoder_class: Callable[[ConfigReader], BartStack] = BlenderbotDecoder


class M2M100Encoder(MBartEncoder):
    positions_class: Callable[[ConfigReader], Module] = PositionBuffer
    norms_embedding = False


class M2M100Decoder(MBartDecoder):
    positions_class: Callable[[ConfigReader], Module] = PositionBuffer
    norms_embedding = False

    def positions(self, batch: int, length: int) -> Handle:
        """Counted from the ids."""
        found: Handle = self.embed_positions((batch, length))
        return found


class M2M100ForConditionalGeneration(ConditionalGeneration):
    def decoder_ids(self, batch: int) -> Handle:
        """The labels, shifted before the base model is called."""
        return shifted(self, batch)


class M2M100Model(Translator):
    encoder_class: Callable[[ConfigReader], BartStack] = M2M100Encoder
    decoder_class: Callable[[ConfigReader], BartStack] = M2M100Decoder
    tasks: ClassVar[Tasks] = {
        Task.SEQ2SEQ_LM: M2M100ForConditionalGeneration,
        Task.BASE: DecodedStates,
    }


# --- Pegasus, Marian, Blenderbot small: embeddings are scaled outside their module -----------------------


class OuterEncoder(BartStack):
    table_class: type[Embedding] = WordEmbedding
    positions_class: Callable[[ConfigReader], Module] = FixedPositions
    norms_embedding = False

    def forward(self, batch: int, length: int) -> Handle:
        self.run.enter(self.name)
        inputs_embeds = self.embed_tokens((batch, length)) * 1.0
        embed_pos = self.embed_positions((batch, length))
        x = inputs_embeds + embed_pos
        if self.norms_embedding:
            x = self.layernorm_embedding(x)
        x = dropout(x, self.dropout)
        for encoder_layer in self.layers:
            x = encoder_layer(x, None)
        return self.closed(x)


class OuterDecoder(BartStack):
    name = "decoder"
    table_class: type[Embedding] = WordEmbedding
    positions_class: Callable[[ConfigReader], Module] = FixedPositions
    norms_embedding = False

    def forward(self, batch: int, length: int, ids: Handle, memory: Handle) -> Handle:
        self.run.enter(self.name)
        inputs_embeds = self.embed_tokens((batch, length), ids)
        inputs_embeds = inputs_embeds * 1.0
        mask = padded_mask(self.run, batch, length)
        positions = self.embed_positions((batch, length))
        x = inputs_embeds + positions
        x = dropout(x, self.dropout)
        for decoder_layer in self.layers:
            x = decoder_layer(x, mask, memory)
        return self.closed(x)


class MarianEncoder(OuterEncoder):
    layer_class: Callable[[ConfigReader], LayerParts] = BartEncoderLayer


class MarianDecoder(OuterDecoder):
    layer_class: Callable[[ConfigReader], LayerParts] = BartDecoderLayer


class MarianModel(Translator):
    table_class: type[Embedding] = WordEmbedding
    encoder_class: Callable[[ConfigReader], BartStack] = MarianEncoder
    decoder_class: Callable[[ConfigReader], BartStack] = MarianDecoder

    def __init__(self, config: ConfigReader) -> None:
        key = "share_encoder_decoder_embeddings"
        if not config.flag(key, default=True):
            problem = "false is not supported: the stacks would have a vocabulary each"
            error = config.fail(key, problem)
            raise error
        super().__init__(config)


class PegasusEncoder(OuterEncoder):
    layer_class: Callable[[ConfigReader], LayerParts] = MBartEncoderLayer
    norms_last = True


class PegasusDecoder(OuterDecoder):
    layer_class: Callable[[ConfigReader], LayerParts] = MBartDecoderLayer
    norms_last = True


class PegasusModel(Translator):
    table_class: type[Embedding] = WordEmbedding
    encoder_class: Callable[[ConfigReader], BartStack] = PegasusEncoder
    decoder_class: Callable[[ConfigReader], BartStack] = PegasusDecoder


class BlenderbotSmallEncoder(OuterEncoder):
    layer_class: Callable[[ConfigReader], LayerParts] = BartEncoderLayer
    positions_class: Callable[[ConfigReader], Module] = PositionsWithoutOffset
    norms_embedding = True


class BlenderbotSmallDecoder(BartStack):
    """It scales nothing, and its norm stands before the positions."""

    name = "decoder"
    table_class: type[Embedding] = WordEmbedding
    layer_class: Callable[[ConfigReader], LayerParts] = BartDecoderLayer
    positions_class: Callable[[ConfigReader], Module] = PositionsWithoutOffset

    def forward(self, batch: int, length: int, ids: Handle, memory: Handle) -> Handle:
        self.run.enter(self.name)
        inputs_embeds = self.embed_tokens((batch, length), ids)
        mask = padded_mask(self.run, batch, length)
        position_ids = self.embed_positions((batch, length))
        inputs_embeds = self.layernorm_embedding(inputs_embeds)
        x = inputs_embeds + position_ids
        x = dropout(x, self.dropout)
        for decoder_layer in self.layers:
            x = decoder_layer(x, mask, memory)
        return self.closed(x)


class BlenderbotSmallModel(Translator):
    table_class: type[Embedding] = WordEmbedding
    encoder_class: Callable[[ConfigReader], BartStack] = BlenderbotSmallEncoder
    decoder_class: Callable[[ConfigReader], BartStack] = BlenderbotSmallDecoder
