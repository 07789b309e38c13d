"""TimeSformer: frames of a clip, whose patches are attended over time first where space and time are divided.

(transformers 5.23, models/timesformer/modeling_timesformer.py)
"""

from typing import ClassVar

from memplan.classes.pictures.base import FirstToken, PictureModel, PictureTask
from memplan.classes.pictures.parts import InOrder, Projected, as_tokens, drop_paths
from memplan.families.towers.layers import tower_activation
from memplan.families.towers.sizes import pair
from memplan.families.towers.vit import num_patches
from memplan.graph.modules.attention import matmul
from memplan.graph.modules.basic import ActivationModule, Dropout, LayerNorm, Linear
from memplan.graph.modules.functional import expanded, repeated, softmax
from memplan.graph.modules.grids import Conv2d, DropPath, mean_along
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.layer_list import LayerList, numbered
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.rotary import concatenate
from memplan.model.config import ConfigReader
from memplan.model.parameters import LayerBlock, ModelPart

VIDEOS = "ForVideoClassification"
DIVIDED, SPACE_ONLY = "divided_space_time", "space_only"


class TimesformerEmbeddings(Module):
    """A token and positions for each frame; then all frames behind one token."""

    def __init__(self, config: ConfigReader, kind: str) -> None:
        size, patch = config.integer("hidden_size"), pair(config, "patch_size")
        projection = Conv2d(config.integer("num_channels"), size, *patch, stride=patch)
        self.patch_embeddings = InOrder(projection=projection)
        self.cls_token = Weight(1, 1, size)
        self.position_embeddings = Weight(1, num_patches(config) + 1, size)
        drop = config.number("hidden_dropout_prob", default=0.0)
        self.pos_drop = Dropout(drop)
        if kind != SPACE_ONLY:
            self.time_embeddings = Weight(1, config.integer("num_frames"), size)
            self.time_drop = Dropout(drop)

    def forward(self, pixel_values: Handle) -> Handle:
        batch, frames, *picture = pixel_values.shape
        given = pixel_values.view(batch * frames, *picture)
        embeddings = as_tokens(self.patch_embeddings(given))
        _, _, size = embeddings.shape
        cls_tokens = expanded(self.operand(self.cls_token), (batch * frames, 1, size))
        embeddings = concatenate(cls_tokens, embeddings, dim=1)
        embeddings = embeddings + self.operand(self.position_embeddings)
        embeddings = self.pos_drop(embeddings)
        cls_tokens = embeddings.narrow(batch, 0).select(1).unsqueeze(1)
        places = embeddings.shape[1] - 1
        embeddings = embeddings.narrow(places, 1)
        embeddings = (
            embeddings.reshape(batch, frames, places, size)
            .permute(0, 2, 1, 3)
            .reshape(batch * places, frames, size)
        )
        embeddings = embeddings + self.operand(self.time_embeddings)
        embeddings = self.time_drop(embeddings)
        embeddings = embeddings.view(batch, places, frames, size).view(batch, places * frames, size)
        embeddings = concatenate(cls_tokens, embeddings, dim=1)
        return embeddings


