"""The tower of packed patches of one language model, MiniCPM-V's, and what leads from it to the text.

(transformers 5.23, models/minicpmv4_6/modeling_minicpmv4_6.py)
"""

from typing import ClassVar

from memplan.classes.joined.packed import (
    SeparateAttention,
    Stretches,
    equal_stretches,
    in_stretches,
    joined,
    joined_patches,
)
from memplan.classes.joined.packed_kin import (
    EncoderTower,
    PaddleOCRVisionEmbeddings,
    ProjectedModel,
)
from memplan.classes.pictures.base import begin
from memplan.classes.pictures.parts import InOrder, as_tokens
from memplan.dtypes import DType
from memplan.families.nesting import PartSpec
from memplan.families.towers.sizes import pair
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.modules.attention import attention_function
from memplan.graph.modules.attention import in_heads as in_rows_of_heads
from memplan.graph.modules.basic import (
    ActivationModule,
    LayerNorm,
    Linear,
    spare,
)
from memplan.graph.modules.functional import index, mean_of_tokens
from memplan.graph.modules.handles import Handle, made_by
from memplan.graph.modules.module import Module
from memplan.graph.modules.rotary import Tables
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.parameters import ModelPart


class MiniCPMAttention(SeparateAttention):
    """Of patches in one sequence."""

    def forward(self, hidden_states: Handle, stretches: Stretches, tables: Tables | None) -> Handle:
        del tables
        query_states = in_rows_of_heads(self.children["q_proj"](hidden_states), self.head_dim)
        key_states = in_rows_of_heads(self.children["k_proj"](hidden_states), self.head_dim)
        value_states = in_rows_of_heads(self.children["v_proj"](hidden_states), self.head_dim)
        splits = [
            in_stretches(each, stretches) for each in (query_states, key_states, value_states)
        ]
        attend = attention_function(self.run, causal=False)
        attn_outputs = [attend(q, k, v, None, 0.0)[0] for q, k, v in zip(*splits, strict=True)]
        attn_output = joined(attn_outputs)
        attn_output = attn_output.reshape(*hidden_states.shape[:2], -1).contiguous()
        attn_output = self.children[self.output](attn_output)
        return attn_output


class MiniCPMVisionEmbeddings(PaddleOCRVisionEmbeddings):
    """Rows of the table, looked up for each patch."""

    def forward(self, pixel_values: Handle) -> Handle:
        patch_embeds = self.patch_embedding(pixel_values.to(self.run.compute))
        embeddings = as_tokens(patch_embeds)
        rows = embeddings.shape[1]
        pos_ids = made_by(self.run, OperationKind.ARANGE, (rows,), DType.INT64)
        position_embeddings = self.position_embedding((rows,), pos_ids).unsqueeze(0)
        embeddings = embeddings + position_embeddings
        return embeddings


