"""Towers of packed patches of one language model each: Kimi K2.5's MoonViT, PaddleOCR-VL's, VideoLLaMA 3's, MiniCPM-V's and
Muse Glimmer's, and what leads from them to the text.

(transformers 5.23, modeling_*.py of models/kimi_k25, paddleocr_vl, video_llama_3, minicpmv4_6, muse_glimmer)
"""

from collections.abc import Sequence
from typing import ClassVar

from memplan.classes.beside_towers.gemma4 import UnscaledNorm
from memplan.classes.compared.clip import patches_across
from memplan.classes.joined.base import PROJECTOR, TOWER
from memplan.classes.joined.packed import (
    AxialRotaryEmbedding,
    EncoderLayer,
    PackedTower,
    SeparateAttention,
    Stretches,
    equal_stretches,
    in_stretches,
    interpolated,
    joined,
    joined_patches,
    window_side,
)
from memplan.classes.joined.qwen_vl import VisionBlock, VisualModel
from memplan.classes.pictures.base import begin, begin_tower
from memplan.classes.pictures.parts import InOrder, as_tokens
from memplan.classes.pictures.vit import two_linear
from memplan.dtypes import DType
from memplan.families.nesting import PartSpec
from memplan.families.towers.layers import tower_activation
from memplan.families.towers.sizes import pair
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.modules.attention import attention_function
from memplan.graph.modules.attention import in_heads as in_rows_of_heads
from memplan.graph.modules.basic import (
    ActivationModule,
    Embedding,
    LayerNorm,
    Linear,
    fp32_under_autocast,
    spare,
)
from memplan.graph.modules.functional import index, made_from, mean_of_tokens
from memplan.graph.modules.grids import Conv2d
from memplan.graph.modules.handles import Handle, empty, made_by
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module, Weight
from memplan.graph.modules.rotary import Tables, concatenate
from memplan.graph.operations.lookups import embedding_backward_scratch
from memplan.model.config import ConfigReader
from memplan.model.networks import Activation
from memplan.model.parameters import ModelPart


class EncoderTower(PackedTower):
    """Patches, layers with rotary positions, a norm."""

    last = "post_layernorm"
    listed = "encoder.layers"
    attention_class: type[SeparateAttention] = SeparateAttention
    rotary_class: type[AxialRotaryEmbedding] = AxialRotaryEmbedding
    embeddings: Module
    layers: LayerList

    def __init__(self, config: ConfigReader) -> None:
        self.width = config.integer("hidden_size")
        self.read_sizes(config)
        self.add_embeddings(config)
        heads = config.integer("num_attention_heads")
        self.rotary_emb = self.rotary_class(
            config.divide("hidden_size", self.width, "num_attention_heads", heads)
        )
        kinds = self.kinds(config)
        self.layers = LayerList("layers", kinds, lambda _: self.layer(config))
        self.children[self.listed] = self.children.pop("layers")
        setattr(self, self.last, LayerNorm(self.width))
        self.cut_into(
            *pair(config, "patch_size"), channels=config.integer("num_channels", default=COLOURS)
        )

    def read_sizes(self, config: ConfigReader) -> None:
        """What else it is told."""

    def kinds(self, config: ConfigReader) -> Sequence[bool]:
        """Of each layer, whether it sees a window of the picture alone."""
        return [False] * config.layers("num_hidden_layers")

    def add_embeddings(self, config: ConfigReader) -> None:
        """What makes tokens of patches."""
        raise NotImplementedError

    def layer(self, config: ConfigReader) -> Module:
        """One of its layers."""
        return EncoderLayer(config, self.attention_class(config, self.width))

    def pixels_shape(self) -> tuple[int, ...]:
        """Each patch is a picture of its own."""
        rows, _ = super().pixels_shape()
        return rows, self.picture.channels, *self.picture.patch

    def embedded(self, pixel_values: Handle) -> Handle:
        """The patches' tokens."""
        made: Handle = self.embeddings(pixel_values)
        return made

    def forward(self, pixel_values: Handle) -> tuple[Handle, ...]:
        hidden_states = self.embedded(pixel_values)
        pictures = equal_stretches(hidden_states.shape[0], self.num_pictures)
        position_embeddings = self.rotary_emb.of_patches(hidden_states.shape[0])
        for encoder_layer in self.layers:
            hidden_states = encoder_layer(hidden_states, pictures, position_embeddings)
        begin(self, f"{self.tower}.norm", ModelPart.NORM, hidden_states)
        last_hidden_state = self.children[self.last](hidden_states)
        return self.merged_states(last_hidden_state)

    def merged_states(self, last_hidden_state: Handle) -> tuple[Handle, ...]:
        """What is read of them."""
        return (last_hidden_state,)


COLOURS = 3
"""Channels, where the class writes them down."""


