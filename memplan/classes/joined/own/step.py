"""Step 3.7: a ViT with rotary positions and scaled residuals, and two convolutions behind it.

(transformers 5.23, models/step3p7/modeling_step3p7.py)
"""

from typing import ClassVar

from memplan.classes.joined.base import CollectedModel
from memplan.classes.joined.packed import AxialRotaryEmbedding, apply_rotary_pos_emb_vision
from memplan.classes.joined.plain import ProjectedModel
from memplan.classes.pictures.base import PictureModel, PictureStates, PictureTask, begin
from memplan.classes.pictures.parts import as_picture, as_tokens
from memplan.classes.pictures.vit import Heads, two_linear
from memplan.families.nesting import PartSpec
from memplan.families.towers.layers import tower_activation
from memplan.families.towers.sizes import pair, ratio
from memplan.graph.modules.attention import Attended
from memplan.graph.modules.basic import Embedding, LayerNorm, Linear
from memplan.graph.modules.grids import Conv2d, interpolate
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.rotary import Tables
from memplan.model.config import ConfigReader
from memplan.model.parameters import ModelPart


class Step3p7VisionAttention(Heads):
    names, output = ("k_proj", "v_proj", "q_proj"), "out_proj"
    dropout_key = "attention_dropout"

    def biases(self, config: ConfigReader) -> tuple[bool, ...]:
        del config
        return True, True, True

    def forward(self, hidden_states: Handle, tables: Tables) -> Attended:
        batch, length, _ = hidden_states.shape
        queries, keys, values = (
            self.children[name](hidden_states).view(batch, length, -1, self.head_dim)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        values = values.transpose(1, 2)
        queries, keys = apply_rotary_pos_emb_vision(queries, keys, *tables)
        queries, keys = queries.transpose(1, 2), keys.transpose(1, 2)
        attn_output, attn_weights = self.attend(queries, keys, values)
        attn_output = attn_output.view(batch, length, -1)
        return self.children[self.output](attn_output), attn_weights


class Step3p7VisionEncoderLayer(Module):
    def __init__(self, config: ConfigReader, size: int) -> None:
        active = tower_activation(config, "hidden_act", default="quick_gelu")
        self.lambda_1, self.lambda_2 = Weight(size), Weight(size)
        self.self_attn = Step3p7VisionAttention(config, size)
        self.mlp = two_linear(size, int(size * ratio(config, "mlp_ratio")), active)
        self.layernorm_before, self.layernorm_after = LayerNorm(size), LayerNorm(size)

    def forward(self, hidden_states: Handle, tables: Tables) -> Handle:
        residual = hidden_states
        hidden_states = self.layernorm_before(hidden_states)
        hidden_states, _ = self.self_attn(hidden_states, tables)
        hidden_states = self.operand(self.lambda_1) * hidden_states
        hidden_states = hidden_states + residual
        residual = hidden_states
        hidden_states = self.layernorm_after(hidden_states)
        hidden_states = self.mlp(hidden_states)
        hidden_states = self.operand(self.lambda_2) * hidden_states
        hidden_states = hidden_states + residual
        return hidden_states


class Step3p7VisionEmbeddings(Module):
    """A table of positions that is resized to pictures it does not fit."""

    def __init__(self, config: ConfigReader, size: int) -> None:
        patch = config.integer("patch_size")
        self.side = pair(config, "image_size")[0] // patch
        self.patch_embedding = Conv2d(
            config.integer("num_channels"), size, patch, stride=patch, bias=False
        )
        self.position_embedding = Embedding(self.side**2, size)

    def forward(self, pixel_values: Handle) -> tuple[Handle, tuple[int, int]]:
        patch_embeds = self.patch_embedding(pixel_values.to(self.run.compute))
        height, width = patch_embeds.shape[2:]
        embeddings = as_tokens(patch_embeds)
        patch_pos_embed = self.operand(self.position_embedding.weight).unsqueeze(0)
        if (height, width) != (self.side, self.side):
            grid = as_picture(patch_pos_embed, self.side, self.side)
            patch_pos_embed = as_tokens(interpolate(grid, height, width))
        embeddings = embeddings + patch_pos_embed
        return embeddings, (height, width)


class Step3p7VisionModel(PictureModel):
    prefix = tower = "vision_model"
    casts = recomputes = True
    endings: ClassVar[dict[str, type[PictureTask]]] = {"Model": PictureStates}

    def __init__(self, config: ConfigReader) -> None:
        size = config.integer("width", "hidden_size")
        self.width = 4 * size
        self.embeddings = Step3p7VisionEmbeddings(config, size)
        self.pre_layernorm = LayerNorm(size)
        kinds = [None] * config.layers("layers", "num_hidden_layers")
        self.layers = LayerList(
            "vision_model.layers", kinds, lambda _: Step3p7VisionEncoderLayer(config, size)
        )
        heads = config.integer("heads", "num_attention_heads")
        self.rotary_emb = AxialRotaryEmbedding(size // heads)
        self.downsampler1 = Conv2d(size, 2 * size, 3, stride=2, padding=1)
        self.downsampler2 = Conv2d(2 * size, 4 * size, 3, stride=2, padding=1)
        channels = config.integer("num_channels")
        self.picture = self.described(*pair(config, "image_size"), channels=channels)

    def forward(self, pixel_values: Handle) -> tuple[Handle, ...]:
        hidden_state, sides = self.embeddings(pixel_values)
        hidden_state = self.pre_layernorm(hidden_state)
        position_embeddings = self.rotary_emb.of_patches(sides[0] * sides[1])
        for layer in self.layers:
            hidden_state = layer(hidden_state, position_embeddings)
        begin(self, f"{self.tower}.downsamplers", ModelPart.OTHER, hidden_state)
        hidden_state = as_picture(hidden_state, *sides)
        hidden_state = self.downsampler1(hidden_state)
        hidden_state = self.downsampler2(hidden_state)
        return (as_tokens(hidden_state),)


class Step3p7Model(CollectedModel, ProjectedModel):
    text = PartSpec(key="text_config")
    sees = "vision_model"

    def __init__(self, config: ConfigReader) -> None:
        tower, outputs = self.add_tower(config), self.text_width(config)
        self.add_text(config)
        bias = config.flag("projector_bias")
        self.multi_modal_projector = Linear(tower.width, outputs, bias=bias)
