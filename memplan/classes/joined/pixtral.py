"""Pixtral's tower: Llama's layers without biases over the patches of all pictures, which lie in one row.

(transformers 5.23, models/pixtral/modeling_pixtral.py)
"""

from typing import ClassVar

from memplan.classes.llama import GatedMLP
from memplan.classes.pictures.base import PictureModel, PictureStates, PictureTask
from memplan.classes.pictures.vit import Heads
from memplan.dtypes import DType
from memplan.families.towers.sizes import PICTURE, pair
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.attention import Attended, attention_function, in_heads
from memplan.graph.modules.basic import RMSNorm
from memplan.graph.modules.grids import Conv2d
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module
from memplan.graph.modules.rotary import Tables, apply_rotary, concatenate
from memplan.model.config import ConfigReader

COLOURS = 3
"""Channels, where the class writes them down."""


class PixtralAttention(Heads):
    names = "k_proj", "v_proj", "q_proj"
    dropout_key = "attention_dropout"
    output_bias = False

    def biases(self, config: ConfigReader) -> tuple[bool, ...]:
        """None has one."""
        del config
        return False, False, False

    def forward(self, x: Handle, mask: Handle | None, tables: Tables) -> Attended:
        query, key, value = (self.children[name](x) for name in ("q_proj", "k_proj", "v_proj"))
        query, key, value = (in_heads(each, self.head_dim) for each in (query, key, value))
        query, key = apply_rotary(query, key, *tables)
        attend = attention_function(self.run, self.eager, causal=False)
        out, weights = attend(query, key, value, mask, self.probability)
        out = out.reshape(*x.shape[:2], -1)
        out = self.children["o_proj"](out)
        return out, weights


class PixtralAttentionLayer(Module):
    def __init__(self, config: ConfigReader) -> None:
        size = config.integer("hidden_size")
        self.attention_norm = RMSNorm(size)
        self.feed_forward = GatedMLP(config)
        self.attention = PixtralAttention(config, size)
        self.ffn_norm = RMSNorm(size)

    def forward(self, hidden_states: Handle, mask: Handle | None, tables: Tables) -> Handle:
        residual = hidden_states
        hidden_states = self.attention_norm(hidden_states)
        hidden_states, _ = self.attention(hidden_states, mask, tables)
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.ffn_norm(hidden_states)
        hidden_states = self.feed_forward(hidden_states)
        hidden_states = residual + hidden_states
        return hidden_states


class PixtralVisionModel(PictureModel):
    endings: ClassVar[dict[str, type[PictureTask]]] = {"Model": PictureStates}
    recomputes = True

    def __init__(self, config: ConfigReader) -> None:
        self.width = config.integer("hidden_size")
        channels = config.integer("num_channels", default=COLOURS)
        patch = pair(config, "patch_size")
        self.patch_conv = Conv2d(channels, self.width, *patch, stride=patch, bias=False)
        self.ln_pre = RMSNorm(self.width)
        kinds = [None] * config.layers("num_hidden_layers")
        self.layers = LayerList("layers", kinds, lambda _: PixtralAttentionLayer(config))
        self.children["transformer.layers"] = self.children.pop("layers")
        heads = config.integer("num_attention_heads")
        self.head_dim = config.integer("head_dim", default=max(1, self.width // heads))
        self.casts = True
        self.picture = self.described(*PICTURE, channels=channels, patch=patch)

    def forward(self, pixel_values: Handle) -> tuple[Handle, ...]:
        patch_embeds = self.patch_conv(pixel_values.to(self.run.compute))
        _, size, *sides = patch_embeds.shape
        patch_embeds_list = patch_embeds.unbind(0)
        del patch_embeds
        flat = [each.view(size, sides[0] * sides[1]).transpose(0, 1) for each in patch_embeds_list]
        x = concatenate(*flat, dim=0).unsqueeze(0)
        del flat
        x = self.ln_pre(x)
        position_embeddings = self.patch_positional_embedding(x)
        attention_mask = None
        if not self.run.kernels.attention.is_package:
            pairs = 1, 1, x.shape[1], x.shape[1]
            attention_mask = made_by(self.run, OperationKind.MASK, pairs, x.dtype)
        for encoder_layer in self.layers:
            x = encoder_layer(x, attention_mask, position_embeddings)
        return (x,)

    def patch_positional_embedding(self, x: Handle) -> Tables:
        """``PixtralVisionRotaryEmbedding``: of rows and of columns, put together behind cosines and sines."""
        shape = 1, x.shape[1], 2, self.head_dim // 2
        freqs = made_by(self.run, OperationKind.MUL, shape, DType.FP32)
        cos = freqs.apart(OperationKind.COS).apart(OperationKind.MUL_SCALAR)
        sin = freqs.apart(OperationKind.SIN).apart(OperationKind.MUL_SCALAR)
        cos = self.recomposed(cos)
        sin = self.recomposed(sin)
        return cos.to(x.dtype), sin.to(x.dtype)

    def recomposed(self, freq: Handle) -> Handle:
        """``recomposition_frequencies``."""
        run, rows = self.run, freq.shape[:2]
        freq_hw = made_by(run, OperationKind.CAT, (*rows, self.head_dim // 2), DType.FP32)
        return freq_hw.apart(OperationKind.CAT, shape=(*rows, self.head_dim))
