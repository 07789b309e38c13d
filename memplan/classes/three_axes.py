"""Texts of language models that see, whose positions are of three axes.

(transformers 5.23, modeling_*.py of models/qwen2_vl, qwen3_vl, qwen3_vl_moe, glm4v, glm4v_moe, glm_ocr, glm_image, paddleocr_vl)
"""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from memplan.classes.glm import Glm4DecoderLayer, Glm4Model, GlmAttention
from memplan.classes.llama import (
    Heads,
    HeadsFirstAttention,
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaModel,
    Qwen2Attention,
    Qwen2DecoderLayer,
    Qwen2Model,
    Qwen3Model,
    RowsAttention,
)
from memplan.classes.mixed.deepseek import Glm4MoeModel
from memplan.classes.mixed.mixtures import (
    MixtureBlock,
    Qwen3MoeDecoderLayer,
    Qwen3MoeModel,
    Qwen3MoeSparseMoeBlock,
)
from memplan.classes.pictures.base import begin
from memplan.families.nesting import same_class
from memplan.graph.modules.functional import copy_at, rows_of
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.rotary import SectionedRotaryEmbedding, Turn, apply_rotary_to_part
from memplan.model.config import ConfigReader
from memplan.model.parameters import ModelPart


class SectionedModel(LlamaModel):
    """Positions are of three axes, and some keys mean nothing whatever the config says."""

    rotary_class = SectionedRotaryEmbedding
    fixed: ClassVar[Mapping[str, object]] = {}

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(same_class(config, {**config.config, **self.fixed}))

    def counted(self, batch: int, length: int) -> Any:  # noqa: ARG002
        """Each token has three, which its layers are not given."""
        return None


class PlainRows(RowsAttention):
    """All three in rows as the matrices give them."""

    def rows(self, x: Handle) -> Heads:
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


class Qwen2VLAttention(PlainRows, Qwen2Attention):
    pass


class Qwen2VLDecoderLayer(Qwen2DecoderLayer):
    attention_class: type[LlamaAttention] = Qwen2VLAttention


class Qwen2VLTextModel(SectionedModel, Qwen2Model):
    layer_class: type[LlamaDecoderLayer] = Qwen2VLDecoderLayer
    fixed: ClassVar[Mapping[str, object]] = {"head_dim": None}


class DeepstackModel(SectionedModel):
    """What the tower's layers gave early is added to what its first layers give."""

    def forward(self, batch: int, length: int, received: Handle | None) -> Handle:
        embeds = self.embedded(batch, length) if received is None else received
        embeds, *visual = self.joined(embeds)
        masks = self.masks(batch, length)
        x = embeds
        tables = self.tables(x, self.counted(batch, length))
        for layer in self.layers:
            x = layer(x, tables[layer.kind.window], masks[layer.kind.window])
            for number in self.layers.take_states() if visual else ():
                begin(self, "decoder.deepstack", ModelPart.OTHER, x)
                x = deepstack_process(x, visual[number - 1])
        x = self.norm(x)
        return x


def deepstack_process(hidden_states: Handle, visual_embeds: Handle) -> Handle:
    """``_deepstack_process``: the mask by which rows are picked and written is kept for the placeholders anyway."""
    shape = hidden_states.shape
    visual_embeds = visual_embeds.to(hidden_states.dtype)
    hidden_states = hidden_states.clone().view(-1, shape[-1])
    local_this = rows_of(hidden_states, visual_embeds.shape) + visual_embeds
    hidden_states = copy_at(hidden_states, local_this)
    return hidden_states.view(*shape)


class Qwen3VLTextModel(DeepstackModel, Qwen3Model):
    pass


class Qwen3VLMoeTextSparseMoeBlock(Qwen3MoeSparseMoeBlock):
    sealed = False


class Qwen3VLMoeTextDecoderLayer(Qwen3MoeDecoderLayer):
    block_class: Callable[[ConfigReader], MixtureBlock] = Qwen3VLMoeTextSparseMoeBlock


class Qwen3VLMoeTextModel(DeepstackModel, Qwen3MoeModel):
    layer_class: type[LlamaDecoderLayer] = Qwen3VLMoeTextDecoderLayer


class GlmImageTextAttention(HeadsFirstAttention, GlmAttention):
    """Tables are repeated once for all layers."""

    turn: Turn = staticmethod(apply_rotary_to_part)


class GlmImageTextDecoderLayer(Glm4DecoderLayer):
    attention_class: type[LlamaAttention] = GlmImageTextAttention


class GlmImageTextModel(SectionedModel, Glm4Model):
    layer_class: type[LlamaDecoderLayer] = GlmImageTextDecoderLayer


class Glm4vTextAttention(PlainRows, GlmAttention):
    """Tables are repeated once for all layers."""

    turn: Turn = staticmethod(apply_rotary_to_part)


class Glm4vTextDecoderLayer(Glm4DecoderLayer):
    attention_class: type[LlamaAttention] = Glm4vTextAttention


class Glm4vTextModel(SectionedModel, Glm4Model):
    layer_class: type[LlamaDecoderLayer] = Glm4vTextDecoderLayer
    fixed: ClassVar[Mapping[str, object]] = {"head_dim": None, "attention_bias": True}


class GlmOcrTextModel(Glm4vTextModel):
    fixed: ClassVar[Mapping[str, object]] = {"attention_bias": False}


class Glm4vMoeTextModel(SectionedModel, Glm4MoeModel):
    fixed: ClassVar[Mapping[str, object]] = {"use_qk_norm": False}


class PaddleOCRAttention(PlainRows):
    pass


class PaddleOCRDecoderLayer(LlamaDecoderLayer):
    attention_class: type[LlamaAttention] = PaddleOCRAttention


class PaddleOCRTextModel(SectionedModel):
    layer_class: type[LlamaDecoderLayer] = PaddleOCRDecoderLayer

    def __init__(self, config: ConfigReader) -> None:
        biased = config.flag("use_bias")
        given = {**config.config, "attention_bias": biased, "mlp_bias": biased}
        super().__init__(same_class(config, given))
