"""Pegasus, Marian and Blenderbot small: BART's kin whose embeddings are scaled outside their module.

(transformers 5.23: models/pegasus, marian, blenderbot_small)
"""

from collections.abc import Callable

from memplan.classes.translating.bart import BartStack, Translator
from memplan.classes.translating.layers import (
    BartDecoderLayer,
    BartEncoderLayer,
    LayerParts,
    MBartDecoderLayer,
    MBartEncoderLayer,
)
from memplan.classes.translating.tables import (
    FixedPositions,
    PositionsWithoutOffset,
    WordEmbedding,
)
from memplan.graph.modules.basic import Embedding, dropout
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.masks import counted_positions, padded_mask, padding
from memplan.graph.modules.module import Module
from memplan.model.config import ConfigReader


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
    renames = True
    """The name of its position ids is that of their vectors then."""

    def forward(
        self,
        batch: int,
        length: int,
        ids: Handle,
        memory: Handle,
        attention_mask: Handle | None = None,
    ) -> Handle:
        self.run.enter(self.name)
        inputs_embeds = self.embed_tokens((batch, length), ids)
        inputs_embeds = inputs_embeds * 1.0
        position_ids: Handle | None = counted_positions(self.run, length) + 0
        attention_mask = padding(self.run, batch, length)
        mask = padded_mask(self.run, batch, length)
        positions = self.embed_positions((batch, length), position_ids)
        if self.renames:
            position_ids = None
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
        if not config.flag(key):
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
    renames = False


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

    def forward(
        self,
        batch: int,
        length: int,
        ids: Handle,
        memory: Handle,
        attention_mask: Handle | None = None,
    ) -> Handle:
        self.run.enter(self.name)
        inputs_embeds = self.embed_tokens((batch, length), ids)
        position_ids = counted_positions(self.run, length) + 0
        attention_mask = padding(self.run, batch, length)
        mask = padded_mask(self.run, batch, length)
        position_ids = self.embed_positions((batch, length), position_ids)
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
