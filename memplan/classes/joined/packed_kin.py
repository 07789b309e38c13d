"""What towers of packed patches of one language model each share, and two of them, PaddleOCR-VL's and VideoLLaMA 3's.

(transformers 5.23, modeling_*.py of models/paddleocr_vl, video_llama_3; Kimi K2.5's, MiniCPM-V's and Muse Glimmer's classes are
beside it)
"""

from collections.abc import Sequence
from typing import ClassVar

from memplan.classes.compared.clip import patches_across
from memplan.classes.joined.base import PROJECTOR, TOWER
from memplan.classes.joined.packed import (
    AxialRotaryEmbedding,
    EncoderLayer,
    PackedTower,
    SeparateAttention,
    equal_stretches,
    interpolated,
    joined_patches,
)
from memplan.classes.joined.qwen_vl import VisualModel
from memplan.classes.pictures.base import begin, begin_tower
from memplan.classes.pictures.parts import InOrder
from memplan.families.nesting import PartSpec
from memplan.families.towers.sizes import pair
from memplan.graph.core.operation_kinds import OperationKind
from memplan.graph.core.segments import Gradient
from memplan.graph.modules.basic import (
    ActivationModule,
    Embedding,
    LayerNorm,
    Linear,
    fp32_under_autocast,
)
from memplan.graph.modules.grids import Conv2d
from memplan.graph.modules.handles import Handle, empty
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module
from memplan.graph.modules.rotary import concatenate
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

    def kinds(self, config: ConfigReader) -> Sequence[bool | None]:
        """Of each layer, whether it sees a window of the picture alone; None where none does."""
        return [None] * config.layers("num_hidden_layers")

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
