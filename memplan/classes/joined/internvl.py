"""InternVL's tower: a Vision Transformer whose sums are scaled number by number.

(transformers 5.23, models/internvl/modeling_internvl.py)
"""

from typing import ClassVar

from memplan.classes.pictures.base import PictureModel, PictureStates, PictureTask
from memplan.classes.pictures.vit import Dinov2Embeddings, Heads, two_linear
from memplan.families.towers.layers import tower_activation
from memplan.families.towers.sizes import pair
from memplan.families.towers.vit import num_patches
from memplan.graph.modules.attention import Attended, in_heads
from memplan.graph.modules.basic import Dropout, LayerNorm, Norm, RMSNorm
from memplan.graph.modules.grids import interpolate
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module, Weight
from memplan.model.config import ConfigReader
from memplan.model.parameters import ModelPart


class InternVLVisionEmbeddings(Dinov2Embeddings):
    """Positions are resized in their own format."""

    def add_own(self, config: ConfigReader) -> None:
        self.patch, self.image = pair(config, "patch_size"), pair(config, "image_size")
        if config.flag("use_mask_token"):
            self.mask_token = Weight(1, 1, self.size)
        self.is_placed = config.flag("use_absolute_position_embeddings")

    def resized(self, table: Handle, height: int, width: int) -> Handle:
        return interpolate(table, height, width)


class InternVLVisionAttention(Heads):
    output = "projection_layer"
    dropout_key = "attention_dropout"
    norm_class: type[Norm] = RMSNorm

    def __init__(self, config: ConfigReader, size: int) -> None:
        super().__init__(config, size)
        self.projection_dropout = Dropout(config.number("projection_dropout", default=0.0))
        self.normed = config.flag("use_qk_norm")
        if self.normed:
            self.q_norm, self.k_norm = self.norm_class(size), self.norm_class(size)

    def biases(self, config: ConfigReader) -> tuple[bool, ...]:
        return (config.flag("attention_bias"),) * 3

    def forward(self, hidden_states: Handle, mask: Handle | None = None) -> Attended:
        assert mask is None  # its pictures have no padding
        query_states, key_states, value_states = (
            self.children[name](hidden_states) for name in self.names
        )
        if self.normed:
            query_states = self.q_norm(query_states)
            key_states = self.k_norm(key_states)
        query_states = in_heads(query_states, self.head_dim)
        key_states = in_heads(key_states, self.head_dim)
        value_states = in_heads(value_states, self.head_dim)
        attn_output, attn_weights = self.attend(query_states, key_states, value_states)
        attn_output = attn_output.reshape(*hidden_states.shape[:2], -1)
        output = self.children[self.output](attn_output)
        output = self.projection_dropout(output)
        return output, attn_weights


class InternVLVisionLayer(Module):
    def __init__(self, config: ConfigReader) -> None:
        size, inner = config.integer("hidden_size"), config.integer("intermediate_size")
        norm: type[Norm] = RMSNorm if config.text("norm_type") == "rms_norm" else LayerNorm
        self.attention = InternVLVisionAttention(config, size)
        self.mlp = two_linear(size, inner, tower_activation(config, "hidden_act"))
        self.layernorm_before, self.layernorm_after = norm(size), norm(size)
        self.lambda_1, self.lambda_2 = Weight(size), Weight(size)
        self.dropout = Dropout(config.number("hidden_dropout_prob", default=0.0))

    def forward(self, hidden_states: Handle) -> Handle:
        attention_output, _ = self.attention(self.layernorm_before(hidden_states))
        attention_output = self.operand(self.lambda_1) * attention_output
        hidden_states = attention_output + hidden_states
        layer_output = self.layernorm_after(hidden_states)
        layer_output = self.mlp(layer_output)
        layer_output = self.dropout(layer_output)
        layer_output = self.operand(self.lambda_2) * layer_output
        layer_output = layer_output + hidden_states
        return layer_output


class InternVLVisionModel(PictureModel):
    endings: ClassVar[dict[str, type[PictureTask]]] = {"Model": PictureStates}
    recomputes = casts = True

    def __init__(self, config: ConfigReader) -> None:
        self.width, self.context = config.integer("hidden_size"), num_patches(config)
        self.embeddings = InternVLVisionEmbeddings(config)
        kinds = [None] * config.layers("num_hidden_layers")
        self.layers = LayerList("layers", kinds, lambda _: InternVLVisionLayer(config))
        self.children["encoder.layer"] = self.children.pop("layers")
        if not config.flag("use_mean_pooling"):
            self.layernorm = LayerNorm(self.width)
            self.layernorm.segment = "norm", ModelPart.NORM
        channels = config.integer("num_channels")
        self.picture = self.described(*pair(config, "image_size"), channels=channels)

    def forward(self, pixel_values: Handle) -> tuple[Handle, ...]:
        hidden_states = self.embeddings(pixel_values)
        for layer_module in self.layers:
            hidden_states = layer_module(hidden_states)
        if "layernorm" in self.children:
            hidden_states = self.layernorm(hidden_states)
        return (hidden_states,)
