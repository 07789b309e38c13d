"""The tower of packed patches of one language model, Kimi K2.5's MoonViT, and what leads from it to the text.

(transformers 5.23, models/kimi_k25/modeling_kimi_k25.py)
"""

from typing import ClassVar

from memplan.classes.joined.packed import (
    AxialRotaryEmbedding,
    SeparateAttention,
)
from memplan.classes.joined.packed_kin import COLOURS, EncoderTower, ProjectedModel
from memplan.classes.joined.qwen_vl import VisionBlock
from memplan.classes.pictures.vit import two_linear
from memplan.dtypes import DType
from memplan.families.nesting import PartSpec
from memplan.families.towers.layers import tower_activation
from memplan.families.towers.sizes import pair
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.modules.basic import (
    ActivationModule,
    LayerNorm,
    Linear,
)
from memplan.graph.modules.functional import index, made_from, mean_of_tokens
from memplan.graph.modules.grids import Conv2d
from memplan.graph.modules.handles import Handle, empty, made_by
from memplan.graph.modules.module import Module, Weight
from memplan.graph.operations.lookups import embedding_backward_scratch
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation


class KimiAttention(SeparateAttention):
    names = "proj", "q_proj", "k_proj", "v_proj"
    output = "proj"


def kimi_block(config: ConfigReader, size: int, active: str) -> VisionBlock:
    """A layer of Kimi K2.5's tower, or of Muse Glimmer's."""
    network = two_linear(
        size,
        config.integer("intermediate_size"),
        tower_activation(config, "hidden_act", default=active),
    )
    return VisionBlock(KimiAttention(config, size), network, LayerNorm(size), LayerNorm(size))


class KimiPositionEmbeddings(Module):
    """Sixteen rows of a grid for each patch, added up by one kernel, and rows of a table of frames."""

    def __init__(self, config: ConfigReader, size: int) -> None:
        self.size, self.frames = size, config.integer("pos_emb_time")
        grid = config.integer("pos_emb_height"), config.integer("pos_emb_width")
        self.position_embeddings = Weight(*grid, size)

    def forward(self, hidden_states: Handle) -> Handle:
        run = self.run
        run.buffer((self.frames + 1) * self.size, DType.FP32)
        table = self.operand(self.position_embeddings)
        pos = self.embedding_bag(table, hidden_states.shape[0])
        pos = pos + made_by(run, OperationKind.INDEX, pos.shape, DType.FP32)
        return hidden_states + pos.to(hidden_states.dtype)

    def embedding_bag(self, table: Handle, rows: int) -> Handle:
        """``F.embedding_bag(..., mode="sum")``: keeps which rows, their shares, where bags begin, whose each is and how long."""
        run, count = self.run, BAG_ROWS * rows
        numbers = made_by(run, OperationKind.ARANGE, (rows, BAG_ROWS), DType.INT64)
        shares = made_by(run, OperationKind.ARANGE, (rows, BAG_ROWS), DType.FP32).to(table.dtype)
        starts = made_by(run, OperationKind.ARANGE, (rows,), DType.INT64)
        sizes, bags = run.tensor(rows, DType.INT64), run.tensor(count, DType.INT64)
        made = empty(run, (rows, self.size), table.dtype)
        kept = numbers.record, shares.record, starts.record
        run.record(
            OperationKind.EMBEDDING, (table.record, *kept), (sizes, bags, made.record),
            saves=(*kept, bags, sizes), gradients=(Gradient.FRESH, *(Gradient.NONE,) * 3),
            backward_scratch_bytes=embedding_backward_scratch(
                run, count, table.numel, self.size, table.dtype
            ),
        )  # fmt: skip
        return made


BAG_ROWS = 16
"""Rows that a bicubic point is mixed from."""


class KimiPatchEmbed(Module):
    def __init__(self, config: ConfigReader, size: int) -> None:
        patch = pair(config, "patch_size")
        channels = config.integer("num_channels", default=COLOURS)
        self.proj = Conv2d(channels, size, *patch, stride=patch)
        self.pos_emb = KimiPositionEmbeddings(config, size)

    def forward(self, pixel_values: Handle) -> Handle:
        hidden_states = self.proj(pixel_values).view(pixel_values.shape[0], -1)
        hidden_states = self.pos_emb(hidden_states)
        return hidden_states


class KimiRotaryEmbedding(AxialRotaryEmbedding):
    """Rows and columns take turns."""

    def recomposed(self, freq: Handle) -> Handle:
        turned = made_from(OperationKind.CLONE, freq.shape, DType.FP32, freq)
        return super().recomposed(turned)


class KimiVisionModel(EncoderTower):
    rotary_class = KimiRotaryEmbedding
    last, listed = "final_layernorm", "layers"
    casts = False

    def read_sizes(self, config: ConfigReader) -> None:
        self.kernel = pair(config, "merge_kernel_size")
        self.joins = max(self.kernel)

    def add_embeddings(self, config: ConfigReader) -> None:
        self.patch_embed = KimiPatchEmbed(config, self.width)

    def embedded(self, pixel_values: Handle) -> Handle:
        made: Handle = self.patch_embed(pixel_values)
        return made

    def layer(self, config: ConfigReader) -> Module:
        return kimi_block(config, self.width, "gelu_pytorch_tanh")

    def merged_states(self, last_hidden_state: Handle) -> tuple[Handle, ...]:
        rows, size = last_hidden_state.shape
        merge_index = made_by(self.run, OperationKind.ARANGE, (rows,), DType.INT64)
        frames = index(last_hidden_state, merge_index, (rows, 1, size))
        return last_hidden_state, mean_of_tokens(frames)


class KimiProjection(Module):
    def __init__(self, config: ConfigReader, joined: int, outputs: int) -> None:
        self.joined = joined
        self.pre_norm = LayerNorm(config.integer("projection_hidden_size"))
        self.in_proj = Linear(joined, joined, bias=True)
        self.act = ActivationModule(Activation.GELU)
        self.out_proj = Linear(joined, outputs, bias=True)

    def forward(self, hidden_states: Handle) -> Handle:
        hidden_states = self.pre_norm(hidden_states).view(-1, self.joined)
        hidden_states = self.in_proj(hidden_states)
        hidden_states = self.act(hidden_states)
        hidden_states = self.out_proj(hidden_states)
        return hidden_states


class KimiModel(ProjectedModel):
    text: ClassVar[PartSpec] = PartSpec(key="text_config", model_type="deepseek_v3")
    copies_ids = True

    def add_projector(self, config: ConfigReader, width: int, outputs: int) -> None:
        high, wide = self.eye.kernel
        self.mm_projector = KimiProjection(config, width * high * wide, outputs)

    def projected(self, image_features: Handle) -> Handle:
        made: Handle = self.mm_projector(image_features)
        return made