class TimesformerSelfAttention(Module):
    """Shares of one matrix's result."""

    block = LayerBlock.ATTENTION

    def __init__(self, config: ConfigReader, size: int) -> None:
        self.num_heads = config.integer("num_attention_heads")
        bias = config.flag("qkv_bias")
        self.qkv = Linear(size, 3 * size, bias=bias)
        drop = config.number("attention_probs_dropout_prob", default=0.0)
        self.attn_drop = Dropout(drop)

    def forward(self, hidden_states: Handle) -> Handle:
        batch, length, size = hidden_states.shape
        qkv = self.qkv(hidden_states).view(batch, length, 3, self.num_heads, size // self.num_heads)
        qkv = qkv.permute(2, 0, 3, 1, 4)
        query, key, value = (qkv.select(0) for _ in range(3))
        attention_probs = matmul(query, key.transpose(2, 3)) * 0.5
        attention_probs = softmax(attention_probs)
        attention_probs = self.attn_drop(attention_probs)
        context_layer = matmul(attention_probs, value).transpose(1, 2).reshape(batch, length, size)
        return context_layer


def turned(x: Handle, batch: int, rows: int, columns: int) -> Handle:
    """A view in which tokens lie column by column."""
    return x.reshape(batch, rows, columns, x.shape[-1]).permute(0, 2, 1, 3)


class TimesformerLayer(Module):
    attention: Projected
    temporal_attention: Projected

    def __init__(self, config: ConfigReader, size: int, rate: float, kind: str) -> None:
        self.frames, inner = config.integer("num_frames"), config.integer("intermediate_size")
        drop = config.number("hidden_dropout_prob", default=0.0)
        self.drop_path = DropPath(rate)
        names = ("attention", "temporal_attention") if kind == DIVIDED else ("attention",)
        for name in names:
            attention = TimesformerSelfAttention(config, size)
            setattr(self, name, Projected("attention", attention, size, drop))
        self.intermediate = InOrder(
            dense=Linear(size, inner, bias=True),
            intermediate_act_fn=ActivationModule(tower_activation(config, "hidden_act")),
            dropout=Dropout(drop),
        )
        self.intermediate.block = LayerBlock.NETWORK
        self.output = InOrder(dense=Linear(inner, size, bias=True), dropout=Dropout(drop))
        self.output.block = LayerBlock.NETWORK
        self.layernorm_before, self.layernorm_after = LayerNorm(size), LayerNorm(size)
        if kind == DIVIDED:
            self.temporal_layernorm = LayerNorm(size)
            self.temporal_dense = Linear(size, size, bias=True)

    def forward(self, hidden_states: Handle) -> Handle:
        if "temporal_dense" in self.children:
            return self.divided(hidden_states)
        attention_output = self.attention(self.layernorm_before(hidden_states))
        hidden_states = hidden_states + self.drop_path(attention_output)
        layer_output = self.layernorm_after(hidden_states)
        layer_output = self.intermediate(layer_output)
        layer_output = self.output(layer_output)
        layer_output = hidden_states + self.drop_path(layer_output)
        return layer_output

    def divided(self, hidden_states: Handle) -> Handle:
        """Over frames first, then over places."""
        batch, length, size = hidden_states.shape
        frames, places = self.frames, (length - 1) // self.frames
        temporal_embedding = hidden_states.narrow(length - 1, 1)
        temporal_embedding = temporal_embedding.reshape(batch * places, frames, size)
        attention_output = self.temporal_attention(self.temporal_layernorm(temporal_embedding))
        temporal_attention_outputs = attention_output
        residual_temporal = self.drop_path(attention_output)
        residual_temporal = residual_temporal.reshape(batch, places * frames, size)
        residual_temporal = self.temporal_dense(residual_temporal)
        temporal_embedding = hidden_states.narrow(length - 1, 1) + residual_temporal
        init_cls_token = hidden_states.select(1).unsqueeze(1)
        cls_token = repeated(init_cls_token, frames, dim=1)
        cls_token = cls_token.reshape(batch * frames, 1, size)
        spatial_embedding = temporal_embedding
        spatial_embedding = turned(spatial_embedding, batch, places, frames)
        spatial_embedding = spatial_embedding.reshape(batch * frames, places, size)
        spatial_embedding = concatenate(cls_token, spatial_embedding, dim=1)
        attention_output = self.attention(self.layernorm_before(spatial_embedding))
        residual_spatial = self.drop_path(attention_output)
        cls_token = residual_spatial.select(1)
        cls_token = cls_token.reshape(batch, frames, size)
        cls_token = mean_along(cls_token, 1)
        residual_spatial = residual_spatial.narrow(places, 1)
        residual_spatial = turned(residual_spatial, batch, frames, places)
        residual_spatial = residual_spatial.reshape(batch, places * frames, size)
        residual = residual_spatial
        hidden_states = temporal_embedding
        hidden_states = concatenate(init_cls_token, hidden_states, dim=1) + concatenate(
            cls_token, residual, dim=1
        )
        layer_output = self.layernorm_after(hidden_states)
        layer_output = self.intermediate(layer_output)
        layer_output = self.output(layer_output)
        layer_output = hidden_states + self.drop_path(layer_output)
        return layer_output


class TimesformerModel(PictureModel):
    prefix = "timesformer"
    recomputes = eager_only = True
    endings: ClassVar[dict[str, type[PictureTask]]] = {VIDEOS: FirstToken}

    def __init__(self, config: ConfigReader) -> None:
        self.frames, size = config.integer("num_frames"), config.integer("hidden_size")
        kinds = DIVIDED, SPACE_ONLY, "joint_space_time"
        self.kind = config.choice("attention_type", config.text("attention_type"), kinds)
        self.width, self.context = size, num_patches(config) * self.frames
        self.embeddings = TimesformerEmbeddings(config, self.kind)
        rates = drop_paths(config, config.layers("num_hidden_layers"))
        layers = LayerList(
            "layers", rates, lambda rate: TimesformerLayer(config, size, rate, self.kind)
        )
        setattr(self, "encoder.layer", layers)
        self.layernorm = LayerNorm(size)
        self.layernorm.segment = "norm", ModelPart.NORM
        channels = config.integer("num_channels")
        self.picture = self.described(*pair(config, "image_size"), channels=channels, fixed=True)

    def left_out(self, ending: str) -> bool:
        """What each frame says of itself alone has no loss in the class: labels are a clip's."""
        del ending
        return self.kind == SPACE_ONLY

    def forward(self, pixel_values: Handle) -> tuple[Handle]:
        embedding_output = self.embeddings(pixel_values)
        hidden_states = embedding_output
        for layer_module in numbered(self)[0]:
            layer_outputs = layer_module(hidden_states)
            hidden_states = layer_outputs
        sequence_output = hidden_states
        sequence_output = self.layernorm(sequence_output)
        return (sequence_output,)