class MiniCPMWindowMerger(Module):
    """Windows of patches attend, and are joined."""

    def __init__(self, config: ConfigReader, size: int) -> None:
        height, width = pair(config, "window_kernel_size")
        self.count = height * width
        joined, inner = size * self.count, config.integer("intermediate_size") * self.count
        self.self_attn = MiniCPMAttention(config, size)
        self.layer_norm1 = LayerNorm(size)
        self.pre_norm = LayerNorm(joined)
        self.linear_1 = Linear(joined, inner, bias=True)
        self.act = ActivationModule(Activation.GELU_TANH)
        self.linear_2 = Linear(inner, size, bias=True)

    def forward(self, hidden_states: Handle) -> Handle:
        residual, shape = hidden_states, hidden_states.shape
        hidden_states = self.layer_norm1(hidden_states)
        window_index = made_by(self.run, OperationKind.ARANGE, (shape[1],), DType.INT64)
        hidden_states = index(hidden_states, window_index, shape)
        hidden_states = self.self_attn(
            hidden_states, (self.count,) * (shape[1] // self.count), None
        )
        hidden_states = index(residual, window_index, shape) + hidden_states
        patch = hidden_states.reshape(-1, self.count, shape[-1])
        flat = patch.view(patch.shape[0], -1)
        patch_residual = mean_of_tokens(patch)
        hidden_state = self.pre_norm(flat)
        hidden_state = self.linear_1(hidden_state)
        hidden_state = self.act(hidden_state)
        hidden_state = self.linear_2(hidden_state)
        hidden_state = (hidden_state + patch_residual).unsqueeze(0)
        return hidden_state


class MiniCPMVisionModel(EncoderTower):
    """Behind one of the layers windows are joined."""

    attention_class = MiniCPMAttention
    merged_after = -1
    """Which layer that is, counted from 0; -1: none."""

    def add_embeddings(self, config: ConfigReader) -> None:
        self.embeddings = MiniCPMVisionEmbeddings(config, self.width)

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.children.pop("rotary_emb")
        self.vit_merger = MiniCPMWindowMerger(config, self.width)

    def pixels_shape(self) -> tuple[int, ...]:
        rows, channels, height, width = super().pixels_shape()
        return 1, channels, height, rows * width

    def forward(self, pixel_values: Handle) -> tuple[Handle, ...]:
        hidden_states = self.embeddings(pixel_values)
        for encoder_layer in self.layers:
            pictures = equal_stretches(hidden_states.shape[1], self.num_pictures)
            hidden_states = encoder_layer(hidden_states, pictures, None)
            if self.layers.take_states():
                begin(self, f"{self.tower}.window_merger", ModelPart.OTHER, hidden_states)
                hidden_states = self.vit_merger(hidden_states)
        begin(self, f"{self.tower}.norm", ModelPart.NORM, hidden_states)
        if not self.layers.captured:
            spare(self.vit_merger)
        last_hidden_state = self.children[self.last](hidden_states)
        return (last_hidden_state,)


class MiniCPMDownsampleMLP(InOrder):
    def __init__(self, joined: int, outputs: int) -> None:
        super().__init__(
            pre_norm=LayerNorm(joined), linear_1=Linear(joined, joined, bias=True),
            act=ActivationModule(Activation.GELU), linear_2=Linear(joined, outputs, bias=True),
        )  # fmt: skip


class MiniCPMMerger(Module):
    def __init__(self, config: ConfigReader, width: int, outputs: int) -> None:
        self.side = pair(config, "merge_kernel_size")[0]
        times = config.integer("merger_times")
        widths = [*[width] * (times - 1), outputs]
        made = {f"_{at}": MiniCPMDownsampleMLP(4 * width, each) for at, each in enumerate(widths)}
        self.mlp = InOrder(**made)

    def forward(self, hidden_state: Handle, wide: int) -> Handle:
        hidden_state = hidden_state.view(-1, hidden_state.shape[-1])
        for mlp in self.mlp.children.values():
            hidden_state = mlp(joined_patches(hidden_state, self.side, wide))
            wide //= self.side
        return hidden_state


class MiniCPMModel(ProjectedModel):
    text: ClassVar[PartSpec] = PartSpec(key="text_config", model_type="qwen3_5_text")

    def add_projector(self, config: ConfigReader, width: int, outputs: int) -> None:
        self.merger = MiniCPMMerger(config, width, outputs)
        layers, side = self.eye.layers, 1
        # Whatever the tower's own config says.
        place = config.integer("insert_layer_id", minimum=-1)
        if config.text("downsample_mode", default="16x") != "4x" and 0 <= place < len(layers.kinds):
            layers.capture(place + 1, is_read=True)
            side = 2
        self.eye.joins = side * self.merger.side ** len(self.merger.mlp.children)

    def projected(self, image_features: Handle) -> Handle:
        wide = self.eye.grid[1] // (2 if self.eye.layers.captured else 1)
        made: Handle = self.merger(image_features, wide)
        return made