class PatchEmbeddings(Module):
    """A vector of each patch."""

    def __init__(self, config: ConfigReader, size: int) -> None:
        patch, channels = (
            pair(config, "patch_size"),
            config.integer("num_channels", default=COLOURS),
        )
        self.patch_embedding = Conv2d(channels, size, *patch, stride=patch)

    def forward(self, pixel_values: Handle) -> Handle:
        patch_embeds = self.patch_embedding(pixel_values.to(self.run.compute))
        return patch_embeds.view(patch_embeds.shape[0], -1)


class ProjectedModel(VisualModel):
    """Something leads from the tower to the text."""

    sees = "vision_tower"
    copies_ids = False
    """It looks up a copy of the ids, with others in the place of placeholders."""

    def __init__(self, config: ConfigReader) -> None:
        super().__init__(config)
        self.add_projector(config, self.eye.width, self.text_width(config))
        self.words.token_table.copies_ids = self.copies_ids

    def add_projector(self, config: ConfigReader, width: int, outputs: int) -> None:
        """Declare it."""
        raise NotImplementedError

    def get_image_features(self) -> Handle:
        begin_tower(self.eye, TOWER)
        last_hidden_state, *pooler_output = self.eye(self.pictures())
        self.named.append(last_hidden_state)
        given = pooler_output.pop() if pooler_output else last_hidden_state
        del last_hidden_state
        begin(self, PROJECTOR, ModelPart.OTHER, given)
        image_embeds = self.projected(given)
        self.named.append(image_embeds)
        return image_embeds

    def projected(self, image_features: Handle) -> Handle:
        """What is written over the placeholders."""
        raise NotImplementedError


class VideoLlama3VisionModel(EncoderTower):
    """Nothing but the layers knows positions; pictures are resized once more, to the size that they have."""

    def add_embeddings(self, config: ConfigReader) -> None:
        self.embeddings = PatchEmbeddings(config, self.width)

    def merged_states(self, last_hidden_state: Handle) -> tuple[Handle, ...]:
        last_hidden_state = fp32_under_autocast(last_hidden_state)
        made = empty(self.run, last_hidden_state.shape, last_hidden_state.dtype)
        self.run.record(
            OperationKind.UPSAMPLE, (last_hidden_state.record,), (made.record,),
            gradients=(Gradient.FRESH,),
        )  # fmt: skip
        del last_hidden_state
        return (concatenate(made, dim=0),)


class VideoLlama3Projector(InOrder):
    def __init__(self, width: int, outputs: int) -> None:
        super().__init__(
            readout=InOrder(
                _0=Linear(width, outputs, bias=True), _1=ActivationModule(Activation.GELU),
                _2=Linear(outputs, outputs, bias=True),
            )
        )  # fmt: skip


class VideoLlama3Model(ProjectedModel):
    text: ClassVar[PartSpec] = PartSpec(key="text_config", model_type="qwen2")
    sees = "vision_model"
    nested_ties = returns_features = True

    def __init__(self, config: ConfigReader) -> None:
        self.add_tower(config)
        self.projector = VideoLlama3Projector(self.eye.width, self.text_width(config))
        self.add_text(config)

    def projected(self, image_features: Handle) -> Handle:
        made: Handle = self.projector(image_features)
        return made


class PaddleOCRVisionEmbeddings(PatchEmbeddings):
    def __init__(self, config: ConfigReader, size: int) -> None:
        super().__init__(config, size)
        self.position_embedding = Embedding(patches_across(config) ** 2, size)

    def forward(self, pixel_values: Handle) -> Handle:
        embeddings = super().forward(pixel_values)
        pos_embeds = interpolated(self.position_embedding, embeddings.shape[0])
        embeddings = embeddings + pos_embeds.to(embeddings.dtype)
        return embeddings


class PaddleOCRVisionModel(EncoderTower):
    def read_sizes(self, config: ConfigReader) -> None:
        self.joins = config.integer("spatial_merge_size")

    def add_embeddings(self, config: ConfigReader) -> None:
        self.embeddings = PaddleOCRVisionEmbeddings(config, self.width)


class PaddleOCRProjector(Module):
    def __init__(self, width: int, side: int, outputs: int) -> None:
        self.side, joined = side, width * side**2
        self.pre_norm = LayerNorm(width)
        self.linear_1 = Linear(joined, joined, bias=True)
        self.act = ActivationModule(Activation.GELU)
        self.linear_2 = Linear(joined, outputs, bias=True)

    def forward(self, image_features: Handle, wide: int) -> Handle:
        image_feature = joined_patches(self.pre_norm(image_features), self.side, wide)
        hidden_states = self.linear_1(image_feature)
        hidden_states = self.act(hidden_states)
        hidden_states = self.linear_2(hidden_states)
        return concatenate(hidden_states, dim=0)


class PaddleOCRVLModel(ProjectedModel):
    text: ClassVar[PartSpec] = PartSpec(key="text_config", flat=True)
    sees = "visual.vision_model"
    nested_ties = True

    def add_projector(self, config: ConfigReader, width: int, outputs: int) -> None:
        del config
        self.projector = PaddleOCRProjector(width, self.eye.joins, outputs)

    def projected(self, image_features: Handle) -> Handle:
        made: Handle = self.projector(image_features, self.eye.grid[1])
        return made


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


