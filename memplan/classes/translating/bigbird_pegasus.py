"""BigBird-Pegasus: Pegasus for long documents, whose encoder attends in BigBird's blocks.

(transformers 5.23, models/bigbird_pegasus/modeling_bigbird_pegasus.py)
"""

from collections.abc import Callable
from typing import ClassVar

from memplan.classes.encoders.big_bird import BigBirdAttentionHeads, create_masks, read_blocks
from memplan.classes.translating.bart import BartDecoder, BartStack, Translator
from memplan.classes.translating.layers import (
    LAYER_NORM,
    AttentionModule,
    BartAttention,
    EncoderLayerParts,
    LayerParts,
    MBartDecoderLayer,
)
from memplan.classes.translating.stacks import (
    LastTokenClassification,
    SpanAnswering,
    Tasks,
    checked,
)
from memplan.classes.translating.tables import PositionsWithoutOffset
from memplan.dtypes import DType
from memplan.errors import UnsupportedOperationError
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.basic import Linear, dropout
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.masks import counted_positions, padding, written_mask
from memplan.graph.modules.module import Module
from memplan.graph.modules.rotary import concatenate
from memplan.model.attention import AttentionSpec
from memplan.model.config import ConfigReader
from memplan.model.heads import Task
from memplan.model.layers import NormPlacement
from memplan.model.norms import NormSpec
from memplan.model.parameters import LayerBlock, ModelPart, WeightRole


class EncoderHeads(BigBirdAttentionHeads):
    dropout_key = "attention_dropout"

    def read_sizes(self, config: ConfigReader) -> int:
        hidden, key = config.integer("d_model"), "encoder_attention_heads"
        self.num_heads = config.integer(key)
        self.head_dim = config.divide("d_model", hidden, key, self.num_heads)
        return hidden


class BigBirdPegasusEncoderAttention(AttentionModule):
    block = LayerBlock.ATTENTION

    def __init__(self, config: ConfigReader, stack: str) -> None:
        del stack
        self.self = EncoderHeads(config)
        hidden, role = config.integer("d_model"), WeightRole.ATTENTION_OUTPUT
        self.output = Linear(hidden, hidden, bias=self.self.bias, role=role)

    def facts(self) -> AttentionSpec:
        """Of its heads."""
        return self.self.facts()

    def forward(self, x: Handle, *beside: Handle | None) -> tuple[Handle, Handle | None]:
        context_layer, attention_probs = self.self(x, *beside)
        attention_output = self.output(context_layer)
        return attention_output, attention_probs


class BigBirdPegasusDecoderAttention(BartAttention):
    def is_biased(self, config: ConfigReader) -> bool:
        """As the config says."""
        return config.flag("use_bias")


class BigBirdPegasusEncoderLayer(EncoderLayerParts):
    placement = NormPlacement.PRE
    attention_class = BigBirdPegasusEncoderAttention

    def forward(self, x: Handle, *beside: Handle | None) -> Handle:
        residual = x
        x = self.self_attn_layer_norm(x)
        x, _ = self.self_attn(x, *beside)
        x = dropout(x, self.dropout)
        x = residual + x
        residual = x
        x = self.final_layer_norm(x)
        x = self.activation_fn(self.fc1(x))
        x = self.fc2(x)
        x = dropout(x, self.dropout)
        x = residual + x
        return checked(x)


class BigBirdPegasusDecoderLayer(MBartDecoderLayer):
    attention_class = BigBirdPegasusDecoderAttention


class NormedStack(BartStack):
    """With its only norm behind its layers."""

    positions_class: Callable[[ConfigReader], Module] = PositionsWithoutOffset

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.layernorm_embedding.segment = f"{self.name}.norm", ModelPart.NORM

    def norm_facts(self) -> NormSpec | None:
        """That of the class."""
        return LAYER_NORM

    def closed(self, x: Handle) -> Handle:
        """What its norm makes of what its last layer did."""
        x = self.layernorm_embedding(x)
        self.returned()
        return x


class BigBirdPegasusEncoder(NormedStack):
    layer_class: Callable[[ConfigReader], LayerParts] = BigBirdPegasusEncoderLayer

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.sizes = read_blocks(config)

    def forward(self, batch: int, length: int) -> Handle:
        run = self.run
        run.enter(self.name)
        inputs_embeds = self.embed_tokens((batch, length))
        embed_pos = self.embed_positions((batch, length))
        x = inputs_embeds + embed_pos
        x = dropout(x, self.dropout)
        ones = made_by(run, OperationKind.ONES, (batch, length), DType.FP32)
        attention_mask = ones.apart(OperationKind.TO, dtype=DType.INT64)
        del ones
        whole = None if self.sizes is None else self.sizes.padded(length)
        beside: tuple[Handle | None, ...]
        if whole is None or self.sizes is None:
            beside = (written_mask(attention_mask, inputs_embeds),)
            del attention_mask
        else:
            self.refuse_autocast()
            if whole != length:
                x, attention_mask = self.padded(x, attention_mask, whole)
            beside = None, *create_masks(attention_mask, self.sizes.block)
        for encoder_layer in self.layers:
            x = encoder_layer(x, *beside)
        x = self.closed(x)
        return x if whole in (None, length) else x.narrow(length, dim=1)

    def refuse_autocast(self) -> None:
        """``attention_probs`` have the masks' fp32, what ``scatter_`` writes into them autocast's 16 bits: it raises."""
        if self.run.autocast is not None:
            msg = (
                "transformers' class of bigbird_pegasus attends in blocks and raises under autocast (scatter_ of 16 "
                "bits into fp32); choose precision bf16 or fp32, or a sequence so short that it attends as a whole"
            )
            raise UnsupportedOperationError(msg)

    def padded(self, x: Handle, mask: Handle, whole: int) -> tuple[Handle, Handle]:
        """``_pad_to_block_size``."""
        batch, length, _ = x.shape
        shape = batch, whole - length
        input_ids_padding = made_by(self.run, OperationKind.INDICES, shape, DType.INT64)
        inputs_embeds_padding = self.embed_tokens(shape, input_ids_padding)
        x = concatenate(x, inputs_embeds_padding, dim=1)
        return x, mask.apart(OperationKind.PAD, shape=(batch, whole))


class BigBirdPegasusDecoder(NormedStack, BartDecoder):
    layer_class: Callable[[ConfigReader], LayerParts] = BigBirdPegasusDecoderLayer

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
        mask = self.mask(batch, length)
        del attention_mask  # the name is the causal mask's
        positions = self.embed_positions((1, length), position_ids)
        x = inputs_embeds + positions
        x = dropout(x, self.dropout)
        for decoder_layer in self.layers:
            x = decoder_layer(x, mask, memory)
        return self.closed(x)


class BigBirdPegasusModel(Translator):
    tasks: ClassVar[Tasks] = {
        **Translator.tasks,
        Task.SEQUENCE_CLASSIFICATION: LastTokenClassification,
        Task.QUESTION_ANSWERING: SpanAnswering,
    }
    eager_only = True
    encoder_class: Callable[[ConfigReader], BartStack] = BigBirdPegasusEncoder
    decoder_class: Callable[[ConfigReader], BartStack] = BigBirdPegasusDecoder
