"""What Swin Transformer V2 and FocalNet share: patches, stages that are checkpointed whole, a mean of all tokens.

(transformers 5.23, models/swinv2/modeling_swinv2.py, models/focalnet/modeling_focalnet.py)
"""

from typing import ClassVar

from memplan.classes.pictures.base import IMAGES, PictureModel, PictureTask, PooledClassification
from memplan.classes.pictures.parts import as_tokens
from memplan.families.towers.sizes import at_least_one, pair
from memplan.families.towers.vit import num_patches
from memplan.graph.modules.basic import Dropout, LayerNorm
from memplan.graph.modules.functional import mean_of_tokens, padded
from memplan.graph.modules.grids import Conv2d
from memplan.graph.modules.handles import Handle
from memplan.graph.modules.layer_list import LayerList
from memplan.graph.modules.module import Module, Weight
from memplan.model.config import ConfigReader
from memplan.model.parameters import ModelPart

MASKED = "ForMaskedImageModeling"


class PatchEmbeddings(Module):
    """A convolution over pictures that are padded to whole patches."""

    def __init__(
        self, channels: int, size: int, patch: tuple[int, int], window: tuple[int, int, int] | None
    ) -> None:
        self.patch_size = patch
        if window is None:
            self.projection = Conv2d(channels, size, *patch, stride=patch)
        else:
            kernel, stride, padding = window
            self.projection = Conv2d(channels, size, kernel, stride=stride, padding=padding)

    def maybe_pad(self, pixel_values: Handle) -> Handle:
        batch, channels, height, width = pixel_values.shape
        if width % self.patch_size[1]:
            width += self.patch_size[1] - width % self.patch_size[1]
            pixel_values = padded(pixel_values, (batch, channels, height, width))
        if height % self.patch_size[0]:
            height += self.patch_size[0] - height % self.patch_size[0]
            pixel_values = padded(pixel_values, (batch, channels, height, width))
        return pixel_values

    def forward(self, pixel_values: Handle) -> tuple[Handle, tuple[int, int]]:
        pixel_values = self.maybe_pad(pixel_values)
        embeddings = self.projection(pixel_values)
        _, _, height, width = embeddings.shape
        embeddings = as_tokens(embeddings)
        return embeddings, (height, width)


class Embeddings(Module):
    def __init__(self, config: ConfigReader, window: tuple[int, int, int] | None) -> None:
        size = config.integer("embed_dim")
        channels, patch = config.integer("num_channels"), pair(config, "patch_size")
        self.patch_embeddings = PatchEmbeddings(channels, size, patch, window)
        self.norm = LayerNorm(size)
        self.dropout = Dropout(config.number("hidden_dropout_prob", default=0.0))

    def forward(self, pixel_values: Handle) -> tuple[Handle, tuple[int, int]]:
        embeddings, output_dimensions = self.patch_embeddings(pixel_values)
        embeddings = self.norm(embeddings)
        embeddings = self.dropout(embeddings)
        return embeddings, output_dimensions


class Stage(Module):
    """Layers, and what narrows the picture behind them."""

    def narrowed(self, height: int, width: int) -> tuple[int, int]:
        """Positions that it gives."""
        raise NotImplementedError


class StagedEncoder(Module):
    """Each stage is a layer; the loop's variable holds what one gave before its picture was narrowed."""

    def __init__(self, name: str, stages: LayerList) -> None:
        self.stages = stages
        self.children[name] = self.children.pop("stages")

    def forward(self, hidden_states: Handle, input_dimensions: tuple[int, int]) -> Handle:
        for stage_module in self.stages:
            stage = self.stages.made[stage_module.kind]
            assert isinstance(stage, Stage)
            stage_outputs = stage_module(hidden_states, input_dimensions)
            hidden_states, hidden_states_before_downsampling = stage_outputs  # noqa: RUF059
            input_dimensions = stage.narrowed(*input_dimensions)
        return hidden_states


class MaskedImageModeling(PictureTask):
    """Patches that are hidden are drawn again: which ones, and so all that is computed, is not written down."""

    size_key = "embed_dim"
    """Of the vectors that patches become."""

    def add_head(self, config: ConfigReader) -> None:
        """The convolution that draws, and what stands for hidden patches."""
        size, pixels = config.integer(self.size_key), config.integer("encoder_stride") ** 2
        outputs = pixels * config.integer("num_channels")
        setattr(self, "decoder.0", Conv2d(self.model.width, outputs, 1))
        self.model.children["embeddings"].mask_token = Weight(1, 1, size)


class StagedModel(PictureModel):
    recomputes = True
    endings: ClassVar[dict[str, type[PictureTask]]] = {
        IMAGES: PooledClassification, MASKED: MaskedImageModeling,
    }  # fmt: skip

    def __init__(self, config: ConfigReader) -> None:
        depths = at_least_one(config, "depths")
        self.width = config.integer("embed_dim") * 2 ** (len(depths) - 1)
        self.context = num_patches(config)
        self.embeddings = self.embedded(config)
        self.encoder = self.encoded(config, depths)
        self.layernorm = LayerNorm(self.width)
        self.layernorm.segment = "norm", ModelPart.NORM
        channels = config.integer("num_channels")
        self.picture = self.described(*pair(config, "image_size"), channels=channels)

    def embedded(self, config: ConfigReader) -> Embeddings:
        """What makes tokens of pictures."""
        return Embeddings(config, None)

    def encoded(self, config: ConfigReader, depths: list[int]) -> StagedEncoder:
        """All stages."""
        raise NotImplementedError

    def left_out(self, ending: str) -> bool:
        """Which patches pretraining hides is not written down."""
        return ending == MASKED

    def forward(self, pixel_values: Handle) -> tuple[Handle, Handle]:
        embedding_output, input_dimensions = self.embeddings(pixel_values)
        sequence_output = self.encoder(embedding_output, input_dimensions)
        sequence_output = self.layernorm(sequence_output)
        with self.pooling(sequence_output):
            pooled_output = mean_of_tokens(sequence_output)
        return sequence_output, pooled_output