class MusePatchEmbedder(Module):
    def __init__(self, config: ConfigReader, size: int) -> None:
        side, frames = config.integer("patch_size"), config.integer("patch_temporal")
        self.patch_embedding = Linear(frames * COLOURS * side**2, size)
        rows = config.integer("pos_emb_height") * config.integer("pos_emb_width")
        self.position_embedding_table = Embedding(rows, size)

    def forward(self, pixel_values: Handle) -> Handle:
        embeddings: Handle = self.patch_embedding(pixel_values.to(self.run.compute))
        pos_embeds = interpolated(self.position_embedding_table, embeddings.shape[0])
        embeddings = embeddings + pos_embeds.to(embeddings.dtype)
        return embeddings


class MuseVisionModel(EncoderTower):
    """Most layers attend in windows, in whose order the patches lie meanwhile."""

    last, listed = "ln_post", "layers"

    def read_sizes(self, config: ConfigReader) -> None:
        self.joins = config.integer("merge_size")
        height = config.integer("pos_emb_height")
        self.side = window_side(config, "pos_emb_height", height, self.joins)
        self.frames_spanned = config.integer("patch_temporal")

    def kinds(self, config: ConfigReader) -> Sequence[bool]:
        count, listed = config.layers("num_hidden_layers"), config.texts("layer_types")
        if not listed:
            return [number % 4 != 3 and number != count - 1 for number in range(count)]
        for kind in listed:
            config.choice("layer_types", kind, ("full_attention", "window_attention"))
        if len(listed) != count:
            error = config.fail("layer_types", f"has {len(listed)} entries for {count} layers")
            raise error
        return [kind != "full_attention" for kind in listed]

    def add_embeddings(self, config: ConfigReader) -> None:
        self.patch_embedder = MusePatchEmbedder(config, self.width)
        self.ln_pre = LayerNorm(self.width)

    def layer(self, config: ConfigReader) -> Module:
        return kimi_block(config, self.width, "gelu")

    def pixels_shape(self) -> tuple[int, ...]:
        return PackedTower.pixels_shape(self)

    def forward(self, pixel_values: Handle) -> tuple[Handle, ...]:
        inputs_embeds = self.patch_embedder(pixel_values)
        rows, size = inputs_embeds.shape
        pictures, windows = equal_stretches(rows, self.num_pictures), self.windows(self.side)
        hidden_states = self.ln_pre(inputs_embeds)
        window_index = made_by(self.run, OperationKind.ARANGE, (rows,), DType.INT64)
        hidden_states = index(hidden_states, window_index, (rows, size))
        cos, sin = self.rotary_emb.of_patches(rows)
        cos, sin = cos.to(hidden_states.dtype), sin.to(hidden_states.dtype)
        for block in self.layers:
            hidden_states = block(hidden_states, windows if block.kind else pictures, (cos, sin))
        begin(self, f"{self.tower}.norm", ModelPart.NORM, hidden_states)
        reverse_indices = made_by(self.run, OperationKind.ARANGE, (rows,), DType.INT64)
        hidden_states = index(hidden_states, reverse_indices, (rows, size))
        hidden_states = self.children[self.last](hidden_states)
        shuffle_index = made_by(self.run, OperationKind.ARANGE, (rows,), DType.INT64)
        hidden_states = index(hidden_states, shuffle_index, (rows, size))
        hidden_states = hidden_states.view(-1, self.joins**2, size)
        return (hidden_states.permute(0, 2, 1).reshape(-1, size * self.joins**2),)


class MuseVisionAdapter(Module):
    def __init__(self, config: ConfigReader) -> None:
        inner = config.integer("projector_hidden_size")
        self.fc1 = Linear(config.integer("out_hidden_size"), inner)
        self.act = ActivationModule(tower_activation(config, "projector_hidden_act"))
        self.fc2 = Linear(inner, inner)

    def forward(self, x: Handle) -> Handle:
        return self.act(self.fc2(self.act(self.fc1(x))))


class MuseModel(ProjectedModel):
    copies_ids = True

    def add_projector(self, config: ConfigReader, width: int, outputs: int) -> None:
        del width
        self.vision_adapter = MuseVisionAdapter(config)
        self.vision_projection = Linear(config.integer("projector_hidden_size"), outputs)
        self.perception_emb_norm = UnscaledNorm()

    def projected(self, image_features: Handle) -> Handle:
        vision_features = self.vision_adapter(image_features)
        vision_features = self.vision_projection(vision_features)
        vision_features = self.perception_emb_norm(vision_features)
        return vision_features

    def adjusted(self, logits: Handle) -> Handle:
        """As its text's class does."""
        made: Handle = self.words.adjusted(logits)
        return made


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
