"""GLM-4.1V, GLM-4.5V, GLM-OCR and EXAONE 4.5: Qwen-VL's kin.

(transformers 5.23, modeling_*.py of models/glm4v, models/glm4v_moe, models/glm_ocr, models/exaone4_5)
"""

from typing import ClassVar

from memplan.classes.joined.packed import PackedTower, VisionAttention, in_heads
from memplan.classes.joined.qwen_vl import (
    Qwen25VLVisionModel,
    QwenTower,
    VisionBlock,
    VisualModel,
)
from memplan.classes.llama import GatedMLP
from memplan.classes.pictures.parts import InOrder
from memplan.classes.pictures.vit import two_linear
from memplan.dtypes import DType
from memplan.families.nesting import PartSpec, read_part
from memplan.families.towers.layers import tower_activation
from memplan.fast_dataclass import replace
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.modules.basic import ActivationModule, Embedding, LayerNorm, Linear, RMSNorm
from memplan.graph.modules.grids import Conv2d
from memplan.graph.modules.handles import Handle, empty, made_by
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module
from memplan.model.config import ConfigReader
from memplan.model.joining import Joining
from memplan.model.networks import Activation
from memplan.model.parameters import WeightRole


class Glm4vVisionAttention(VisionAttention):
    def biases(self, config: ConfigReader) -> tuple[bool, bool]:
        return config.flag("attention_bias"), False


class Glm4vVisionPatchMerger(GatedMLP):
    """A linear layer, a norm, a gated network."""

    def __init__(self, config: ConfigReader, inner: int) -> None:
        size = config.integer("out_hidden_size")
        self.proj = Linear(size, size)
        self.post_projection_norm = LayerNorm(size)
        self.act1 = ActivationModule(Activation.GELU)
        super().__init__(config, inner, hidden=size)

    def forward(self, hidden_state: Handle) -> Handle:
        hidden_state = self.proj(hidden_state)
        hidden_state = self.act1(self.post_projection_norm(hidden_state))
        return super().forward(hidden_state)


class GlmTower(QwenTower):
    """Neighbouring patches are joined by a convolution."""

    patch_bias = True
    norm_class = RMSNorm

    def network(self, config: ConfigReader) -> Module:
        return GatedMLP(config, config.integer("out_hidden_size"))

    def merger_width(self, config: ConfigReader) -> int:
        """Inside of the network that ends it."""
        return config.integer("intermediate_size")

    def add_merger(self, config: ConfigReader) -> None:
        self.merger = Glm4vVisionPatchMerger(config, self.merger_width(config))
        self.add_norms()
        side, outputs = self.joins, config.integer("out_hidden_size")
        self.downsample = Conv2d(self.width, outputs, side, stride=(side, side))
        self.post_layernorm = RMSNorm(self.width)

    def add_norms(self) -> None:
        """What stands between the convolutions."""

    def merged_states(self, hidden_states: Handle) -> tuple[Handle, ...]:
        hidden_states = self.post_layernorm(hidden_states)
        hidden_states = hidden_states.view(-1, self.joins, self.joins, self.width)
        hidden_states = hidden_states.permute(0, 3, 1, 2)
        hidden_states = self.downsample(hidden_states)
        hidden_states = hidden_states.view(-1, hidden_states.shape[1])
        return hidden_states, self.merger(hidden_states)


class Glm4vVisionModel(GlmTower):
    """A table of positions, of which points are sampled."""

    attention_class = Glm4vVisionAttention

    def add_embeddings(self, config: ConfigReader) -> None:
        count = config.integer("image_size") // config.integer("patch_size")
        self.embeddings = Glm4vVisionEmbeddings(count**2, self.width)
        super().add_embeddings(config)

    def add_norms(self) -> None:
        self.post_conv_layernorm = RMSNorm(self.width)

    def placed(self, hidden_states: Handle) -> Handle:
        hidden_states = self.post_conv_layernorm(hidden_states)
        return self.embeddings(hidden_states)


class Glm4vVisionEmbeddings(Module):
    def __init__(self, count: int, size: int) -> None:
        self.position_embedding = Embedding(count, size)

    def forward(self, embeddings: Handle) -> Handle:
        run, table = self.run, self.position_embedding
        pos_embed_2d = table.operand(table.weight).float()
        grid = made_by(run, OperationKind.ARANGE, (embeddings.shape[0], 2), DType.FP32)
        interpolated_embed_fp32 = grid_sample(pos_embed_2d, grid, embeddings.shape)
        adapted_pos_embed = interpolated_embed_fp32.to(table.operand(table.weight).dtype)
        embeddings = embeddings + adapted_pos_embed
        return embeddings


def grid_sample(x: Handle, grid: Handle, shape: tuple[int, ...]) -> Handle:
    """``F.grid_sample``: keeps both; backward makes a gradient of the grid beside the picture's."""
    made = empty(x.run, shape, DType.FP32)
    x.run.record(
        OperationKind.INDEX, (x.record, grid.record), (made.record,),
        saves=(x.record, grid.record), gradients=(Gradient.FRESH, Gradient.NONE),
        backward_scratch_bytes=grid.record.storage.num_bytes,
    )  # fmt: skip
    return made


