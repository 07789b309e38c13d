"""BART and its kin: layer norms, biases everywhere, position tables, a buffer on the logits.

Layers that ``layerdrop`` may skip are counted as run. (transformers 5.23: models/bart, plbart, mbart,
blenderbot, m2m_100)
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

from memplan.classes.translating.layers import (
    DROPOUT,
    LAYER_NORM,
    BartDecoderLayer,
    BartEncoderLayer,
    LayerParts,
    MBartDecoderLayer,
    MBartEncoderLayer,
)
from memplan.classes.translating.stacks import (
    ConditionalGeneration,
    DecodedStates,
    LastTokenClassification,
    Stack,
    Tasks,
    TwoStacks,
    shifted,
)
from memplan.classes.translating.tables import (
    LearnedPositions,
    PositionBuffer,
    PositionsWithoutOffset,
    ScaledWordEmbedding,
)
from memplan.dtypes import promote
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.modules.basic import Embedding, LayerNorm, dropout
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.masks import counted_positions, padded_mask, padding
from memplan.graph.modules.module import Module
from memplan.model.config import ConfigReader
from memplan.model.heads import Task
from memplan.model.layers import EmbeddingSpec
from memplan.model.norms import NormSpec
from memplan.model.parameters import ModelPart


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
    rows_key = "vocab_size"
    """What its config calls the number of its tokens."""

    def __init__(self, config: ConfigReader) -> None:
        hidden = config.integer("d_model")
        self.dropout = config.number("dropout", default=DROPOUT)
        self.embed_tokens = self.table_class(config.integer(self.rows_key), hidden)
        self.embed_positions = self.positions_class(config)
        kinds = self.kinds(config, config.layers(f"{self.name}_layers"))
        self.layers = LayerList(f"{self.name}.layers", kinds, lambda kind: self.layer(config, kind))
        if self.norms_embedding:
            self.layernorm_embedding = LayerNorm(hidden)
        if self.norms_last:
            self.layer_norm = LayerNorm(hidden)
            self.layer_norm.segment = f"{self.name}.norm", ModelPart.NORM

    def kinds(self, config: ConfigReader, count: int) -> Sequence[Hashable]:
        """What sets each layer apart from the others."""
        del config
        return [None] * count

    def layer(self, config: ConfigReader, kind: Any) -> LayerParts:
        """One of a kind."""
        del kind
        return self.layer_class(config)

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
        inputs_embeds = self.joined(inputs_embeds)
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
    counts = pads = True
    """It makes position ids, and a mask of ones for its padding."""
    renames = False
    """The name of its ids is that of their vectors then; else it is the ones' that is the causal mask's."""

    def forward(
        self,
        batch: int,
        length: int,
        ids: Handle,
        memory: Handle,
        attention_mask: Handle | None = None,
    ) -> Handle:
        """The mask is never handed in, as in the class: an argument's name, which a frame lets go of before those of its
        other names."""
        self.run.enter(self.name)
        inputs_embeds = self.embed_tokens((batch, length), ids)
        position_ids = counted_positions(self.run, length) + 0 if self.counts else None
        attention_mask = padding(self.run, batch, length) if self.pads else None
        mask = self.mask(batch, length)
        attention_mask = attention_mask if self.renames else None  # or else the mask has its name
        positions = self.positions(batch, length, position_ids)
        position_ids = None if self.renames else position_ids  # or else the vectors have theirs
        x = inputs_embeds + positions
        if self.norms_embedding:
            x = self.layernorm_embedding(x)
        x = dropout(x, self.dropout)
        for decoder_layer in self.layers:
            x = decoder_layer(x, mask, memory)
        return self.closed(x)

    def mask(self, batch: int, length: int) -> Handle | None:
        """Of tokens before one another."""
        return padded_mask(self.run, batch, length)

    def positions(self, batch: int, length: int, position_ids: Handle | None) -> Handle:
        """Rows of the table: it is told the positions, which are those of all sequences."""
        del batch
        found: Handle = self.embed_positions((1, length), position_ids)
        return found


class BartForConditionalGeneration(ConditionalGeneration):
    """With a bias on the logits, which is a buffer."""

    def decoder_ids(self, batch: int) -> Handle:
        """The labels, shifted before the base model is called."""
        return shifted(self, batch, around=self.two.shifts_around)

    def adjusted(self, logits: Handle) -> Handle:
        """``final_logits_bias`` in the model's format: fp32 logits under autocast."""
        run = self.run
        dtype = promote(logits.dtype, run.options.weights)
        run.hold_buffer(self.spec.num_outputs, run.options.weights)
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
    shifts_around = True


class MBartEncoder(BartEncoder):
    layer_class: Callable[[ConfigReader], LayerParts] = MBartEncoderLayer
    norms_last = True


class MBartDecoder(BartDecoder):
    renames = True
    layer_class: Callable[[ConfigReader], LayerParts] = MBartDecoderLayer
    norms_last = True


class MBartModel(BartModel):
    default_labels = 2
    shifts_around = True
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
    norms_embedding = counts = renames = False

    def positions(self, batch: int, length: int, position_ids: Handle | None) -> Handle:  # noqa: ARG002
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