class GlmOcrVisionAttention(VisionAttention):
    def __init__(self, config: ConfigReader, size: int) -> None:
        super().__init__(config, size)
        self.q_norm = RMSNorm(self.head_dim)
        self.k_norm = RMSNorm(self.head_dim)

    def biases(self, config: ConfigReader) -> tuple[bool, bool]:
        return (config.flag("attention_bias"),) * 2

    def projected(self, hidden_states: Handle) -> tuple[Handle, Handle, Handle]:
        query_states, key_states, value_states = super().projected(hidden_states)
        query_states = self.q_norm(query_states)
        key_states = self.k_norm(key_states)
        return query_states, key_states, value_states


class GlmOcrVisionMlp(GatedMLP):
    def bias(self, config: ConfigReader) -> bool:
        return config.flag("attention_bias")


class GlmOcrVisionModel(GlmTower):
    attention_class = GlmOcrVisionAttention

    def network(self, config: ConfigReader) -> Module:
        return GlmOcrVisionMlp(config)

    def merger_width(self, config: ConfigReader) -> int:
        return config.integer("out_hidden_size") * config.integer("in_channels")


class Glm4vModel(VisualModel):
    nested_ties = True


class GlmImageVisionAttention(VisionAttention):
    def biases(self, config: ConfigReader) -> tuple[bool, bool]:
        return (config.flag("attention_bias"),) * 2


class GlmImageVisionModel(PackedTower):
    """Its source pictures are shown in no step that is modelled."""

    def __init__(self, config: ConfigReader) -> None:
        self.width = size = config.integer("hidden_size")
        patch, channels = config.integer("patch_size"), config.integer("in_channels")
        self.embeddings = Glm4vVisionEmbeddings((config.integer("image_size") // patch) ** 2, size)
        self.patch_embed = InOrder(proj=Conv2d(channels, size, patch, stride=(patch, patch)))
        self.blocks = LayerList(
            "layers", [None] * config.layers("depth"), lambda _: self.layer(config)
        )
        self.cut_into(patch, patch, channels=channels)

    def layer(self, config: ConfigReader) -> Module:
        """One of its layers."""
        active, inner = tower_activation(config, "hidden_act"), config.integer("intermediate_size")
        return VisionBlock(
            GlmImageVisionAttention(config, self.width), two_linear(self.width, inner, active),
            LayerNorm(self.width), LayerNorm(self.width),
        )  # fmt: skip


class GlmImageModel(VisualModel):
    """What is drawn is given as tokens, whose scores alone are made."""

    joining = Joining.UNSEEN

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.picture = replace(self.picture, channels=0)
        drawn = read_part(config, PartSpec(key="vq_config")).reader
        latent, width = drawn.integer("latent_channels"), drawn.integer("embed_dim")
        self.vqmodel = InOrder(
            quantize=InOrder(embedding=Embedding(drawn.integer("num_embeddings"), width)),
            quant_conv=Conv2d(latent, width, 1), post_quant_conv=Conv2d(width, latent, 1),
        )  # fmt: skip

    def segment_of(self, child: str) -> str:
        return "vqgan" if child == "vqmodel" else super().segment_of(child)

    def ties_head(self, config: ConfigReader, tied: bool) -> bool:
        del config, tied
        return False

    def output_rows(self, config: ConfigReader) -> int:
        del config
        return self.part.reader.integer("vision_vocab_size")


class Exaone45VisionAttention(VisionAttention):
    """Fewer heads of keys and values."""

    def add_projections(self, config: ConfigReader, size: int) -> None:
        kv_heads = config.integer("num_key_value_heads", default=self.num_heads)
        config.divide("num_heads", self.num_heads, "num_key_value_heads", kv_heads)
        self.kv_dim = kv_heads * self.head_dim
        self.proj = Linear(size, size, bias=True, role=WeightRole.ATTENTION_OUTPUT)
        self.qkv = Linear(size, size + 2 * self.kv_dim, bias=True)

    def projected(self, hidden_states: Handle) -> tuple[Handle, Handle, Handle]:
        size, kv_dim = hidden_states.shape[-1], self.kv_dim
        query_states, key_states, value_states = self.qkv(hidden_states).split(size, kv_dim, kv_dim)
        query_states = in_heads(query_states, self.head_dim)
        key_states = in_heads(key_states, self.head_dim)
        value_states = in_heads(value_states, self.head_dim)
        return query_states, key_states, value_states


class Exaone45VisionModel(Qwen25VLVisionModel):
    attention_class = Exaone45VisionAttention


class Exaone45Model(VisualModel):
    text: ClassVar[PartSpec] = PartSpec(key="text_config", model_type="exaone4")
